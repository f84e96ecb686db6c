"""Measures the step curve: milliseconds of drafting, and of a round in each bucket of the ladder.

What is timed is the very program that decodes, led through all buckets, so it is compiled once for
both. What a round takes beyond its drafting is its verify time: verifying, accepting, committing,
and scheduling.
"""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import os
import pathlib
import statistics
import time
from typing import Any, Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import ladder as ladder_lib
from dspark_jax.decode import loop
from dspark_jax.decode import step as step_lib
from dspark_jax.decode.state import DecodeState, Frame
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler import policies, step_table
from dspark_jax.scheduler.step_curve import StepCurve, Timings, make_step_curve
from dspark_jax.scheduler.step_table import StepTable

REPEATS = 5, 25  # turns of a measurement, fewest and most, and
SECONDS = 10.0  # what it may take between the two
CONTEXT_TOKENS = 128  # committed tokens of every request while timing


def measure_timings(frame: Frame, params, batch: int, *, context_tokens: int = CONTEXT_TOKENS,
                    num_slots: int | None = None, temperature: float = 0.0,
                    repeats: int | None = None, state: DecodeState | None = None,
                    run: Callable[..., DecodeState] = loop.run_one_round) -> Timings:
  """Times a round in every bucket of `frame.ladder`, and drafting for its rows, for a batch size.

  All take turns, so that a machine that drifts favours none; each number is a median. Compiles
  first.

  Args:
    frame: with a drafter, a policy and a ladder.
    context_tokens: committed tokens of each request, fewer where it has room for fewer.
    num_slots: of the caches, None = just enough; attention on CPU reads all of them.
    repeats: turns, None = as many of REPEATS as fit into SECONDS: a small batch is over in no time,
      and what else the machine does must not decide how it is served.
    state: a batch without a scheduler to run rounds of, whatever its requests are; donated. None =
      one of `num_slots` and `temperature`.
    run: (frame, params, state) -> state after one round; donates the state.
  """
  if frame.drafter is None or frame.ladder is None:
    raise ValueError("frame: found no drafter or no ladder, expected both to measure a step curve")
  width = policies.max_verify_len(frame.policy, frame.proposal_len)
  ladder_lib.check_ladder(frame.ladder, batch, width)
  # Any policy that can be led; the usual ones are it already, and share their program.
  frame = dataclasses.replace(frame, policy=policies.make_leadable(frame.policy))
  if state is None:
    state = _make_state(frame, params, batch, context_tokens, num_slots, temperature)
  lens = ladder_lib.draft_lens(frame.ladder)
  any_curve = make_step_curve(Timings(frame.ladder, tuple(float(n) for n, _ in frame.ladder),
                                      (1.0,) * len(lens)))
  draft = _compile_parts(frame)[0]
  num_context = min(context_tokens, state.tokens_BxS.shape[1] - frame.slack - 1)
  tokens_BxS = jnp.asarray(np.random.default_rng(0).integers(
      0, frame.target.vocab_size, state.tokens_BxS.shape), jnp.int32)

  def make_state() -> DecodeState:
    fresh = state.replace(tokens_BxS=jnp.copy(tokens_BxS),
                          lens_B=jnp.full(batch, num_context, jnp.int32),
                          is_valid_B=jnp.ones(batch, bool))
    return loop.attach_scheduler(frame, fresh, jax.tree.map(jnp.copy, any_curve))

  draft_ms, round_ms = [[] for _ in lens], [[] for _ in frame.ladder]
  for turn in itertools.count():  # the first compiles and is dropped
    for ms, num_drafts in zip(draft_ms, lens):
      ms.append(1e3 * _time(draft, params, state.replace(scheduler=None), num_drafts)[0])
    for n, led in enumerate(loop.lead_through_shapes(frame, make_state)):
      jax.block_until_ready(led)
      seconds, state = _time(run, frame, params, led)
      bucket = int(jnp.argmax(state.scheduler.bucket_counts_N))
      if bucket != n:
        raise ValueError(f"ladder: bucket {frame.ladder[n]} can never be used, for "
                         f"{frame.ladder[bucket]} comes first and holds as much")
      round_ms[n].append(1e3 * seconds)
    if turn == 1 and repeats is None:
      turn_s = sum(ms[-1] for ms in draft_ms + round_ms) / 1e3
      repeats = min(max(int(SECONDS / turn_s), REPEATS[0]), REPEATS[1])
    if turn and turn == repeats:
      break
  draft_ms, round_ms = ([round(statistics.median(ms[1:]), 4) for ms in group]
                        for group in (draft_ms, round_ms))
  known_ms = dict(zip((0, *lens), (0.0, *draft_ms)))
  # Noise must not make a round of a toy faster than its drafting.
  verify_ms = [round(max(ms - known_ms[rows - 1], ms / 10), 4)
               for ms, (_, rows) in zip(round_ms, frame.ladder)]
  return Timings(frame.ladder, tuple(verify_ms), tuple(draft_ms))


@dataclasses.dataclass(frozen=True)
class RoundTime:
  """Medians of a round's two parts: drafting; judging and committing."""
  draft_ms: float
  verify_ms: float


def compare_rounds(frames: Mapping[str, tuple[Frame, Any]], batch: int = 1, *,
                   context_tokens: int = CONTEXT_TOKENS, temperature: float = 0.0,
                   repeats: int = REPEATS[0]) -> dict[str, RoundTime]:
  """Times rounds of several drafters, every draft verified; they take turns, compiled before.

  Args:
    frames: name -> (frame with a drafter, its params).
  """
  parts, ms = {}, {}
  for name, (frame, params) in frames.items():
    frame = dataclasses.replace(frame, policy=None, estimator=None, ladder=None)
    lens_B = jnp.full(batch, frame.proposal_len, jnp.int32)
    state = _make_state(frame, params, batch, context_tokens, None, temperature)
    parts[name] = (*_compile_parts(frame), params, state, lens_B)
    ms[name] = [], []
  for repeat in range(repeats + 1):  # the first compiles and is dropped
    for name, (draft, verify, params, state, lens_B) in parts.items():
      draft_s, proposal = _time(draft, params, state)
      verify_s, state = _time(verify, params, state, proposal, lens_B)
      parts[name] = (draft, verify, params, state, lens_B)  # the old state was donated
      if repeat:
        ms[name][0].append(1e3 * draft_s)
        ms[name][1].append(1e3 * verify_s)
  return {name: RoundTime(*map(statistics.median, both)) for name, both in ms.items()}


def describe(frame: Frame, name: str) -> dict[str, str]:
  """Returns what a step curve is a property of, for `step_table`."""
  bare = dataclasses.replace(frame, policy=None, estimator=None, ladder=None)
  shape = hashlib.sha256(repr(bare).encode()).hexdigest()[:12]
  device = jax.devices()[0]
  kind = device.device_kind
  if device.platform == "cpu":
    kind = f"{kind} ({os.cpu_count()} cores)"
  versions = [f"{p} {importlib.metadata.version(p)}" for p in ("jax", "jaxlib")]
  return dict(device=kind, model=f"{name} {shape}", dtype=frame.dtype,
              versions=", ".join(versions))


def load_or_measure(frame: Frame, params, batch: int, *, name: str,
                    directory: str | pathlib.Path, measure: Callable[..., Timings] =
                    measure_timings, **options) -> Timings:
  """Returns timings from the cache in `directory`, or measures them and writes them there.

  A file is named after format, device, model, dtype, versions, batch and ladder; one that does not
  fit what it is named after was edited or moved, and is refused.
  """
  about = describe(frame, name)
  key = repr((step_table.TITLE, sorted(about.items()), batch, frame.ladder))
  key = hashlib.sha256(key.encode()).hexdigest()
  path = pathlib.Path(directory) / f"step_curve_{key[:16]}.txt"
  if path.is_file():
    return step_table.choose_timings(step_table.read_table(path), about=about, batch=batch,
                                     ladder=frame.ladder)
  timings = measure(frame, params, batch, **options)
  step_table.write_table(path, StepTable(about | {
      "measured": time.strftime("%Y-%m-%d %H:%M:%S")}, {batch: timings}))
  return timings


def prepare_batch(frame: Frame, params, batch: int, *, name: str, directory: str | pathlib.Path,
                  make_state: Callable[[], DecodeState | None] = lambda: None,
                  run: Callable[..., DecodeState] = loop.run_one_round
                  ) -> tuple[Frame, StepCurve | None]:
  """Returns the frame with what its policy needs for a batch size: a ladder, and a step curve.

  A policy whose verify lengths vary gets buckets, unless the frame has a ladder; an adaptive one
  gets the curve, measured now if it never was, by running rounds as they will be run.

  Args:
    make_state, run: `state` and `run` of `measure_timings`, the former made when it is needed.
  """
  is_adaptive = policies.is_adaptive(frame.policy)
  if frame.drafter is None or not (
      is_adaptive or isinstance(frame.policy, policies.ConfidenceThreshold)):
    return frame, None
  if frame.ladder is None:
    width = policies.max_verify_len(frame.policy, frame.proposal_len)
    frame = dataclasses.replace(frame, ladder=ladder_lib.make_ladder(batch, width))
  if not is_adaptive:
    return frame, None
  measure = lambda *args: measure_timings(*args, state=make_state(), run=run)
  return frame, make_step_curve(load_or_measure(frame, params, batch, name=name,
                                                directory=directory, measure=measure))


def _compile_parts(frame: Frame) -> tuple[Callable, Callable]:
  """Returns jitted (draft, verify): `draft` of the whole block or of its first drafts; `verify`
  leaves lengths as they were, and donates its state."""
  def verify(params, state, proposal, lens_B):
    after, _, _ = step_lib.judge_and_commit(frame, params, state, proposal, lens_B)
    # Every run starts from the same lengths.
    return after.replace(lens_B=state.lens_B, is_done_B=state.is_done_B)

  draft = jax.jit(lambda params, state, num_drafts=None: step_lib.draft(
      frame, params, state, num_drafts), static_argnums=2)
  return draft, jax.jit(verify, donate_argnums=1)


def _make_state(frame: Frame, params, batch, context_tokens, num_slots, temperature) -> DecodeState:
  """A batch that has `context_tokens` of some text; what text does not matter for time."""
  bare = dataclasses.replace(frame, policy=None, estimator=None, ladder=None)
  num_new = max(frame.slack + 1, 0 if num_slots is None else num_slots - context_tokens)
  num_prompt = max(1, min(context_tokens - 1, frame.target.max_position_embeddings - num_new))
  tokens = np.random.default_rng(0).integers(0, frame.target.vocab_size, num_prompt)
  state = loop.start_requests(
      bare, params, [tokens.tolist()] * batch, max_new_tokens=num_new,
      sampling=make_sampling_params(batch, temperature=temperature, seed=np.arange(batch)))
  # It must not matter whether the first token happened to end a request.
  return state.replace(is_done_B=jnp.zeros(batch, bool))


def _time(run: Callable, *args):
  start = time.perf_counter()
  found = jax.block_until_ready(run(*args))
  return time.perf_counter() - start, found
