"""What the scripts that serve share: an engine for each method, jobs, and taking turns."""

import itertools
import random
from typing import Mapping, Sequence

import tqdm

from dspark_jax import DSpark
from dspark_jax.metrics.load_report import LoadReport, summarize_load, take_medians
from dspark_jax.scheduler.policies import ConfidenceThreshold, EarlyStop, FixedLength, Lagged
from dspark_jax.serving import load
from dspark_jax.serving.engine import Engine, EngineOptions
from experiments import _timing


def make_methods(model: DSpark, config) -> dict[str, DSpark]:
  """Returns {name: model}: plain decoding, fixed lengths, thresholds, and adaptive policies."""
  policies = {f"fixed {n}": FixedLength(n) for n in config.max_draft_lens}
  policies |= {f"threshold {t:g}": ConfidenceThreshold(t) for t in config.thresholds}
  if config.adaptive:
    policies |= {"early_stop": EarlyStop(), "lagged": Lagged()}
  return {"plain": model} | {name: model.with_policy(p) for name, p in policies.items()}


def make_engines(model: DSpark, config, *, batch: int) -> dict[str, Engine]:
  """Returns a warm engine for each method, all with `batch` slots."""
  options = EngineOptions(batch, config.max_len, tuple(config.prompt_buckets))
  engines, methods = {}, make_methods(model, config)
  for name, other in tqdm.tqdm(methods.items(), desc=f"compile for {batch}", unit="method"):
    is_plain = name == "plain"
    frame = other.plain_frame if is_plain else other.frame
    params = {"target": model.target.params} if is_plain else other.params
    engines[name] = Engine(frame, params, options, step_curves=model.step_curves, name=model.name,
                           clock=load.StopWatch())
    engines[name].warm_up()
  return engines


def make_jobs(model: DSpark, config) -> list[dict]:
  """Returns one job a prompt that fits, domains in turn."""
  domains = _timing.choose_prompts(config.prompts, config.num_prompts, seed=config.seed)
  longest = max(config.prompt_buckets, default=config.max_len)
  rng, jobs = random.Random(config.seed), []
  for prompt in filter(None, itertools.chain(*itertools.zip_longest(*domains.values()))):
    ids = model.encode(prompt["messages"])
    new = rng.randint(max(config.max_new_tokens // 2, 1), config.max_new_tokens)
    if len(ids) <= longest and len(ids) + new <= config.max_len:
      jobs.append(dict(prompt=ids, max_new_tokens=new, stop_ids=model.stop_ids, seed=len(jobs),
                       temperature=config.temperature))
  if not jobs:
    raise ValueError(f"max_len: found {config.max_len}, prompt_buckets: found "
                     f"{config.prompt_buckets}, but no prompt with its answer is so short")
  return jobs


def measure_closed(engines: Mapping[str, Engine], jobs: Sequence[dict], *, num_users: int,
                   num_measured: int, repeats: int, turn_s: float) -> list[LoadReport]:
  """Measures the closed loop of every engine, in turns of seconds; returns medians of repeats."""
  reports = {name: [] for name in engines}
  for _ in tqdm.tqdm(range(repeats), desc=f"load {num_users}", unit="repeat"):
    found = load.run_in_turns(engines, {
        name: load.closed_loop(engine, itertools.cycle(jobs), num_users=num_users,
                               num_measured=num_measured)
        for name, engine in engines.items()}, turn_s=turn_s)
    for name, result in found.items():
      reports[name].append(_summarize(name, num_users, result))
  return [take_medians(group) for group in reports.values()]


def measure_open(engines: Mapping[str, Engine], jobs: Sequence[dict], times_s: Sequence[float], *,
                 rate: float, repeats: int) -> list[LoadReport]:
  """Measures the open loop of one engine after the other, in rotating order: an arrival cannot
  wait. Returns medians of repeats."""
  names, reports = list(engines), {name: [] for name in engines}
  for repeat in range(repeats):
    first = repeat % len(names)
    for name in tqdm.tqdm(names[first:] + names[:first], desc=f"load {rate:g}"):
      engines[name].clock.start()
      reports[name].append(_summarize(name, rate, load.run_open(engines[name], jobs, times_s)))
      engines[name].clock.stop()
  return [take_medians(group) for group in reports.values()]


def _summarize(name: str, load_value: float, result: load.LoadRun) -> LoadReport:
  return summarize_load(name, load_value, result.requests, result.totals, seconds=result.seconds)
