"""Rejection sampling on TPU: two streams over the vocabulary, nothing of its size written.

1. `measure_rows` reads every row once, tile by tile: log-normaliser, the draft token's logit,
   whether the row is a law.
2. A few operations on [B, G] decide how many drafts stand, and with it the one row per request
   that draws the next token.
3. `draw_tokens` reads that row of the target, and for a rejected request that of the drafter, once:
   single rows are copied out of the (8, 128) tiles by DMA, eight requests to the eight sublanes.

Traffic is (W + G + 2) / (W + G) of the logits' size at most: 1.13 at G = 7. XLA's own program for
the reference moves 7.4 times the logits on v5e (max, sum, validity and two gathers each read them,
and the gathers copy); see `experiments/compile_report.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kernel_math import gumbel_block
from pallas_kernels.rejection_sampling import reference

LANES, SUBLANES = 128, 8


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Tile sizes, in elements; columns are multiples of the unrolled width."""
  rows: int = 64  # rows of a block of `measure_rows`
  columns: int = 8192
  unroll: int = 8  # vectors of 128 columns in a step of its loops
  draw_columns: int = 16384  # columns of a block of `draw_tokens`
  draw_width: int = 512  # columns a loop step there: five carried arrays must stay in registers


def rejection_sampling_tpu(target_logits_BxWxV, draft_logits_BxGxD, draft_tokens_BxG, verify_lens_B,
                           coins_BxG, noise_words_BxWx2, draft_ids=None, *, tiles: Tiles = Tiles(),
                           interpret=False):
  """Same as `api.rejection_sampling`."""
  measure = functools.partial(measure_rows, tiles=tiles, interpret=interpret)
  draw = functools.partial(draw_tokens, tiles=tiles, interpret=interpret)
  return reference.decide(
      target_logits_BxWxV, draft_logits_BxGxD, draft_tokens_BxG, verify_lens_B, coins_BxG,
      noise_words_BxWx2, draft_ids, measure=measure, draw=draw)


class Rows:
  """Logits [B, N, V] as rows [B * N, V] in the order that costs no relayout on TPU.

  Two dimensions share (8, 128) tiles with the vocabulary, so the flattened one must be a multiple
  of 8: the N rows of a request where they are, else the requests.
  """

  def __init__(self, logits_BxNxV: jax.Array):
    self.batch, self.num_rows, self.vocab = logits_BxNxV.shape
    self.is_slot_major = self.num_rows % SUBLANES != 0 and self.batch % SUBLANES == 0
    self.logits_BxNxV = logits_BxNxV
    self.rows_MxV = self.flatten(logits_BxNxV)

  def flatten(self, array_BxNxX: jax.Array) -> jax.Array:
    """Returns [B * N, X] in the order of the rows."""
    if self.is_slot_major:
      array_BxNxX = jnp.swapaxes(array_BxNxX, 0, 1)
    return array_BxNxX.reshape(self.batch * self.num_rows, -1)

  def unflatten(self, array_Mx1: jax.Array) -> jax.Array:
    """Returns what was found for each row as [B, N]."""
    if self.is_slot_major:
      return array_Mx1.reshape(self.num_rows, self.batch).T
    return array_Mx1.reshape(self.batch, self.num_rows)

  def select(self, row_B: jax.Array, draft_ids=None, vocab: int | None = None):
    """Returns (rows, index_B): row `row_B[b]` of request b is rows[index_B[b]].

    Rows have a multiple of 128 columns, which DMA needs; where that, or the ids of a reduced
    vocabulary, ask for it, the B rows are copied.
    """
    request_B = jnp.arange(self.batch, dtype=jnp.int32)
    if draft_ids is None and self.vocab % LANES == 0:
      if self.is_slot_major:
        return self.rows_MxV, row_B * self.batch + request_B
      return self.rows_MxV, request_B * self.num_rows + row_B
    row_BxV = reference.take_rows(self.logits_BxNxV, row_B)
    width = round_up(vocab or self.vocab, LANES)
    if draft_ids is not None:
      return reference.spread(row_BxV, draft_ids, width, -jnp.inf), request_B
    padding = ((0, 0), (0, width - self.vocab))
    return jnp.pad(row_BxV, padding, constant_values=-jnp.inf), request_B


def measure_rows(logits_BxNxV: jax.Array, columns_BxN: jax.Array, *, tiles: Tiles, interpret):
  """Same as `reference.measure_rows`; every row is read once."""
  rows = Rows(logits_BxNxV)
  num_rows, vocab = rows.rows_MxV.shape
  group = min(SUBLANES, num_rows)
  block_rows = min(tiles.rows, num_rows // group * group)
  step = LANES * min(tiles.unroll, pl.cdiv(vocab, LANES))
  block_columns = min(tiles.columns // step * step, round_up(vocab, step))
  num_tiles = pl.cdiv(vocab, block_columns)
  per_row = pl.BlockSpec((block_rows, 1), lambda m, t: (m, 0))
  found = pl.pallas_call(
      functools.partial(_measure_kernel, vocab=vocab, group=group, step=step),
      grid=(pl.cdiv(num_rows, block_rows), num_tiles),
      in_specs=[per_row, pl.BlockSpec((block_rows, block_columns), lambda m, t: (m, t))],
      out_specs=[per_row] * 3,
      out_shape=[jax.ShapeDtypeStruct((num_rows, 1), jnp.float32)] * 3,
      scratch_shapes=[pltpu.VMEM((block_rows, LANES), jnp.float32)] * 4,
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
      cost_estimate=pl.CostEstimate(
          flops=8 * num_rows * vocab, transcendentals=num_rows * vocab,
          bytes_accessed=4 * num_rows * (vocab + 4)),
      interpret=interpret, name="measure_rows")(rows.flatten(columns_BxN[..., None]), rows.rows_MxV)
  lse_BxN, logit_BxN, is_law_BxN = (rows.unflatten(a_Mx1) for a_Mx1 in found)
  return lse_BxN, logit_BxN, is_law_BxN > 0


def _measure_kernel(column_ref, logits_ref, lse_ref, logit_ref, is_law_ref, top_ref, total_ref,
                    bad_ref, found_ref, *, vocab: int, group: int, step: int):
  """One tile; maximum, sum, broken entries and the wanted logit are kept lane by lane."""
  block_rows, block_columns = logits_ref.shape
  tile, num_tiles = pl.program_id(1), pl.cdiv(vocab, block_columns)
  start = tile * block_columns

  @pl.when(tile == 0)
  def _():
    top_ref[...] = jnp.full(top_ref.shape, -jnp.inf)
    total_ref[...] = jnp.zeros(total_ref.shape)
    bad_ref[...] = jnp.zeros(bad_ref.shape)
    found_ref[...] = jnp.full(found_ref.shape, -jnp.inf)

  def fold(is_last: bool):
    num_steps = block_columns // step
    if is_last:
      num_steps = pl.cdiv(vocab - (num_tiles - 1) * block_columns, step)

    def fold_group(g, _):
      rows = pl.ds(pl.multiple_of(g * group, group), group)
      column = column_ref[rows, :] - start

      def vectors(i):
        for u in range(step // LANES):
          offset = pl.multiple_of(i * step + u * LANES, LANES)
          x = logits_ref[rows, pl.ds(offset, LANES)]
          lane = offset + lax.broadcasted_iota(jnp.int32, x.shape, 1)
          yield lane, jnp.where(lane < vocab - start, x, -jnp.inf) if is_last else x

      def look(i, carry):
        top, bad, found = carry
        for lane, x in vectors(i):
          top = jnp.maximum(top, x)
          bad = jnp.where(x < jnp.inf, bad, 1.0)
          found = jnp.where(lane == column, x, found)
        return top, bad, found

      before = top_ref[rows, :]
      top, bad, found = lax.fori_loop(0, num_steps, look,
                                      (before, bad_ref[rows, :], found_ref[rows, :]))
      # A lane of nothing but -inf has no maximum to subtract.
      safe = jnp.where(top > -jnp.inf, top, 0.0)

      def add(i, total):
        for _, x in vectors(i):
          total = total + jnp.exp(x - safe)
        return total

      total = total_ref[rows, :] * jnp.exp(before - safe)
      total_ref[rows, :] = lax.fori_loop(0, num_steps, add, total)
      top_ref[rows, :], bad_ref[rows, :], found_ref[rows, :] = top, bad, found
      return _

    lax.fori_loop(0, block_rows // group, fold_group, 0)

  pl.when(tile < num_tiles - 1)(lambda: fold(False))

  @pl.when(tile == num_tiles - 1)
  def _():
    fold(True)
    lane_top = top_ref[...]
    top = jnp.max(lane_top, axis=1, keepdims=True)
    safe = jnp.where(top > -jnp.inf, top, 0.0)
    total = jnp.sum(total_ref[...] * jnp.exp(lane_top - safe), axis=1, keepdims=True)
    lse_ref[...] = top + jnp.log(total)
    logit_ref[...] = jnp.max(found_ref[...], axis=1, keepdims=True)
    is_bad = jnp.max(bad_ref[...], axis=1, keepdims=True) > 0
    is_law_ref[...] = jnp.where(is_bad | (top == -jnp.inf), 0.0, 1.0)


def draw_tokens(target_logits_BxWxV, row_B, lse_B, words_Bx2, draft, is_rejected_B, *,
                tiles: Tiles, interpret):
  """Same as `reference.draw_tokens`; reads the row that draws, and the drafter's where rejected."""
  batch, _, vocab = target_logits_BxWxV.shape
  target_MxV, target_index_B = Rows(target_logits_BxWxV).select(row_B)
  width = target_MxV.shape[1]
  if draft is None:
    draft_MxV, draft_index_B, draft_lse_B = target_MxV, jnp.full_like(row_B, -1), lse_B
  else:
    draft_logits_BxGxD, draft_row_B, draft_lse_B, draft_ids = draft
    draft_MxV, draft_index_B = Rows(draft_logits_BxGxD).select(draft_row_B, draft_ids, vocab)
    draft_index_B = jnp.where(is_rejected_B, draft_index_B, -1)  # -1: not read
  padded = round_up(batch, SUBLANES)
  lse_Bx2 = jnp.stack([lse_B, draft_lse_B], axis=1)
  pad = lambda a: jnp.pad(a, ((0, padded - batch),) + ((0, 0),) * (a.ndim - 1))
  step = min(tiles.draw_width, width)
  columns = min(tiles.draw_columns, width) // step * step
  per_row = lambda n: pl.BlockSpec((SUBLANES, n), lambda b, t, *_: (b, 0))
  vmem = lambda dtype: pltpu.VMEM((SUBLANES, step), dtype)
  num_reads = 2 if draft is not None else 1
  recovered, mass, bonus = pl.pallas_call(
      functools.partial(_draw_kernel, batch=batch, vocab=vocab, width=width, columns=columns,
                        step=step),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2, grid=(padded // SUBLANES, pl.cdiv(width, columns)),
          in_specs=[per_row(2), per_row(2), pl.BlockSpec(memory_space=pl.ANY),
                    pl.BlockSpec(memory_space=pl.ANY)],
          out_specs=[per_row(1)] * 3,
          scratch_shapes=[
              pltpu.VMEM((2, 2, SUBLANES, columns), jnp.float32),
              pltpu.SemaphoreType.DMA((2,)), vmem(jnp.float32), vmem(jnp.int32), vmem(jnp.float32),
              vmem(jnp.int32), vmem(jnp.float32)]),
      out_shape=[jax.ShapeDtypeStruct((padded, 1), d) for d in (jnp.int32, jnp.float32, jnp.int32)],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
      cost_estimate=pl.CostEstimate(
          flops=180 * batch * vocab, transcendentals=(3 + 2 * num_reads) * batch * vocab,
          bytes_accessed=4 * batch * (num_reads * width + 16)),
      interpret=interpret, name="draw_tokens",
  )(pad(target_index_B), pad(draft_index_B), pad(lse_Bx2), pad(words_Bx2), target_MxV, draft_MxV)
  recovered_B, mass_B, bonus_B = (a[:batch, 0] for a in (recovered, mass, bonus))
  return jnp.where(is_rejected_B & (mass_B > reference.MIN_RESIDUAL_MASS), recovered_B, bonus_B)


def _draw_kernel(target_index_ref, draft_index_ref, lse_ref, words_ref, target_ref, draft_ref,
                 recovered_ref, mass_out_ref, bonus_ref, rows_ref, sem_ref, best_r_ref, id_r_ref,
                 best_t_ref, id_t_ref, mass_ref, *, batch: int, vocab: int, width: int,
                 columns: int, step: int):
  """One tile of eight requests; the best score and its id are kept lane by lane.

  A strict comparison keeps the lowest id of a lane, so the lowest of all wins a tie at the end.
  """
  block, tile = pl.program_id(0), pl.program_id(1)
  num_tiles = pl.cdiv(width, columns)

  def copy_row(at_tile, size: int, s: int, kind: int, act):
    """Calls `act` on the copy of one request's tile into sublane `s`, where it takes place."""
    hbm_ref, index_ref = ((target_ref, target_index_ref), (draft_ref, draft_index_ref))[kind]
    request = block * SUBLANES + s
    row, slot = index_ref[request], lax.rem(at_tile, 2)
    where = pl.ds(pl.multiple_of(at_tile * columns, LANES), size)

    @pl.when((request < batch) & (row >= 0))
    def _():
      act(pltpu.make_async_copy(hbm_ref.at[pl.ds(row, 1), where],
                                rows_ref.at[slot, kind, pl.ds(s, 1), pl.ds(0, size)],
                                sem_ref.at[slot]))

  def copy_tile(at_tile, act):
    def copy(size):
      for s in range(SUBLANES):
        for kind in (0, 1):
          copy_row(at_tile, size, s, kind, act)

    if num_tiles > 1:
      pl.when(at_tile < num_tiles - 1)(lambda: copy(columns))
    pl.when(at_tile == num_tiles - 1)(lambda: copy(width - (num_tiles - 1) * columns))

  @pl.when(tile == 0)
  def _():
    copy_tile(tile, lambda copy: copy.start())
    for best_ref, id_ref in ((best_r_ref, id_r_ref), (best_t_ref, id_t_ref)):
      best_ref[...] = jnp.full(best_ref.shape, -jnp.inf)
      id_ref[...] = jnp.zeros(id_ref.shape, jnp.int32)
    mass_ref[...] = jnp.zeros(mass_ref.shape)

  @pl.when(tile + 1 < num_tiles)
  def _():
    copy_tile(tile + 1, lambda copy: copy.start())

  copy_tile(tile, lambda copy: copy.wait())
  slot = lax.rem(tile, 2)
  word0, word1 = words_ref[:, 0:1], words_ref[:, 1:2]
  target_lse, draft_lse = lse_ref[:, 0:1], lse_ref[:, 1:2]

  def fold(i, carry):
    best_r, id_r, best_t, id_t, mass = carry
    offset = pl.multiple_of(i * step, LANES)
    target = rows_ref[slot, 0, :, pl.ds(offset, step)]
    draft = rows_ref[slot, 1, :, pl.ds(offset, step)]
    ids = tile * columns + offset + lax.broadcasted_iota(jnp.int32, target.shape, 1)
    noise = gumbel_block(word0, word1, ids)
    target = jnp.where(ids < vocab, target, -jnp.inf)
    residual = jnp.maximum(jnp.exp(target - target_lse) - jnp.exp(draft - draft_lse), 0.0)
    residual = jnp.where(ids < vocab, residual, 0.0)
    score_t, score_r = target + noise, jnp.log(residual) + noise
    is_new_t, is_new_r = score_t > best_t, score_r > best_r
    return (jnp.where(is_new_r, score_r, best_r), jnp.where(is_new_r, ids, id_r),
            jnp.where(is_new_t, score_t, best_t), jnp.where(is_new_t, ids, id_t), mass + residual)

  state = (best_r_ref, id_r_ref, best_t_ref, id_t_ref, mass_ref)
  num_steps = jnp.where(tile < num_tiles - 1, columns // step,
                        pl.cdiv(width - (num_tiles - 1) * columns, step))
  found = lax.fori_loop(0, num_steps, fold, tuple(ref[...] for ref in state))
  for ref, array in zip(state, found, strict=True):
    ref[...] = array

  @pl.when(tile == num_tiles - 1)
  def _():
    for out_ref, best, ids in ((recovered_ref, found[0], found[1]), (bonus_ref, *found[2:4])):
      is_best = best == jnp.max(best, axis=1, keepdims=True)
      out_ref[...] = jnp.min(jnp.where(is_best, ids, vocab - 1), axis=1, keepdims=True)
    mass_out_ref[...] = jnp.sum(found[4], axis=1, keepdims=True)


def round_up(n: int, multiple: int) -> int:
  """Returns the next multiple."""
  return pl.cdiv(n, multiple) * multiple
