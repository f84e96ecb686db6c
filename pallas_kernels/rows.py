"""Row reductions that XLA's own make slow (argmax) or wrong (validity) on CPU."""

import jax
import jax.numpy as jnp
from jax import lax


def first_argmax(scores: jax.Array) -> jax.Array:
  """Returns the lowest index of the maximum along the last axis, int32 [...], in range for any row.

  Two vector reductions: XLA's own argmax is a scalar loop on CPU, three to eight times slower.
  """
  index = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
  is_best = scores == jnp.max(scores, axis=-1, keepdims=True)
  found = jnp.min(jnp.where(is_best, index, scores.shape[-1]), axis=-1)
  return jnp.where(found == scores.shape[-1], 0, found)


def find_laws(logits: jax.Array) -> jax.Array:
  """Returns whether each row of logits is a law, bool [...]: no NaN, no +inf, something finite.

  By comparisons only: XLA's fast CPU max and exp may turn a NaN into a number, so isfinite of a
  maximum or of a log-sum-exp was seen to call a row of NaNs valid.
  """
  return jnp.all(logits < jnp.inf, axis=-1) & jnp.any(logits > -jnp.inf, axis=-1)
