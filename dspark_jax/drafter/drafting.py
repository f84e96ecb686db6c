"""What every drafter does with the logits of a draft: the law, the draw, the report."""

import jax
import jax.numpy as jnp

from dspark_jax import sampling
from dspark_jax.types import Proposal
from pallas_kernels import counter_rng


def draw(logits_BxV: jax.Array, slot, sampling_params: sampling.SamplingParams,
         anchor_positions_B: jax.Array, *, vocab_limit: int | None = None,
         draft_ids: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws draft `slot` of each request.

  Returns:
    (target ids [B], law logits [B, Vd], margin of the logits [B]): what `make_proposal` joins.
  """
  law_BxV = sampling.law_logits(logits_BxV, sampling_params, vocab_limit=vocab_limit,
                                ids=draft_ids)
  words = counter_rng.noise_words(sampling_params.seed, counter_rng.DRAFT, anchor_positions_B,
                                  jnp.full_like(anchor_positions_B, slot))
  return sampling.sample(law_BxV, words, ids=draft_ids), law_BxV, top_margin(logits_BxV)


def make_proposal(tokens_BxG: jax.Array, laws_BxGxV: jax.Array,
                  margin_BxG: jax.Array) -> Proposal:
  """Returns the Proposal of a drafter that has no confidence head."""
  return Proposal(tokens_BxG=tokens_BxG, draft_logits_BxGxV=laws_BxGxV,
                  confidence_BxG=jnp.ones(tokens_BxG.shape, jnp.float32),
                  confidence_logits_BxG=jnp.full(tokens_BxG.shape, jnp.inf, jnp.float32),
                  margin_BxG=margin_BxG)


def top_margin(logits_xV: jax.Array) -> jax.Array:
  """Best minus second-best logit; 0 at a tie. Dropped by the compiler where nobody reads it."""
  best_x1 = jnp.max(logits_xV, axis=-1, keepdims=True)
  num_best_x = jnp.sum(logits_xV == best_x1, axis=-1)
  second_x = jnp.max(jnp.where(logits_xV < best_x1, logits_xV, -jnp.inf), axis=-1)
  return jnp.where(num_best_x > 1, 0.0, best_x1[..., 0] - second_x)
