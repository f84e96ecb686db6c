"""Plain jnp: the definition of the distillation loss, and the fast path on CPU.

One chunk of tokens at a time: [C, Vd] logits live only inside a loop body. `terms_and_gradients`
is that loop; what it does with one chunk (`run_chunk`) is what a kernel replaces.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 128  # tokens; the products are at full speed, and [C, Vd] buffers are the peak of memory

ACCEPT_FLOOR = 1e-12  # keeps LK finite for laws that have nothing in common


class Tokens(NamedTuple):
  """What belongs to single tokens: N of them, or the C of one chunk.

  Weights d_ce, d_tv, d_kl, d_lk (float32) are the gradients of the result by each term. Without
  `d_kl_N` the KL term is left out; `d_lk_N`, `target_lse_N` and the copies are optional too.
  """
  hidden_NxD: jax.Array
  bias_in_NxR: jax.Array
  target_NxD: jax.Array
  labels_N: jax.Array
  d_ce_N: jax.Array
  d_tv_N: jax.Array
  d_kl_N: jax.Array | None = None
  target_lse_N: jax.Array | None = None
  copy_index_N: jax.Array | None = None
  copy_bias_N: jax.Array | None = None
  d_lk_N: jax.Array | None = None


# What fills up the last chunk: a label and a copy outside the vocabulary, zeros elsewhere.
FILL = Tokens(0, 0, 0, -1, 0, 0, 0, 0, -1, 0, 0)


def _sum_rows(x_CxV: jax.Array) -> jax.Array:
  """Sums the last axis. Strides of 128 first: XLA's CPU row reduction is scalar, this is not."""
  C, V = x_CxV.shape
  if V % 128 or V == 128:
    return x_CxV.sum(-1)
  return x_CxV.reshape(C, V // 128, 128).sum(1).sum(-1)


def _max_rows(x_CxV: jax.Array) -> jax.Array:
  C, V = x_CxV.shape
  if V % 128 or V == 128:
    return x_CxV.max(-1)
  return x_CxV.reshape(C, V // 128, 128).max(1).max(-1)


def _log_sum_exp(x_CxV: jax.Array) -> jax.Array:
  top_C = _max_rows(x_CxV)
  return top_C + jnp.log(_sum_rows(jnp.exp(x_CxV - top_C[:, None])))


def _logits(x_CxD: jax.Array, w_VxD: jax.Array) -> jax.Array:
  return jax.lax.dot_general(x_CxD, w_VxD, (((1,), (1,)), ((), ())),
                             preferred_element_type=jnp.float32)


def _chunk_laws(tokens: Tokens, head_VdxD, w2_VdxR, *, in_turn: bool):
  """Returns (terms (ce, tv, accept, kl), the two laws) of one chunk.

  `in_turn` keeps the target's logits waiting for the draft's law: two [C, Vd] buffers, not three.
  """
  logits_CxVd = _logits(tokens.hidden_NxD, head_VdxD)
  if w2_VdxR.shape[1]:
    logits_CxVd = logits_CxVd + _logits(tokens.bias_in_NxR, w2_VdxR)
  if tokens.copy_index_N is not None:
    index_C = tokens.copy_index_N
    logits_CxVd = logits_CxVd.at[jnp.arange(index_C.shape[0]), jnp.maximum(index_C, 0)].add(
        jnp.where(index_C >= 0, tokens.copy_bias_N, 0.0))
  draft_lse_C = _log_sum_exp(logits_CxVd)
  draft_CxVd = jnp.exp(logits_CxVd - draft_lse_C[:, None])
  target_CxD = tokens.target_NxD
  if in_turn:
    # Data, since XLA's CPU scheduler makes all products first even across an optimization_barrier.
    # No term changes: a draft row without a finite normaliser has none either way.
    target_CxD = jnp.where(jnp.isfinite(draft_lse_C)[:, None], target_CxD, jnp.nan)
  target_logits_CxVd = _logits(target_CxD, head_VdxD)
  target_lse_C = tokens.target_lse_N
  if target_lse_C is None:
    target_lse_C = _log_sum_exp(target_logits_CxVd)
  target_CxVd = jnp.exp(target_logits_CxVd - target_lse_C[:, None])
  accept_C = jnp.minimum(_sum_rows(jnp.minimum(draft_CxVd, target_CxVd)), 1.0)
  labels_C = tokens.labels_N
  label_logit_C = jnp.take_along_axis(
      logits_CxVd, jnp.maximum(labels_C, 0)[:, None], axis=1)[:, 0]
  ce_C = jnp.where(labels_C >= 0, draft_lse_C - label_logit_C, 0.0)
  kl_C = jnp.zeros_like(ce_C)
  if tokens.d_kl_N is not None:
    log_ratio_CxVd = target_logits_CxVd - logits_CxVd - (target_lse_C - draft_lse_C)[:, None]
    kl_C = _sum_rows(target_CxVd * log_ratio_CxVd)
  return (ce_C, 2.0 - 2.0 * accept_C, accept_C, kl_C), (draft_CxVd, target_CxVd)


def below(draft_x, target_x):
  """1 where the draft law is below the target's, 1/2 where they are equal, else 0."""
  return jnp.where(draft_x < target_x, 1.0, jnp.where(draft_x > target_x, 0.0, 0.5))


def lk_loss(accept_x, kl_x, lk_eta: float | None):
  """The LK loss of each token, float32; see `api` for the two forms. `kl` is read by the blend."""
  if lk_eta is None:
    return -jnp.log(jnp.maximum(accept_x, ACCEPT_FLOOR))
  share_x = jnp.exp(-lk_eta * accept_x)
  return share_x * kl_x + (1.0 - share_x) * (1.0 - accept_x)


def fold_lk(tokens: Tokens, terms, lk_eta: float | None) -> Tokens:
  """Adds what the LK loss weighs into the weights of TV and KL, whose gradients it has.

  d(-log accept) = d tv / (2 accept), and the share of KL in the blend is a constant: once the terms
  of a token are known, LK is nothing but other weights. Below ACCEPT_FLOOR the slope is that of the
  floor, not 0, since such drafts need it most.
  """
  if tokens.d_lk_N is None:
    return tokens
  accept_C, d_lk_C = terms[2], tokens.d_lk_N
  if lk_eta is None:
    return tokens._replace(
        d_tv_N=tokens.d_tv_N + 0.5 * d_lk_C / jnp.maximum(accept_C, ACCEPT_FLOOR))
  share_C = jnp.exp(-lk_eta * accept_C)
  return tokens._replace(d_tv_N=tokens.d_tv_N + 0.5 * (1.0 - share_C) * d_lk_C,
                         d_kl_N=tokens.d_kl_N + share_C * d_lk_C)


def _chunk_gradients(laws, tokens: Tokens, head_VdxD, w2_VdxR):
  """Gradients of sum(d_ce * ce + d_tv * tv + d_kl * kl): d (hidden, bias_in, copy_bias, w2).

  d tv / d logit_v = -2 p_v (b_v - sum_u p_u b_u), b = [p_d < p_t], 1/2 where they are equal. The
    sum is accurate however little the laws have in common, which LK divides it by;
  d ce / d logit_v = p_v - [v = label], nothing where the label is outside;
  d kl / d logit_v = p_v sum_u q_u - q_v, q the target's law.
  """
  draft_CxVd, target_CxVd = laws
  d_tv_C, d_kl_C = tokens.d_tv_N, tokens.d_kl_N
  is_below_CxVd = below(draft_CxVd, target_CxVd)
  d_ce_C = jnp.where(tokens.labels_N >= 0, tokens.d_ce_N, 0.0)
  mean_below_C = _sum_rows(draft_CxVd * is_below_CxVd)
  coefficient_C = d_ce_C + 2.0 * d_tv_C * mean_below_C
  if d_kl_C is not None:
    coefficient_C = coefficient_C + d_kl_C * _sum_rows(target_CxVd)
  d_logits_CxVd = draft_CxVd * (coefficient_C[:, None] - 2.0 * d_tv_C[:, None] * is_below_CxVd)
  if d_kl_C is not None:
    d_logits_CxVd = d_logits_CxVd - d_kl_C[:, None] * target_CxVd
  row_C = jnp.arange(d_ce_C.shape[0])
  d_logits_CxVd = d_logits_CxVd.at[row_C, jnp.maximum(tokens.labels_N, 0)].add(-d_ce_C)
  d_bias_C = None
  if tokens.copy_index_N is not None:
    index_C = tokens.copy_index_N
    d_bias_C = jnp.where(index_C >= 0, d_logits_CxVd[row_C, jnp.maximum(index_C, 0)], 0.0)
  d_logits_CxVd = d_logits_CxVd.astype(head_VdxD.dtype)
  d_hidden_CxD = jnp.dot(d_logits_CxVd, head_VdxD, preferred_element_type=jnp.float32)
  d_bias_in_CxR = jnp.dot(d_logits_CxVd, w2_VdxR, preferred_element_type=jnp.float32)
  d_w2_VdxR = jax.lax.dot_general(d_logits_CxVd, tokens.bias_in_NxR, (((0,), (0,)), ((), ())),
                                  preferred_element_type=jnp.float32)
  return d_hidden_CxD, d_bias_in_CxR, d_bias_C, d_w2_VdxR


def run_chunk(tokens: Tokens, head_VdxD, w2_VdxR, d_w2_VdxR, *, with_gradients: bool,
              lk_eta: float | None = None):
  """Returns (d_w2 + this chunk's, ((ce, tv, accept, kl), d hidden, d bias_in, d copy_bias)).

  Gradients are None unless wanted, that of the copy bias also without copies.
  """
  # With gradients there is a third buffer anyway, and the products may as well run side by side.
  terms, laws = _chunk_laws(tokens, head_VdxD, w2_VdxR, in_turn=not with_gradients)
  if not with_gradients:
    return d_w2_VdxR, (terms, None, None, None)
  tokens = fold_lk(tokens, terms, lk_eta)
  *gradients, more_VdxR = _chunk_gradients(laws, tokens, head_VdxD, w2_VdxR)
  return d_w2_VdxR + more_VdxR, (terms, *gradients)


def fit_chunk(num_tokens: int, chunk: int) -> int:
  """Returns the size of as few chunks as `chunk` allows, evened out: little of the last is fill."""
  num_chunks = max(-(-num_tokens // chunk), 1)
  even = -(-num_tokens // (16 * num_chunks)) * 16
  return max(min(chunk, num_tokens, even), 1)


def _split(array_Nx, chunk: int, fill):
  """[N, ...] -> [N / chunk, chunk, ...], the last chunk filled up."""
  missing = -array_Nx.shape[0] % chunk
  pad = [(0, missing)] + [(0, 0)] * (array_Nx.ndim - 1)
  array_Nx = jnp.pad(array_Nx, pad, constant_values=fill)
  return array_Nx.reshape(array_Nx.shape[0] // chunk, chunk, *array_Nx.shape[1:])


def _join(array_KxCx, length: int):
  K, C, *rest = array_KxCx.shape
  return array_KxCx.reshape(K * C, *rest)[:length]


def _run_chunks(one_chunk, carry, xs, keep_KxC):
  """Scans `one_chunk(carry, x) -> (carry, y)`; a chunk with nothing to keep yields zeros."""
  shapes = jax.eval_shape(one_chunk, carry, jax.tree.map(lambda a: a[0], xs))[1]
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def body(carry, item):
    keep_C, x = item
    return jax.lax.cond(keep_C.any(), one_chunk, lambda carry, x: (carry, zeros), carry, x)

  return jax.lax.scan(body, carry, (keep_KxC, xs))


def terms_and_gradients(tokens: Tokens, lm_head_VdxD, w2_VdxR, keep_N, *, chunk: int,
                        with_gradients: bool = True, lk_eta: float | None = None,
                        run_chunk=run_chunk):
  """Returns ((ce_N, tv_N, accept_N, kl_N), d hidden, d bias_in, d w2, d copy bias).

  Products are in the dtype of the hidden states, sums in float32. Terms of tokens outside keep_N
  (bool [N]) are undefined, their gradients zero if their weights are. A chunk has at most `chunk`
  tokens. `run_chunk` is that of this file or a kernel's of its signature.
  """
  dtype, num_tokens = tokens.hidden_NxD.dtype, tokens.labels_N.shape[0]
  given = tokens
  tokens = tokens._replace(bias_in_NxR=tokens.bias_in_NxR.astype(dtype),
                           target_NxD=tokens.target_NxD.astype(dtype))
  head_VdxD, rows_VdxR = lm_head_VdxD.astype(dtype), w2_VdxR.astype(dtype)
  chunk = fit_chunk(num_tokens, chunk)
  # Dropped tokens go to the end, where whole chunks of them are skipped.
  order_N = jnp.argsort(~keep_N, stable=True)
  tokens, keep_N = jax.tree.map(lambda a: a[order_N], (tokens, keep_N))
  xs = Tokens(*(None if a is None else _split(a, chunk, f) for a, f in zip(tokens, FILL)))

  def one_chunk(d_w2_VdxR, x):
    return run_chunk(x, head_VdxD, rows_VdxR, d_w2_VdxR, with_gradients=with_gradients,
                     lk_eta=lk_eta)

  carry = jnp.zeros(w2_VdxR.shape if with_gradients else (0, 0), jnp.float32)
  d_w2_VdxR, per_token = _run_chunks(one_chunk, carry, xs, _split(keep_N, chunk, False))
  back_N = jnp.argsort(order_N)
  terms, d_hidden, d_bias_in, d_copy = jax.tree.map(
      lambda a: _join(a, num_tokens)[back_N], per_token)
  if not with_gradients:
    return terms, None, None, None, None
  return (terms, d_hidden.astype(dtype), d_bias_in.astype(given.bias_in_NxR.dtype),
          d_w2_VdxR.astype(w2_VdxR.dtype), d_copy)


def target_lse(hidden_NxD, lm_head_VxD, *, chunk: int):
  """Streaming log-normaliser, by chunks of vocabulary: float32 [N]."""
  num_tokens = hidden_NxD.shape[0]
  vocab = lm_head_VxD.shape[0]
  chunk = min(chunk, vocab)
  num_whole = vocab // chunk

  def fold(carry, w_CxD):
    top_N, total_N = carry
    logits_NxC = _logits(hidden_NxD, w_CxD.astype(hidden_NxD.dtype))
    new_top_N = jnp.maximum(top_N, _max_rows(logits_NxC))
    total_N = total_N * jnp.exp(top_N - new_top_N) + _sum_rows(
        jnp.exp(logits_NxC - new_top_N[:, None]))
    return (new_top_N, total_N), None

  carry = (jnp.full(num_tokens, -jnp.inf, jnp.float32), jnp.zeros(num_tokens, jnp.float32))
  whole_KxCxD = lm_head_VxD[:num_whole * chunk].reshape(num_whole, chunk, -1)
  carry, _ = jax.lax.scan(fold, carry, whole_KxCxD)
  if vocab % chunk:
    carry, _ = fold(carry, lm_head_VxD[num_whole * chunk:])
  top_N, total_N = carry
  return top_N + jnp.log(total_N)
