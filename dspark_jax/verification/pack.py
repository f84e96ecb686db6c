"""Ragged verification: the rows of all requests in one packed row of a few static sizes.

The ladder is a short list of shapes (tokens, rows): tokens of the packed row, and rows that one
request may have in it (its anchor and its drafts). Dense layers run on the packed row; attention
goes back to one rectangle of `rows` a request, by the packing's (request, row) markers.
"""

import jax
import jax.numpy as jnp

from dspark_jax.types import Packing

Ladder = tuple[tuple[int, int], ...]


def make_ladder(batch: int, max_draft: int) -> Ladder:
  """Returns shapes for up to `batch` requests of up to `max_draft` drafts each.

  Sizes grow by a third to a half, are 1, 2, 4 or multiples of 8 (what matmuls run anyway, see
  `layers.linear`), and end with every draft of every request. One of them is plain decoding of the
  full batch, with one row a request.
  """
  check_batch(batch, max_draft)
  most = batch * (max_draft + 1)
  sizes, step = {batch, most}, 1
  while step < most:
    sizes |= {_round(step, most), _round(step * 3 // 2, most)}
    step *= 2
  smallest = min(batch, 8)
  return tuple((n, 1 if n == batch else min(n, max_draft + 1))
               for n in sorted(sizes) if n >= smallest)


def check_ladder(ladder: Ladder, batch: int, max_draft: int) -> None:
  """Raises ValueError unless the ladder grows and can hold everything that may be verified."""
  check_batch(batch, max_draft)
  for shape in ladder:
    if len(shape) != 2 or not all(isinstance(n, int) and n >= 1 for n in shape):
      raise ValueError(f"ladder: found bucket {shape!r}, expected (tokens, rows), both >= 1")
  if list(ladder) != sorted(set(ladder)):
    raise ValueError(f"ladder: found {ladder}, expected growing buckets")
  most = batch * (max_draft + 1)
  if not ladder or ladder[-1][0] < most or ladder[-1][1] < max_draft + 1:
    raise ValueError(f"ladder: found a last bucket {ladder[-1:]}, expected at least {most} tokens "
                     f"and {max_draft + 1} rows, all drafts of {batch} requests")


def check_batch(batch: int, max_draft: int) -> None:
  for name, value, least in (("batch", batch, 1), ("max_draft", max_draft, 0)):
    if not isinstance(value, int) or value < least:
      raise ValueError(f"{name}: found {value!r}, expected an integer >= {least}")


def measure_padding(ladder: Ladder, batch: int) -> float:
  """Returns the share of packed slots without a row, mean over all totals of a full batch."""
  sizes = [tokens for tokens, _ in ladder]
  totals = range(batch, sizes[-1] + 1)
  return sum(1 - n / min(s for s in sizes if s >= n) for n in totals) / len(totals)


def choose_bucket(ladder: Ladder, verify_lens_B: jax.Array, is_live_B: jax.Array) -> jax.Array:
  """Returns int32 [], the index of the first shape that holds every live request's rows."""
  num_rows_B = jnp.where(is_live_B, verify_lens_B + 1, 0)
  total, widest = jnp.sum(num_rows_B), jnp.max(num_rows_B)
  does_fit = jnp.stack([(tokens >= total) & (rows >= widest) for tokens, rows in ladder])
  return jnp.argmax(does_fit).astype(jnp.int32)


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


def _round(n: int, most: int) -> int:
  """The next size that a matmul has of its own: 1, 2, 4 or a multiple of 8."""
  return min(next((k for k in (1, 2, 4) if n <= k), -(-n // 8) * 8), most)
