"""CE, TV and acceptance of a drafter straight from hidden states and the LM head.

For token n with draft law p_d = softmax(lm_head @ draft_hidden + w2 @ bias_in) and target law
p_t = softmax(lm_head @ target_hidden):

  ce = -log p_d(label)    accept = sum_v min(p_d(v), p_t(v))    tv = 2 (1 - accept) = |p_d - p_t|_1
  kl = sum_v p_t(v) log(p_t(v) / p_d(v)) over the draft vocabulary
  lk = -log(accept)        or, with a number `lk_eta`,
  lk = s kl + (1 - s) (1 - accept), s = exp(-lk_eta accept) taken as a constant

in float32 (equation numbers: DSpark, arXiv 2607.05147, section 3.3; LK: arXiv 2602.23881, whose two
forms these are, as vllm-project/speculators has them, pull requests 657 and 673, with s for each
token by itself). No array of [N, Vd] is ever
in memory: tokens go through in chunks, and gradients are written by hand.

A drafter with a reduced vocabulary passes the rows of the LM head that it uses, and
`target_lse_N`, the target's log-normaliser over the full vocabulary: p_t then sums to less than 1
on those rows, and the missing mass is in tv, since p_d is 0 there.

tokamax's linear_softmax_cross_entropy_loss carries no part of it: its public form returns one
reduced cross-entropy, neither per-token terms nor the log-normalisers that TV, acceptance and KL
need of both laws. Its backward pass also makes the gradient of the LM head, which is frozen here:
a third of the work for nothing.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import IMPLEMENTATIONS, dispatch
from pallas_kernels.distillation_loss import kernel_tpu, reference
from pallas_kernels.distillation_loss.reference import Tokens


def distillation_loss(draft_hidden_NxD: jax.Array, target_hidden_NxD: jax.Array,
                      lm_head_VdxD: jax.Array, bias_in_NxR: jax.Array, w2_VdxR: jax.Array,
                      labels_N: jax.Array, *, target_lse_N: jax.Array | None = None,
                      implementation: str = "auto", chunk: int = reference.CHUNK):
  """Returns per token (ce_N, tv_N, accept_N), float32, any weighting left to the caller.

  Args:
    draft_hidden_NxD: final-normed draft hidden states.
    target_hidden_NxD: final-normed target hidden states at the positions that predict the labels.
    lm_head_VdxD: frozen LM head [out, in], rows of the draft vocabulary in its order.
    bias_in_NxR, w2_VdxR: the sequential head's bias is w2 @ bias_in; R = 0 where there is none.
    labels_N: int index into the draft vocabulary; -1 = outside it: ce is 0 without gradient.
    target_lse_N: float32 log-normaliser of the target over the full vocabulary; None = Vd is full.
    implementation: 'auto' (on TPU a kernel for D <= 1024), 'reference', or 'pallas' (on TPU the
      kernel at any D, on GPU one for the terms); see `pallas_kernels.dispatch`.
    chunk: most tokens a step of the reference; its peak memory grows with chunk * Vd.

  Gradients flow to draft_hidden, bias_in and w2 from ce and tv. Target, LM head and accept are
  detached. The backward pass computes the laws again; `weighted_distillation_loss` does not.

  Raises:
    ValueError: naming the argument, for shapes that do not fit or an unknown implementation.
  """
  _check(draft_hidden_NxD, target_hidden_NxD, lm_head_VdxD, bias_in_NxR, w2_VdxR, labels_N,
         target_lse_N, implementation, chunk)
  ce_N, tv_N, accept_N = _per_token(
      (implementation, chunk, None), draft_hidden_NxD, bias_in_NxR, w2_VdxR, target_hidden_NxD,
      lm_head_VdxD, labels_N, target_lse_N)
  return ce_N, tv_N, jax.lax.stop_gradient(accept_N)


def weighted_distillation_loss(draft_hidden_NxD: jax.Array, target_hidden_NxD: jax.Array,
                               lm_head_VdxD: jax.Array, bias_in_NxR: jax.Array,
                               w2_VdxR: jax.Array, labels_N: jax.Array, ce_weights_N: jax.Array,
                               tv_weights_N: jax.Array, *, keep_N: jax.Array | None = None,
                               kl_weights_N: jax.Array | None = None,
                               lk_weights_N: jax.Array | None = None,
                               lk_eta: float | None = None,
                               copy_index_N: jax.Array | None = None,
                               copy_bias_N: jax.Array | None = None,
                               target_lse_N: jax.Array | None = None,
                               implementation: str = "auto", chunk: int = reference.CHUNK):
  """Returns (sum(ce_weights * ce + tv_weights * tv), (ce_N, tv_N, accept_N) detached).

  With `kl_weights_N` the sum has kl_weights * kl too, with `lk_weights_N` lk_weights * lk, of the
  form that `lk_eta` says. With `copy_index_N` (int index into the draft vocabulary, -1 = none) each
  token's draft logit at its index gets `copy_bias_N` (float32, differentiated) on top.

  The same maths as `distillation_loss` for weights known beforehand, which lets the gradient be
  made in the forward pass, from laws computed once: 3 products of N x Vd x D instead of 5.
  Weights are constants (no gradient). Tokens outside keep_N (bool; None = all are kept) count
  with weight 0 and are skipped, by whole chunks after sorting: their terms are undefined.
  """
  _check(draft_hidden_NxD, target_hidden_NxD, lm_head_VdxD, bias_in_NxR, w2_VdxR, labels_N,
         target_lse_N, implementation, chunk)
  for name, weights_N in (("ce_weights_N", ce_weights_N), ("tv_weights_N", tv_weights_N),
                          ("kl_weights_N", kl_weights_N), ("lk_weights_N", lk_weights_N),
                          ("copy_index_N", copy_index_N), ("copy_bias_N", copy_bias_N)):
    if weights_N is not None:
      _expect(name, weights_N, labels_N.shape)
  if keep_N is None:
    keep_N = jnp.ones(labels_N.shape, bool)
  _expect("keep_N", keep_N, labels_N.shape)
  if lk_weights_N is not None and lk_eta is not None and kl_weights_N is None:
    kl_weights_N = jnp.zeros(labels_N.shape)  # the blend reads KL
  ce_weights_N, tv_weights_N, kl_weights_N, lk_weights_N = (
      None if w is None else jnp.where(keep_N, w, 0.0).astype(jnp.float32)
      for w in (ce_weights_N, tv_weights_N, kl_weights_N, lk_weights_N))
  if (copy_index_N is None) != (copy_bias_N is None):
    raise ValueError("copy_bias_N: expected together with copy_index_N, found one of them")
  loss, terms = _weighted(
      (implementation, chunk, lk_eta), draft_hidden_NxD, bias_in_NxR, w2_VdxR, copy_bias_N,
      copy_index_N, target_hidden_NxD, lm_head_VdxD, labels_N, target_lse_N, ce_weights_N,
      tv_weights_N, kl_weights_N, lk_weights_N, keep_N)
  return loss, jax.lax.stop_gradient(terms[:3])


def target_lse(hidden_NxD: jax.Array, lm_head_VxD: jax.Array, *, implementation: str = "auto",
               chunk: int = 4096) -> jax.Array:
  """Returns log sum_v exp(lm_head @ hidden), float32 [N], by chunks of `chunk` vocabulary rows.

  Not differentiated: it describes the frozen target.
  """
  _expect("lm_head_VxD", lm_head_VxD, (lm_head_VxD.shape[0], hidden_NxD.shape[1]))
  lse_N = dispatch(implementation, jax.lax.stop_gradient(hidden_NxD),
                   jax.lax.stop_gradient(lm_head_VxD),
                   reference=functools.partial(reference.target_lse, chunk=chunk))
  return jax.lax.stop_gradient(lse_N)


def _expect(name: str, array, shape) -> None:
  if array.shape != tuple(shape):
    raise ValueError(f"{name}: found shape {array.shape}, expected {tuple(shape)}")


def _check(draft_hidden_NxD, target_hidden_NxD, lm_head_VdxD, bias_in_NxR, w2_VdxR, labels_N,
           target_lse_N, implementation, chunk) -> None:
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"implementation: found {implementation!r}, expected one of "
                     f"{IMPLEMENTATIONS}")
  if draft_hidden_NxD.ndim != 2:
    raise ValueError(f"draft_hidden_NxD: found shape {draft_hidden_NxD.shape}, expected 2 axes")
  if chunk < 1:
    raise ValueError(f"chunk: found {chunk}, expected a positive integer")
  (N, D), Vd, R = draft_hidden_NxD.shape, lm_head_VdxD.shape[0], w2_VdxR.shape[-1]
  _expect("target_hidden_NxD", target_hidden_NxD, (N, D))
  _expect("lm_head_VdxD", lm_head_VdxD, (Vd, D))
  _expect("w2_VdxR", w2_VdxR, (Vd, R))
  _expect("bias_in_NxR", bias_in_NxR, (N, R))
  _expect("labels_N", labels_N, (N,))
  if not jnp.issubdtype(labels_N.dtype, jnp.integer):
    raise ValueError(f"labels_N: found dtype {labels_N.dtype}, expected an integer type")
  if target_lse_N is not None:
    _expect("target_lse_N", target_lse_N, (N,))


def _run(options, tokens: Tokens, lm_head_VdxD, w2_VdxR, keep_N, *, with_gradients: bool):
  """`reference.terms_and_gradients` by the chosen implementation; options = (name, chunk, eta)."""
  implementation, chunk, lk_eta = options
  options = dict(with_gradients=with_gradients, lk_eta=lk_eta)
  kernels = {"tpu": functools.partial(kernel_tpu.terms_and_gradients, **options)}
  is_narrow = lm_head_VdxD.shape[1] <= kernel_tpu.MAX_AUTO_WIDTH
  return dispatch(
      implementation, tokens, lm_head_VdxD, w2_VdxR, keep_N,
      reference=functools.partial(reference.terms_and_gradients, chunk=chunk, **options),
      kernels=kernels if is_narrow else None,
      on_request=kernels | {"cuda": functools.partial(_run_gpu, chunk=chunk, **options)})


def _run_gpu(*args, **options):
  # Imported when asked for: Pallas will drop Triton one day, and nothing else may break then.
  from pallas_kernels.distillation_loss import kernel_gpu

  return kernel_gpu.terms_and_gradients(*args, **options)


# The differentiated arguments come first; everything after them is frozen.

@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _per_token(options, hidden_NxD, bias_in_NxR, w2_VdxR, target_NxD, lm_head_VdxD, labels_N,
               target_lse_N):
  ones_N = jnp.ones(labels_N.shape, jnp.float32)
  tokens = Tokens(hidden_NxD, bias_in_NxR, target_NxD, labels_N, ones_N, ones_N,
                  target_lse_N=target_lse_N)
  return _run(options, tokens, lm_head_VdxD, w2_VdxR, ones_N > 0, with_gradients=False)[0][:3]


def _per_token_forward(options, *args):
  return _per_token(options, *args), args


def _per_token_backward(options, args, cotangents):
  hidden_NxD, bias_in_NxR, w2_VdxR, target_NxD, lm_head_VdxD, labels_N, target_lse_N = args
  d_ce_N, d_tv_N, _ = cotangents  # accept is detached
  tokens = Tokens(hidden_NxD, bias_in_NxR, target_NxD, labels_N, d_ce_N, d_tv_N,
                  target_lse_N=target_lse_N)
  _, d_hidden, d_bias_in, d_w2, _ = _run(options, tokens, lm_head_VdxD, w2_VdxR,
                                         jnp.ones(labels_N.shape, bool), with_gradients=True)
  return d_hidden, d_bias_in, d_w2, None, None, None, None


_per_token.defvjp(_per_token_forward, _per_token_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted(options, *args):
  return _run_weighted(options, *args, with_gradients=False)[0]


def _run_weighted(options, hidden_NxD, bias_in_NxR, w2_VdxR, copy_bias_N, copy_index_N, target_NxD,
                  lm_head_VdxD, labels_N, target_lse_N, ce_weights_N, tv_weights_N, kl_weights_N,
                  lk_weights_N, keep_N, *, with_gradients: bool = True):
  """Returns ((loss, terms), gradients of the first four)."""
  tokens = Tokens(hidden_NxD, bias_in_NxR, target_NxD, labels_N, ce_weights_N, tv_weights_N,
                  kl_weights_N, target_lse_N, copy_index_N, copy_bias_N, lk_weights_N)
  terms, *gradients = _run(options, tokens, lm_head_VdxD, w2_VdxR, keep_N,
                           with_gradients=with_gradients)
  loss = jnp.sum(ce_weights_N * terms[0]) + jnp.sum(tv_weights_N * terms[1])
  if kl_weights_N is not None:
    loss = loss + jnp.sum(kl_weights_N * terms[3])
  if lk_weights_N is not None:
    loss = loss + jnp.sum(lk_weights_N * reference.lk_loss(*terms[2:], options[2]))
  return (loss, terms), gradients


def _weighted_backward(options, gradients, cotangents):
  scale = cotangents[0]  # the terms are detached
  scaled = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
  return *scaled, *(None,) * 10


_weighted.defvjp(_run_weighted, _weighted_backward)
