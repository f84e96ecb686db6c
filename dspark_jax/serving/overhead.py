"""What engine and scheduler add to a round."""

import dataclasses
import statistics
import time
from typing import Sequence

import jax
import jax.numpy as jnp

from dspark_jax.decode import loop
from dspark_jax.decode.state import Frame
from dspark_jax.ladder import choose_bucket, draft_lens, make_ladder
from dspark_jax.scheduler import schedule
from dspark_jax.scheduler.estimator import Outcome, Signals
from dspark_jax.scheduler.step_curve import Timings, make_step_curve
from dspark_jax.serving.engine import Engine


@dataclasses.dataclass(frozen=True)
class Overhead:
  """Medians over repeats.

  Attributes:
    engine_ms: milliseconds of a round in the engine: reports, host, hand-out.
    bare_ms: of the same round as `loop.run_rounds` alone, dispatched without a look at it.
    share: median of engine / bare - 1 over pairs that stood side by side.
  """
  engine_ms: float
  bare_ms: float
  share: float


def measure_overhead(engine: Engine, prompts: Sequence[Sequence[int]], *, num_rounds: int,
                     repeats: int) -> Overhead:
  """Fills every slot and times `num_rounds` rounds from one and the same state, both ways.

  The engine must be idle and warm, and `max_len` must leave room for all the rounds' tokens. Order
  alternates from repeat to repeat.

  Args:
    prompts: token ids, used in turn.
  """
  width, bound = engine.frame.proposal_len + 1, engine.options.max_len
  if max(map(len, prompts)) + width * (num_rounds + 2) > bound:
    raise ValueError(f"num_rounds: found {num_rounds}, expected so few that {width} tokens each "
                     f"and the prompt fit max_len = {bound}")
  pairs = []
  for repeat in range(repeats + 1):  # the first one warms up
    requests = [engine.submit(prompts[b % len(prompts)], max_new_tokens=bound)
                for b in range(engine.options.batch)]
    engine.step()
    copy = jax.block_until_ready(jax.tree.map(jnp.copy, engine.state))
    ms = {}
    for kind in ("engine", "bare") if repeat % 2 else ("bare", "engine"):
      seconds = (_time_engine(engine, num_rounds) if kind == "engine" else
                 _time_bare(engine, copy, num_rounds))
      ms[kind] = 1e3 * seconds / num_rounds
    if repeat:
      pairs.append((ms["engine"], ms["bare"]))
    for request in requests:
      engine.cancel(request)
    engine.run()
  return Overhead(*(statistics.median(x) for x in zip(*pairs)),
                  share=statistics.median(a / b - 1 for a, b in pairs))


def measure_scheduler(frame: Frame, batch: int, *, repeats: int = 50) -> float:
  """Returns the milliseconds of an adaptive policy's part in a round: to plan, choose and learn.

  As a program of its own, dispatch included; inside the round it can only be less.

  Args:
    frame: with a drafter and an adaptive policy.
  """
  G, policy, estimator = frame.proposal_len, frame.policy, frame.estimator
  ladder = frame.ladder or make_ladder(batch, G)
  # Any curve that rises: its numbers do not change the time.
  curve = make_step_curve(Timings(ladder, tuple(10.0 + tokens for tokens, _ in ladder),
                                  tuple(1.0 + n for n in draft_lens(ladder))))
  state = schedule.init_scheduler(batch, G, policy=policy, estimator=estimator, ladder=ladder,
                                  curve=curve)
  logits_BxG = jax.random.normal(jax.random.key(0), (batch, G))
  is_live_B, room_B = jnp.ones(batch, bool), jnp.full(batch, G)

  @jax.jit
  def run(state, signals):
    plan = schedule.plan_round(policy, estimator, state, is_live_B, room_B, ladder=ladder)
    lens_B, survival_BxG = schedule.choose_lens(
        policy, estimator, state, plan, signals, is_live_B=is_live_B, max_lens_B=room_B,
        ladder=ladder)
    return schedule.learn(policy, estimator, state, plan, signals, survival_BxG,
                          Outcome(lens_B, lens_B // 2, is_live_B), ladder=ladder,
                          bucket=choose_bucket(ladder, lens_B, is_live_B))

  times_ms = []
  for _ in range(repeats + 1):  # the first compiles
    start_s = time.perf_counter()
    state = jax.block_until_ready(run(state, Signals(logits_BxG, jnp.abs(logits_BxG))))
    times_ms.append(1e3 * (time.perf_counter() - start_s))
  return statistics.median(times_ms[1:])


def _time_engine(engine: Engine, num_rounds: int) -> float:
  jax.block_until_ready(engine.state)
  start_s = engine.clock()
  for _ in range(num_rounds):
    engine.step()
  jax.block_until_ready(engine.state)
  return engine.clock() - start_s


def _time_bare(engine: Engine, state, num_rounds: int) -> float:
  one = jnp.int32(1)
  start_s = engine.clock()
  for _ in range(num_rounds):
    state = loop.run_rounds(engine.frame, engine.params, state, one)
  jax.block_until_ready(state)
  return engine.clock() - start_s
