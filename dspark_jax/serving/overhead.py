"""What the engine adds to the jitted step: the same rounds with it and without it."""

import dataclasses
import statistics
from typing import Sequence

import jax
import jax.numpy as jnp

from dspark_jax.decode import loop
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
