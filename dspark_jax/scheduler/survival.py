"""Survival: the probability that a draft and all before it are accepted."""

import jax
import jax.numpy as jnp


def compute_survival(confidence_BxG: jax.Array) -> jax.Array:
  """Cumulative product along the drafts, float32 in [0, 1]; a NaN ends a request's survival."""
  is_number_BxG = confidence_BxG == confidence_BxG
  clean_BxG = jnp.where(is_number_BxG, jnp.clip(confidence_BxG, 0.0, 1.0), 0.0)
  return jnp.cumprod(clean_BxG.astype(jnp.float32), axis=1)


UNKNOWN_CONFIDENCE = 0.7  # a usual accept rate; holds until the first rounds are two rounds old


def fill_unknown(survival_BxG: jax.Array, is_known_B: jax.Array) -> jax.Array:
  """Gives rows without a value the mean of those that have one, a usual one where none has."""
  num_known = jnp.sum(is_known_B, dtype=jnp.float32)
  known_BxG = jnp.where(is_known_B[:, None], survival_BxG, 0.0)
  usual_G = UNKNOWN_CONFIDENCE ** (1.0 + jnp.arange(survival_BxG.shape[1], dtype=jnp.float32))
  mean_G = jnp.where(num_known > 0, known_BxG.sum(axis=0) / jnp.maximum(num_known, 1.0), usual_G)
  return jnp.where(is_known_B[:, None], survival_BxG, mean_G[None, :])
