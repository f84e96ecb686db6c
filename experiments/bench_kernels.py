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

from experiments import _cli, _timing
from experiments._bench_cases import BENCHES


def time_forms(forms: dict, args, *, repeats: int) -> dict[str, float]:
  """Returns median seconds a call of each form that exists here; compilation is not counted."""
  alive = {}
  for name, form in forms.items():
    try:
      jax.block_until_ready(form(*args))
      alive[name] = form
    except NotImplementedError:  # the platform has no kernel
      print(f"{name}: none for {jax.default_backend()}")
  seconds = {name: [] for name in alive}
  for _ in range(repeats):
    for name, form in alive.items():
      started = time.perf_counter()
      jax.block_until_ready(form(*args))
      seconds[name].append(time.perf_counter() - started)
  return {name: statistics.median(times) for name, times in seconds.items()}


def measure_copy(num_bytes: int, *, repeats: int) -> float:
  """Returns bytes per second, read and written, of copying an array of about `num_bytes`."""
  array = jnp.ones(max(num_bytes // 4, 1), jnp.float32)
  seconds = time_forms({"copy": jax.jit(lambda x: x + 1.0)}, (array,), repeats=repeats)["copy"]
  return 2 * array.nbytes / seconds


def bench(config) -> list[dict]:
  """Times the families that the config names; prints a table and returns its rows."""
  names = [name for name in BENCHES if config.family in name]
  if not names or config.repeats < 1:
    raise ValueError(f"family, repeats: found {config.family!r} and {config.repeats}, expected a "
                     f"part of {sorted(BENCHES)} and an integer >= 1")
  platform = jax.default_backend()
  copy_bytes_per_s = measure_copy(config.copy_bytes, repeats=config.repeats)
  print(f"{jax.devices()[0].device_kind}: a copy moves {copy_bytes_per_s / 1e9:.1f} GB/s\n")
  print("| family | form | ms | GB/s of the floor | of a copy |\n|---|---|---|---|---|")
  rows = []
  for name in names:
    family = BENCHES[name]
    sizes = family.sizes.get(platform, family.sizes.get("default"))
    args, forms = family.build(**sizes)
    floor_bytes = family.floor_bytes or sum(a.nbytes for a in jax.tree.leaves(args))
    for form, seconds in time_forms(forms, args, repeats=config.repeats).items():
      rate = floor_bytes / seconds
      rows.append(dict(family=name, form=form, ms=seconds * 1e3, bytes_per_s=rate,
                       copy_bytes_per_s=copy_bytes_per_s, platform=platform, sizes=sizes))
      print(f"| {name} | {form} | {seconds * 1e3:.3f} | {rate / 1e9:.1f} | "
            f"{rate / copy_bytes_per_s:.2f} |", flush=True)
  if config.out:
    path = pathlib.Path(config.out)
    _timing.prepare_directory(path.parent)
    path.write_text(json.dumps(rows, indent=1))
  return rows


if __name__ == "__main__":
  _cli.run(bench, config="configs/bench_kernels.py")
