"""Rejection sampling on GPU through Triton: one program a row, then one a request.

The two streams of `kernel_tpu`, without its scratch and copies, which Triton does not take: a
program walks its row in chunks of a power of two. The last chunk starts early enough to stay inside
the row and masks what the one before it has seen.

On request only (`implementation="pallas"`): it lowers for CUDA and equals the reference in
interpret mode, but no GPU was at hand to time it against XLA's own fusion. Triton serves Ampere and
newer; it is deprecated in Pallas since jax 0.11, in favour of Mosaic GPU (Hopper and newer).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kernel_math import gumbel_block
from pallas_kernels.rejection_sampling import reference


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Columns of a loop step (powers of two) and warps of a program."""
  measure_columns: int = 4096
  draw_columns: int = 1024
  num_warps: int = 8


def rejection_sampling_gpu(target_logits_BxWxV, draft_logits_BxGxD, draft_tokens_BxG, verify_lens_B,
                           coins_BxG, noise_words_BxWx2, draft_ids=None, *, tiles: Tiles = Tiles(),
                           interpret=False):
  """Same as `api.rejection_sampling`."""
  measure = functools.partial(measure_rows, tiles=tiles, interpret=interpret)
  draw = functools.partial(draw_tokens, tiles=tiles, interpret=interpret)
  return reference.decide(
      target_logits_BxWxV, draft_logits_BxGxD, draft_tokens_BxG, verify_lens_B, coins_BxG,
      noise_words_BxWx2, draft_ids, measure=measure, draw=draw)


def measure_rows(logits_BxNxV: jax.Array, columns_BxN: jax.Array, *, tiles: Tiles, interpret):
  """Same as `reference.measure_rows`; every row is read once."""
  batch, num_rows, vocab = logits_BxNxV.shape
  step = _chunk(tiles.measure_columns, vocab)
  shape = jax.ShapeDtypeStruct((batch, num_rows), jnp.float32)
  lse_BxN, logit_BxN, is_law_BxN = pl.pallas_call(
      functools.partial(_measure_kernel, step=step), grid=(batch, num_rows),
      out_shape=[shape] * 3, compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps),
      cost_estimate=pl.CostEstimate(
          flops=8 * logits_BxNxV.size, transcendentals=logits_BxNxV.size,
          bytes_accessed=4 * batch * num_rows * (vocab + 4)),
      interpret=interpret, name="measure_rows")(columns_BxN, logits_BxNxV)
  return lse_BxN, logit_BxN, is_law_BxN > 0


def _measure_kernel(column_ref, logits_ref, lse_ref, logit_ref, is_law_ref, *, step: int):
  request, row = pl.program_id(0), pl.program_id(1)
  vocab = logits_ref.shape[-1]
  column = column_ref[request, row]

  def fold(i, carry):
    top, total, bad, found = carry
    start, ids, is_new = _locate(i, step, vocab)
    x = jnp.where(is_new, logits_ref[request, row, pl.ds(start, step)], -jnp.inf)
    new_top = jnp.maximum(top, x)
    safe = jnp.where(new_top > -jnp.inf, new_top, 0.0)
    return (new_top, total * jnp.exp(top - safe) + jnp.exp(x - safe),
            jnp.where(x < jnp.inf, bad, 1.0), jnp.where(ids == column, x, found))

  full = lambda value: jnp.full((step,), value, jnp.float32)
  start = (full(-jnp.inf), full(0.0), full(0.0), full(-jnp.inf))
  top, total, bad, found = lax.fori_loop(0, pl.cdiv(vocab, step), fold, start)
  row_top = jnp.max(top)
  safe = jnp.where(row_top > -jnp.inf, row_top, 0.0)
  lse_ref[request, row] = row_top + jnp.log(jnp.sum(total * jnp.exp(top - safe)))
  logit_ref[request, row] = jnp.max(found)
  is_law_ref[request, row] = jnp.where((jnp.max(bad) > 0) | (row_top == -jnp.inf), 0.0, 1.0)


def draw_tokens(target_logits_BxWxV, row_B, lse_B, words_Bx2, draft, is_rejected_B, *,
                tiles: Tiles, interpret):
  """Same as `reference.draw_tokens`; reads one row of target and drafter each."""
  batch, _, vocab = target_logits_BxWxV.shape
  # Without a draft the target's row stands in, and nothing is rejected.
  draft_logits_BxGxV, draft_row_B, draft_lse_B, draft_ids = draft or (
      target_logits_BxWxV, row_B, lse_B, None)
  if draft_ids is not None:
    rows_BxD = reference.take_rows(draft_logits_BxGxV, draft_row_B)
    draft_logits_BxGxV = reference.spread(rows_BxD, draft_ids, vocab, -jnp.inf)[:, None]
    draft_row_B = jnp.zeros_like(draft_row_B)
  shape = lambda dtype: jax.ShapeDtypeStruct((batch,), dtype)
  recovered_B, mass_B, bonus_B = pl.pallas_call(
      functools.partial(_draw_kernel, step=_chunk(tiles.draw_columns, vocab)), grid=(batch,),
      out_shape=[shape(jnp.int32), shape(jnp.float32), shape(jnp.int32)],
      compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps),
      cost_estimate=pl.CostEstimate(
          flops=180 * batch * vocab, transcendentals=7 * batch * vocab,
          bytes_accessed=4 * batch * (2 * vocab + 16)),
      interpret=interpret, name="draw_tokens",
  )(row_B, draft_row_B, lse_B, draft_lse_B, words_Bx2[:, 0], words_Bx2[:, 1],
    target_logits_BxWxV, draft_logits_BxGxV)
  return jnp.where(is_rejected_B & (mass_B > reference.MIN_RESIDUAL_MASS), recovered_B, bonus_B)


def _draw_kernel(target_row_ref, draft_row_ref, target_lse_ref, draft_lse_ref, word0_ref, word1_ref,
                 target_ref, draft_ref, recovered_ref, mass_ref, bonus_ref, *, step: int):
  request = pl.program_id(0)
  vocab = target_ref.shape[-1]
  target_row, draft_row = target_row_ref[request], draft_row_ref[request]
  target_lse, draft_lse = target_lse_ref[request], draft_lse_ref[request]
  word0, word1 = word0_ref[request], word1_ref[request]

  def fold(i, carry):
    best_r, id_r, best_t, id_t, mass = carry
    start, ids, is_new = _locate(i, step, vocab)
    target = target_ref[request, target_row, pl.ds(start, step)]
    draft = draft_ref[request, draft_row, pl.ds(start, step)]
    noise = gumbel_block(word0, word1, ids)
    residual = jnp.maximum(jnp.exp(target - target_lse) - jnp.exp(draft - draft_lse), 0.0)
    residual = jnp.where(is_new, residual, 0.0)
    score_t, score_r = target + noise, jnp.log(residual) + noise
    is_new_t, is_new_r = score_t > best_t, score_r > best_r
    return (jnp.where(is_new_r, score_r, best_r), jnp.where(is_new_r, ids, id_r),
            jnp.where(is_new_t, score_t, best_t), jnp.where(is_new_t, ids, id_t), mass + residual)

  full = lambda value, dtype=jnp.float32: jnp.full((step,), value, dtype)
  start = (full(-jnp.inf), full(0, jnp.int32), full(-jnp.inf), full(0, jnp.int32), full(0.0))
  best_r, id_r, best_t, id_t, mass = lax.fori_loop(0, pl.cdiv(vocab, step), fold, start)
  for out_ref, best, ids in ((recovered_ref, best_r, id_r), (bonus_ref, best_t, id_t)):
    out_ref[request] = jnp.min(jnp.where(best == jnp.max(best), ids, vocab - 1))
  mass_ref[request] = jnp.sum(mass)


def _chunk(columns: int, vocab: int) -> int:
  """Returns the largest power of two that is at most `columns` and `vocab`."""
  return min(columns, 1 << (vocab.bit_length() - 1))


def _locate(i, step: int, vocab: int):
  """Returns (first column, ids, whether an id was in no chunk before) of chunk i."""
  start = jnp.minimum(i * step, vocab - step)
  ids = start + lax.broadcasted_iota(jnp.int32, (step,), 0)
  return start, ids, ids >= i * step
