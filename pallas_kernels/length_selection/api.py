"""Length selection: survivals of all drafts -> verify lengths; the one function of the family."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import dispatch
from pallas_kernels.length_selection import kernel_tpu, reference


def length_selection(
  survival_BxG: jax.Array,
  *,
  step_curve_C: jax.Array | None = None,
  budget: jax.Array | int | None = None,
  is_live_B: jax.Array | None = None,
  min_lens_B: jax.Array | None = None,
  max_lens_B: jax.Array | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Returns int32 [B] verify lengths in 0..G, by one of two rules over one order of the drafts.

  The order: falling survival; ties by position, then by request, so that no request's prefix is
  broken. With `step_curve_C` the rule is Algorithm 1 of the paper (section 3.2.2): drafts are
  admitted in that order while each strictly raises

    tokens_per_s = (live requests + sum of admitted survivals) * step_curve[tokens],
    tokens = live requests + admitted drafts,

  and the first that does not ends it. The decision on a draft then uses only what comes before it,
  which keeps the output law exact. With `budget` the first `budget` drafts of the order are taken;
  the budget itself must not depend on this round's confidences.

  Args:
    survival_BxG: float32, probability that draft k and all before it are accepted. Values are
      clipped to [0, 1] and cut to the running minimum along G; a NaN is never admitted, nor is
      anything after it.
    step_curve_C: float32 steps per second (any unit: only ratios count) of a round with c tokens
      in all at index c; entry 0 is not read. Totals of C tokens or more are never used.
    budget: int32 scalar, drafts in all requests together.
    is_live_B: bool; a request that is not live counts nowhere and gets 0. None = all are.
    min_lens_B: int32, drafts admitted before the rule starts, whatever it would say (they count in
      tokens, sum and budget). None = 0.
    max_lens_B: int32, no draft beyond is admitted; also cuts min_lens. None = G.
    implementation: "auto", "reference" or "pallas"; see `pallas_kernels.dispatch`.

  Admitted survivals are added in float32 in the order of admission, so that near-ties fall alike in
  every implementation.

  Raises:
    ValueError: both or neither of step_curve and budget; shapes do not fit together, or a dtype.
  """
  if (step_curve_C is None) == (budget is None):
    raise ValueError("found both or neither of step_curve and budget, "
                     "expected exactly one")
  if survival_BxG.ndim != 2 or survival_BxG.dtype != jnp.float32:
    raise ValueError(f"survival: found {survival_BxG.dtype}{survival_BxG.shape}, "
                     "expected float32 of rank 2")
  batch, num_drafts = survival_BxG.shape
  for name, array in (("is_live", is_live_B), ("min_lens", min_lens_B), ("max_lens", max_lens_B)):
    if array is not None and array.shape != (batch,):
      raise ValueError(f"{name}: found shape {array.shape}, expected {(batch,)}")
  if step_curve_C is not None and (step_curve_C.ndim != 1 or step_curve_C.shape[0] < 1
                                   or step_curve_C.dtype != jnp.float32):
    raise ValueError(f"step_curve: found {step_curve_C.dtype}{step_curve_C.shape}, "
                     "expected float32 of rank 1 with an entry")
  if budget is not None and jnp.ndim(budget):
    raise ValueError(f"budget: found shape {jnp.shape(budget)}, expected a scalar")

  is_live_B = jnp.ones(batch, bool) if is_live_B is None else is_live_B
  most_B = num_drafts if max_lens_B is None else jnp.clip(max_lens_B, 0, num_drafts)
  most_B = jnp.where(is_live_B, most_B, 0).astype(jnp.int32)
  least_B = 0 if min_lens_B is None else min_lens_B
  least_B = jnp.clip(least_B, 0, most_B).astype(jnp.int32)
  keys_BxG, forced = make_keys(survival_BxG, least_B, most_B)
  num_forced = jnp.sum(least_B, dtype=jnp.int32)
  if step_curve_C is None:
    room = jnp.asarray(budget, jnp.int32) - num_forced
    return least_B + dispatch(
      implementation, keys_BxG, room, reference=reference.fill_budget,
      kernels={"tpu": kernel_tpu.fill_budget_tpu})
  num_live = jnp.sum(is_live_B, dtype=jnp.int32)
  expected_tokens = num_live.astype(jnp.float32) + forced
  return least_B + dispatch(implementation, keys_BxG, expected_tokens, num_live + num_forced,
                            step_curve_C, reference=reference.stop_early,
                            kernels={"tpu": kernel_tpu.stop_early_tpu})


def make_keys(survival_BxG: jax.Array, least_B: jax.Array, most_B: jax.Array):
  """Returns (keys_BxG, sum of the survivals below `least_B`).

  A key is the draft's survival from `least_B` up to `most_B`, as cleaned as `length_selection`
  says, and -1 where the draft is no candidate.
  """
  is_number_BxG = lax.cummin((survival_BxG == survival_BxG).astype(jnp.int32), axis=1) > 0
  clean_BxG = lax.cummin(jnp.where(is_number_BxG, jnp.clip(survival_BxG, 0.0, 1.0), 0.0), axis=1)
  slot_1xG = jnp.arange(survival_BxG.shape[1], dtype=jnp.int32)[None]
  is_forced_BxG = slot_1xG < least_B[:, None]
  is_candidate_BxG = ~is_forced_BxG & (slot_1xG < most_B[:, None]) & is_number_BxG
  return (jnp.where(is_candidate_BxG, jnp.abs(clean_BxG), -1.0),  # abs: no -0.0
          jnp.sum(jnp.where(is_forced_BxG, clean_BxG, 0.0)))
