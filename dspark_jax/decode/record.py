"""Decoding that keeps what every round showed: data for calibration and for studies."""

import dataclasses
import functools
from typing import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.state import DecodeState, Frame
from dspark_jax.decode.step import run_round


@dataclasses.dataclass(frozen=True)
class Records:
  """Rounds of live requests, in the order they ran: N of them, requests of a round side by side.

  Attributes:
    logits_NxG: raw confidence logits.
    margin_NxG: margins of the draft laws; zero-width from a drafter that does not tell them.
    verify_lens_N, num_accepted_N: drafts verified and accepted.
    num_new_N: tokens committed: the accepted drafts and one more, or fewer where a stop token among
      the drafts, or the limit, ended the request.
    round_N, request_N: in which round, and whose.
  """
  logits_NxG: np.ndarray
  margin_NxG: np.ndarray
  verify_lens_N: np.ndarray
  num_accepted_N: np.ndarray
  num_new_N: np.ndarray
  round_N: np.ndarray
  request_N: np.ndarray

  def select(self, is_chosen_N) -> "Records":
    return Records(**{f.name: getattr(self, f.name)[is_chosen_N]
                      for f in dataclasses.fields(self)})

  def only_full(self) -> "Records":
    """Those whose whole block was verified; a request's last round may have had no room for it."""
    return self.select(self.verify_lens_N == self.logits_NxG.shape[1])


def join_records(parts: Sequence[Records]) -> Records:
  """One after the other; rounds and requests are counted on."""
  if not parts:
    raise ValueError("records: found none, expected at least one run")
  joined = {f.name: np.concatenate([getattr(p, f.name) for p in parts])
            for f in dataclasses.fields(Records)}
  for name in ("round_N", "request_N"):
    before, counted = 0, []
    for part in parts:
      counted.append(getattr(part, name) + before)
      before += int(getattr(part, name).max(initial=-1)) + 1
    joined[name] = np.concatenate(counted)
  return Records(**joined)


@functools.partial(jax.jit, static_argnames=("frame", "chunk_rounds"), donate_argnames=("state",))
def _run_chunk(frame: Frame, params, state: DecodeState, max_rounds: jax.Array, *,
               chunk_rounds: int):
  """Rounds until all are done, at most `max_rounds`; what they showed, stacked to chunk_rounds."""
  def run(state):
    after, shown = run_round(frame, params, state)
    return after, (shown, after.lens_B - state.lens_B)

  def body(carry):
    i, state, shown = carry
    state, new = run(state)
    return i + 1, state, jax.tree.map(lambda rows, row: rows.at[i].set(row), shown, new)

  def is_open(carry):
    return (carry[0] < max_rounds) & ~carry[1].is_done_B.all()

  shown = jax.tree.map(lambda x: jnp.zeros((chunk_rounds, *x.shape), x.dtype),
                       jax.eval_shape(run, state)[1])
  return jax.lax.while_loop(is_open, body, (jnp.int32(0), state, shown))[1:]


def record_rounds(frame: Frame, params, state: DecodeState, *, chunk_rounds: int = 16,
                  max_rounds: int | None = None) -> tuple[DecodeState, Records]:
  """Decodes to the end, or for `max_rounds`; the host reads the rounds chunk by chunk."""
  left = np.iinfo(np.int32).max if max_rounds is None else max_rounds
  parts, num_rounds = [_no_records(frame)], 0
  while left > 0 and not bool(state.is_done_B.all()):
    state, found = _run_chunk(frame, params, state, jnp.int32(min(left, chunk_rounds)),
                              chunk_rounds=chunk_rounds)
    rounds, num_new_TxB = jax.device_get(found)
    is_live_TxB = rounds.outcome.is_live_B  # False in the rounds of a chunk that were not run
    flat = lambda x, is_live_TxB=is_live_TxB: np.broadcast_to(
        x, is_live_TxB.shape + x.shape[2:])[is_live_TxB]
    logits_NxG = flat(rounds.signals.confidence_logits_BxG)
    margin = rounds.signals.margin_BxG
    parts.append(Records(
        logits_NxG=logits_NxG,
        margin_NxG=np.zeros((len(logits_NxG), 0), np.float32) if margin is None else flat(margin),
        verify_lens_N=flat(rounds.outcome.verify_lens_B),
        num_accepted_N=flat(rounds.outcome.num_accepted_B), num_new_N=flat(num_new_TxB),
        round_N=flat(num_rounds + np.arange(chunk_rounds)[:, None]),
        request_N=flat(np.arange(is_live_TxB.shape[1])[None])))
    num_rounds, left = num_rounds + chunk_rounds, left - chunk_rounds
  # Within a run, rounds are already counted on.
  kept = parts[1:] or parts
  return state, Records(**{f.name: np.concatenate([getattr(p, f.name) for p in kept])
                           for f in dataclasses.fields(Records)})


def _no_records(frame: Frame) -> Records:
  empty = np.zeros((0, frame.proposal_len), np.float32)
  return Records(empty, empty, *(np.zeros(0, np.int32) for _ in range(5)))
