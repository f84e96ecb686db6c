"""Policies: how many drafts of each request to verify this round.

A policy is a frozen dataclass; the functions here are pure and run inside the jitted step. The
decision on draft k may use confidences up to k only, never the drafted token k itself or anything
after it: that is what keeps the output law exact (paper section 3.2.2, appendix A).

`EarlyStop` and `Lagged` maximise expected tokens per millisecond,
(live requests + sum of admitted survivals) / (draft time + verify time of the bucket). Before a
round drafts, survivals two rounds old choose the best bucket of the true staircase, where a search
is allowed; its rows say how many drafts of a request are drawn at all, down to none. Then
`EarlyStop` decides by this round's survivals, in the paper's order and up to the first draft that
does not pay, on the smoothed curve; `Lagged` fills that bucket with this round's best.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.ladder import Ladder, choose_bucket, draft_lens
from dspark_jax.scheduler.step_curve import StepCurve
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
    explore_every: every so many rounds a round drafts in full, without which survivals once
      estimated too low are never seen again; with an estimator that learns from outcomes it also
      verifies one request in full, the requests in turn. 0 = never.
    explore_share: most time that exploring may add to plain decoding; it waits longer for that.
    memory: in [0, 1), weight of older rounds in the survivals that the bucket is chosen by, against
      those of the round two rounds back; 0 = that round alone.
  """
  min_draft: int = 0
  max_draft: int | None = None
  may_skip_draft: bool = True
  explore_every: int = 32
  explore_share: float = 0.01
  memory: float = 0.9

  def __post_init__(self):
    _check_length(self.min_draft, "min_draft")
    _check_length(self.explore_every, "explore_every")
    if self.max_draft is not None:
      _check_length(self.max_draft, "max_draft")
      if self.max_draft < self.min_draft:
        raise ValueError(f"max_draft: found {self.max_draft}, expected at least min_draft = "
                         f"{self.min_draft}")
    if not self.explore_share > 0:
      raise ValueError(f"explore_share: found {self.explore_share}, expected a number > 0")
    if not 0.0 <= self.memory < 1.0:
      raise ValueError(f"memory: found {self.memory}, expected a number in [0, 1)")

  @property
  def length(self) -> int | None:
    return self.max_draft


@dataclasses.dataclass(frozen=True)
class EarlyStop(_Adaptive):
  """Algorithm 1 on the smoothed step curve, among the drafts that earlier rounds had drawn.

  With `fills_bucket` the order of admission then goes on to the end of the bucket that has to be
  paid anyway. That is still exact: a draft is admitted or not by what comes before it in the order.
  """
  fills_bucket: bool = True


@dataclasses.dataclass(frozen=True)
class Lagged(_Adaptive):
  """Bucket by survivals two rounds old, filled by this round's survivals."""


Policy = FixedLength | ConfidenceThreshold | EarlyStop | Lagged


@flax.struct.dataclass
class Plan:
  """What is decided before a round drafts, from earlier rounds alone.

  Attributes:
    draft_choice: int32 [], drafts that are drawn of a request: an index into (0, *draft_lens).
    budget: int32 [], most drafts verified in all; used by `Lagged` alone.
    min_lens_B, max_lens_B: int32 bounds of each request's verify length.
  """
  draft_choice: jax.Array
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


def make_leadable(policy: Policy | None) -> Policy:
  """Returns an adaptive policy of the same width that any curve can send into any bucket."""
  if isinstance(policy, EarlyStop):
    return dataclasses.replace(policy, min_draft=0, may_skip_draft=True, fills_bucket=True)
  if isinstance(policy, Lagged):
    return dataclasses.replace(policy, min_draft=0, may_skip_draft=True)
  return EarlyStop(max_draft=None if policy is None else policy.length)


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
              curve: StepCurve, ladder: Ladder, max_lens_B: jax.Array, round_index: jax.Array,
              does_learn: bool = True) -> Plan:
  """Decides from survivals of earlier rounds how much to draft, and `Lagged`'s budget.

  Args:
    past_survival_BxG: float32, two rounds old.
    is_live_B: bool; requests that are done count nowhere.
    max_lens_B: int32, drafts that a request still has room for.
    round_index: int32 [], rounds run before this one.
    does_learn: whether outcomes teach the estimator, so that exploring verifies too.
  """
  batch, proposal_len = past_survival_BxG.shape
  length = max_verify_len(policy, proposal_len)
  max_lens_B = jnp.where(is_live_B, jnp.minimum(max_lens_B, length), 0)
  min_lens_B = jnp.minimum(policy.min_draft, max_lens_B)
  is_exploring = jnp.bool_(False)
  if policy.explore_every and draft_lens(ladder):
    period = _explore_period(policy, curve, ladder, batch, does_learn)
    is_exploring = round_index % period == period - 1
    if does_learn:
      is_chosen_B = is_exploring & (jnp.arange(batch) == (round_index // period) % batch)
      min_lens_B = jnp.where(is_chosen_B, max_lens_B, min_lens_B)

  bucket, _ = search_buckets(
      past_survival_BxG, curve=curve, ladder=ladder, is_live_B=is_live_B, min_lens_B=min_lens_B,
      max_lens_B=max_lens_B, may_skip_draft=policy.may_skip_draft)
  row_limit = _rows_of(ladder)[bucket] - 1
  if isinstance(policy, EarlyStop):  # what was drawn to explore may be used
    row_limit = jnp.where(is_exploring, length, row_limit)
  num_live = jnp.sum(is_live_B, dtype=jnp.int32)
  return Plan(
      draft_choice=jnp.where(is_exploring, len(draft_lens(ladder)),
                             _choices_of(ladder, policy.may_skip_draft)[bucket]),
      budget=jnp.maximum(_tokens_of(ladder)[bucket] - num_live, 0),
      min_lens_B=min_lens_B, max_lens_B=jnp.minimum(max_lens_B, row_limit))


def choose_adaptive(policy: Policy, plan: Plan, survival_BxG: jax.Array, is_live_B: jax.Array, *,
                    curve: StepCurve, ladder: Ladder) -> jax.Array:
  """Returns int32 [B] verify lengths of an adaptive policy from this round's survivals."""
  bounds = dict(is_live_B=is_live_B, min_lens_B=plan.min_lens_B)
  if isinstance(policy, Lagged):
    return length_selection(survival_BxG, budget=plan.budget, max_lens_B=plan.max_lens_B, **bounds)
  lens_B = length_selection(survival_BxG, step_curve_C=curve.steps_per_ms_DxC[plan.draft_choice],
                            max_lens_B=plan.max_lens_B, **bounds)
  if policy.fills_bucket:
    paid = choose_bucket(ladder, lens_B, is_live_B)
    budget = _tokens_of(ladder)[paid] - jnp.sum(is_live_B, dtype=jnp.int32)
    max_lens_B = jnp.minimum(plan.max_lens_B, _rows_of(ladder)[paid] - 1)
    lens_B = length_selection(survival_BxG, budget=budget, max_lens_B=max_lens_B, **bounds)
  return lens_B


def search_buckets(survival_BxG: jax.Array, *, curve: StepCurve, ladder: Ladder,
                   is_live_B: jax.Array, min_lens_B: jax.Array, max_lens_B: jax.Array,
                   may_skip_draft: bool = True) -> tuple[jax.Array, jax.Array]:
  """Searches all buckets for the most expected tokens per millisecond; ties go to the smaller.

  A bucket holds the requests' anchors, their `min_lens`, and the best further survivals that fit
  into its tokens and rows. Buckets too small for the first two are out. Each costs the drafting
  that its rows need; without `may_skip_draft` that is never nothing.

  Returns:
    (int32 [] index of the best, float32 [] its expected tokens per millisecond).
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
  total_ms_N = curve.verify_ms_N + curve.draft_ms_D[_choices_of(ladder, may_skip_draft)]
  rates = []
  for n, (tokens, rows) in enumerate(ladder):
    num_more = jnp.clip(tokens - num_forced, 0, survival_BxG.size)
    rate = (forced + best_sums[rows][num_more]) / total_ms_N[n]
    is_possible = (tokens >= num_forced) & (rows > jnp.max(min_lens_B))
    rates.append(jnp.where(is_possible, rate, -1.0))
  rates_N = jnp.stack(rates)
  return jnp.argmax(rates_N).astype(jnp.int32), jnp.max(rates_N)


def _explore_period(policy, curve: StepCurve, ladder: Ladder, batch: int, does_learn: bool):
  """Rounds from one that explores to the next, so that all of them cost no more than their share.

  A round costs the drafting of the full block and, to learn, the smallest bucket that holds it.
  """
  first = lambda found: next(n for n, shape in enumerate(ladder) if found(*shape))
  plain_ms = curve.verify_ms_N[first(lambda tokens, rows: tokens >= batch)]
  more_ms = curve.draft_ms_D[-1]
  if does_learn:
    most = ladder[-1][1]
    more_ms += curve.verify_ms_N[
        first(lambda tokens, rows: rows == most and tokens >= batch + most - 1)] - plain_ms
  rounds = jnp.ceil(jnp.clip(more_ms / (policy.explore_share * plain_ms), 1.0, 1e6))
  return jnp.maximum(policy.explore_every, rounds.astype(jnp.int32))


def _tokens_of(ladder: Ladder) -> jax.Array:
  return jnp.asarray([tokens for tokens, _ in ladder], jnp.int32)


def _rows_of(ladder: Ladder) -> jax.Array:
  return jnp.asarray([rows for _, rows in ladder], jnp.int32)


def _choices_of(ladder: Ladder, may_skip_draft: bool) -> jax.Array:
  """int32 [N]: what to draft for each shape, as `Plan.draft_choice`."""
  lens = (0, *draft_lens(ladder))
  least = 0 if may_skip_draft else min(1, len(lens) - 1)
  return jnp.asarray([max(lens.index(rows - 1), least) for _, rows in ladder], jnp.int32)


def _check_length(length, name: str = "length") -> None:
  if not isinstance(length, int) or length < 0:
    raise ValueError(f"{name}: found {length!r}, expected an integer >= 0")


def _check_policy(policy) -> None:
  if policy is not None and not isinstance(policy, Policy):
    raise TypeError(f"policy: found {policy!r}, expected FixedLength, ConfidenceThreshold, "
                    "EarlyStop, Lagged or None")
