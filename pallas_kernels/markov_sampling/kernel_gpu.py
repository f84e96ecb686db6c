"""The sequential walk on GPU through Triton: one launch a slot, one program a chunk of columns.

XLA walks from slot to slot and does the small work between (W1 rows, gates, the best of the
chunks); a launch streams W2 and a slot's base logits once. Triton takes powers of two: the last
chunk starts early enough to stay inside the vocabulary and masks what the one before has seen, and
rows beyond the batch repeat its last.

On request only (`implementation="pallas"`): it lowers for CUDA and equals the reference in
interpret mode, but no GPU was at hand to time it against XLA's own fusion. A rank that is no power
of two from 16 on goes to the reference.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.kernel_math import gumbel_block
from pallas_kernels.markov_sampling.reference import (
    Draws, advance, markov_sampling_reference, walk)

_FAR = 2**31 - 1
_SMALLEST_DOT = 16


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Columns of a program (a power of two) and its warps."""
  columns: int = 128
  num_warps: int = 4


def markov_sampling_gpu(base_logits_GxBxV, w1_UxR, w2_VxR, first_token_B, words_GxBx2,
                        temperature_B, pre_GxBxE=None, cell_ExI=None, ids_V=None, *,
                        kind: str = "vanilla", with_logits: bool = False, tiles: Tiles = Tiles(),
                        interpret=False) -> Draws:
  """Same as `api.markov_sampling`."""
  (G, B, V), R = base_logits_GxBxV.shape, w1_UxR.shape[1]
  if R < _SMALLEST_DOT or R & (R - 1) or V < _SMALLEST_DOT:
    return markov_sampling_reference(
        base_logits_GxBxV, w1_UxR, w2_VxR, first_token_B, words_GxBx2, temperature_B, pre_GxBxE,
        cell_ExI, ids_V, kind=kind, with_logits=with_logits)
  ids_V = jnp.arange(V, dtype=jnp.int32) if ids_V is None else ids_V.astype(jnp.int32)
  is_greedy_B = ~(temperature_B > 0)
  scale_B = jnp.where(is_greedy_B, 1.0, temperature_B).astype(jnp.float32)

  def step(carry, slot, previous_B, _, words_Bx2):
    embed_BxR = w1_UxR[previous_B]
    pre_BxE = None if pre_GxBxE is None else pre_GxBxE[slot]
    carry, bias_in_BxR = advance(kind, carry, embed_BxR, pre_BxE, cell_ExI)
    parts, logits_BxV = _scan_columns(
        slot, base_logits_GxBxV, bias_in_BxR.astype(w2_VxR.dtype), w2_VxR, words_Bx2, scale_B,
        is_greedy_B, ids_V, with_logits=with_logits, tiles=tiles, interpret=interpret)
    token_B, logp_B, lse_B = _join(parts, scale_B, is_greedy_B)
    token_B = jnp.where(token_B == _FAR, ids_V[0], token_B)  # a row that is no law
    return carry, token_B, (logp_B, lse_B, embed_BxR, bias_in_BxR, logits_BxV)

  # The kernel takes a slot's logits where they are; as the walk's input they would be copied.
  carry = jnp.zeros((B, R), w1_UxR.dtype)
  tokens_GxB, extras = walk(jnp.zeros((G, 0)), words_GxBx2, first_token_B, carry, step)
  return Draws(tokens_GxB, *extras)


def _scan_columns(slot, base_GxBxV, bias_in_BxR, w2_VxR, words_Bx2, scale_B, is_greedy_B, ids_V, *,
                  with_logits, tiles, interpret):
  """Returns (maximum, sum, faults, and the best token's logit, noise and id; each [K, B]), logits.

  K is the number of chunks; logits_BxV is None unless asked for.
  """
  B, (V, R) = bias_in_BxR.shape[0], w2_VxR.shape
  columns = min(tiles.columns, 1 << (V.bit_length() - 1))
  rows = max(_SMALLEST_DOT, 1 << (B - 1).bit_length())
  num_chunks = pl.cdiv(V, columns)
  part = lambda dtype: jax.ShapeDtypeStruct((num_chunks, rows), dtype)
  out = [part(jnp.float32)] * 5 + [part(jnp.int32)]
  if with_logits:
    out.append(jax.ShapeDtypeStruct((B, V), jnp.float32))
  found = pl.pallas_call(
      functools.partial(_columns_kernel, rows=rows, columns=columns), grid=(num_chunks,),
      out_shape=out, compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps),
      cost_estimate=pl.CostEstimate(
          flops=2 * B * V * R + 150 * B * V, transcendentals=3 * B * V,
          bytes_accessed=((1 + with_logits) * 4 * B * V + V * R * w2_VxR.dtype.itemsize + 4 * V
                          + num_chunks * rows * 24)),
      interpret=interpret, name="walk_slot",
  )(slot[None], base_GxBxV, bias_in_BxR, w2_VxR, words_Bx2[:, 0], words_Bx2[:, 1], scale_B,
    is_greedy_B.astype(jnp.int32), ids_V)
  return [part_KxB[:, :B] for part_KxB in found[:6]], found[6] if with_logits else None


def _columns_kernel(slot_ref, base_ref, bias_in_ref, w2_ref, word0_ref, word1_ref, scale_ref,
                    greedy_ref, ids_ref, top_ref, total_ref, bad_ref, logit_ref, noise_ref, id_ref,
                    *logits_ref, rows: int, columns: int):
  chunk = pl.program_id(0)
  batch, vocab = bias_in_ref.shape[0], w2_ref.shape[0]
  start = jnp.minimum(chunk * columns, vocab - columns)
  column_T = start + lax.broadcasted_iota(jnp.int32, (columns,), 0)
  row_B = jnp.minimum(lax.broadcasted_iota(jnp.int32, (rows,), 0), batch - 1)
  here = row_B[:, None], column_T[None, :]
  rank_R = lax.broadcasted_iota(jnp.int32, (bias_in_ref.shape[1],), 0)
  bias_in_BxR = bias_in_ref[row_B[:, None], rank_R[None, :]]
  bias_BxT = lax.dot_general(bias_in_BxR, w2_ref[pl.ds(start, columns), :],
                             (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  logits_BxT = base_ref[slot_ref[0], here[0], here[1]] + bias_BxT
  if logits_ref:
    logits_ref[0][here[0], here[1]] = logits_BxT
  logits_BxT = jnp.where((column_T >= chunk * columns)[None, :], logits_BxT, -jnp.inf)
  ids_1xT = ids_ref[pl.ds(start, columns)][None, :]
  scale_Bx1 = scale_ref[row_B][:, None]
  noise_BxT = gumbel_block(word0_ref[row_B][:, None], word1_ref[row_B][:, None], ids_1xT)
  noise_BxT = jnp.where(greedy_ref[row_B][:, None] > 0, 0.0, noise_BxT)

  top_B = jnp.max(logits_BxT, axis=1)
  safe_Bx1 = jnp.where(top_B > -jnp.inf, top_B, 0.0)[:, None]
  shifted_BxT = (logits_BxT - safe_Bx1) / scale_Bx1
  score_BxT = shifted_BxT + noise_BxT
  is_best_BxT = score_BxT == jnp.max(score_BxT, axis=1)[:, None]
  id_B = jnp.min(jnp.where(is_best_BxT, ids_1xT, _FAR), axis=1)
  is_it_BxT = is_best_BxT & (ids_1xT == id_B[:, None])
  pick = lambda x_BxT: jnp.max(jnp.where(is_it_BxT, x_BxT, -jnp.inf), axis=1)
  top_ref[chunk, :] = top_B
  total_ref[chunk, :] = jnp.sum(jnp.exp(shifted_BxT), axis=1)
  bad_ref[chunk, :] = jnp.max(jnp.where(logits_BxT < jnp.inf, 0.0, 1.0), axis=1)
  logit_ref[chunk, :] = pick(logits_BxT)
  noise_ref[chunk, :] = pick(noise_BxT)
  id_ref[chunk, :] = id_B


def _join(parts, scale_B, is_greedy_B):
  """Returns (token, log-probability, log-normaliser) of each row from its chunks, [B]."""
  top_KxB, total_KxB, bad_KxB, logit_KxB, noise_KxB, id_KxB = parts
  top_B = jnp.max(top_KxB, axis=0)
  is_law_B = ~(jnp.max(bad_KxB, axis=0) > 0) & (top_B > -jnp.inf)
  safe_1xB = jnp.where(is_law_B, top_B, 0.0)[None]
  weight_KxB = jnp.exp((top_KxB - safe_1xB) / scale_B[None])
  log_sum_B = jnp.where(is_greedy_B, 0.0, jnp.log(jnp.sum(total_KxB * weight_KxB, axis=0)))
  score_KxB = (logit_KxB - safe_1xB) / scale_B[None] + noise_KxB
  is_best_KxB = score_KxB == jnp.max(score_KxB, axis=0)[None]
  token_B = jnp.min(jnp.where(is_best_KxB, id_KxB, _FAR), axis=0)
  is_it_KxB = is_best_KxB & (id_KxB == token_B[None])
  logit_B = jnp.max(jnp.where(is_it_KxB, logit_KxB, -jnp.inf), axis=0)
  logp_B = (logit_B - safe_1xB[0]) / scale_B - log_sum_B
  lse_B = safe_1xB[0] / scale_B + log_sum_B
  return token_B, *(jnp.where(is_law_B, x_B, jnp.nan) for x_B in (logp_B, lse_B))
