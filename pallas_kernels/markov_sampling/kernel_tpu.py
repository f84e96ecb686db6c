"""Mosaic TPU kernel of the sequential walk: the whole walk in one call, W2 streamed in tiles.

Grid (batch blocks, slots, vocabulary tiles), in order. A tile's logits exist in VMEM alone; what
survives it is, per row, a running maximum and sum, and per lane the best token so far. At a slot's
last tile the token is known, and its W1 row is fetched for the next slot.

Every slot needs all of W2, after the token before it: G passes. What VMEM has room for stays there
after the first, so that the traffic is that of base logits and W2 once, and of what W2 has beyond
the room G - 1 times more. A W2 of 78 MB is read once on a TPU with 128 MiB; with 64 MiB no form of
the walk moves less than 1.18 times that at production shapes, however it orders its work.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kernel_math import gumbel_block
from pallas_kernels.markov_sampling.reference import Draws, advance

_LANES = 128
_FLOOR = -1e30  # start of running maxima: finite, so that exp(-inf - it) is 0
_FAR = 2**31 - 1
_ROWS = 16  # W1 rows a fetch: a tile of bfloat16


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Sizes of what is in VMEM at a time.

  Attributes:
    batch: requests, at most.
    vocab: columns, a multiple of 128.
    resident_bytes: of W2 kept in VMEM from slot to slot, at most; None = as much as there is room.
    vmem_bytes: of the TPU; None = of the one that is traced for.
  """
  batch: int = 64
  vocab: int = 1024
  resident_bytes: int | None = None
  vmem_bytes: int | None = None


_SPARE_BYTES = 2 << 20  # of VMEM: half for the compiler's own, half for what is counted roughly
_SMALLEST_VMEM_BYTES = 64 << 20  # of v5p and v7x; v5e and v6e have twice as much


def find_vmem_bytes() -> int:
  """Returns the VMEM of the TPU that is traced for; the least of all since v5e where it is unknown.

  It is unknown where a program is compiled for a TPU that is not there.
  """
  try:
    return pltpu.get_tpu_info().vmem_capacity_bytes
  except ValueError:  # the device is none
    return _SMALLEST_VMEM_BYTES


def count_resident(tiles: Tiles, *, batch: int, tile: int, num_tiles: int, rank: int, gates: int,
                   itemsize: int, with_logits: bool) -> tuple[int, int]:
  """Returns (how many tiles of W2 stay in VMEM, the compiler's limit in bytes)."""
  tile_bytes = tile * rank * itemsize
  need = (2 * tile_bytes + (2 * (1 + with_logits) + 4) * batch * tile * 4  # W2; base, logits, noise
          + batch * (_ROWS + 8) * rank * itemsize + 2 * batch * gates * 4
          + 2 * gates * 2 * rank * itemsize)
  limit = (tiles.vmem_bytes or find_vmem_bytes()) - _SPARE_BYTES // 2
  room = max(limit - _SPARE_BYTES // 2 - need, 0)
  if tiles.resident_bytes is not None:
    room = min(room, tiles.resident_bytes)
  return min(room // tile_bytes, num_tiles), limit


def markov_sampling_tpu(base_logits_GxBxV, w1_UxR, w2_VxR, first_token_B, words_GxBx2,
                        temperature_B, pre_GxBxE=None, cell_ExI=None, ids_V=None, *,
                        kind: str = "vanilla", with_logits: bool = False, tiles: Tiles = Tiles(),
                        interpret=False) -> Draws:
  """Same as `api.markov_sampling`."""
  (G, B, V), (U, R) = base_logits_GxBxV.shape, w1_UxR.shape
  batch, tile = min(tiles.batch, B), min(tiles.vocab, -(-V // _LANES) * _LANES)
  num_blocks, num_tiles = -(-B // batch), -(-V // tile)
  if kind == "vanilla":  # unread; a block needs a size
    pre_GxBxE, cell_ExI = jnp.zeros((G, B, 1), jnp.float32), jnp.zeros((1, 1), w1_UxR.dtype)
  E = pre_GxBxE.shape[-1]
  num_resident, vmem_limit = count_resident(
      tiles, batch=batch, tile=tile, num_tiles=num_tiles, rank=R, gates=E,
      itemsize=w2_VxR.dtype.itemsize, with_logits=with_logits)
  if G * num_blocks == 1:  # one pass
    num_resident = 0
  ids_V = jnp.arange(V, dtype=jnp.int32) if ids_V is None else ids_V.astype(jnp.int32)
  is_sampled_B = jnp.pad(temperature_B > 0, (0, num_blocks * batch - B))
  any_sampled_K = is_sampled_B.reshape(num_blocks, batch).any(1).astype(jnp.int32)

  def find_w2_tile(b, g, j):
    # A resident tile is asked for once; afterwards the index rests on the first that is not.
    return (jnp.where((b + g == 0) | (j >= num_resident), j,
                      min(num_resident, num_tiles - 1)), 0)

  per_slot = lambda width: pl.BlockSpec((None, batch, width), lambda b, g, j, *_: (g, b, 0))
  per_row = lambda width: pl.BlockSpec((batch, width), lambda b, g, j, *_: (b, 0))
  per_tile = pl.BlockSpec((None, batch, tile), lambda b, g, j, *_: (g, b, j))
  slots = lambda width, dtype: jax.ShapeDtypeStruct((G, B, width), dtype)
  out = [(per_slot(1), slots(1, jnp.int32)), (per_slot(1), slots(1, jnp.float32)),
         (per_slot(1), slots(1, jnp.float32)), (per_slot(R), slots(R, w1_UxR.dtype))]
  if with_logits:
    out.append((per_tile, slots(V, jnp.float32)))
  num_w2_rows = V + (G * num_blocks - 1) * max(V - num_resident * tile, 0)
  found = pl.pallas_call(
      functools.partial(_walk_kernel, kind=kind, vocab=V, tile=tile, num_resident=num_resident,
                        num_embeds=U, with_logits=with_logits),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1, grid=(num_blocks, G, num_tiles),
          in_specs=[
              per_tile, pl.BlockSpec(memory_space=pl.ANY),
              pl.BlockSpec((tile, R), lambda b, g, j, *_: find_w2_tile(b, g, j)),
              per_row(R), per_slot(2), per_row(1), per_slot(E),
              pl.BlockSpec(cell_ExI.shape, lambda *_: (0, 0)),
              pl.BlockSpec((1, tile), lambda b, g, j, *_: (0, j))],
          out_specs=[spec for spec, _ in out],
          scratch_shapes=[
              pltpu.VMEM((max(num_resident, 1), tile, R), w2_VxR.dtype),
              pltpu.VMEM((batch, R), w1_UxR.dtype),  # embedding of the previous token
              pltpu.VMEM((batch, R), w1_UxR.dtype),  # the cell's state
              pltpu.VMEM((batch, _ROWS, R), w1_UxR.dtype),  # W1 rows around each token
              pltpu.VMEM((batch, _LANES), jnp.float32),  # per lane the best token's logit,
              pltpu.VMEM((batch, _LANES), jnp.float32),  # noise,
              pltpu.VMEM((batch, _LANES), jnp.int32),  # and id
              pltpu.VMEM((batch, _LANES), jnp.float32),  # per row: maximum, sum, is no law
              pltpu.VMEM((batch, tile), jnp.float32),  # noise of a tile
              pltpu.VMEM((batch, _LANES), jnp.int32),  # tokens on their way to
              pltpu.SMEM((batch, _LANES), jnp.int32),  # where addresses are read
              pltpu.SemaphoreType.DMA]),
      out_shape=[shape for _, shape in out],
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=vmem_limit),
      cost_estimate=pl.CostEstimate(
          flops=2 * G * B * V * R + 150 * G * B * V,  # Threefry is 100 of the 150
          transcendentals=3 * G * B * V,
          bytes_accessed=((1 + with_logits) * G * B * V * 4 + num_blocks * G * V * 4
                          + num_w2_rows * R * w2_VxR.dtype.itemsize
                          + G * B * ((_ROWS + 1) * R * w1_UxR.dtype.itemsize + 4 * E + 20))),
      interpret=interpret,
  )(any_sampled_K, base_logits_GxBxV, _pad_rows(w1_UxR), w2_VxR, w1_UxR[first_token_B],
    words_GxBx2, temperature_B.astype(jnp.float32)[:, None], pre_GxBxE, cell_ExI, ids_V[None])
  tokens_GxB, logp_GxB, lse_GxB = (a[..., 0] for a in found[:3])
  previous_GxB = jnp.concatenate([first_token_B.astype(jnp.int32)[None], tokens_GxB[:-1]])
  return Draws(tokens_GxB, logp_GxB, lse_GxB, w1_UxR[previous_GxB], found[3],
               found[4] if with_logits else None)


def _pad_rows(w1_UxR):
  """Makes the last fetch a whole one; vocabularies of real models need no copy."""
  missing = -w1_UxR.shape[0] % _ROWS
  return jnp.pad(w1_UxR, ((0, missing), (0, 0))) if missing else w1_UxR


def _walk_kernel(any_sampled, base, w1, w2, first_embed, words, temperature, pre, cell, ids,
                 tokens, logp, lse, bias_in, *rest, kind, vocab, tile, num_resident, num_embeds,
                 with_logits):
  logits_out, rest = (rest[0], rest[1:]) if with_logits else (None, rest)
  (resident, embed, carry, rows, best_logit, best_noise, best_id, running, noise, tokens_vmem,
   tokens_smem, semaphore) = rest
  block, slot, index = (pl.program_id(i) for i in range(3))
  batch = base.shape[0]
  is_greedy_Bx1 = ~(temperature[...] > 0)
  scale_Bx1 = jnp.where(is_greedy_Bx1, 1.0, temperature[...])

  @pl.when(index == 0)
  def _():
    @pl.when(slot == 0)
    def _():
      embed[...] = first_embed[...]
      carry[...] = jnp.zeros(carry.shape, carry.dtype)

    next_carry, bias_in_BxR = advance(kind, carry[...], embed[...], pre[...], cell[...])
    carry[...] = next_carry
    bias_in[...] = bias_in_BxR
    best_logit[...] = jnp.full(best_logit.shape, -jnp.inf, jnp.float32)
    best_noise[...] = jnp.zeros(best_noise.shape, jnp.float32)
    best_id[...] = jnp.full(best_id.shape, _FAR, jnp.int32)
    column_BxL = lax.broadcasted_iota(jnp.int32, running.shape, 1)
    running[...] = jnp.where(column_BxL == 0, _FLOOR, 0.0)

  w2_TxR = _find_w2(w2, resident, is_first=block + slot == 0, index=index,
                    num_resident=num_resident)
  logits_BxT = base[...] + lax.dot_general(bias_in[...], w2_TxR, (((1,), (1,)), ((), ())),
                                           preferred_element_type=jnp.float32)
  if with_logits:
    logits_out[...] = logits_BxT
  column_BxT = index * tile + lax.broadcasted_iota(jnp.int32, (batch, tile), 1)
  logits_BxT = jnp.where(column_BxT < vocab, logits_BxT, -jnp.inf)
  _add_to_sum(running, logits_BxT, scale_Bx1)
  ids_1xT = ids[...]

  @pl.when(any_sampled[block] > 0)
  def _():
    noise[...] = jnp.where(is_greedy_Bx1, 0.0, gumbel_block(words[:, 0:1], words[:, 1:2], ids_1xT))

  @pl.when(any_sampled[block] == 0)
  def _():
    noise[...] = jnp.zeros(noise.shape, jnp.float32)

  noise_BxT = noise[...]
  for start in range(0, tile, _LANES):
    part = slice(start, start + _LANES)
    logit_BxL, noise_BxL = logits_BxT[:, part], noise_BxT[:, part]
    # As a difference of logits: exact where two tokens are close, whatever their size. Of equals
    # the first stays, which is the lowest id.
    lead_BxL = (logit_BxL - best_logit[...]) / scale_Bx1 + (noise_BxL - best_noise[...])
    is_better_BxL = lead_BxL > 0
    best_logit[...] = jnp.where(is_better_BxL, logit_BxL, best_logit[...])
    best_noise[...] = jnp.where(is_better_BxL, noise_BxL, best_noise[...])
    best_id[...] = jnp.where(is_better_BxL, ids_1xT[:, part], best_id[...])

  @pl.when(index == pl.num_programs(2) - 1)
  def _():
    token_Bx1, logit_Bx1 = _find_winner(best_logit[...], best_noise[...], best_id[...], scale_Bx1)
    token_Bx1 = jnp.clip(token_Bx1, 0, num_embeds - 1)  # rows that are no law, or no request
    top_Bx1 = running[:, 0:1]
    log_sum_Bx1 = jnp.where(is_greedy_Bx1, 0.0, jnp.log(running[:, 1:2]))
    is_law_Bx1 = (running[:, 2:3] == 0) & (top_Bx1 > _FLOOR)
    tokens[...] = token_Bx1
    logp[...] = jnp.where(is_law_Bx1, (logit_Bx1 - top_Bx1) / scale_Bx1 - log_sum_Bx1, jnp.nan)
    lse[...] = jnp.where(is_law_Bx1, top_Bx1 / scale_Bx1 + log_sum_Bx1, jnp.nan)

    @pl.when(slot < pl.num_programs(1) - 1)
    def _():
      tokens_vmem[...] = jnp.broadcast_to(token_Bx1, tokens_vmem.shape)
      _fetch_embeds(w1, token_Bx1, embed, rows, tokens_vmem, tokens_smem, semaphore)


def _find_w2(w2, resident, *, is_first, index, num_resident):
  """Returns the tile of W2, from the pipeline or from where the first pass left it."""
  if num_resident == 0:
    return w2[...]

  @pl.when(is_first & (index < num_resident))
  def _():
    resident[index] = w2[...]

  kept_TxR = resident[jnp.minimum(index, num_resident - 1)]
  return jnp.where(index < num_resident, kept_TxR, w2[...])


def _add_to_sum(running, logits_BxT, scale_Bx1):
  """Columns of `running`: maximum of the logits, sum of exp((logit - maximum) / t), faults."""
  top_Bx1 = running[:, 0:1]
  new_top_Bx1 = jnp.maximum(top_Bx1, jnp.max(logits_BxT, axis=1, keepdims=True))
  more_Bx1 = jnp.sum(jnp.exp((logits_BxT - new_top_Bx1) / scale_Bx1), axis=1, keepdims=True)
  running[:, 1:2] = running[:, 1:2] * jnp.exp((top_Bx1 - new_top_Bx1) / scale_Bx1) + more_Bx1
  running[:, 0:1] = new_top_Bx1
  # By comparison: a maximum may turn a NaN into a number.
  running[:, 2:3] += jnp.sum(jnp.where(logits_BxT < jnp.inf, 0.0, 1.0), axis=1, keepdims=True)


def _find_winner(logit_BxL, noise_BxL, id_BxL, scale_Bx1):
  """Returns (id, logit) of the best lane, [B, 1]; the lowest id of equals."""
  top_Bx1 = jnp.max(logit_BxL, axis=1, keepdims=True)
  score_BxL = (logit_BxL - top_Bx1) / scale_Bx1 + noise_BxL
  is_best_BxL = score_BxL == jnp.max(score_BxL, axis=1, keepdims=True)
  id_Bx1 = jnp.min(jnp.where(is_best_BxL, id_BxL, _FAR), axis=1, keepdims=True)
  is_it_BxL = is_best_BxL & (id_BxL == id_Bx1)
  return id_Bx1, jnp.max(jnp.where(is_it_BxL, logit_BxL, -jnp.inf), axis=1, keepdims=True)


def _fetch_embeds(w1, token_Bx1, embed, rows, tokens_vmem, tokens_smem, semaphore):
  """Writes W1's rows of the tokens to `embed`: groups of rows from memory, then one of each."""
  copy = pltpu.make_async_copy(tokens_vmem, tokens_smem, semaphore)
  copy.start()
  copy.wait()

  def row_copy(b):
    start = pl.multiple_of(tokens_smem[b, 0] & ~(_ROWS - 1), _ROWS)
    return pltpu.make_async_copy(w1.at[pl.ds(start, _ROWS)], rows.at[b], semaphore)

  def start(b, _):
    row_copy(b).start()
    return _

  def wait(b, _):
    row_copy(b).wait()
    return _

  lax.fori_loop(0, rows.shape[0], start, 0)
  lax.fori_loop(0, rows.shape[0], wait, 0)
  # By bits: // and % ask for the device when they are lowered, which fails where there is none.
  at_Bx1x1 = (token_Bx1 & (_ROWS - 1))[:, :, None]
  row_BxKx1 = lax.broadcasted_iota(jnp.int32, (*rows.shape[:2], 1), 1)
  chosen_BxKxR = jnp.where(row_BxKx1 == at_Bx1x1, rows[...].astype(jnp.float32), 0.0)
  embed[...] = jnp.sum(chosen_BxKxR, axis=1).astype(embed.dtype)
