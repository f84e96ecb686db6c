"""The scheduler of a running batch: its state on the device, and its three moments in a round.

`plan_round` before drafting, from earlier rounds alone; `choose_lens` after drafting; `learn` when
the outcome is known. Without a step curve an adaptive policy verifies the full block.
"""

import functools
import warnings
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.ladder import Ladder, draft_lens
from dspark_jax.scheduler import policies
from dspark_jax.scheduler.estimator import Estimator, Outcome, Signals, TrainedHead
from dspark_jax.scheduler.policies import Plan, Policy
from dspark_jax.scheduler.step_curve import StepCurve
from dspark_jax.scheduler.survival import average_survival, compute_survival

USUAL_CONFIDENCE = 0.7  # a usual accept rate, where nothing was drafted yet
USUAL_MEMORY = 0.95  # of what is usual, by rounds that drafted


@flax.struct.dataclass
class SchedulerState:
  """What the scheduler keeps between rounds; of the engine, but for the rows of the requests.

  Attributes:
    num_rounds: int32 [].
    past_survival_BxG: survivals at least two rounds old, averaged by the policy's `memory`.
    last_survival_BxG: survivals of the last round.
    num_drawn_B: int32, drafts of each request that the last round drew; 0 where it took no part.
    usual_survival_G: mean over requests and rounds; what a new request starts with.
    curve: StepCurve, or None.
    estimator: the estimator's state.
    num_drafted: int32 [], rounds that drafted.
    num_tokens: float32 [], rows verified, anchors included.
    bucket_counts_N: int32, rounds run in each bucket of the ladder.
  """
  num_rounds: jax.Array
  past_survival_BxG: jax.Array
  last_survival_BxG: jax.Array
  num_drawn_B: jax.Array
  usual_survival_G: jax.Array
  curve: StepCurve | None
  estimator: Any
  num_drafted: jax.Array
  num_tokens: jax.Array
  bucket_counts_N: jax.Array


def init_scheduler(batch: int, proposal_len: int, *, policy: Policy | None = None,
                   estimator: Estimator | None = None, ladder: Ladder | None = None,
                   curve: StepCurve | None = None) -> SchedulerState:
  """Returns the state before the first round.

  An adaptive policy without a curve is told here: it will verify every draft.

  Raises:
    ValueError: a curve that was measured for another ladder.
  """
  if policies.is_adaptive(policy) and curve is None:
    warnings.warn(f"step curve: none given to {type(policy).__name__}, so every draft is verified; "
                  "experiments/profile_step_curve.py measures one", stacklevel=2)
  num_buckets = len(ladder or ())
  if curve is not None and curve.verify_ms_N.shape != (num_buckets,):
    raise ValueError(f"step curve: found {curve.verify_ms_N.shape[0]} buckets, expected the "
                     f"ladder's {num_buckets}")
  usual_G = USUAL_CONFIDENCE ** (1.0 + jnp.arange(proposal_len, dtype=jnp.float32))
  return SchedulerState(
      num_rounds=jnp.int32(0), past_survival_BxG=jnp.tile(usual_G, (batch, 1)),
      last_survival_BxG=jnp.zeros((batch, proposal_len), jnp.float32),
      num_drawn_B=jnp.zeros(batch, jnp.int32), usual_survival_G=usual_G, curve=curve,
      estimator=(estimator or TrainedHead()).init(proposal_len), num_drafted=jnp.int32(0),
      num_tokens=jnp.float32(0), bucket_counts_N=jnp.zeros(num_buckets, jnp.int32))


def forget_requests(state: SchedulerState, is_new_B: jax.Array) -> SchedulerState:
  """For slots that got a new request: what the last one left does not count."""
  return state.replace(
      num_drawn_B=jnp.where(is_new_B, 0, state.num_drawn_B),
      past_survival_BxG=jnp.where(is_new_B[:, None], state.usual_survival_G[None],
                                  state.past_survival_BxG))


def plan_round(policy: Policy, estimator: Estimator | None, state: SchedulerState,
               is_live_B: jax.Array, max_lens_B: jax.Array, *,
               ladder: Ladder | None) -> Plan | None:
  """Returns what earlier rounds decide, or None where nothing needs them (see `make_plan`)."""
  if not policies.is_adaptive(policy) or state.curve is None:
    return None
  return policies.make_plan(
      policy, state.past_survival_BxG, is_live_B, curve=state.curve, ladder=ladder,
      max_lens_B=max_lens_B, round_index=state.num_rounds,
      does_learn=(estimator or TrainedHead()).does_learn)


def choose_lens(policy: Policy | None, estimator: Estimator | None, state: SchedulerState | None,
                plan: Plan | None, signals: Signals, *, is_live_B: jax.Array,
                max_lens_B: jax.Array, ladder: Ladder | None) -> tuple[jax.Array, jax.Array]:
  """Returns (int32 [B] verify lengths, float32 [B, G] survivals)."""
  estimator_state = None if state is None else state.estimator
  confidence_BxG = (estimator or TrainedHead()).estimate(estimator_state, signals)
  survival_BxG = compute_survival(confidence_BxG)
  if plan is None:
    lens_B = policies.choose_verify_lens(policy, confidence_BxG)
  else:
    lens_B = policies.choose_adaptive(policy, plan, survival_BxG, is_live_B, curve=state.curve,
                                      ladder=ladder)
  return jnp.where(is_live_B, jnp.minimum(lens_B, max_lens_B), 0), survival_BxG


def learn(policy: Policy | None, estimator: Estimator | None, state: SchedulerState,
          plan: Plan | None, signals: Signals, survival_BxG: jax.Array, outcome: Outcome, *,
          ladder: Ladder | None, bucket: jax.Array | None) -> SchedulerState:
  """Returns the state after a round; `bucket` is the index of the shape it ran in."""
  num_drawn = jnp.int32(survival_BxG.shape[1])
  if plan is not None:
    num_drawn = jnp.asarray((0, *draft_lens(ladder)), jnp.int32)[plan.draft_choice]
  memory = policy.memory if policies.is_adaptive(policy) else 0.0
  average = jax.vmap(functools.partial(average_survival, memory=memory))
  past_BxG = average(state.past_survival_BxG, state.last_survival_BxG, state.num_drawn_B)
  took_part_B = state.num_drawn_B > 0
  mean_G = jnp.sum(jnp.where(took_part_B[:, None], state.last_survival_BxG, 0.0), axis=0)
  mean_G = mean_G / jnp.maximum(jnp.sum(took_part_B, dtype=jnp.float32), 1.0)
  usual_G = average_survival(state.usual_survival_G, mean_G, jnp.max(state.num_drawn_B),
                             memory=USUAL_MEMORY)
  bucket_counts_N = state.bucket_counts_N
  if bucket is not None:
    is_bucket_N = jnp.arange(bucket_counts_N.shape[0]) == bucket
    bucket_counts_N = bucket_counts_N + is_bucket_N.astype(jnp.int32)
  return state.replace(
      num_rounds=state.num_rounds + 1, past_survival_BxG=past_BxG, usual_survival_G=usual_G,
      last_survival_BxG=survival_BxG,
      num_drawn_B=jnp.where(outcome.is_live_B, num_drawn, 0).astype(jnp.int32),
      # A round without drafts verified none, so it teaches nothing.
      estimator=(estimator or TrainedHead()).observe(state.estimator, signals, outcome),
      num_drafted=state.num_drafted + (num_drawn > 0), bucket_counts_N=bucket_counts_N,
      num_tokens=state.num_tokens + jnp.sum(
          jnp.where(outcome.is_live_B, 1 + outcome.verify_lens_B, 0)).astype(jnp.float32))


def measure_waste(state: SchedulerState, ladder: Ladder) -> float:
  """Returns the share of packed slots that held no row, 0 without a round; host only."""
  num_slots = sum(int(n) * tokens for n, (tokens, _) in zip(state.bucket_counts_N, ladder))
  return 1.0 - float(state.num_tokens) / num_slots if num_slots else 0.0
