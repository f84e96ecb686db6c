"""Block verification (Sun et al. 2024, arXiv 2403.10444): drafts accepted as a block.

Token-wise rejection looks at every draft by itself. Here the weight of a whole prefix decides,
w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i)), w_0 = 1: a draft that the target likes better than the
drafter did makes up for one before it that it liked less. The committed tokens still follow the
target exactly, and at least as many drafts are accepted in expectation.

With r_i = sum_v max(w_i p_{i+1}(v) - q_{i+1}(v), 0) and l drafts sent, prefix i < l stands with
probability h_i = r_i / (r_i + 1 - w_i), and the whole with h_l = w_l; each by a coin of its own.
The longest that stands is accepted. The next token is drawn from max(w_i p_{i+1} - q_{i+1}, 0), or
from p_{l+1} after all l. (l may depend on drafts up to l, as a threshold on confidence does.)
"""

import jax
import jax.numpy as jnp

from pallas_kernels.counter_rng import gumbel_argmax
from pallas_kernels.rejection_sampling.reference import MIN_RESIDUAL_MASS, gather_logits
from pallas_kernels.rows import find_laws

MAX_LOG_RATIO = 80.0  # exp of it is a float32; one such draft makes any weight 1


def verify_block(target_logits_BxWxV: jax.Array, draft_logits_BxGxD: jax.Array,
                 draft_tokens_BxG: jax.Array, *, verify_lens_B: jax.Array, coins_BxG: jax.Array,
                 noise_words_BxWx2: jax.Array, draft_ids: jax.Array | None = None):
  """Arguments and results as `pallas_kernels.rejection_sampling`, but for the coins.

  Coin i decides prefix i + 1, and ALL of them are looked at, rejected drafts' too. So they must be
  of this round alone: coins that a later round meets again, as those keyed by a token's position
  are, would bias it.
  """
  G = min(draft_tokens_BxG.shape[1], target_logits_BxWxV.shape[1] - 1)
  sent_B = jnp.clip(verify_lens_B, 0, G)
  is_target_law_BxW = find_laws(target_logits_BxWxV)
  # A row that is no law ends the block, as if nothing after it had been sent.
  is_usable_BxG = is_target_law_BxW[:, :G] & find_laws(draft_logits_BxGxD)[:, :G]
  num_usable_B = jnp.cumprod(is_usable_BxG.astype(jnp.int32), axis=1).sum(axis=1)
  lens_B = jnp.minimum(sent_B, num_usable_B)

  p_BxWxV = jax.nn.softmax(target_logits_BxWxV, axis=-1)
  q_BxGxV = _spread(jax.nn.softmax(draft_logits_BxGxD[:, :G], axis=-1), draft_ids,
                    p_BxWxV.shape[-1])
  weight_BxW = _prefix_weights(target_logits_BxWxV[:, :G], draft_logits_BxGxD[:, :G],
                               draft_tokens_BxG[:, :G], draft_ids, is_usable_BxG)
  residual_BxGxV = jnp.maximum(weight_BxW[:, :G, None] * p_BxWxV[:, :G] - q_BxGxV, 0.0)
  mass_BxG = residual_BxGxV.sum(axis=-1)

  # Prefixes 1..G; that of length G has no row after it, and is the last one in any case.
  inner_BxG = jnp.pad(mass_BxG[:, 1:], ((0, 0), (0, 1)))
  rest_BxG = 1.0 - weight_BxW[:, 1:]
  total_BxG = inner_BxG + rest_BxG
  # 0 / 0: the next laws are equal and the weight is 1, so that a longer prefix stands anyway.
  stands_BxG = jnp.where(total_BxG > 0, inner_BxG / jnp.where(total_BxG > 0, total_BxG, 1.0), 1.0)
  prefix_1xG = jnp.arange(1, G + 1)[None]
  stands_BxG = jnp.where(prefix_1xG == lens_B[:, None], weight_BxW[:, 1:], stands_BxG)
  is_standing_BxG = (coins_BxG[:, :G] < stands_BxG) & (prefix_1xG <= lens_B[:, None])
  num_accepted_B = jnp.max(jnp.where(is_standing_BxG, prefix_1xG, 0), axis=1, initial=0)
  num_accepted_B = num_accepted_B.astype(jnp.int32)

  row_Bx1 = num_accepted_B[:, None]
  take = lambda rows, at_Bx1: jnp.take_along_axis(
      rows, at_Bx1.reshape(at_Bx1.shape + (1,) * (rows.ndim - 2)), axis=1)[:, 0]
  scores_BxV, words_Bx2 = take(target_logits_BxWxV, row_Bx1), take(noise_words_BxWx2, row_Bx1)
  if G:
    at_Bx1 = jnp.minimum(row_Bx1, G - 1)
    uses_residual_B = (num_accepted_B < lens_B) & (take(mass_BxG, at_Bx1) > MIN_RESIDUAL_MASS)
    # Bonus and fallback keep the logits, so that they draw the very token of plain decoding.
    scores_BxV = jnp.where(uses_residual_B[:, None], jnp.log(take(residual_BxGxV, at_Bx1)),
                           scores_BxV)
  is_valid_B = take(is_target_law_BxW, row_Bx1)
  is_valid_B &= (num_accepted_B < lens_B) | (lens_B == sent_B)  # ended by a broken row
  next_token_B = gumbel_argmax(scores_BxV, words_Bx2)
  return num_accepted_B, jnp.where(is_valid_B, next_token_B, 0), is_valid_B


def _prefix_weights(target_logits_BxGxV, draft_logits_BxGxD, tokens_BxG, draft_ids, is_usable_BxG):
  """Returns w_0..w_G, float32 [B, G + 1]; 0 from the first draft with p = 0 or q = 0 on."""
  logp_BxG = gather_logits(target_logits_BxGxV, tokens_BxG, None)
  logp_BxG -= jax.nn.logsumexp(target_logits_BxGxV, axis=-1)
  logq_BxG = gather_logits(draft_logits_BxGxD, tokens_BxG, draft_ids)
  logq_BxG -= jax.nn.logsumexp(draft_logits_BxGxD, axis=-1)
  is_possible_BxG = is_usable_BxG & (logp_BxG > -jnp.inf) & (logq_BxG > -jnp.inf)
  difference_BxG = jnp.where(is_possible_BxG, logp_BxG - logq_BxG, -jnp.inf)
  ratio_BxG = jnp.exp(jnp.minimum(difference_BxG, MAX_LOG_RATIO))
  weights = [jnp.ones(tokens_BxG.shape[:1], jnp.float32)]
  for k in range(tokens_BxG.shape[1]):
    weights.append(jnp.minimum(1.0, weights[-1] * ratio_BxG[:, k]))
  return jnp.stack(weights, axis=1)


def _spread(q_BxGxD: jax.Array, draft_ids: jax.Array | None, vocab_size: int) -> jax.Array:
  """Puts laws of a reduced vocabulary into the whole one."""
  if draft_ids is None:
    return q_BxGxD
  zeros = jnp.zeros((*q_BxGxD.shape[:2], vocab_size), q_BxGxD.dtype)
  return zeros.at[:, :, draft_ids].set(q_BxGxD, unique_indices=True, indices_are_sorted=True)
