"""A soak run: many requests of all kinds through one engine, and nothing lost, mixed, or leaked.

Requests differ in prompt, length, sampling law, stop ids and seed; some are cancelled from outside,
some from their own callback, some have a deadline, some cannot be done, and the queue is kept full
enough to refuse now and then. Afterwards each is accounted for, and a sample of them is decoded
again alone, by the loop that knows no engine.
"""

import dataclasses
import random
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode import loop
from dspark_jax.decode.state import Frame, init_stats
from dspark_jax.host_memory import count_used_bytes
from dspark_jax.serving.engine import Engine, EngineOptions, QueueFull
from dspark_jax.serving.request import Request


@dataclasses.dataclass(frozen=True)
class SoakOptions:
  """How much of what.

  Attributes:
    num_requests: to be submitted, the impossible ones not counted.
    max_new_tokens: longest answer asked for.
    num_checked: requests decoded again alone; the rest of the checks look at all.
    cancel_share: cancelled after some rounds, half of them by their own callback.
    deadline_share: with a deadline that has passed already when it is looked at.
    impossible_share: of submissions that are too long or out of range, and must be refused.
    greedy_share: the rest samples.
    seed: of everything drawn.
  """
  num_requests: int = 1000
  max_new_tokens: int = 32
  num_checked: int = 48
  cancel_share: float = 0.12
  deadline_share: float = 0.02
  impossible_share: float = 0.03
  greedy_share: float = 0.4
  seed: int = 0


@dataclasses.dataclass
class SoakReport:
  """What came of it.

  Attributes:
    num_by_reason: requests by finish reason.
    num_refused, num_impossible: submissions that the queue had no room for (tried again later), and
      that were refused at the door.
    lost: ids of requests without an end, or without exactly one told end.
    mixed: ids of checked requests whose tokens are not those of their run alone.
    num_checked: requests that were decoded again.
    device_bytes, host_bytes: of live arrays, and all that the process uses, each after a tenth of
      the requests and at the end.
  """
  num_by_reason: dict[str, int]
  num_refused: int
  num_impossible: int
  lost: list[int]
  mixed: list[int]
  num_checked: int
  device_bytes: tuple[int, int]
  host_bytes: tuple[int, int]
  num_rounds: int
  num_tokens: int

  def find_problems(self) -> list[str]:
    """Returns what went wrong, one line each; memory may grow by what the handles hold."""
    problems = [f"{name} requests {ids}" for name, ids in (("lost", self.lost),
                                                           ("mixed", self.mixed)) if ids]
    num_requests = sum(self.num_by_reason.values())
    for name, (before, after), slack in (
        ("device", self.device_bytes, 2**16),  # reports that were under way
        ("host", self.host_bytes, 2**24 + 4096 * num_requests)):
      if after > before + slack:
        problems.append(f"{name} memory grew from {before} to {after} bytes")
    return problems


@dataclasses.dataclass
class _Client:
  """One request's user: keeps what it is told, and may lose its patience."""
  cancel_after_tokens: int | None
  engine: Engine
  tokens: list[int] = dataclasses.field(default_factory=list)
  num_ends: int = 0

  def __call__(self, request: Request, tokens: list[int]) -> None:
    self.tokens += tokens
    self.num_ends += request.is_done
    if self.cancel_after_tokens is not None and len(self.tokens) >= self.cancel_after_tokens:
      self.engine.cancel(request)


def run_soak(frame: Frame, params, prompts: Sequence[Sequence[int]], *,
             engine_options: EngineOptions, options: SoakOptions = SoakOptions(),
             on_step: Callable[[int], None] = lambda num_submitted: None) -> SoakReport:
  """Runs the whole soak; see SoakReport for what to look at.

  Args:
    frame, params: a policy that decides by the request alone (or greedy_share 1), or sampled
      requests are not comparable to their runs alone.
    prompts: token ids, cut to random lengths.
    on_step: called after every step with the number of requests submitted, for a progress bar.
  """
  rng = random.Random(options.seed)
  engine = Engine(frame, params, engine_options)
  engine.warm_up()
  requests: list[Request] = []
  clients: list[_Client] = []
  num_impossible, next_job, memory = 0, None, None
  while len(requests) < options.num_requests or engine.is_busy:
    for _ in range(rng.choice([0, 0, 1, 1, 2, 8])):
      if len(requests) == options.num_requests:
        break
      if rng.random() < options.impossible_share:
        num_impossible += _submit_impossible(engine, rng)
      job = next_job or _make_job(rng, prompts, engine, options)
      client = _Client(rng.randint(1, options.max_new_tokens)
                       if rng.random() < options.cancel_share / 2 else None, engine)
      try:
        requests.append(engine.submit(**job, on_tokens=client))
      except QueueFull:
        next_job = job
        break
      clients.append(client)
      next_job = None
    engine.step()
    # Some users outside give up on whatever is on its way.
    if requests and rng.random() < _outside_rate(options, engine):
      engine.cancel(rng.choice(requests[-3 * engine_options.batch:]))
    on_step(len(requests))
    if memory is None and 10 * len(requests) >= options.num_requests:
      memory = measure_memory(engine)
  memory_end = measure_memory(engine)
  lost = [r.id for r, c in zip(requests, clients)
          if not r.is_done or c.num_ends != 1 or c.tokens != r.tokens or r.finish_reason == "error"]
  checked = rng.sample(requests, min(options.num_checked, len(requests)))
  mixed = [r.id for r in checked if not is_as_alone(frame, params, r, engine_options)]
  reasons = [r.finish_reason for r in requests]
  return SoakReport(
      num_by_reason={reason: reasons.count(reason) for reason in sorted(set(reasons), key=str)},
      num_refused=engine.counts.num_refused, num_impossible=num_impossible, lost=lost, mixed=mixed,
      num_checked=len(checked), device_bytes=(memory[0], memory_end[0]),
      host_bytes=(memory[1], memory_end[1]), num_rounds=engine.counts.num_rounds,
      num_tokens=engine.counts.num_tokens)


def is_as_alone(frame: Frame, params, request: Request, engine_options: EngineOptions) -> bool:
  """Whether a request's tokens are those of its run alone, or their beginning if it was ended."""
  alone = decode_alone(frame, params, request, engine_options)
  if request.finish_reason in ("stop", "length"):
    return request.tokens == alone
  return request.tokens == alone[:len(request.tokens)]


def decode_alone(frame: Frame, params, request: Request,
                 engine_options: EngineOptions) -> list[int]:
  """The answer of a batch of one by `decode.loop`; one program for each prompt bucket."""
  n, E = len(request.prompt), loop.round_up(engine_options.max_stop_ids, loop.STOP_BUCKET)
  T = next(size for size in engine_options.prompt_buckets if size >= n)
  prompt_1xT = np.zeros((1, T), np.int32)
  prompt_1xT[0, :n] = request.prompt
  stop_ids_1xE = np.full((1, E), -1, np.int32)
  stop_ids_1xE[0, :len(request.stop_ids)] = request.stop_ids
  state = loop.prefill(
      frame.for_prefill(), params, jnp.asarray(prompt_1xT), jnp.asarray([n], jnp.int32),
      limits_B=jnp.asarray([n + request.max_new_tokens], jnp.int32), sampling=request.sampling,
      stop_ids_BxE=jnp.asarray(stop_ids_1xE), num_slots=engine_options.max_len + frame.slack)
  state = state.replace(stats=init_stats(1, frame.proposal_len))
  # No buckets: they are of the engine's batch.
  alone = Frame(frame.target, frame.drafter, frame.policy, estimator=frame.estimator,
                vocab_limit=frame.vocab_limit, dtype=frame.dtype)
  state = loop.run_rounds(alone, params, loop.attach_scheduler(alone, state),
                          jnp.int32(np.iinfo(np.int32).max))
  return np.asarray(state.tokens_BxS)[0, n:int(state.lens_B[0])].tolist()


def measure_memory(engine: Engine) -> tuple[int, int]:
  """Returns (bytes of live arrays, used bytes of the process; 0 where that is unknown).

  Between two rounds, when no program has scratch memory.
  """
  jax.block_until_ready(engine.state)
  device = sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())
  return device, count_used_bytes() or 0


def _make_job(rng: random.Random, prompts, engine: Engine, options: SoakOptions) -> dict[str, Any]:
  prompt = list(rng.choice(prompts))
  longest = min(len(prompt), engine.options.prompt_buckets[-1],
                engine.options.max_len - options.max_new_tokens)
  # Mostly its beginning, so that neighbours begin alike and differ later.
  job = dict(prompt=prompt[:rng.randint(1, longest)], seed=rng.randrange(2**32),
             max_new_tokens=rng.randint(1, options.max_new_tokens))
  if rng.random() >= options.greedy_share:
    job |= dict(temperature=rng.choice([0.5, 0.8, 1.0, 1.2]), top_k=rng.choice([0, 0, 20]),
                top_p=rng.choice([1.0, 0.95]), min_p=rng.choice([0.0, 0.0, 0.02]))
  if rng.random() < 0.3:
    num_ids = rng.randint(1, engine.options.max_stop_ids)
    job["stop_ids"] = [rng.randrange(engine.frame.target.vocab_size) for _ in range(num_ids)]
  if rng.random() < options.deadline_share:
    job["deadline_s"] = 1e-9
  return job


def _submit_impossible(engine: Engine, rng: random.Random) -> int:
  """Asks for something that must be refused; returns 1, and fails where it was not."""
  bad = rng.choice([dict(prompt=[1] * engine.options.max_len), dict(prompt=[]),
                    dict(prompt=[engine.frame.target.vocab_size]),
                    dict(prompt=[1], max_new_tokens=0), dict(prompt=[1], top_p=0.0)])
  try:
    engine.submit(**bad)
  except ValueError:
    return 1
  raise AssertionError(f"submit took {bad}")


def _outside_rate(options: SoakOptions, engine: Engine) -> float:
  """Probability of a cancellation a step, so that about half of `cancel_share` comes of it."""
  steps_a_request = max(engine.counts.num_rounds, 1) / max(engine.counts.num_prefills, 1)
  return options.cancel_share / 2 / max(steps_a_request, 1e-6)
