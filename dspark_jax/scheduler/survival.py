"""Survival: the probability that a draft and all before it are accepted."""

import jax
import jax.numpy as jnp


def compute_survival(confidence_BxG: jax.Array) -> jax.Array:
  """Cumulative product along the drafts, float32 in [0, 1]; a NaN ends a request's survival."""
  is_number_BxG = confidence_BxG == confidence_BxG
  clean_BxG = jnp.where(is_number_BxG, jnp.clip(confidence_BxG, 0.0, 1.0), 0.0)
  return jnp.cumprod(clean_BxG.astype(jnp.float32), axis=1)


def average_survival(past_G: jax.Array, fresh_G: jax.Array, num_drawn: jax.Array, *,
                     memory: float) -> jax.Array:
  """Returns memory * past + (1 - memory) * fresh for the first `num_drawn` drafts.

  Later drafts, which were not drawn, keep what the past says of them given the last one that was:
  they rise and fall with it.
  """
  last = jnp.maximum(num_drawn - 1, 0)
  mixed_G = memory * past_G + (1.0 - memory) * fresh_G
  ratio = jnp.where(past_G[last] > 0, mixed_G[last] / past_G[last], 0.0)
  later_G = jnp.minimum(past_G * ratio, mixed_G[last])
  averaged_G = jnp.where(jnp.arange(past_G.shape[0]) < num_drawn, mixed_G, later_G)
  return jnp.where(num_drawn > 0, averaged_G, past_G)
