"""Times kernels against the reference and the naive form, on whatever device is here.

  python -m experiments.bench_kernels --config=configs/bench_kernels.py

All forms of a family take turns in one process, so that a slow moment of the machine hits all.
"""

import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

from experiments import _cli, _timing
from experiments._bench_cases import BENCHES


COLUMNS = ("family", "form", "ms", "best ms", "GB/s of the floor", "of a copy", "temporaries MB",
           "peak MB")


def format_row(row: dict) -> str:
  """One row of the table; MB are 10^6 bytes, peak is arguments, results and temporaries."""
  rate = row["bytes_per_s"]
  cells = (row["family"], row["form"], *(f"{row[key]:.3f}" for key in ("ms", "best_ms")),
           f"{rate / 1e9:.1f}", f"{rate / row['copy_bytes_per_s']:.2f}",
           *(f"{row[key] / 1e6:.1f}" for key in ("temp_bytes", "peak_bytes")))
  return f"| {' | '.join(cells)} |"


def compile_forms(forms: dict, args) -> dict:
  """Returns the compiled forms, without those that this platform has no kernel for."""
  compiled = {}
  for name, form in forms.items():
    try:
      compiled[name] = form.lower(*args).compile()
    except NotImplementedError:
      pass
  return compiled


def time_forms(compiled: dict, args, *, repeats: int) -> dict[str, list[float]]:
  """Returns the seconds of each call of each form, which take turns."""
  seconds = {name: [] for name in compiled}
  for turn in range(repeats + 1):
    for name, form in compiled.items():
      started = time.perf_counter()
      jax.block_until_ready(form(*args))
      if turn:  # the first touches memory that nobody had before
        seconds[name].append(time.perf_counter() - started)
  return seconds


def measure_copy(num_bytes: int, *, repeats: int) -> float:
  """Returns bytes per second, read and written, of passes over an array of about `num_bytes`."""
  array = jnp.ones(max(num_bytes // 4, 1), jnp.float32)
  # One call makes many passes, in place: allocating the result costs a CPU as much as a pass.
  run = jax.jit(lambda x, num: lax.fori_loop(0, num, lambda _, x: x + 1.0, x))
  num_passes = 16
  compiled = {"copy": run.lower(array, num_passes).compile()}
  seconds = statistics.median(time_forms(compiled, (array, num_passes), repeats=repeats)["copy"])
  return 2 * array.nbytes * num_passes / seconds


def bench(config) -> list[dict]:
  """Times the families that the config names; prints a table and returns its rows."""
  names = [name for name in BENCHES if config.family in name]
  if not names or config.repeats < 1:
    raise ValueError(f"family, repeats: found {config.family!r} and {config.repeats}, expected a "
                     f"part of {sorted(BENCHES)} and an integer >= 1")
  platform = jax.default_backend()
  copy_bytes_per_s = measure_copy(config.copy_bytes, repeats=config.repeats)
  print(f"{jax.devices()[0].device_kind}: a copy moves {copy_bytes_per_s / 1e9:.1f} GB/s\n")
  print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
  rows = []
  for name in names:
    family = BENCHES[name]
    sizes = family.sizes.get(platform, family.sizes.get("default"))
    args, forms = family.build(**sizes)
    floor_bytes = family.floor_bytes or sum(a.nbytes for a in jax.tree.leaves(args))
    compiled = compile_forms(forms, args)
    for form, seconds in time_forms(compiled, args, repeats=config.repeats).items():
      memory = compiled[form].memory_analysis()
      median_s, best_s = statistics.median(seconds), min(seconds)
      rows.append(dict(
          family=name, form=form, ms=median_s * 1e3, best_ms=best_s * 1e3,
          bytes_per_s=floor_bytes / median_s, copy_bytes_per_s=copy_bytes_per_s,
          temp_bytes=memory.temp_size_in_bytes,
          peak_bytes=(memory.argument_size_in_bytes + memory.output_size_in_bytes
                      + memory.temp_size_in_bytes), platform=platform, sizes=sizes))
      print(format_row(rows[-1]), flush=True)
    absent = set(forms) - set(compiled)
    if absent:
      print(f"| {name} | {', '.join(sorted(absent))}: none for {platform} |", flush=True)
  if config.out:
    path = pathlib.Path(config.out)
    _timing.prepare_directory(path.parent)
    path.write_text(json.dumps(rows, indent=1))
  return rows


if __name__ == "__main__":
  _cli.run(bench, config="configs/bench_kernels.py")
