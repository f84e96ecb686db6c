"""Mosaic TPU kernels of the distillation loss: a chunk of tokens in VMEM, the vocabulary streamed.

Two kernels a chunk. `_terms_kernel` goes over the LM head twice, since TV needs both normalisers
before its first term: once for log-sum-exps, once for the terms. `_gradients_kernel` goes over it
once more, with the logits computed again. Of width Vd only tiles exist, and the gradient of W2.

That is 4 and 7 products of C x Vd x D where the reference needs 2 and 3. Compiled for v5e at 512
tokens, V = 151,936, D = 2560, bfloat16:

| | accessed | floor | FLOPs | temporaries |
|---|---|---|---|---|
| terms, reference | 4.51 GB | 0.86 GB | 0.84 T | 623 MB |
| terms, kernel | 1.79 GB | 0.86 GB | 1.71 T | 0.2 MB |
| terms and gradients, reference | 8.28 GB | 0.94 GB | 1.32 T | 1093 MB |
| terms and gradients, kernel | 3.39 GB | 0.94 GB | 2.99 T | 162 MB |

So a token and column costs 63 bytes less and 8.4 D FLOPs more: worth it below D = 1,245 (v5p),
1,800 (v5e), 2,300 (v7x) and 4,200 (v6e), by peak FLOPs over peak bandwidth. No TPU was at hand to
time it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.distillation_loss import reference
from pallas_kernels.distillation_loss.reference import Tokens

MAX_AUTO_WIDTH = 1024  # D up to which the kernel is the default on TPU; see above

# Logits of columns past the vocabulary: finite, so that a difference of two of them is 0, not NaN.
_MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Sizes of what is in VMEM at a time.

  Attributes:
    tokens: of a chunk, a multiple of 16; the LM head is read three times a chunk.
    vocab: rows of the LM head a grid step, a multiple of 128.
    vmem_bytes: the compiler's limit, below the 64 MiB of v5p and v7x.
  """
  tokens: int = 512
  vocab: int = 512
  vmem_bytes: int = 56 << 20


def fit_tiles(num_tokens: int, vocab: int, width: int, rank: int, dtype) -> Tiles:
  """Returns the default tiles, smaller where few tokens or a wide model ask for it."""
  tiles = Tiles()
  size = jnp.dtype(dtype).itemsize
  tokens = min(tiles.tokens, -(-num_tokens // 16) * 16)
  vocab_tile = min(tiles.vocab, -(-vocab // 128) * 128)

  def count_bytes():
    rows = 2 * vocab_tile * ((width + rank) * size + 2 * rank * 4)  # two buffers each
    state = tokens * (width * (2 * size + 8) + rank * (size + 8))
    return rows + state + 8 * tokens * vocab_tile * 4

  while count_bytes() > 0.8 * tiles.vmem_bytes and max(tokens // 32, vocab_tile // 128) > 1:
    if tokens > vocab_tile or vocab_tile == 128:
      tokens = -(-tokens // 32) * 16
    else:
      vocab_tile = -(-vocab_tile // 256) * 128
  return dataclasses.replace(tiles, tokens=tokens, vocab=vocab_tile)


def terms_and_gradients(tokens: Tokens, lm_head_VdxD, w2_VdxR, keep_N, *, with_gradients: bool,
                        lk_eta: float | None = None, tiles: Tiles | None = None, interpret=False):
  """Same as `reference.terms_and_gradients`."""
  num_tokens, width = tokens.hidden_NxD.shape
  if tiles is None:
    tiles = fit_tiles(num_tokens, *w2_VdxR.shape[:1], width, w2_VdxR.shape[1],
                      tokens.hidden_NxD.dtype)
  return reference.terms_and_gradients(
      tokens, lm_head_VdxD, w2_VdxR, keep_N, chunk=tiles.tokens, with_gradients=with_gradients,
      lk_eta=lk_eta, run_chunk=functools.partial(run_chunk, tiles=tiles, interpret=interpret))


def run_chunk(tokens: Tokens, head_VdxD, w2_VdxR, d_w2_VdxR, *, with_gradients: bool,
              lk_eta: float | None, tiles: Tiles, interpret):
  """Same as `reference.run_chunk`."""
  num_tokens = tokens.labels_N.shape[0]
  missing = -num_tokens % 16  # only where there are fewer tokens than a chunk
  padded = Tokens(*(
      None if a is None else jnp.pad(a, ((0, missing),) + ((0, 0),) * (a.ndim - 1),
                                     constant_values=fill)
      for a, fill in zip(tokens, reference.FILL)))
  call = _Call(padded, head_VdxD, w2_VdxR, tiles, interpret)
  stats_Cx8 = call.compute_terms(call.pack_tokens())
  ce_C, kl_C = stats_Cx8[:, _CE], stats_Cx8[:, _KL]
  accept_C = jnp.minimum(stats_Cx8[:, _ACCEPT], 1.0)
  all_terms = (ce_C, 2.0 - 2.0 * accept_C, accept_C, kl_C)
  terms = tuple(term_C[:num_tokens] for term_C in all_terms)
  if not with_gradients:
    return d_w2_VdxR, (terms, None, None, None)
  call.tokens = reference.fold_lk(call.tokens, all_terms, lk_eta)
  d_hidden, d_bias_in, d_copy, d_w2_VdxR = call.compute_gradients(call.pack_tokens(), stats_Cx8,
                                                                  d_w2_VdxR)
  if tokens.copy_index_N is None:
    d_copy = None
  gradients = jax.tree.map(lambda a: a[:num_tokens], (d_hidden, d_bias_in, d_copy))
  return d_w2_VdxR, (terms, *gradients)


# Per-token scalars travel as columns of one float32 array: integers below 2^24 are exact there.
_LABEL, _COPY, _COPY_BIAS, _TARGET_LSE_IN, _D_CE, _D_TV, _D_KL = range(7)
# Results of the terms kernel, which the gradients kernel reads.
_CE, _ACCEPT, _KL, _DRAFT_LSE, _TARGET_LSE, _MEAN_BELOW, _TARGET_MASS = range(7)


class _Call:
  """One chunk's shapes and blocks, shared by the two kernels."""

  def __init__(self, tokens: Tokens, head_VdxD, w2_VdxR, tiles: Tiles, interpret):
    self.tokens, self.head, self.w2, self.interpret = tokens, head_VdxD, w2_VdxR, interpret
    (self.num_tokens, self.width), self.vocab = tokens.hidden_NxD.shape, head_VdxD.shape[0]
    # A block of zero columns is no block: without a sequential head both sides are one zero.
    self.rank = max(w2_VdxR.shape[1], 1)
    if w2_VdxR.shape[1] == 0:
      self.w2 = jnp.zeros((self.vocab, 1), head_VdxD.dtype)
      self.tokens = tokens._replace(
          bias_in_NxR=jnp.zeros((self.num_tokens, 1), head_VdxD.dtype))
    self.tile = min(tiles.vocab, -(-self.vocab // 128) * 128)
    self.num_tiles = -(-self.vocab // self.tile)
    self.params = dict(vocab=self.vocab, tile=self.tile,
                       has_copy=tokens.copy_index_N is not None,
                       has_kl=tokens.d_kl_N is not None,
                       has_target_lse=tokens.target_lse_N is not None)
    self.vmem_bytes = tiles.vmem_bytes

  def pack_tokens(self):
    """Returns labels, copies, log-normalisers and weights as float32 [C, 8]."""
    t = self.tokens
    zeros_C = jnp.zeros(self.num_tokens, jnp.float32)
    columns = (t.labels_N, zeros_C - 1 if t.copy_index_N is None else t.copy_index_N,
               t.copy_bias_N, t.target_lse_N, t.d_ce_N, t.d_tv_N, t.d_kl_N, None)
    return jnp.stack([zeros_C if c is None else c.astype(jnp.float32) for c in columns], axis=1)

  def compute_terms(self, columns_Cx8):
    specs = self._specs(lambda phase, tile: tile, with_stats=False)
    return self._call(
        functools.partial(_terms_kernel, **self.params), (2, self.num_tiles), specs,
        (columns_Cx8,), out_specs=pl.BlockSpec((self.num_tokens, 8), lambda *_: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((self.num_tokens, 8), jnp.float32),
        scratch_shapes=[pltpu.VMEM((self.num_tokens, 8), jnp.float32)],
        cost=self._estimate(num_passes=2, num_products=4))

  def compute_gradients(self, columns_Cx8, stats_Cx8, d_w2_VdxR):
    C, D, R = self.num_tokens, self.width, self.rank
    has_head = d_w2_VdxR.shape[1] > 0
    d_w2_VdxR = d_w2_VdxR if has_head else jnp.zeros((self.vocab, 1), jnp.float32)
    specs = self._specs(lambda tile: tile, with_stats=True)
    specs.append(pl.BlockSpec((self.tile, R), lambda tile: (tile, 0)))
    whole = lambda *shape: pl.BlockSpec(shape, lambda tile: (0, 0))
    d_hidden, d_bias_in, d_copy_Cx1, d_w2_VdxR = self._call(
        functools.partial(_gradients_kernel, **self.params), (self.num_tiles,), specs,
        (columns_Cx8, stats_Cx8, d_w2_VdxR),
        out_specs=[whole(C, D), whole(C, R), whole(C, 1), specs[-1]],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)
                   for shape in ((C, D), (C, R), (C, 1), (self.vocab, R))],
        input_output_aliases={len(specs) - 1: 3},
        cost=self._estimate(num_passes=1, num_products=3))
    return d_hidden, d_bias_in[:, :R * has_head], d_copy_Cx1[:, 0], d_w2_VdxR[:, :R * has_head]

  def _specs(self, tile_of, *, with_stats: bool):
    """Blocks of hidden, bias_in, target, LM head, W2, columns and, on request, stats."""
    C, D, R = self.num_tokens, self.width, self.rank
    whole = lambda *shape: pl.BlockSpec(shape, lambda *_: (0, 0), pipeline_mode=pl.Buffered(1))
    rows = lambda width: pl.BlockSpec((self.tile, width), lambda *at: (tile_of(*at), 0))
    return [whole(C, D), whole(C, R), whole(C, D), rows(D), rows(R)] + [
        whole(C, 8)] * (1 + with_stats)

  def _call(self, kernel, grid, in_specs, more, *, cost, scratch_shapes=(), **kwargs):
    t = self.tokens
    return pl.pallas_call(
        kernel, grid=grid, in_specs=in_specs, scratch_shapes=scratch_shapes, cost_estimate=cost,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * len(grid), vmem_limit_bytes=self.vmem_bytes),
        interpret=self.interpret, **kwargs)(
            t.hidden_NxD, t.bias_in_NxR, t.target_NxD, self.head, self.w2, *more)

  def _estimate(self, *, num_passes: int, num_products: int):
    """What really moves: the head and W2 once a pass, the gradient of W2 in and out."""
    C, D, R, V = self.num_tokens, self.width, self.rank, self.vocab
    size = self.head.dtype.itemsize
    has_gradients = num_products == 3
    d_w2 = 2 * V * R * 4 if has_gradients else 0
    return pl.CostEstimate(
        flops=2 * C * V * (num_products * D + (num_products - 1) * R),
        transcendentals=2 * C * V * num_passes,
        bytes_accessed=(num_passes * V * (D + R) * size + C * (2 * D + R) * size + 64 * C + d_w2
                        + has_gradients * C * (D + R + 1) * 4))


def _contract(x_CxD, w_TxD):
  return lax.dot_general(x_CxD, w_TxD, (((1,), (1,)), ((), ())),
                         preferred_element_type=jnp.float32)


def _compute_logits(hidden, bias_in, target, head, w2, columns, tile_index, *, vocab, tile,
                    has_copy):
  """Returns the draft's and target's logits [C, T] of a tile and its column numbers."""
  column_CxT = tile_index * tile + lax.broadcasted_iota(jnp.int32, (hidden.shape[0], tile), 1)
  draft_CxT = _contract(hidden[...], head[...]) + _contract(bias_in[...], w2[...])
  if has_copy:
    at_Cx1 = columns[:, _COPY:_COPY + 1].astype(jnp.int32)
    draft_CxT += jnp.where(column_CxT == at_Cx1, columns[:, _COPY_BIAS:_COPY_BIAS + 1], 0.0)
  target_CxT = _contract(target[...], head[...])
  is_real_CxT = column_CxT < vocab
  return (jnp.where(is_real_CxT, draft_CxT, _MASKED), jnp.where(is_real_CxT, target_CxT, _MASKED),
          column_CxT)


def _sum(x_CxT):
  return jnp.sum(x_CxT, axis=1, keepdims=True)


def _terms_kernel(hidden, bias_in, target, head, w2, columns, stats, running, *, vocab, tile,
                  has_copy, has_kl, has_target_lse):
  """Pass 0: running maxima and sums of both rows of logits; pass 1: the terms."""
  phase, tile_index = pl.program_id(0), pl.program_id(1)
  draft_CxT, target_CxT, column_CxT = _compute_logits(
      hidden, bias_in, target, head, w2, columns, tile_index, vocab=vocab, tile=tile,
      has_copy=has_copy)
  column = lambda ref, i: ref[:, i:i + 1]
  label_Cx1 = column(columns, _LABEL).astype(jnp.int32)

  @pl.when((phase == 0) & (tile_index == 0))
  def _():
    stats[...] = jnp.zeros(stats.shape, jnp.float32)
    running[...] = jnp.where(
        lax.broadcasted_iota(jnp.int32, running.shape, 1) % 2 == 0, _MASKED, 0.0)

  @pl.when(phase == 0)
  def _():
    for i, logits_CxT in ((0, draft_CxT), (2, target_CxT)):
      top_Cx1 = column(running, i)
      new_top_Cx1 = jnp.maximum(top_Cx1, jnp.max(logits_CxT, axis=1, keepdims=True))
      running[:, i + 1:i + 2] = (column(running, i + 1) * jnp.exp(top_Cx1 - new_top_Cx1)
                                 + _sum(jnp.exp(logits_CxT - new_top_Cx1)))
      running[:, i:i + 1] = new_top_Cx1
    stats[:, _CE:_CE + 1] -= _sum(jnp.where(column_CxT == label_Cx1, draft_CxT, 0.0))

  @pl.when((phase == 1) & (tile_index == 0))
  def _():
    draft_lse_Cx1, target_lse_Cx1 = (column(running, i) + jnp.log(column(running, i + 1))
                                     for i in (0, 2))
    stats[:, _CE:_CE + 1] = jnp.where(label_Cx1 >= 0, draft_lse_Cx1 + column(stats, _CE), 0.0)
    stats[:, _DRAFT_LSE:_DRAFT_LSE + 1] = draft_lse_Cx1
    stats[:, _TARGET_LSE:_TARGET_LSE + 1] = (
        column(columns, _TARGET_LSE_IN) if has_target_lse else target_lse_Cx1)

  @pl.when(phase == 1)
  def _():
    draft_lse_Cx1, target_lse_Cx1 = column(stats, _DRAFT_LSE), column(stats, _TARGET_LSE)
    draft_p_CxT = jnp.exp(draft_CxT - draft_lse_Cx1)
    target_p_CxT = jnp.exp(target_CxT - target_lse_Cx1)
    stats[:, _ACCEPT:_ACCEPT + 1] += _sum(jnp.minimum(draft_p_CxT, target_p_CxT))
    stats[:, _MEAN_BELOW:_MEAN_BELOW + 1] += _sum(
        draft_p_CxT * reference.below(draft_p_CxT, target_p_CxT))
    stats[:, _TARGET_MASS:_TARGET_MASS + 1] += _sum(target_p_CxT)
    if has_kl:
      log_ratio_CxT = target_CxT - draft_CxT - (target_lse_Cx1 - draft_lse_Cx1)
      stats[:, _KL:_KL + 1] += _sum(target_p_CxT * log_ratio_CxT)


def _gradients_kernel(hidden, bias_in, target, head, w2, columns, stats, d_w2_in, d_hidden,
                      d_bias_in, d_copy, d_w2, *, vocab, tile, has_copy, has_kl, has_target_lse):
  """One pass: d logits of a tile, and what it adds to each gradient; maths in `reference`."""
  del has_target_lse  # only the log-normaliser differs, and that is in stats
  tile_index = pl.program_id(0)
  draft_CxT, target_CxT, column_CxT = _compute_logits(
      hidden, bias_in, target, head, w2, columns, tile_index, vocab=vocab, tile=tile,
      has_copy=has_copy)
  column = lambda ref, i: ref[:, i:i + 1]

  @pl.when(tile_index == 0)
  def _():
    for ref in (d_hidden, d_bias_in, d_copy):
      ref[...] = jnp.zeros(ref.shape, jnp.float32)

  label_Cx1 = column(columns, _LABEL).astype(jnp.int32)
  d_ce_Cx1 = jnp.where(label_Cx1 >= 0, column(columns, _D_CE), 0.0)
  d_tv_Cx1 = column(columns, _D_TV)
  draft_p_CxT = jnp.exp(draft_CxT - column(stats, _DRAFT_LSE))
  target_p_CxT = jnp.exp(target_CxT - column(stats, _TARGET_LSE))
  coefficient_Cx1 = d_ce_Cx1 + 2.0 * d_tv_Cx1 * column(stats, _MEAN_BELOW)
  if has_kl:
    d_kl_Cx1 = column(columns, _D_KL)
    coefficient_Cx1 += d_kl_Cx1 * column(stats, _TARGET_MASS)
  d_logits_CxT = draft_p_CxT * (
      coefficient_Cx1 - 2.0 * d_tv_Cx1 * reference.below(draft_p_CxT, target_p_CxT))
  if has_kl:
    d_logits_CxT -= d_kl_Cx1 * target_p_CxT
  d_logits_CxT -= jnp.where(column_CxT == label_Cx1, d_ce_Cx1, 0.0)
  if has_copy:
    at_Cx1 = column(columns, _COPY).astype(jnp.int32)
    d_copy[...] += _sum(jnp.where(column_CxT == at_Cx1, d_logits_CxT, 0.0))
  d_logits_CxT = d_logits_CxT.astype(head.dtype)
  # Rows past the vocabulary are whatever was in memory: zero times NaN is NaN.
  is_row_Tx1 = tile_index * tile + lax.broadcasted_iota(jnp.int32, (tile, 1), 0) < vocab
  multiply = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
  d_hidden[...] += multiply(d_logits_CxT, jnp.where(is_row_Tx1, head[...], 0))
  d_bias_in[...] += multiply(d_logits_CxT, jnp.where(is_row_Tx1, w2[...], 0))
  d_w2[...] = d_w2_in[...] + lax.dot_general(
      d_logits_CxT, bias_in[...], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
