"""Decoding that keeps what every round showed: data for calibration and for studies."""

import dataclasses
import functools

import jax
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
    round_N: in which round.
  """
  logits_NxG: np.ndarray
  margin_NxG: np.ndarray
  verify_lens_N: np.ndarray
  num_accepted_N: np.ndarray
  round_N: np.ndarray

  def select(self, is_chosen_N) -> "Records":
    return Records(**{f.name: getattr(self, f.name)[is_chosen_N]
                      for f in dataclasses.fields(self)})

  def only_full(self) -> "Records":
    """Those whose whole block was verified; a request's last round may have had no room for it."""
    return self.select(self.verify_lens_N == self.logits_NxG.shape[1])


def join_records(parts: list[Records]) -> Records:
  """One after the other; rounds are counted on."""
  if not parts:
    raise ValueError("records: found none, expected at least one run")
  joined = {f.name: np.concatenate([getattr(p, f.name) for p in parts])
            for f in dataclasses.fields(Records)}
  before, rounds = 0, []
  for part in parts:
    rounds.append(part.round_N + before)
    before += int(part.round_N.max(initial=-1)) + 1
  return Records(**(joined | {"round_N": np.concatenate(rounds)}))


@functools.partial(jax.jit, static_argnames=("frame", "num_rounds"), donate_argnames=("state",))
def _run_chunk(frame: Frame, params, state: DecodeState, *, num_rounds: int):
  return jax.lax.scan(lambda state, _: run_round(frame, params, state), state, None,
                      length=num_rounds)


def record_rounds(frame: Frame, params, state: DecodeState, *,
                  chunk_rounds: int = 16) -> tuple[DecodeState, Records]:
  """Decodes to the end; rounds run in chunks of one `lax.scan`, read by the host in between."""
  parts, num_rounds = [], 0
  while not bool(state.is_done_B.all()):
    state, rounds = _run_chunk(frame, params, state, num_rounds=chunk_rounds)
    rounds = jax.device_get(rounds)
    is_live_TxB = rounds.outcome.is_live_B
    flat = lambda x, is_live_TxB=is_live_TxB: x[is_live_TxB]
    logits_NxG = flat(rounds.signals.confidence_logits_BxG)
    margin = rounds.signals.margin_BxG
    round_TxB = np.broadcast_to(num_rounds + np.arange(chunk_rounds)[:, None], is_live_TxB.shape)
    parts.append(Records(
        logits_NxG=logits_NxG,
        margin_NxG=np.zeros((len(logits_NxG), 0), np.float32) if margin is None else flat(margin),
        verify_lens_N=flat(rounds.outcome.verify_lens_B),
        num_accepted_N=flat(rounds.outcome.num_accepted_B), round_N=flat(round_TxB)))
    num_rounds += chunk_rounds
  if not parts:
    empty = np.zeros((0, frame.proposal_len), np.float32)
    return state, Records(empty, empty, *(np.zeros(0, np.int32) for _ in range(3)))
  # Within a run, rounds are already counted on.
  return state, Records(**{f.name: np.concatenate([getattr(p, f.name) for p in parts])
                           for f in dataclasses.fields(Records)})
