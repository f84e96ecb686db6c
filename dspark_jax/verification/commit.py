"""Commits a verdict: tokens with stop and length rules, then cache rows."""

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.types import Verdict

commit_rows = kv_cache.write_rows


@flax.struct.dataclass
class Committed:
  """Token buffer after a round: tokens_BxS, lens_B, is_done_B, and num_new_B tokens appended."""
  tokens_BxS: jax.Array
  lens_B: jax.Array
  is_done_B: jax.Array
  num_new_B: jax.Array


def commit_tokens(tokens_BxS: jax.Array, lens_B: jax.Array, drafts_BxG: jax.Array,
                  verdict: Verdict, *, limits_B: jax.Array, stop_ids_BxE: jax.Array,
                  is_done_B: jax.Array) -> Committed:
  """Appends accepted drafts and the next token, cut after the first stop id and at the limit.

  Args:
    tokens_BxS: token buffer with at least G + 1 slots past every limit.
    lens_B: valid tokens; a request that is done, or whose verdict is invalid, appends nothing.
    drafts_BxG, verdict: the round's drafts and what became of them.
    limits_B: no request grows beyond its limit.
    stop_ids_BxE: ids that end a request; the stop id itself is kept.
  """
  num_accepted_B = verdict.num_accepted_B
  slot_W = jnp.arange(drafts_BxG.shape[1] + 1)[None, :]
  row_BxW = jnp.pad(drafts_BxG, ((0, 0), (0, 1)))
  row_BxW = jnp.where(slot_W == num_accepted_B[:, None], verdict.next_token_B[:, None], row_BxW)
  num_new_B = jnp.minimum(num_accepted_B + 1, limits_B - lens_B)
  is_stop_BxW = (row_BxW[:, :, None] == stop_ids_BxE[:, None, :]).any(-1)
  is_stop_BxW &= slot_W < num_new_B[:, None]
  has_stop_B = is_stop_BxW.any(axis=1)
  num_new_B = jnp.where(has_stop_B, jnp.argmax(is_stop_BxW, axis=1) + 1, num_new_B)
  num_new_B = jnp.where(is_done_B | ~verdict.is_valid_B, 0, num_new_B).astype(jnp.int32)

  def write(tokens_S, row_W, start, num_new):
    old_W = jax.lax.dynamic_slice(tokens_S, (start,), row_W.shape)
    row_W = jnp.where(jnp.arange(row_W.shape[0]) < num_new, row_W, old_W)
    return jax.lax.dynamic_update_slice(tokens_S, row_W, (start,))

  lens_after_B = lens_B + num_new_B
  return Committed(
      tokens_BxS=jax.vmap(write)(tokens_BxS, row_BxW.astype(jnp.int32), lens_B, num_new_B),
      lens_B=lens_after_B,
      is_done_B=is_done_B | has_stop_B | (lens_after_B >= limits_B),
      num_new_B=num_new_B)


def read_tokens(tokens_BxS: jax.Array, starts_B: jax.Array, num_tokens: int) -> jax.Array:
  """Returns int32 [B, num_tokens] from starts_B on; 0 where nothing is committed."""
  read = lambda row_S, start: jax.lax.dynamic_slice(row_S, (start,), (num_tokens,))
  return jnp.maximum(jax.vmap(read)(tokens_BxS, starts_B), 0)
