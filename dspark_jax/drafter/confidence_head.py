"""The confidence head (arXiv 2607.05147, eq. 7-8)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers


class ConfidenceHead(nn.Module):
  """logit_k = w . [h_k; e_k] + b, in float32: P(draft k accepted | the drafts before it were).

  It reads the previous token only, never the draft it judges, so a verify length may depend on
  it without biasing what is decoded.

  Attributes:
    stop_gradient: cut the gradient into backbone and W1 (the public reference lets it flow).
  """
  stop_gradient: bool = False

  def setup(self):
    self.proj = layers.Linear(1, True, jnp.float32)

  def __call__(self, hidden_xD: jax.Array, embed_xR: jax.Array | None) -> jax.Array:
    """[..., D] and [..., r] or None -> [...]."""
    inputs = hidden_xD.astype(jnp.float32)
    if embed_xR is not None:
      inputs = jnp.concatenate([inputs, embed_xR.astype(jnp.float32)], axis=-1)
    if self.stop_gradient:
      inputs = jax.lax.stop_gradient(inputs)
    return self.proj(inputs)[..., 0]
