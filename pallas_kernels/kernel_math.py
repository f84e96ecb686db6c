"""Block functions that kernels of every backend share: `counter_rng` in the operations they have.

The same noise as `counter_rng.gumbel`, bit for bit in the uniforms, and within 4 units in the last
place (of 1 near zero) after the logarithms. Two operations are avoided on purpose: log1p (missing
from Mosaic GPU; a log(1 + x) would give the tail infinite noise) and uint32 -> float32 (signed on
some backends).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.counter_rng import threefry2x32


def uniform_block(bits: jax.Array) -> jax.Array:
  """Returns the uniforms of `counter_rng.uniform_at` for their uint32 bits, float32."""
  high = (bits >> jnp.uint32(16)).astype(jnp.int32).astype(jnp.float32)
  low = (bits & jnp.uint32(0xFFFF)).astype(jnp.int32).astype(jnp.float32)
  # One rounding, at the sum, as in the conversion of the whole word.
  whole = high * jnp.float32(65536) + low
  return jnp.minimum(whole * jnp.float32(2.0**-32) + jnp.float32(2.0**-33),
                     jnp.float32(1 - 2.0**-24))


def exponential_block(uniforms: jax.Array) -> jax.Array:
  """Returns -log(1 - u) to float32 accuracy for u in (0, 1), however small."""
  # 2 atanh(z) with z = u / (2 - u) <= 1/7 below u = 1/4: the next term is z^10 / 11 < 4e-10.
  z = uniforms / (2.0 - uniforms)
  s = z * z
  series = 2.0 * z * (1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9)))))
  return jnp.where(uniforms < 0.25, series, -jnp.log(1.0 - uniforms))


def gumbel_block(word0: jax.Array, word1: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns Gumbel noise of int32 ids under the noise words (uint32, broadcast against ids)."""
  counter = ids.astype(jnp.uint32)
  bits, _ = threefry2x32((word0, word1), (counter, jnp.zeros_like(counter)))
  return -jnp.log(exponential_block(uniform_block(bits)))
