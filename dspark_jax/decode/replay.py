"""Replays recorded rounds under another estimator and policy: what would have been verified, at
what cost, and what the estimator would have learnt.

Records come from a run that verified every draft, so the outcome of any shorter verify length is
known: min(length, accepted). Which rounds come next would differ in a real run; that part is not
replayed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.record import Records
from dspark_jax.ladder import Ladder, choose_bucket
from dspark_jax.scheduler import schedule
from dspark_jax.scheduler.estimator import Outcome, Signals
from dspark_jax.scheduler.policies import Policy
from dspark_jax.scheduler.step_curve import StepCurve


@dataclasses.dataclass(frozen=True)
class Oracle:
  """The estimator that knows what will be accepted; an upper bound, not to be used in decoding."""
  does_learn = False

  def init(self, proposal_len: int):
    return None

  def estimate(self, state, signals: Signals) -> jax.Array:
    return signals.confidence_logits_BxG  # `replay` puts the outcomes there

  def observe(self, state, signals: Signals, outcome: Outcome):
    return state


@dataclasses.dataclass(frozen=True)
class Replay:
  """Outcome of a replay over T rounds of R requests.

  Attributes:
    survival_TxRxG: as estimated before the round's outcome was known.
    verify_lens_TxR: drafts that would have been verified.
    tokens, ms: committed tokens and milliseconds by the step curve, of all rounds.
  """
  survival_TxRxG: np.ndarray
  verify_lens_TxR: np.ndarray
  tokens: int
  ms: float

  @property
  def tokens_per_s(self) -> float:
    return 1e3 * self.tokens / self.ms


def replay(records: Records, estimator, policy: Policy, *, curve: StepCurve, ladder: Ladder,
           num_requests: int) -> Replay:
  """Runs `num_requests` records side by side as a round, in their order; a rest is left out."""
  num_rounds = len(records.num_accepted_N) // num_requests
  if not num_rounds:
    raise ValueError(f"records: found {len(records.num_accepted_N)}, expected at least "
                     f"{num_requests}")
  proposal_len = records.logits_NxG.shape[1]
  fold = lambda x: jnp.asarray(x[:num_rounds * num_requests].reshape(
      num_rounds, num_requests, *x.shape[1:]))
  logits, accepted_TxR = fold(records.logits_NxG), fold(records.num_accepted_N)
  if isinstance(estimator, Oracle):
    logits = (jnp.arange(proposal_len)[None, None] < accepted_TxR[..., None]).astype(jnp.float32)
  margin = fold(records.margin_NxG) if records.margin_NxG.shape[1] else None
  state = schedule.init_scheduler(num_requests, proposal_len, policy=policy, estimator=estimator,
                                  ladder=ladder, curve=curve)
  survival, lens, counts, ms = jax.device_get(_scan(
      estimator, policy, ladder, state, Signals(logits, margin), accepted_TxR))
  return Replay(survival, lens, int(counts.sum()), float(ms.astype(np.float64).sum()))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _scan(estimator, policy, ladder, state, signals_T, accepted_TxR):
  num_requests, proposal_len = signals_T.confidence_logits_BxG.shape[1:]
  is_live_B = jnp.ones(num_requests, bool)
  room_B = jnp.full(num_requests, proposal_len)

  def run_round(state, inputs):
    signals, accepted_B = inputs
    plan = schedule.plan_round(policy, estimator, state, is_live_B, room_B, ladder=ladder)
    lens_B, survival_BxG = schedule.choose_lens(
        policy, estimator, state, plan, signals, is_live_B=is_live_B, max_lens_B=room_B,
        ladder=ladder)
    bucket = choose_bucket(ladder, lens_B, is_live_B)
    num_accepted_B = jnp.minimum(lens_B, accepted_B)
    ms = state.curve.verify_ms_N[bucket] + state.curve.draft_ms_D[
        -1 if plan is None else plan.draft_choice]
    state = schedule.learn(policy, estimator, state, plan, signals, survival_BxG,
                           Outcome(lens_B, num_accepted_B, is_live_B), ladder=ladder,
                           bucket=bucket)
    return state, (survival_BxG, lens_B, jnp.sum(num_accepted_B + 1), ms)

  return jax.lax.scan(run_round, state, (signals_T, accepted_TxR))[1]
