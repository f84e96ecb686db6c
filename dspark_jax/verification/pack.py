"""Packing of ragged verification: the rows of all requests in one packed row (see `ladder`).

Dense layers run on the packed row; attention goes back to one rectangle of so many rows a request,
by the packing's (request, row) markers.
"""

import jax
import jax.numpy as jnp

from dspark_jax.types import Packing


def make_packing(verify_lens_B: jax.Array, is_live_B: jax.Array, *, num_tokens: int,
                 num_rows: int) -> Packing:
  """Lays out anchor and drafts of the live requests one after the other in `num_tokens` slots.

  The caller guarantees that they fit. Slots past them are padding: they repeat some request's
  marker, compute something, and are read by nobody. Requests that are not live have no slot.
  """
  num_rows_B = jnp.where(is_live_B, verify_lens_B + 1, 0)
  ends_B = jnp.cumsum(num_rows_B)
  starts_B = ends_B - num_rows_B
  row_1xW = jnp.arange(num_rows)[None]
  slot_P = jnp.arange(num_tokens)
  request_P = jnp.sum(slot_P[:, None] >= ends_B[None], axis=1)
  request_P = jnp.minimum(request_P, num_rows_B.shape[0] - 1)
  return Packing(
      slots_BxW=jnp.minimum(starts_B[:, None] + row_1xW, num_tokens - 1),
      exists_BxW=row_1xW < num_rows_B[:, None],
      request_P=request_P,
      row_P=jnp.clip(slot_P - starts_B[request_P], 0, num_rows - 1))
