"""Measures policies on batches of requests: speed, milliseconds a round, verified drafts, padding.

  python -m experiments.bench_schedule --config=configs/bench_schedule.py
"""

import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import DSpark
from dspark_jax.decode import loop
from dspark_jax.decode.profile import prepare_batch
from dspark_jax.metrics.compare import find_difference
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler.policies import ConfidenceThreshold, EarlyStop, FixedLength, Lagged
from dspark_jax.scheduler.schedule import measure_waste
from experiments import _cli, _timing

ALL_ROUNDS = jnp.int32(np.iinfo(np.int32).max)


def make_methods(config, model: DSpark) -> dict:
  """Returns {name: model}; plain decoding first."""
  make = {f"fixed {n}": FixedLength(n) for n in config.max_draft_lens}
  make |= {f"threshold {t:g}": ConfidenceThreshold(t) for t in config.thresholds}
  make |= {"early_stop": EarlyStop(), "lagged": Lagged()}
  return {"plain": model} | {name: model.with_policy(policy) for name, policy in make.items()}


def run(config, method: str, model: DSpark, ids) -> dict:
  """Decodes one batch by one method."""
  is_plain = method == "plain"
  frame = model.plain_frame if is_plain else model.frame
  params = {"target": model.target.params} if is_plain else model.params
  frame, curve = prepare_batch(frame, params, len(ids), name=model.name,
                               directory=model.step_curves)
  # No stop ids: every request stays to the end, so the concurrency is what it says.
  state = jax.block_until_ready(loop.start(
      frame, params, ids, max_new_tokens=config.max_new_tokens, curve=curve,
      sampling=make_sampling_params(len(ids), temperature=config.temperature,
                                    seed=np.arange(len(ids)))))
  start = time.perf_counter()
  state = jax.block_until_ready(loop.run_rounds(frame, params, state, ALL_ROUNDS))
  seconds = time.perf_counter() - start
  stats = jax.device_get(state.stats)
  rounds, num = int(stats.num_rounds_B.max()), int(stats.num_rounds_B.sum())
  found = dict(seconds=seconds, tokens=int(stats.num_committed_B.sum()),
               ms_per_round=1e3 * seconds / rounds, tau=float(stats.num_committed_B.sum() / num),
               verified=float(stats.verified_BxG.sum() / num), drafted=float(not is_plain),
               padding=0.0, answers=[row[:n].tolist() for row, n in zip(
                   *jax.device_get((state.tokens_BxS, state.lens_B)))])
  if state.scheduler is not None:
    found |= dict(padding=measure_waste(state.scheduler, frame.ladder),
                  drafted=int(state.scheduler.num_drafted) / rounds)
  return found


def main(config):
  out = pathlib.Path(config.out)
  _timing.prepare_directory(out.parent)
  _timing.use_compilation_cache(config.compilation_cache)
  model = DSpark(config.target, config.draft_model, dtype=config.dtype)
  methods = make_methods(config, model)
  most = max(config.num_requests)
  domains = _timing.choose_prompts(config.prompts, -(-most // 3), seed=config.seed)
  ids = [model.encode(p["messages"]) for group in zip(*domains.values()) for p in group]
  results = {}
  for num in config.num_requests:
    batch = (ids * num)[:num]
    runs = {name: [] for name in methods}
    for repeat in range(config.repeats + 1):  # the first compiles and is dropped
      for name, method in methods.items():
        runs[name].append(run(config, name, method, batch))
    plain = runs["plain"][-1]["answers"]
    print(f"\n{num} requests\n" + "method".ljust(16) + "  tok/s  speed-up  tau  verified  drafted"
          "  ms/round  padding  identical")
    results[num] = {}
    for name, found in runs.items():
      same = sum(find_difference(a, b) is None for a, b in zip(found[-1]["answers"], plain))
      ratios = [a["tokens"] * b["seconds"] / (a["seconds"] * b["tokens"])
                for a, b in zip(found[1:], runs["plain"][1:])]
      row = results[num][name] = {
          key: statistics.median(r[key] for r in found[1:])
          for key in ("ms_per_round", "tau", "verified", "drafted", "padding")} | dict(
              tokens_per_s=statistics.median(r["tokens"] / r["seconds"] for r in found[1:]),
              speed_up=statistics.median(ratios), identical=same)
      print(f"{name:16}{row['tokens_per_s']:7.1f}  {row['speed_up']:7.2f}x  {row['tau']:.2f}"
            f"  {row['verified']:8.2f}  {row['drafted']:7.2f}  {row['ms_per_round']:8.1f}"
            f"  {100 * row['padding']:6.0f}%  {same}/{num}")
    out.write_text(json.dumps(dict(config=config.to_dict(), results=results), indent=1) + "\n")
  print(f"\n-> {out}")


if __name__ == "__main__":
  _cli.run(main, config="configs/bench_schedule.py")
