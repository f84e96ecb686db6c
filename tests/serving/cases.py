"""A small engine, and requests that differ in everything, with their tokens when run alone."""

import functools

import numpy as np

from dspark_jax.decode import loop
from dspark_jax.sampling import make_sampling_params
from dspark_jax.serving.engine import Engine, EngineOptions
from tests.decode import cases as decode_cases

OPTIONS = EngineOptions(batch=3, max_len=60, prompt_buckets=(8, 24), max_queue=20, max_stop_ids=3)


def make_engine(pair=None, *, options=OPTIONS, **kwargs) -> Engine:
  """Programs are shared by all engines of one frame and one size: only the first compiles."""
  frame, params = pair or decode_cases.make_pair()
  return Engine(frame, params, options, **kwargs)


def make_jobs(num: int, *, seed: int = 0) -> list[dict]:
  """Arguments of `submit`, greedy and sampled, short and long, some with stop ids."""
  rng = np.random.default_rng(seed)
  jobs = []
  for _ in range(num):
    length = int(rng.integers(1, 25))
    job = dict(prompt=rng.integers(0, 34, length).tolist(),
               max_new_tokens=int(rng.integers(1, 25)), seed=int(rng.integers(2**32)))
    if rng.random() < 0.6:
      job |= dict(temperature=float(rng.choice([0.7, 1.0, 1.3])), top_k=int(rng.choice([0, 0, 5])),
                  top_p=float(rng.choice([1.0, 0.9])), min_p=float(rng.choice([0.0, 0.05])))
    if rng.random() < 0.5:
      job["stop_ids"] = rng.integers(0, decode_cases.VOCAB, 2).tolist()
    jobs.append(job)
  return jobs


def run_alone(job: dict, pair=None) -> list[int]:
  """The answer of a batch of one, by the loop that knows no engine."""
  return run_alone_counted(job, pair)[0]


def run_alone_counted(job: dict, pair=None):
  """(answer, (rounds, drafts verified, drafts accepted)) of a batch of one."""
  (frame, params), job = pair or decode_cases.make_pair(), dict(job)
  prompt, stop_ids = job.pop("prompt"), job.pop("stop_ids", ())
  state = loop.generate(
      frame, params, [prompt], max_new_tokens=job.pop("max_new_tokens"), stop_ids=stop_ids,
      max_slots=OPTIONS.max_len, sampling=make_sampling_params(1, **job))
  stats = state.stats
  counts = int(stats.num_rounds_B[0]), int(stats.verified_BxG.sum()), int(stats.accepted_BxG.sum())
  return decode_cases.tokens_of(state)[0][len(prompt):], counts


@functools.lru_cache
def standard_jobs():
  """Twelve jobs, their answers alone, and their counts alone; made once."""
  jobs = make_jobs(12)
  return jobs, *zip(*(run_alone_counted(job) for job in jobs))
