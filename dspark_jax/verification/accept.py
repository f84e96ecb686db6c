"""Acceptance: raw target logits and a proposal -> how many drafts stand, and the token after
them."""

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.sampling import SamplingParams, law_logits
from dspark_jax.types import Packing, Verdict
from dspark_jax.verification.block import verify_block
from pallas_kernels.counter_rng import COIN, RECOVER, noise_words, uniform
from pallas_kernels.rejection_sampling import rejection_sampling
from pallas_kernels.rejection_sampling.reference import count_prefix, gather_logits
from pallas_kernels.rows import find_laws, first_argmax

RULES = ("token", "block")


def accept(
  target_logits_BxWxV: jax.Array,
  draft_tokens_BxG: jax.Array,
  *,
  draft_logits_BxGxD: jax.Array,
  verify_lens_B: jax.Array,
  params: SamplingParams,
  anchor_positions_B: jax.Array,
  draft_ids: jax.Array | None = None,
  vocab_limit: int | None = None,
  packing: Packing | None = None,
  rule: str = "token",
  implementation: str = "auto",
) -> Verdict:
  """Returns the Verdict on a round's drafts; committed tokens follow the target's law exactly.

  Target row j decides the token at position anchor + j + 1; its coin and its recovery noise are
  keyed by (request seed, that position), so they are fresh for every token and independent of the
  draft noise. A greedy row accepts drafts while they are the argmax and continues with the argmax;
  when all rows are greedy nothing else is computed.

  Args:
    target_logits_BxWxV: raw logits of the verify pass, any float type, W <= G + 1.
    draft_tokens_BxG: int32 target ids.
    draft_logits_BxGxD: float32 law logits of the drafter (from `sampling.law_logits`).
    verify_lens_B: int32 in 0..W-1, drafts to consider.
    params: SamplingParams of [B].
    anchor_positions_B: int32, absolute position of each request's anchor token.
    draft_ids: int32 sorted target ids of the draft vocabulary, None = the whole vocabulary.
    vocab_limit: static int, ids from here on are padding of the LM head and never drawn.
    packing: with it the target logits are [1, P, V], of the rows that it has a slot for. A request
      without any gets an invalid verdict.
    rule: "token" (rejection sampling draft by draft) or "block" (`block.verify_block`).
    implementation: see `pallas_kernels.dispatch`.
  """
  check_rule(rule)
  num_rows, num_drafts = target_logits_BxWxV.shape[1], draft_tokens_BxG.shape[1]
  unpack = lambda x: x
  if packing is not None:
    num_rows, unpack = packing.slots_BxW.shape[1], packing.unpack
  verify_lens_B = jnp.clip(verify_lens_B, 0, min(num_drafts, num_rows - 1))
  draft_logits_BxGxD = draft_logits_BxGxD.astype(jnp.float32)

  def accept_greedy():
    draft_logit_BxG = gather_logits(draft_logits_BxGxD, draft_tokens_BxG, draft_ids)
    logits = target_logits_BxWxV
    logits = logits if vocab_limit is None else logits[..., :vocab_limit]
    return _accept_greedy(
      unpack(first_argmax(logits)), unpack(find_laws(logits)),
      draft_tokens_BxG, draft_logit_BxG, verify_lens_B,
    )  # fmt: skip

  def accept_sampled():
    def words(purpose, num_positions):
      positions_Bxn = anchor_positions_B[:, None] + 1 + jnp.arange(num_positions)[None]
      return noise_words(params.seed, purpose, positions_Bxn, 0)

    if packing is None:
      law_BxWxV = law_logits(target_logits_BxWxV, params, vocab_limit=vocab_limit)
    else:
      params_P = jax.tree.map(lambda a: a[packing.request_P], params)
      law_PxV = law_logits(target_logits_BxWxV[0], params_P, vocab_limit=vocab_limit)
      law_BxWxV = unpack(law_PxV[None])
    keywords = {
      "verify_lens_B": verify_lens_B,
      "noise_words_BxWx2": words(RECOVER, num_rows),
      "draft_ids": draft_ids,
    }
    if rule == "block":
      # Coins of the round, not of positions: see verify_block. Slot 0 is the token-wise coin.
      slots_BxG = jnp.broadcast_to(jnp.arange(1, num_drafts + 1)[None], draft_tokens_BxG.shape)
      coins_BxG = uniform(noise_words(params.seed, COIN, anchor_positions_B, slots_BxG))
      return verify_block(
        law_BxWxV, draft_logits_BxGxD, draft_tokens_BxG, coins_BxG=coins_BxG, **keywords
      )
    return rejection_sampling(
      law_BxWxV,
      draft_logits_BxGxD,
      draft_tokens_BxG,
      coins_BxG=uniform(words(COIN, num_drafts)),
      implementation=implementation,
      **keywords,
    )

  return Verdict(*lax.cond(jnp.any(params.temperature > 0), accept_sampled, accept_greedy))


def check_rule(rule: str) -> None:
  if rule not in RULES:
    raise ValueError(f"accept_rule: found {rule!r}, expected one of {', '.join(RULES)}")


def _accept_greedy(best_BxW, is_law_BxW, draft_tokens_BxG, draft_logit_BxG, verify_lens_B):
  """The all-greedy verdict from argmaxes alone; equal to the sampled path on the same rows."""
  num_drafts = min(draft_tokens_BxG.shape[1], best_BxW.shape[1] - 1)
  draft_logit_BxG = draft_logit_BxG[:, :num_drafts]
  is_match_BxG = (
    (draft_tokens_BxG[:, :num_drafts] == best_BxW[:, :num_drafts])
    & is_law_BxW[:, :num_drafts]
    & (draft_logit_BxG > -jnp.inf)
    & (draft_logit_BxG < jnp.inf)
  )
  num_accepted_B = count_prefix(is_match_BxG, verify_lens_B)
  row_Bx1 = num_accepted_B[:, None]
  next_token_B = jnp.take_along_axis(best_BxW, row_Bx1, axis=1)[:, 0]
  is_valid_B = jnp.take_along_axis(is_law_BxW, row_Bx1, axis=1)[:, 0]
  if num_drafts:
    # A broken draft row is NaN throughout (see `law_logits`), so its token's entry shows it.
    draft_row_Bx1 = jnp.minimum(row_Bx1, num_drafts - 1)
    draft_B = jnp.take_along_axis(draft_logit_BxG, draft_row_Bx1, axis=1)[:, 0]
    is_valid_B &= (num_accepted_B == verify_lens_B) | (draft_B < jnp.inf)
  return num_accepted_B, jnp.where(is_valid_B, next_token_B, 0), is_valid_B
