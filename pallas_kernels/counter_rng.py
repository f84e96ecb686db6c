"""Counter-based random numbers in plain uint32 jnp: the same bits on every backend.

No jax key and no state: a number is a function of (seed, purpose, position, slot, vocabulary id),
so a request's tokens depend neither on its batch neighbours, nor on padding, nor on how often a
round was resumed. One (purpose, position, slot) gives two uint32 `noise words`; the words are the
threefry key from which the noise of any single vocabulary id can be had without computing the
others.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rows import first_argmax

# Purposes. Draft, coin and recovery noise must be independent, or acceptance is biased.
DRAFT = 1  # drawing a draft token: position = the round's anchor, slot = draft position
COIN = 2  # the acceptance coin: position = the token being decided
RECOVER = 3  # residual, bonus or plain draw: position = the token being decided

COIN_ID = 0xFFFFFFFF  # counter of the coin; vocabulary ids are below it

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(key, counter) -> tuple[jax.Array, jax.Array]:
  """Returns two uint32 arrays, the 20-round Threefry-2x32 block of `counter` under `key`.

  `key` and `counter` are pairs of uint32 arrays (or scalars) that broadcast against each other.
  Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
  """
  k0, k1 = (jnp.asarray(k, jnp.uint32) for k in key)
  x0, x1 = (jnp.asarray(c, jnp.uint32) for c in counter)
  schedule = (k0, k1, k0 ^ k1 ^ jnp.uint32(_PARITY))
  x0, x1 = x0 + k0, x1 + k1
  for group in range(5):
    for rotation in _ROTATIONS[group % 2]:
      x0 = x0 + x1
      x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
      x1 = x0 ^ x1
    x0 = x0 + schedule[(group + 1) % 3]
    x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
  return x0, x1


def noise_words(seed, purpose: int, position, slot) -> jax.Array:
  """Returns the two noise words of a draw, uint32 [..., 2].

  `seed`, `position` and `slot` are integers or integer arrays aligned at their leading axes (a [B]
  seed meets [B, W] positions as one seed per request); `purpose` is DRAFT, COIN or RECOVER.
  """
  seed, position, slot = (jnp.asarray(a).astype(jnp.uint32) for a in (seed, position, slot))
  rank = max(seed.ndim, position.ndim, slot.ndim)
  seed, position, slot = (
    a.reshape(a.shape + (1,) * (rank - a.ndim)) for a in (seed, position, slot)
  )
  words = threefry2x32((seed, jnp.uint32(purpose)), (position, slot))
  # Words become keys of a second threefry; fusing the two, XLA of jax 0.12 compiles without end.
  return lax.optimization_barrier(jnp.stack(jnp.broadcast_arrays(*words), axis=-1))


def uniform_at(words: jax.Array, ids) -> jax.Array:
  """Returns float32 uniforms in [2^-33, 1 - 2^-24], one per id: shape as for `gumbel`.

  All 32 bits are used, so that events of probability 1e-9 happen as often as they should; never 0
  (a log stays finite) and never 1 (a ratio of 1 always accepts).
  """
  ids = jnp.asarray(ids).astype(jnp.uint32)
  if ids.ndim <= 1:
    ids = ids.reshape((1,) * (words.ndim - 1) + (-1,))
  bits, _ = threefry2x32((words[..., 0, None], words[..., 1, None]), (ids, jnp.uint32(0)))
  # The half is added after scaling: float32 cannot hold bits + 0.5 above 2^23, and need not.
  uniforms = bits.astype(jnp.float32) * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
  return jnp.minimum(uniforms, jnp.float32(1 - 2.0**-24))


def gumbel(words: jax.Array, ids) -> jax.Array:
  """Returns standard Gumbel noise for vocabulary ids, float32 [..., V], at most 22.9.

  `words` is uint32 [..., 2]. `ids` is int [V], shared by all rows, or int [..., V] with the leading
  axes of `words`. Ids are target vocabulary ids, so that padded, reduced and full vocabularies
  agree.
  """
  return -jnp.log(-jnp.log1p(-uniform_at(words, ids)))


def uniform(words: jax.Array) -> jax.Array:
  """Returns the acceptance coin of each pair of words, float32 [...] in [2^-33, 1 - 2^-24]."""
  return uniform_at(words, jnp.uint32(COIN_ID))[..., 0]


def gumbel_argmax(logits: jax.Array, words: jax.Array, ids=None) -> jax.Array:
  """Draws one index per row from softmax(logits), int32 [...]: exact, by the Gumbel-max trick.

  `logits` is float32 [..., V], `words` uint32 [..., 2], `ids` int [V] the vocabulary ids of the
  columns (default 0..V-1). The result is a column, not an id.
  """
  ids = jnp.arange(logits.shape[-1]) if ids is None else ids
  # The barrier keeps the noise in one vectorised loop instead of inside the scalar reduction.
  return first_argmax(lax.optimization_barrier(logits + gumbel(words, ids)))
