"""Policies: how many drafts of each request to verify this round.

A policy is a frozen dataclass; the functions here are pure and run inside the jitted step. The
decision on draft k may use confidences up to k only, never the drafted token k itself or anything
after it: that is what keeps the output law exact (paper section 3.2.2, appendix A).

`EarlyStop` and `Lagged` maximise expected tokens per millisecond,
(live requests + sum of admitted survivals) / (draft time + verify time of the bucket). The first
decides by this round's survivals, in the paper's order and up to the first draft that does not
pay, on the smoothed curve. The second takes a budget from survivals two rounds old, where a search
over the true staircase is allowed, and fills it with this round's best.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.scheduler.step_curve import Ladder, StepCurve
from pallas_kernels.length_selection import length_selection


@dataclasses.dataclass(frozen=True)
class FixedLength:
  """Verifies the first `length` drafts of every request; 0 is plain decoding."""
  length: int

  def __post_init__(self):
    _check_length(self.length)


@dataclasses.dataclass(frozen=True)
class ConfidenceThreshold:
  """Verifies drafts up to the first whose confidence is below `threshold` (0 = all of them).

  `length` bounds the drafts verified, None = the whole proposal.
  """
  threshold: float
  length: int | None = None

  def __post_init__(self):
    if self.length is not None:
      _check_length(self.length)
    if not 0.0 <= self.threshold <= 1.0:
      raise ValueError(
          f"confidence_threshold: found {self.threshold}, expected a number in [0, 1]")


@dataclasses.dataclass(frozen=True)
class _Adaptive:
  """What the two policies that use the step curve share.

  Attributes:
    min_draft: drafts of every live request that are verified whatever the curve says.
    max_draft: most drafts verified of a request, None = the whole proposal.
    may_skip_draft: where earlier rounds say that plain decoding is faster, nothing is drafted.
    explore_every: every so many rounds a round drafts and verifies one request in full, the
      requests in turn: without it survivals once estimated too low are never seen again. 0 = never.
  """
  min_draft: int = 0
  max_draft: int | None = None
  may_skip_draft: bool = True
  explore_every: int = 32

  def __post_init__(self):
    _check_length(self.min_draft, "min_draft")
    _check_length(self.explore_every, "explore_every")
    if self.max_draft is not None:
      _check_length(self.max_draft, "max_draft")
      if self.max_draft < self.min_draft:
        raise ValueError(f"max_draft: found {self.max_draft}, expected at least min_draft = "
                         f"{self.min_draft}")

  @property
  def length(self) -> int | None:
    return self.max_draft


@dataclasses.dataclass(frozen=True)
class EarlyStop(_Adaptive):
  """Algorithm 1 on the smoothed step curve.

  With `fills_bucket` the order of admission then goes on to the end of the bucket that has to be
  paid anyway. That is still exact: a draft is admitted or not by what comes before it in the order.
  """
  fills_bucket: bool = False


@dataclasses.dataclass(frozen=True)
class Lagged(_Adaptive):
  """Bucket by survivals two rounds old, filled by this round's survivals.

  `memory` in [0, 1) averages over rounds before those: weight of what was remembered, 0 = none.
  """
  memory: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    if not 0.0 <= self.memory < 1.0:
      raise ValueError(f"memory: found {self.memory}, expected a number in [0, 1)")


Policy = FixedLength | ConfidenceThreshold | EarlyStop | Lagged


@flax.struct.dataclass
class Plan:
  """What is decided before a round drafts, from earlier rounds alone.

  Attributes:
    should_draft: bool []; False = a round of plain decoding.
    budget: int32 [], most drafts verified in all; used by `Lagged` alone.
    min_lens_B, max_lens_B: int32 bounds of each request's verify length.
  """
  should_draft: jax.Array
  budget: jax.Array
  min_lens_B: jax.Array
  max_lens_B: jax.Array


def is_adaptive(policy: Policy | None) -> bool:
  """Whether a policy uses the step curve and what earlier rounds left behind."""
  _check_policy(policy)
  return isinstance(policy, _Adaptive)


def max_verify_len(policy: Policy | None, proposal_len: int) -> int:
  """Returns the most drafts a policy can ever verify: the static width of the verify pass."""
  _check_policy(policy)
  if policy is None or policy.length is None:
    return proposal_len
  return min(policy.length, proposal_len)


def choose_verify_lens(policy: Policy | None, confidence_BxG: jax.Array) -> jax.Array:
  """Returns int32 [B] verify lengths in 0..G of a policy that needs no step curve.

  No policy verifies every draft, and so does an adaptive one, which cannot judge without a curve.
  """
  batch, proposal_len = confidence_BxG.shape
  length = max_verify_len(policy, proposal_len)
  if isinstance(policy, ConfidenceThreshold):
    is_kept_BxG = jnp.cumprod((confidence_BxG >= policy.threshold).astype(jnp.int32), axis=1)
    return is_kept_BxG[:, :length].sum(axis=1, dtype=jnp.int32)
  return jnp.full((batch,), length, jnp.int32)


def make_plan(policy: Policy, past_survival_BxG: jax.Array, is_live_B: jax.Array, *,
              curve: StepCurve, ladder: Ladder, max_lens_B: jax.Array,
              round_index: jax.Array) -> Plan:
  """Decides from survivals of earlier rounds whether to draft, and `Lagged`'s budget.

  Args:
    past_survival_BxG: float32, two rounds old.
    is_live_B: bool; requests that are done count nowhere.
    max_lens_B: int32, drafts that a request still has room for.
    round_index: int32 [], rounds run before this one.
  """
  batch, proposal_len = past_survival_BxG.shape
  length = max_verify_len(policy, proposal_len)
  max_lens_B = jnp.where(is_live_B, jnp.minimum(max_lens_B, length), 0)
  min_lens_B = jnp.minimum(policy.min_draft, max_lens_B)
  if policy.explore_every:
    turn = round_index // policy.explore_every
    is_exploring = round_index % policy.explore_every == policy.explore_every - 1
    is_chosen_B = is_exploring & (jnp.arange(batch) == turn % batch)
    min_lens_B = jnp.where(is_chosen_B, max_lens_B, min_lens_B)
  bounds = dict(is_live_B=is_live_B, min_lens_B=min_lens_B, max_lens_B=max_lens_B)

  if isinstance(policy, Lagged):
    budget, row_limit, rate = search_buckets(
        past_survival_BxG, curve=curve, ladder=ladder, **bounds)
    max_lens_B = jnp.minimum(max_lens_B, row_limit)
  else:
    lens_B = length_selection(past_survival_BxG, step_curve_C=curve.steps_per_ms_C, **bounds)
    budget = jnp.int32(batch * proposal_len)  # not used
    rate = _tokens(past_survival_BxG, lens_B, is_live_B) * curve.steps_per_ms_C[
        jnp.sum(is_live_B + lens_B)]
  should_draft = jnp.bool_(True)
  if policy.may_skip_draft:
    num_live = jnp.sum(is_live_B, dtype=jnp.int32)
    plain_ms = jnp.min(jnp.where(_tokens_of(ladder) >= num_live, curve.verify_ms_N, jnp.inf))
    should_draft = jnp.any(min_lens_B > 0) | (rate > num_live / plain_ms)
  return Plan(should_draft=should_draft, budget=budget, min_lens_B=min_lens_B,
              max_lens_B=max_lens_B)


def choose_adaptive(policy: Policy, plan: Plan, survival_BxG: jax.Array, is_live_B: jax.Array, *,
                    curve: StepCurve, ladder: Ladder) -> jax.Array:
  """Returns int32 [B] verify lengths of an adaptive policy from this round's survivals."""
  bounds = dict(is_live_B=is_live_B, min_lens_B=plan.min_lens_B, max_lens_B=plan.max_lens_B)
  if isinstance(policy, Lagged):
    lens_B = length_selection(survival_BxG, budget=plan.budget, **bounds)
  else:
    lens_B = length_selection(survival_BxG, step_curve_C=curve.steps_per_ms_C, **bounds)
    if policy.fills_bucket:
      num_live = jnp.sum(is_live_B, dtype=jnp.int32)
      size_N = _tokens_of(ladder)
      is_fit_N = size_N >= num_live + jnp.sum(lens_B)
      paid = jnp.min(jnp.where(is_fit_N, size_N, jnp.max(size_N)))
      lens_B = length_selection(survival_BxG, budget=paid - num_live, **bounds)
  return jnp.where(plan.should_draft, lens_B, 0)


def search_buckets(survival_BxG: jax.Array, *, curve: StepCurve, ladder: Ladder,
                   is_live_B: jax.Array, min_lens_B: jax.Array, max_lens_B: jax.Array):
  """Searches all buckets for the most expected tokens per millisecond; ties go to the smaller.

  A bucket holds the requests' anchors, their `min_lens`, and the best further survivals that fit
  into its tokens and rows. Buckets too small for the first two are out.

  Returns:
    (int32 [] drafts that fit the best bucket, int32 [] drafts of a request that fit its rows,
    float32 [] expected tokens per millisecond).
  """
  num_live = jnp.sum(is_live_B, dtype=jnp.int32)
  slot_1xG = jnp.arange(survival_BxG.shape[1])[None]
  is_forced_BxG = slot_1xG < min_lens_B[:, None]
  forced = num_live + jnp.sum(jnp.where(is_forced_BxG, survival_BxG, 0.0))
  num_forced = num_live + jnp.sum(min_lens_B)
  best_sums = {}
  for rows in {rows for _, rows in ladder}:
    is_candidate_BxG = ~is_forced_BxG & (slot_1xG < jnp.minimum(max_lens_B, rows - 1)[:, None])
    sorted_N = -jnp.sort(-jnp.where(is_candidate_BxG, survival_BxG, 0.0).reshape(-1))
    best_sums[rows] = jnp.concatenate([jnp.zeros(1), jnp.cumsum(sorted_N)])
  rates = []
  for n, (tokens, rows) in enumerate(ladder):
    num_more = jnp.clip(tokens - num_forced, 0, survival_BxG.size)
    rate = (forced + best_sums[rows][num_more]) / (curve.draft_ms + curve.verify_ms_N[n])
    is_possible = (tokens >= num_forced) & (rows > jnp.max(min_lens_B))
    rates.append(jnp.where(is_possible, rate, -1.0))
  best = jnp.argmax(jnp.stack(rates))
  row_limit = jnp.asarray([rows - 1 for _, rows in ladder], jnp.int32)[best]
  return jnp.maximum(_tokens_of(ladder)[best] - num_live, 0), row_limit, jnp.max(jnp.stack(rates))


def _tokens(survival_BxG, lens_B, is_live_B):
  is_admitted_BxG = jnp.arange(survival_BxG.shape[1])[None] < lens_B[:, None]
  return jnp.sum(is_live_B, dtype=jnp.int32) + jnp.sum(
      jnp.where(is_admitted_BxG, survival_BxG, 0.0))


def _tokens_of(ladder: Ladder) -> jax.Array:
  return jnp.asarray([tokens for tokens, _ in ladder], jnp.int32)


def _check_length(length, name: str = "length") -> None:
  if not isinstance(length, int) or length < 0:
    raise ValueError(f"{name}: found {length!r}, expected an integer >= 0")


def _check_policy(policy) -> None:
  if policy is not None and not isinstance(policy, Policy):
    raise TypeError(f"policy: found {policy!r}, expected FixedLength, ConfidenceThreshold, "
                    "EarlyStop, Lagged or None")
