"""The terms of the distillation loss on GPU through Triton: the vocabulary streamed, twice.

Two launches, for the same reason as the two passes of `kernel_tpu`: first log-sum-exps, then terms.
A program takes a block of tokens and a span of the vocabulary, tile by tile, with the products cut
along the width; it writes one partial sum a token, and XLA joins the spans. The last tile starts
early enough to stay inside the vocabulary and masks what the one before has seen.

On request only (`implementation="pallas"`): it lowers for CUDA and equals the reference in
interpret mode, but no GPU was at hand to time it. Gradients are the reference's: a program would
have to add its [tokens, D] share of the hidden states' gradient to memory by atomics, in an order
that changes from run to run. So are widths and ranks that 16 does not divide, which Triton's
products do not take.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.distillation_loss import reference
from pallas_kernels.distillation_loss.reference import Tokens

_SMALLEST_DOT = 16
_MASKED = -1e30  # finite, so that a difference of two of them is 0, not NaN


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Sizes; all but `tokens` are powers of two.

  Attributes:
    tokens: of two launches.
    rows: tokens of a program.
    vocab: rows of the LM head a step.
    span: rows of the LM head of a program.
    width: columns of hidden states and LM head multiplied at a time.
    num_warps: of a program.
  """
  tokens: int = 512
  rows: int = 64
  vocab: int = 128
  span: int = 4096
  width: int = 64
  num_warps: int = 8


def terms_and_gradients(tokens: Tokens, lm_head_VdxD, w2_VdxR, keep_N, *, with_gradients: bool,
                        lk_eta: float | None = None, chunk: int = reference.CHUNK,
                        tiles: Tiles = Tiles(), interpret=False):
  """Same as `reference.terms_and_gradients`; gradients and odd sizes are its own, by `chunk`."""
  options = dict(with_gradients=with_gradients, lk_eta=lk_eta)
  (vocab, width), rank = lm_head_VdxD.shape, w2_VdxR.shape[1]
  if with_gradients or width % _SMALLEST_DOT or rank % _SMALLEST_DOT or vocab < _SMALLEST_DOT:
    return reference.terms_and_gradients(tokens, lm_head_VdxD, w2_VdxR, keep_N, chunk=chunk,
                                         **options)
  return reference.terms_and_gradients(
      tokens, lm_head_VdxD, w2_VdxR, keep_N, chunk=tiles.tokens,
      run_chunk=functools.partial(run_chunk, tiles=tiles, interpret=interpret), **options)


def run_chunk(tokens: Tokens, head_VdxD, w2_VdxR, d_w2_VdxR, *, with_gradients: bool,
              lk_eta: float | None, tiles: Tiles, interpret):
  """Same as `reference.run_chunk`, for terms alone."""
  assert not with_gradients, lk_eta
  num_tokens, vocab = tokens.labels_N.shape[0], head_VdxD.shape[0]
  rows = min(tiles.rows, max(_SMALLEST_DOT, 1 << (num_tokens - 1).bit_length()))
  tile = min(tiles.vocab, 1 << (vocab.bit_length() - 1))
  tiles = dataclasses.replace(tiles, rows=rows, vocab=tile, span=max(tiles.span, tile))
  t = Tokens(*(
      None if a is None else jnp.pad(a, ((0, -num_tokens % rows),) + ((0, 0),) * (a.ndim - 1),
                                     constant_values=fill)
      for a, fill in zip(tokens, reference.FILL)))
  arrays = dict(hidden=t.hidden_NxD, target=t.target_NxD, head=head_VdxD)
  if w2_VdxR.shape[1]:
    arrays |= dict(bias_in=t.bias_in_NxR, w2=w2_VdxR)
  if t.copy_index_N is not None:
    arrays |= dict(copy_index=t.copy_index_N.astype(jnp.int32),
                   copy_bias=t.copy_bias_N.astype(jnp.float32))
  call = functools.partial(_call, tiles=tiles, interpret=interpret)
  draft_top, draft_total, target_top, target_total, label_logit = call(
      _lse_kernel, arrays | dict(labels=t.labels_N.astype(jnp.int32)), num_out=5)
  draft_lse_C, target_lse_C = _join(draft_top, draft_total), _join(target_top, target_total)
  if t.target_lse_N is not None:
    target_lse_C = t.target_lse_N.astype(jnp.float32)
  has_kl = t.d_kl_N is not None
  accept_KxC, *kl = call(
      functools.partial(_terms_kernel, has_kl=has_kl),
      arrays | dict(draft_lse=draft_lse_C, target_lse=target_lse_C), num_out=1 + has_kl)
  accept_C = jnp.minimum(accept_KxC.sum(0), 1.0)
  ce_C = jnp.where(t.labels_N >= 0, draft_lse_C - label_logit.sum(0), 0.0)
  kl_C = kl[0].sum(0) if has_kl else jnp.zeros_like(ce_C)
  terms = (ce_C, 2.0 - 2.0 * accept_C, accept_C, kl_C)
  return d_w2_VdxR, (tuple(term_C[:num_tokens] for term_C in terms), None, None, None)


def _join(top_KxC, total_KxC):
  """Returns the log-sum-exp of each token from those of the spans."""
  top_C = top_KxC.max(0)
  return top_C + jnp.log(jnp.sum(total_KxC * jnp.exp(top_KxC - top_C[None]), axis=0))


def _call(kernel, arrays: dict, *, num_out: int, tiles: Tiles, interpret):
  """Launches one pass; its outputs are float32 [spans, tokens]."""
  (num_tokens, width), vocab = arrays["hidden"].shape, arrays["head"].shape[0]
  rank = arrays["w2"].shape[1] if "w2" in arrays else 0
  num_spans, num_blocks = pl.cdiv(vocab, tiles.span), num_tokens // tiles.rows
  out_shape = [jax.ShapeDtypeStruct((num_spans, num_tokens), jnp.float32)] * num_out

  def run(*refs):
    kernel({name: ref for name, ref in zip(arrays, refs)}, refs[len(arrays):], tiles)

  return pl.pallas_call(
      run, grid=(num_spans, num_blocks), out_shape=out_shape,
      compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps),
      cost_estimate=pl.CostEstimate(
          flops=2 * num_tokens * vocab * (2 * width + rank),
          transcendentals=2 * num_tokens * vocab,
          bytes_accessed=sum(a.nbytes for a in arrays.values())
          + 4 * num_out * num_spans * num_tokens),
      interpret=interpret, name=getattr(kernel, "func", kernel).__name__.strip("_"),
  )(*arrays.values())


def _multiply(pairs, tiles: Tiles):
  """Returns x @ w.T summed over pairs of (columns of x, columns of w, how many), [C, T]."""
  total = jnp.zeros((tiles.rows, tiles.vocab), jnp.float32)
  for read_x, read_w, width in pairs:
    step = min(tiles.width, width & -width)  # a power of two that divides the width

    def add(i, total, read_x=read_x, read_w=read_w, step=step):
      at = pl.ds(i * step, step)
      return total + lax.dot_general(read_x(at), read_w(at), (((1,), (1,)), ((), ())),
                                     preferred_element_type=jnp.float32)

    total = lax.fori_loop(0, width // step, add, total)
  return total


def _fold_tiles(ins, fold, carry, tiles: Tiles):
  """Folds this program's span tile by tile; returns (what is found, span, rows of tokens).

  `fold(carry, draft logits, target logits, ids, is_new)` gives the next carry; logits of ids that
  the tile before has had are -1e30.
  """
  span, row = pl.program_id(0), pl.ds(pl.program_id(1) * tiles.rows, tiles.rows)
  vocab, width = ins["head"].shape
  steps = tiles.span // tiles.vocab

  def one_tile(i, carry):
    start = jnp.minimum(i * tiles.vocab, vocab - tiles.vocab)
    columns = pl.ds(start, tiles.vocab)
    ids_1xT = (start + lax.broadcasted_iota(jnp.int32, (tiles.vocab,), 0))[None, :]
    is_new_1xT = ids_1xT >= i * tiles.vocab
    pair = lambda x, w: (lambda at: ins[x][row, at], lambda at: ins[w][columns, at],
                         ins[w].shape[1])
    draft_pairs = [pair("hidden", "head")] + ([pair("bias_in", "w2")] if "w2" in ins else [])
    draft_CxT = _multiply(draft_pairs, tiles)
    target_CxT = _multiply([pair("target", "head")], tiles)
    if "copy_index" in ins:
      draft_CxT += jnp.where(ids_1xT == ins["copy_index"][row][:, None],
                             ins["copy_bias"][row][:, None], 0.0)
    return fold(carry, *(jnp.where(is_new_1xT, x, _MASKED) for x in (draft_CxT, target_CxT)),
                ids_1xT, is_new_1xT)

  last = jnp.minimum((span + 1) * steps, pl.cdiv(vocab, tiles.vocab))
  return lax.fori_loop(span * steps, last, one_tile, carry), span, row


def _lse_kernel(ins, outs, tiles: Tiles):
  """Writes running maximum and sum of both laws, and the label's logit, 0 outside the span."""
  def fold(carry, draft_CxT, target_CxT, ids_1xT, is_new_1xT):
    found = []
    for x_CxT, top_C, total_C in ((draft_CxT, *carry[:2]), (target_CxT, *carry[2:4])):
      new_top_C = jnp.maximum(top_C, jnp.max(x_CxT, axis=1))
      more_C = jnp.sum(jnp.exp(x_CxT - new_top_C[:, None]), axis=1)
      found += [new_top_C, total_C * jnp.exp(top_C - new_top_C) + more_C]
    is_label_CxT = (ids_1xT == labels_Cx1) & is_new_1xT
    return *found, carry[4] + jnp.sum(jnp.where(is_label_CxT, draft_CxT, 0.0), axis=1)

  rows = pl.ds(pl.program_id(1) * tiles.rows, tiles.rows)
  labels_Cx1 = ins["labels"][rows][:, None]
  full = lambda value: jnp.full((tiles.rows,), value, jnp.float32)
  carry = full(_MASKED), full(0.0), full(_MASKED), full(0.0), full(0.0)
  found, span, row = _fold_tiles(ins, fold, carry, tiles)
  for out, value_C in zip(outs, found):
    out[span, row] = value_C


def _terms_kernel(ins, outs, tiles: Tiles, *, has_kl: bool):
  """Writes the overlap of both laws and, on request, KL."""
  rows = pl.ds(pl.program_id(1) * tiles.rows, tiles.rows)
  draft_lse_Cx1, target_lse_Cx1 = (ins[name][rows][:, None] for name in ("draft_lse", "target_lse"))

  def fold(carry, draft_CxT, target_CxT, *_):
    target_p_CxT = jnp.exp(target_CxT - target_lse_Cx1)
    accept_CxT = jnp.minimum(jnp.exp(draft_CxT - draft_lse_Cx1), target_p_CxT)
    more = [accept_CxT]
    if has_kl:
      more.append(target_p_CxT * (target_CxT - draft_CxT - (target_lse_Cx1 - draft_lse_Cx1)))
    return tuple(total_C + jnp.sum(x_CxT, axis=1) for total_C, x_CxT in zip(carry, more))

  zeros = (jnp.zeros((tiles.rows,), jnp.float32),) * len(outs)
  found, span, row = _fold_tiles(ins, fold, zeros, tiles)
  for out, value_C in zip(outs, found):
    out[span, row] = value_C
