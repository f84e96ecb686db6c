"""Rejection sampling in plain jnp: the definition of correct, and the fast path on CPU.

Of the [B, W, V] logits only log-normalisers and single entries are read; probabilities exist for
the one row per request that draws a token.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.counter_rng import gumbel_argmax
from pallas_kernels.rows import find_laws

MIN_RESIDUAL_MASS = 1e-8


def rejection_sampling_reference(
  target_logits_BxWxV,
  draft_logits_BxGxD,
  draft_tokens_BxG,
  verify_lens_B,
  coins_BxG,
  noise_words_BxWx2,
  draft_ids=None,
):
  """Same as `api.rejection_sampling`."""
  num_rows = target_logits_BxWxV.shape[1]
  num_drafts = min(draft_tokens_BxG.shape[1], num_rows - 1)
  verify_lens_B = jnp.clip(verify_lens_B, 0, num_drafts)
  target_lse_BxW = jax.nn.logsumexp(target_logits_BxWxV, axis=-1)
  draft_lse_BxG = jax.nn.logsumexp(draft_logits_BxGxD, axis=-1)

  target_logp_BxG = gather_logits(target_logits_BxWxV[:, :num_drafts], draft_tokens_BxG, None)
  target_logp_BxG -= target_lse_BxW[:, :num_drafts]
  draft_logp_BxG = gather_logits(draft_logits_BxGxD, draft_tokens_BxG, draft_ids) - draft_lse_BxG
  is_accepted_BxG = accept_drafts(target_logp_BxG, draft_logp_BxG[:, :num_drafts], coins_BxG)
  is_target_law_BxW = find_laws(target_logits_BxWxV)
  is_draft_law_BxG = find_laws(draft_logits_BxGxD)[:, :num_drafts]
  is_accepted_BxG &= is_target_law_BxW[:, :num_drafts] & is_draft_law_BxG
  num_accepted_B = count_prefix(is_accepted_BxG, verify_lens_B)

  row_Bx1x1 = num_accepted_B[:, None, None]
  target_row_BxV = jnp.take_along_axis(target_logits_BxWxV, row_Bx1x1, axis=1)[:, 0]
  target_row_lse_B = jnp.take_along_axis(target_lse_BxW, row_Bx1x1[:, 0], axis=1)[:, 0]
  words_Bx2 = jnp.take_along_axis(noise_words_BxWx2, row_Bx1x1, axis=1)[:, 0]
  is_valid_B = jnp.take_along_axis(is_target_law_BxW, row_Bx1x1[:, 0], axis=1)[:, 0]
  if num_drafts == 0:
    next_token_B = gumbel_argmax(target_row_BxV, words_Bx2)
    return num_accepted_B, jnp.where(is_valid_B, next_token_B, 0), is_valid_B

  draft_row_Bx1 = jnp.minimum(num_accepted_B, num_drafts - 1)[:, None]
  draft_row_BxD = jnp.take_along_axis(draft_logits_BxGxD, draft_row_Bx1[..., None], axis=1)[:, 0]
  draft_row_lse_B = jnp.take_along_axis(draft_lse_BxG, draft_row_Bx1, axis=1)[:, 0]
  draft_BxV = jnp.exp(draft_row_BxD - draft_row_lse_B[:, None])
  if draft_ids is not None:
    draft_BxV = (
      jnp.zeros_like(target_row_BxV)
      .at[:, draft_ids]
      .set(draft_BxV, unique_indices=True, indices_are_sorted=True)
    )
  is_rejected_B = num_accepted_B < verify_lens_B
  residual_BxV, mass_B = subtract_laws(
    jnp.exp(target_row_BxV - target_row_lse_B[:, None]), draft_BxV
  )
  uses_residual_B = is_rejected_B & (mass_B > MIN_RESIDUAL_MASS)
  # Bonus and fallback keep the logits, so that they draw the very token of plain decoding.
  scores_BxV = jnp.where(uses_residual_B[:, None], jnp.log(residual_BxV), target_row_BxV)
  next_token_B = gumbel_argmax(scores_BxV, words_Bx2)
  is_draft_law_B = jnp.take_along_axis(is_draft_law_BxG, draft_row_Bx1, axis=1)[:, 0]
  is_valid_B &= ~is_rejected_B | is_draft_law_B
  return num_accepted_B, jnp.where(is_valid_B, next_token_B, 0), is_valid_B


def accept_drafts(target_logp_BxG, draft_logp_BxG, coins_BxG):
  """Returns whether u < min(1, p/q) draft by draft, bool [B, G]; False where p or q is 0 or NaN."""
  coins_BxG = coins_BxG[:, : target_logp_BxG.shape[1]]
  difference_BxG = target_logp_BxG - draft_logp_BxG
  # The first clause makes a ratio of 1 certain whatever exp rounds to.
  is_below_BxG = (difference_BxG >= 0) | (coins_BxG < jnp.exp(difference_BxG))
  return is_below_BxG & (target_logp_BxG > -jnp.inf) & (draft_logp_BxG > -jnp.inf)


def count_prefix(is_accepted_BxG, verify_lens_B):
  """Returns the length of the leading run of accepted drafts within verify_lens, int32 [B]."""
  slot_G = jnp.arange(is_accepted_BxG.shape[1])
  is_run_BxG = is_accepted_BxG & (slot_G[None] < verify_lens_B[:, None])
  return jnp.sum(jnp.cumprod(is_run_BxG.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def subtract_laws(p_BxV, q_BxV):
  """Returns max(p - q, 0), not normalised, [B, V], and its mass [B]."""
  residual_BxV = jnp.maximum(p_BxV - q_BxV, 0.0)
  return residual_BxV, jnp.sum(residual_BxV, axis=-1)


def residual_law(p_BxV, q_BxV):
  """Returns max(p - q, 0) normalised, [B, V], or p in rows where its mass is <= 1e-8."""
  residual_BxV, mass_B = subtract_laws(p_BxV, q_BxV)
  is_usable_Bx1 = (mass_B > MIN_RESIDUAL_MASS)[:, None]
  safe_mass_Bx1 = jnp.where(is_usable_Bx1, mass_B[:, None], 1.0)
  return jnp.where(is_usable_Bx1, residual_BxV / safe_mass_Bx1, p_BxV)


def gather_logits(logits_BxGxD, tokens_BxG, draft_ids):
  """Returns the logit of each row's token, [B, rows]; -inf for a token outside the vocabulary."""
  tokens_BxG = tokens_BxG[:, : logits_BxGxD.shape[1]]
  columns_BxG = find_columns(tokens_BxG, draft_ids, logits_BxGxD.shape[-1])
  safe_BxGx1 = jnp.maximum(columns_BxG, 0)[..., None]
  found_BxG = jnp.take_along_axis(logits_BxGxD, safe_BxGx1, axis=-1)[..., 0]
  return jnp.where(columns_BxG >= 0, found_BxG, -jnp.inf)


def find_columns(tokens_BxG, draft_ids, size: int):
  """Returns the column of each token, int32 of the same shape; -1 outside the vocabulary."""
  if draft_ids is None:
    return jnp.where((tokens_BxG >= 0) & (tokens_BxG < size), tokens_BxG, -1)
  columns_BxG = jnp.searchsorted(draft_ids, tokens_BxG)
  is_known_BxG = jnp.take(draft_ids, columns_BxG, mode="clip") == tokens_BxG
  return jnp.where(is_known_BxG, jnp.minimum(columns_BxG, size - 1), -1)
