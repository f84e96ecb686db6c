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

  Rows of a request double from 1, plain decoding of the full batch, to every draft: attention pays
  for them, asked for or not, and drafting too (`draft_lens`). Under each number of rows, tokens go
  from half full to full; they are 1, 2, 4 or multiples of 8 (what matmuls run anyway, see
  `layers.linear`). Smaller buckets serve a batch of which few requests are live.
  """
  check_batch(batch, max_draft)
  full = max_draft + 1
  shapes, rows, small = {(batch, 1)}, 1, 8
  while rows < full:
    rows = min(2 * rows, full)
    for tokens in (batch * rows // 2, batch * rows * 3 // 4, batch * rows):
      tokens = _round(tokens, batch * rows)
      if tokens > batch or tokens == batch * rows:
        shapes.add((tokens, min(tokens, rows)))
  while small < batch and full > 1:
    shapes.add((small, min(small, full)))
    small *= 2
  return tuple(sorted(shapes))


def draft_lens(ladder: Ladder) -> tuple[int, ...]:
  """Returns the numbers of drafts a request that its shapes have rows for, growing, without 0."""
  return tuple(sorted({rows - 1 for _, rows in ladder} - {0}))


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
