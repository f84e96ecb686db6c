"""Times one training step and its peak memory, against the same step in plain PyTorch.

  python -m experiments.bench_training --config=configs/bench_training.py

Each side runs in processes of its own, the sides taking turns. Peak memory is getrusage's, from
after the first step on, less what was in memory once weights, optimiser state and batch were.
"""

import gc
import importlib
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import time

from experiments import _cli
from experiments import _training_case as case

OURS = "experiments._training_ours"


def measure(config, side: str) -> dict:
  """Runs one side here: seconds and losses of its steps, bytes beyond what loading left."""
  module = importlib.import_module(OURS if side == "ours" else config.peer)
  shape = case.Shape(**config.shape.to_dict())
  step = module.make_step(shape, case.make_arrays(shape, seed=config.seed), dtype=config.dtype)
  gc.collect()
  case.give_back_freed()
  loaded, seconds, losses = case.current_bytes(), [], []
  for i in range(config.steps + 1):
    started = time.perf_counter()
    losses.append(step())
    seconds.append(time.perf_counter() - started)
    if i == 0:
      first_peak, is_reset = case.peak_bytes(), case.reset_peak()
  return dict(side=side, seconds=seconds[1:], first_s=seconds[0], losses=losses, is_reset=is_reset,
              loaded_bytes=loaded, peak_bytes=case.peak_bytes() - loaded,
              first_peak_bytes=first_peak - loaded,
              matmul_flops_per_s=module.measure_matmul(config.dtype))


def run_apart(side: str, argv: list[str]) -> dict:
  """Runs one side in a process of its own, with the flags of this one."""
  command = [sys.executable, "-m", "experiments.bench_training", *argv, f"--config.side={side}"]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
  if done.returncode:
    raise ValueError(f"side: {side} ended with status {done.returncode}, expected 0")
  return json.loads(done.stdout.splitlines()[-1])


def compare(config, argv: list[str]) -> dict:
  """Runs both sides in turn and prints the table."""
  has_peer = config.peer and importlib.util.find_spec("torch")
  sides = ["ours", "peer"] if has_peer else ["ours"]
  if not has_peer:
    print("no peer: " + ("torch is not installed" if config.peer else "none asked for"))
  runs = [run_apart(side, argv) for _ in range(config.repeats) for side in sides]
  median = lambda side, read: statistics.median(read(r) for r in runs if r["side"] == side)
  print(f"products in {config.dtype}")
  print("| side | s a step | first step, s | peak MB over loaded |\n|---|---|---|---|")
  rows = {}
  for side in sides:
    rows[side] = row = dict(
        step_s=median(side, lambda r: statistics.median(r["seconds"])),
        first_s=median(side, lambda r: r["first_s"]),
        peak_mb=median(side, lambda r: r["peak_bytes"] / 1e6))
    print(f"| {side} | {row['step_s']:.3f} | {row['first_s']:.1f} | {row['peak_mb']:.0f} |")
  if not all(r["is_reset"] for r in runs):
    print("peaks include the first step's, compilation and all: this system cannot reset them")
  if has_peer:
    print(f"ours is {rows['peer']['step_s'] / rows['ours']['step_s']:.2f} times as fast with "
          f"{rows['ours']['peak_mb'] / rows['peer']['peak_mb']:.2f} of the memory")
  flops = case.count_flops(case.Shape(**config.shape.to_dict()))
  rate, total = max(r["matmul_flops_per_s"] for r in runs), sum(flops.values())
  parts = ", ".join(f"{name} {n / 1e9:.1f}" for name, n in flops.items())
  print(f"counted: {total / 1e9:.1f} GFLOP a step ({parts}); at {rate / 1e9:.0f} GFLOP/s, the best "
        f"product seen, at least {total / rate:.3f} s")
  return dict(config=config.to_dict(), rows=rows, flops=flops, flops_per_s=rate, runs=runs)


def main(config):
  if config.side not in ("", "ours", "peer") or min(config.repeats, config.steps) < 1:
    raise ValueError(f"side, repeats, steps: found {config.side!r}, {config.repeats} and "
                     f"{config.steps}, expected '', 'ours' or 'peer' and positive integers")
  if config.dtype not in ("float32", "bfloat16"):
    raise ValueError(f"dtype: found {config.dtype!r}, expected 'float32' or 'bfloat16'")
  if config.side:
    print(json.dumps(measure(config, config.side)))
    return
  out = pathlib.Path(config.out)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(json.dumps(compare(config, sys.argv[1:]), indent=1) + "\n")
  print(f"-> {out}")


if __name__ == "__main__":
  _cli.run(main, config="configs/bench_training.py")
