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
  return decide(
    target_logits_BxWxV,
    draft_logits_BxGxD,
    draft_tokens_BxG,
    verify_lens_B,
    coins_BxG,
    noise_words_BxWx2,
    draft_ids,
    measure=measure_rows,
    draw=draw_tokens,
  )


def decide(
  target_logits_BxWxV,
  draft_logits_BxGxD,
  draft_tokens_BxG,
  verify_lens_B,
  coins_BxG,
  noise_words_BxWx2,
  draft_ids,
  *,
  measure,
  draw,
):
  """The decisions of every implementation; `measure` and `draw` do what reads the vocabulary.

  Both have the signatures of `measure_rows` and `draw_tokens` below.
  """
  num_rows = target_logits_BxWxV.shape[1]
  num_drafts = min(draft_tokens_BxG.shape[1], num_rows - 1)
  verify_lens_B = jnp.clip(verify_lens_B, 0, num_drafts)
  tokens_BxW = jnp.pad(
    draft_tokens_BxG[:, :num_drafts], ((0, 0), (0, num_rows - num_drafts)), constant_values=-1
  )
  target_columns_BxW = find_columns(tokens_BxW, None, target_logits_BxWxV.shape[2])
  target_lse_BxW, target_logit_BxW, is_target_law_BxW = measure(
    target_logits_BxWxV, target_columns_BxW
  )
  num_accepted_B = jnp.zeros_like(verify_lens_B)
  if num_drafts:
    draft_columns_BxG = find_columns(draft_tokens_BxG, draft_ids, draft_logits_BxGxD.shape[2])
    draft_lse_BxG, draft_logit_BxG, is_draft_law_BxG = measure(
      draft_logits_BxGxD, draft_columns_BxG
    )
    is_accepted_BxG = accept_drafts(
      (target_logit_BxW - target_lse_BxW)[:, :num_drafts],
      (draft_logit_BxG - draft_lse_BxG)[:, :num_drafts],
      coins_BxG,
    )
    is_accepted_BxG &= is_target_law_BxW[:, :num_drafts] & is_draft_law_BxG[:, :num_drafts]
    num_accepted_B = count_prefix(is_accepted_BxG, verify_lens_B)

  words_Bx2 = take_rows(noise_words_BxWx2, num_accepted_B)
  is_valid_B = _take(is_target_law_BxW, num_accepted_B)
  is_rejected_B = num_accepted_B < verify_lens_B
  draft = None
  if num_drafts:
    draft_row_B = jnp.minimum(num_accepted_B, num_drafts - 1)
    draft = draft_logits_BxGxD, draft_row_B, _take(draft_lse_BxG, draft_row_B), draft_ids
    is_valid_B &= ~is_rejected_B | _take(is_draft_law_BxG, draft_row_B)
  next_token_B = draw(
    target_logits_BxWxV,
    num_accepted_B,
    _take(target_lse_BxW, num_accepted_B),
    words_Bx2,
    draft,
    is_rejected_B,
  )
  return num_accepted_B, jnp.where(is_valid_B, next_token_B, 0), is_valid_B


def measure_rows(logits_BxNxV, columns_BxN):
  """Returns (log-normaliser, logit at `columns`, whether the row is a law), each [B, N].

  A column of -1 has the logit -inf. The first two mean nothing in a row that is no law.
  """
  lse_BxN = jax.nn.logsumexp(logits_BxNxV, axis=-1)
  return lse_BxN, pick(logits_BxNxV, columns_BxN), find_laws(logits_BxNxV)


def draw_tokens(target_logits_BxWxV, row_B, lse_B, words_Bx2, draft, is_rejected_B):
  """Returns the next token, int32 [B]: of target row `row_B`, or of its residual where rejected.

  `draft` is (logits_BxGxD, row_B, lse_B, draft_ids), or None where nothing was drafted.
  """
  target_BxV = take_rows(target_logits_BxWxV, row_B)
  if draft is None:
    return gumbel_argmax(target_BxV, words_Bx2)
  draft_logits_BxGxD, draft_row_B, draft_lse_B, draft_ids = draft
  draft_BxV = jnp.exp(take_rows(draft_logits_BxGxD, draft_row_B) - draft_lse_B[:, None])
  if draft_ids is not None:
    draft_BxV = spread(draft_BxV, draft_ids, target_BxV.shape[1], 0.0)
  residual_BxV, mass_B = subtract_laws(jnp.exp(target_BxV - lse_B[:, None]), draft_BxV)
  uses_residual_B = is_rejected_B & (mass_B > MIN_RESIDUAL_MASS)
  # Bonus and fallback keep the logits, so that they draw the very token of plain decoding.
  scores_BxV = jnp.where(uses_residual_B[:, None], jnp.log(residual_BxV), target_BxV)
  return gumbel_argmax(scores_BxV, words_Bx2)


def take_rows(array_BxNxX, row_B):
  """Returns array[b, row_B[b]], [B, X]."""
  return jnp.take_along_axis(array_BxNxX, row_B[:, None, None], axis=1)[:, 0]


def spread(rows_BxD, draft_ids, vocab: int, fill: float):
  """Returns rows over the target's vocabulary, [B, V], `fill` where the drafter has no token."""
  return (
    jnp.full((rows_BxD.shape[0], vocab), fill, rows_BxD.dtype)
    .at[:, draft_ids]
    .set(rows_BxD, unique_indices=True, indices_are_sorted=True)
  )


def _take(array_BxN, index_B):
  return jnp.take_along_axis(array_BxN, index_B[:, None], axis=1)[:, 0]


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
  return pick(logits_BxGxD, find_columns(tokens_BxG, draft_ids, logits_BxGxD.shape[-1]))


def pick(logits_BxNxV, columns_BxN):
  """Returns each row's logit at its column, [B, N]; -inf at a column of -1."""
  safe_BxNx1 = jnp.maximum(columns_BxN, 0)[..., None]
  found_BxN = jnp.take_along_axis(logits_BxNxV, safe_BxNx1, axis=-1)[..., 0]
  return jnp.where(columns_BxN >= 0, found_BxN, -jnp.inf)


def find_columns(tokens_BxG, draft_ids, size: int):
  """Returns the column of each token, int32 of the same shape; -1 outside the vocabulary."""
  if draft_ids is None:
    return jnp.where((tokens_BxG >= 0) & (tokens_BxG < size), tokens_BxG, -1)
  columns_BxG = jnp.searchsorted(draft_ids, tokens_BxG)
  is_known_BxG = jnp.take(draft_ids, columns_BxG, mode="clip") == tokens_BxG
  return jnp.where(is_known_BxG, jnp.minimum(columns_BxG, size - 1), -1)
