"""The ladder: the few static shapes that ragged verification runs in.

A shape is (tokens, rows): tokens of the packed row, and rows that one request may have in it, its
anchor and its drafts. Packing and scheduling both go by it.
"""

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int, int]
Ladder = tuple[Shape, ...]


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


def fill_shape(batch: int, shape: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
  """Returns (int32 [B] verify lengths, bool [B] who is live) that just fill a shape."""
  tokens, rows = shape
  num_live = min(batch, tokens)
  if 0 < tokens - num_live < rows - 1:  # too few left for a full width
    num_live = max(tokens - (rows - 1), 1)
  left, lens = tokens - num_live, np.zeros(batch, np.int32)
  while left and (lens[:num_live] < rows - 1).any():
    for b in range(num_live):
      # The first request goes to the full width, so that no narrower bucket would do.
      more = min(left, rows - 1 - lens[b], rows if b == 0 else 1)
      lens[b] += more
      left -= more
  return jnp.asarray(lens), jnp.arange(batch) < num_live


def _round(n: int, most: int) -> int:
  """The next size that a matmul has of its own: 1, 2, 4 or a multiple of 8."""
  return min(next((k for k in (1, 2, 4) if n <= k), -(-n // 8) * 8), most)
