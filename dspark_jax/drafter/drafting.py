"""What every drafter does with the logits of a draft: the law, the draw, the report."""

from typing import Sequence

import jax
import jax.numpy as jnp

from dspark_jax import sampling
from dspark_jax.types import Proposal
from pallas_kernels import counter_rng


def draw(logits_BxV: jax.Array, slot, sampling_params: sampling.SamplingParams,
         anchor_positions_B: jax.Array, *, vocab_limit: int | None = None,
         draft_ids: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
  """Draws draft `slot` of each request; returns (target ids [B], law logits [B, Vd])."""
  law_BxV = sampling.law_logits(logits_BxV, sampling_params, vocab_limit=vocab_limit,
                                ids=draft_ids)
  words = counter_rng.noise_words(sampling_params.seed, counter_rng.DRAFT, anchor_positions_B,
                                  jnp.full_like(anchor_positions_B, slot))
  return sampling.sample(law_BxV, words, ids=draft_ids), law_BxV


def make_proposal(tokens: Sequence[jax.Array] | jax.Array,
                  laws: Sequence[jax.Array] | jax.Array) -> Proposal:
  """Joins G drafts (tokens [B], laws [B, Vd]) of a drafter that has no confidence head.

  Arrays that are joined already, [B, G] and [B, G, Vd], are taken as they are.
  """
  if not isinstance(tokens, jax.Array):
    tokens, laws = jnp.stack(tokens, axis=1), jnp.stack(laws, axis=1)
  return Proposal(tokens_BxG=tokens, draft_logits_BxGxV=laws,
                  confidence_BxG=jnp.ones(tokens.shape, jnp.float32),
                  confidence_logits_BxG=jnp.full(tokens.shape, jnp.inf, jnp.float32))
