"""Key-value cache as a struct of arrays: init, write rows.

A pass over new tokens reads the cache and returns the new rows beside it (a `KVCache` whose
slot axis holds just those rows); `write_rows` commits them afterwards. Roll-back is therefore
nothing at all: rejected rows lie beyond the valid length, where nobody reads, until they are
overwritten. Allocate `slack` slots past the longest sequence, because
`lax.dynamic_update_slice` silently moves a write that would cross the end.
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class KVCache:
  """Keys (after norm and RoPE) and values, one [B, K, S, H] array a layer."""
  keys: tuple
  values: tuple

  @property
  def num_slots(self) -> int:
    return self.keys[0].shape[2]


def init_cache(batch: int, num_slots: int, *, num_layers: int, num_kv_heads: int, head_dim: int,
               dtype=jnp.float32) -> KVCache:
  """Returns a cache of zeros with `num_slots` rows a request.

  On CPU it is float32 whatever `dtype` is: to write one row of a bfloat16 array, XLA's CPU compiler
  converts the whole array to float32 and back. The rows are those of `dtype` all the same.
  """
  dtype = jnp.float32 if jax.default_backend() == "cpu" else dtype
  shape = (batch, num_kv_heads, num_slots, head_dim)
  make = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))
  return KVCache(keys=make(), values=make())


def write_rows(cache: KVCache, rows: KVCache, starts_B: jax.Array) -> KVCache:
  """Writes all rows of `rows` [B, K, W, H] at slots starts_B + (0..W-1) of each request.

  The caller guarantees starts_B + W <= S; rows past a request's valid length are dead.
  """
  # One update a request, in a loop of its own. A batched scatter, and an unrolled update too, say
  # the same, but make XLA's CPU compiler copy every layer's cache where it sees nothing that puts
  # the writing after all reading (`decode.step.commit` gives it something).
  def write_request(b, cache):
    def write(old_BxKxSxH, new_BxKxWxH):
      new_1xKxWxH = jax.lax.dynamic_slice_in_dim(new_BxKxWxH, b, 1).astype(old_BxKxSxH.dtype)
      return jax.lax.dynamic_update_slice(old_BxKxSxH, new_1xKxWxH, (b, 0, starts_B[b], 0))
    return jax.tree.map(write, cache, rows)

  # The trip count must not be a constant, or a loop over one request is unrolled again.
  num_requests = jnp.where(starts_B[0] >= 0, starts_B.shape[0], 0)
  return jax.lax.fori_loop(0, num_requests, write_request, cache)
