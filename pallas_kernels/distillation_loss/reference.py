"""Plain jnp: the definition of the distillation loss, and the fast path on CPU.

One chunk of tokens at a time: [C, Vd] logits live only inside a loop body. Draft logits and
bias are one product, [hidden; bias_in] @ [lm_head; w2].T, and so are their gradients.
"""

import jax
import jax.numpy as jnp

CHUNK = 256  # tokens; 256 x 8192 float32 = 8 MB a buffer, and the products are at full speed


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


def _chunk_laws(x_CxE, target_CxD, joint_VdxE, labels_C, target_lse_C, copy_C, *, with_kl: bool):
  """Returns (terms (ce, tv, accept, kl), what the gradient needs) of one chunk.

  x = [draft hidden; bias input], joint = [LM head; w2], so E = D + R.
  """
  logits_CxVd = _logits(x_CxE, joint_VdxE)
  if copy_C is not None:
    index_C, bias_C = copy_C
    logits_CxVd = logits_CxVd.at[jnp.arange(index_C.shape[0]), jnp.maximum(index_C, 0)].add(
        jnp.where(index_C >= 0, bias_C, 0.0))
  draft_lse_C = _log_sum_exp(logits_CxVd)
  draft_CxVd = jnp.exp(logits_CxVd - draft_lse_C[:, None])
  target_logits_CxVd = _logits(target_CxD, joint_VdxE[:, :target_CxD.shape[1]])
  outside_C = jnp.zeros_like(draft_lse_C)
  if target_lse_C is None:
    target_lse_C = _log_sum_exp(target_logits_CxVd)
    target_CxVd = jnp.exp(target_logits_CxVd - target_lse_C[:, None])
  else:
    target_CxVd = jnp.exp(target_logits_CxVd - target_lse_C[:, None])
    outside_C = jnp.maximum(1.0 - _sum_rows(target_CxVd), 0.0)
  gap_CxVd = draft_CxVd - target_CxVd
  tv_C = _sum_rows(jnp.abs(gap_CxVd)) + outside_C
  label_logit_C = jnp.take_along_axis(
      logits_CxVd, jnp.maximum(labels_C, 0)[:, None], axis=1)[:, 0]
  ce_C = jnp.where(labels_C >= 0, draft_lse_C - label_logit_C, 0.0)
  kl_C = jnp.zeros_like(ce_C)
  if with_kl:
    log_ratio_CxVd = target_logits_CxVd - logits_CxVd - (target_lse_C - draft_lse_C)[:, None]
    kl_C = _sum_rows(target_CxVd * log_ratio_CxVd)
  return (ce_C, tv_C, 1.0 - 0.5 * tv_C, kl_C), (draft_CxVd, target_CxVd)


def _chunk_gradients(saved, x_CxE, joint_VdxE, labels_C, d_ce_C, d_tv_C, d_kl_C, copy_C,
                     num_head_columns):
  """Gradients of sum(d_ce * ce + d_tv * tv + d_kl * kl): (d x_CxE, d w2_VdxR, d copy_bias_C).

  d tv / d logit_v = p_v (s_v - sum_u p_u s_u), s = sign(p_d - p_t), 0 where they are equal;
  d ce / d logit_v = p_v - [v = label], nothing where the label is outside;
  d kl / d logit_v = p_v sum_u q_u - q_v, q the target's law. d_kl_C is None without that term.
  """
  draft_CxVd, target_CxVd = saved
  sign_CxVd = jnp.sign(draft_CxVd - target_CxVd)
  d_ce_C = jnp.where(labels_C >= 0, d_ce_C, 0.0)
  mean_sign_C = _sum_rows(draft_CxVd * sign_CxVd)
  coefficient_C = d_ce_C - d_tv_C * mean_sign_C
  if d_kl_C is not None:
    coefficient_C = coefficient_C + d_kl_C * _sum_rows(target_CxVd)
  d_logits_CxVd = draft_CxVd * (d_tv_C[:, None] * sign_CxVd + coefficient_C[:, None])
  if d_kl_C is not None:
    d_logits_CxVd = d_logits_CxVd - d_kl_C[:, None] * target_CxVd
  row_C = jnp.arange(labels_C.shape[0])
  d_logits_CxVd = d_logits_CxVd.at[row_C, jnp.maximum(labels_C, 0)].add(-d_ce_C)
  d_bias_C = None
  if copy_C is not None:
    index_C, _ = copy_C
    d_bias_C = jnp.where(index_C >= 0, d_logits_CxVd[row_C, jnp.maximum(index_C, 0)], 0.0)
  d_logits_CxVd = d_logits_CxVd.astype(x_CxE.dtype)
  d_x_CxE = jnp.dot(d_logits_CxVd, joint_VdxE, preferred_element_type=jnp.float32)
  d_w2_VdxR = jax.lax.dot_general(d_logits_CxVd, x_CxE[:, num_head_columns:],
                                  (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
  return d_x_CxE, d_w2_VdxR, d_bias_C


def _split(array_Nx, chunk: int, fill=0):
  """[N, ...] -> [N / chunk, chunk, ...], the last chunk filled up."""
  missing = -array_Nx.shape[0] % chunk
  pad = [(0, missing)] + [(0, 0)] * (array_Nx.ndim - 1)
  array_Nx = jnp.pad(array_Nx, pad, constant_values=fill)
  return array_Nx.reshape(-1, chunk, *array_Nx.shape[1:])


def _join(array_CxCx, length: int):
  return array_CxCx.reshape(-1, *array_CxCx.shape[2:])[:length]


def _run_chunks(one_chunk, carry, xs, keep_KxC):
  """Scans `one_chunk(carry, x) -> (carry, y)`; a chunk with nothing to keep yields zeros."""
  shapes = jax.eval_shape(one_chunk, carry, jax.tree.map(lambda a: a[0], xs))[1]
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

  def body(carry, item):
    keep_C, x = item
    return jax.lax.cond(keep_C.any(), one_chunk, lambda carry, x: (carry, zeros), carry, x)

  return jax.lax.scan(body, carry, (keep_KxC, xs))


def _joint(hidden_NxD, bias_in_NxR, lm_head_VdxD, w2_VdxR):
  """Appends the bias input to the hidden state and w2 to the LM head, in the hidden's dtype."""
  dtype = hidden_NxD.dtype
  x_NxE = jnp.concatenate([hidden_NxD, bias_in_NxR.astype(dtype)], axis=1)
  joint_VdxE = jnp.concatenate([lm_head_VdxD.astype(dtype), w2_VdxR.astype(dtype)], axis=1)
  return x_NxE, joint_VdxE


def _scan_terms(x_NxE, joint_VdxE, target_NxD, labels_N, target_lse_N, d_ce_N, d_tv_N, d_kl_N,
                keep_N, copy_N, chunk, with_terms: bool, with_gradients: bool):
  """The one loop: per-token terms and, with gradients, (d x, d copy_bias, d w2)."""
  num_tokens, num_head_columns = target_NxD.shape
  rank = x_NxE.shape[1] - num_head_columns
  xs = (_split(x_NxE, chunk), _split(target_NxD.astype(x_NxE.dtype), chunk),
        _split(labels_N, chunk, -1), _split(d_ce_N, chunk), _split(d_tv_N, chunk),
        None if d_kl_N is None else _split(d_kl_N, chunk),
        None if target_lse_N is None else _split(target_lse_N, chunk),
        None if copy_N is None else (_split(copy_N[0], chunk, -1), _split(copy_N[1], chunk)))

  def one_chunk(d_w2_VdxR, item):
    x_CxE, target_CxD, labels_C, d_ce_C, d_tv_C, d_kl_C, target_lse_C, copy_C = item
    terms, saved = _chunk_laws(x_CxE, target_CxD, joint_VdxE, labels_C, target_lse_C, copy_C,
                               with_kl=d_kl_C is not None)
    d_x_CxE = d_bias_C = None
    if with_gradients:
      d_x_CxE, more, d_bias_C = _chunk_gradients(saved, x_CxE, joint_VdxE, labels_C, d_ce_C, d_tv_C,
                                       d_kl_C, copy_C, num_head_columns)
      d_w2_VdxR = d_w2_VdxR + more
    return d_w2_VdxR, (terms if with_terms else None, d_x_CxE, d_bias_C)

  carry = jnp.zeros((joint_VdxE.shape[0], rank if with_gradients else 0), jnp.float32)
  d_w2_VdxR, per_token = _run_chunks(one_chunk, carry, xs, _split(keep_N, chunk, False))
  return *jax.tree.map(lambda a: _join(a, num_tokens), per_token), d_w2_VdxR


def terms_and_gradients(draft_hidden_NxD, target_hidden_NxD, lm_head_VdxD, bias_in_NxR, w2_VdxR,
                        labels_N, target_lse_N, d_ce_N, d_tv_N, d_kl_N=None, copy_N=None, *,
                        chunk: int, keep_N=None, with_terms: bool = True,
                        with_gradients: bool = True):
  """Returns ((ce_N, tv_N, accept_N, kl_N), d hidden, d bias_in, d w2, d copy bias).

  d_kl_N = None leaves the KL term out (kl_N is 0 then); copy_N is (index_N, bias_N) or None.
  """
  x_NxE, joint_VdxE = _joint(draft_hidden_NxD, bias_in_NxR, lm_head_VdxD, w2_VdxR)
  if keep_N is None:
    keep_N = jnp.ones(labels_N.shape, bool)
  tokens = (x_NxE, target_hidden_NxD, labels_N, target_lse_N, d_ce_N, d_tv_N, d_kl_N, keep_N,
            copy_N)
  # Dropped tokens go to the end, where whole chunks of them are skipped.
  order_N = jnp.argsort(~keep_N, stable=True)
  x_NxE, target_NxD, *rest = jax.tree.map(lambda a: a[order_N], tokens)
  terms, d_x_NxE, d_bias_N, d_w2_VdxR = _scan_terms(
      x_NxE, joint_VdxE, target_NxD, *rest, min(chunk, max(labels_N.shape[0], 1)), with_terms,
      with_gradients)
  back_N = jnp.argsort(order_N)
  terms, d_x_NxE, d_bias_N = jax.tree.map(lambda a: a[back_N], (terms, d_x_NxE, d_bias_N))
  if not with_gradients:
    return terms, None, None, None, None
  num_columns = draft_hidden_NxD.shape[1]
  return (terms, d_x_NxE[:, :num_columns].astype(draft_hidden_NxD.dtype),
          d_x_NxE[:, num_columns:].astype(bias_in_NxR.dtype), d_w2_VdxR.astype(w2_VdxR.dtype),
          d_bias_N)


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
