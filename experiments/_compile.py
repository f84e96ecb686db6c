"""Compiles one case for one TPU that is not here, with the compiler in the PyPI package libtpu.

  python -m experiments._compile CASE TARGET      prints one line of JSON

A process compiles for one target: libtpu is loaded once and keeps its settings.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ENVIRONMENT = dict(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
                   TPU_STDERR_LOG_LEVEL="4", TPU_MIN_LOG_LEVEL="4")


def has_compiler() -> bool:
  """Returns whether libtpu is installed."""
  return importlib.util.find_spec("libtpu") is not None


def compile_elsewhere(name: str, target: str, *, timeout_s: float = 1800) -> dict:
  """Compiles a case in a process of its own; returns `compile_here`'s findings.

  Raises RuntimeError with the compiler's last lines when it refuses the program.
  """
  run = subprocess.run([sys.executable, "-m", "experiments._compile", name, target],
                       env=os.environ | ENVIRONMENT, capture_output=True, text=True,
                       timeout=timeout_s)
  lines = run.stdout.strip().splitlines()
  if run.returncode or not lines:
    raise RuntimeError(f"{name} for {target}: " + "\n".join(run.stderr.splitlines()[-30:]))
  return json.loads(lines[-1])


def compile_here(name: str, target: str) -> dict:
  """Returns what the compiler says about a case: seconds, bytes, FLOPs, copies.

  Meant for a process of its own: the compiler is told by XLA_FLAGS to write the program down, and
  reads those once.
  """
  with tempfile.TemporaryDirectory() as directory:
    # `compiled.as_text()` fails where libtpu knows an instruction that jaxlib does not (7x).
    flags = f"--xla_dump_to={directory} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    return _compile_into(pathlib.Path(directory), name, target)


def _compile_into(directory: pathlib.Path, name: str, target: str) -> dict:
  import jax
  from jax.experimental import topologies
  from jax.sharding import SingleDeviceSharding

  from experiments._compile_cases import CASES
  case = CASES[name]
  devices = topologies.get_topology_desc(platform="tpu", topology_name=target).devices
  sharding = SingleDeviceSharding(devices[0])
  f, args = case.build()
  args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
  started = time.perf_counter()
  lowered = jax.jit(f, donate_argnums=case.donate).lower(*args)
  lowered_at = time.perf_counter()
  compiled = lowered.compile()
  cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
  # An output that takes a donated input's place is written in part only: it is not counted twice.
  floor = case.floor_bytes or (count_bytes(args) + memory.output_size_in_bytes
                               - memory.alias_size_in_bytes)
  # The host's programs are called "*.cpu_after_optimizations.txt".
  text = "".join(path.read_text() for path in directory.glob("*.after_optimizations.txt"))
  accessed = cost.get("bytes accessed", 0.0)
  return dict(
      case=name, target=target, lower_s=lowered_at - started,
      compile_s=time.perf_counter() - lowered_at, temp_bytes=memory.temp_size_in_bytes,
      argument_bytes=memory.argument_size_in_bytes, output_bytes=memory.output_size_in_bytes,
      bytes_accessed=accessed, floor_bytes=floor, ratio=accessed / floor,
      flops=cost.get("flops", 0.0), transcendentals=cost.get("transcendentals", 0.0),
      copies=case.no_copies_of and find_copies(text, *case.no_copies_of))


def count_bytes(tree) -> int:
  """Returns the bytes of arrays, unpadded."""
  import jax
  return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def find_copies(text: str, dtype: str, shape: tuple[int, ...]) -> list[str]:
  """Returns the instructions of an HLO text that copy or transpose an array of a shape.

  A copy between memories (S(1) is the on-chip VMEM, and then one side alone has it) is how an array
  is read or written anyway, and is left out. Raises ValueError where the text has no such array at
  all: finding none would mean nothing.
  """
  array = rf"{dtype}\[{','.join(map(str, shape))}\]"
  if not re.search(array, text):
    raise ValueError(f"no_copies_of: found no {dtype}{list(shape)} in the program")
  found = re.findall(rf"\S+ = \(?{array}\S* (?:\S+ )*?(?:copy|copy-start|transpose)\(.*", text)
  is_move = lambda line: "copy-start(" in line and line.split("copy-start(")[0].count("S(1)") == 1
  return [line[:300] for line in found if not is_move(line)]


if __name__ == "__main__":
  print(json.dumps(compile_here(*sys.argv[1:3])))
