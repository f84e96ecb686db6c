"""One table of cases over every implementation, against NumPy float64.

What is compared is `terms_and_gradients`, the function that the platforms differ in; the public
functions around it are tested in `distillation_loss_test.py`.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import special

from pallas_kernels.distillation_loss import api, kernel_gpu, kernel_tpu, reference
from pallas_kernels.distillation_loss.kernel_tpu import Tiles
from pallas_kernels.distillation_loss.reference import Tokens
from tests.pallas_kernels import devices

SMALL = Tiles(tokens=16, vocab=128)


def run_reference(tokens, head, w2, keep, tiles=SMALL, lk_eta=None):
  return reference.terms_and_gradients(tokens, head, w2, keep, chunk=tiles.tokens, lk_eta=lk_eta)


def run_tpu(tokens, head, w2, keep, tiles=SMALL, lk_eta=None):
  return kernel_tpu.terms_and_gradients(tokens, head, w2, keep, with_gradients=True, tiles=tiles,
                                        lk_eta=lk_eta, interpret=True)


def run_gpu(*args, tiles=SMALL, lk_eta=None):
  """The kernel's terms; its gradients, which are the reference's, by another call."""
  options = dict(lk_eta=lk_eta, interpret=True, tiles=kernel_gpu.Tiles(
      tokens=2 * tiles.tokens, rows=16, vocab=min(tiles.vocab, 1024), span=2 * tiles.vocab,
      width=16))
  terms, *nothing = kernel_gpu.terms_and_gradients(*args, with_gradients=False, **options)
  assert nothing == [None] * 4
  return terms, *kernel_gpu.terms_and_gradients(*args, with_gradients=True, **options)[1:]


IMPLEMENTATIONS = {"reference": run_reference, "tpu": run_tpu, "gpu": run_gpu}
pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def make_case(N, D, Vd, R, *, extras=(), seed=0, scale=1.0):
  """Returns (Tokens, LM head, W2, keep) in float64."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape) * scale
  is_kept_N = rng.uniform(size=N) < 0.8
  weights = lambda: rng.uniform(0.1, 1, N) * is_kept_N
  tokens = Tokens(normal(N, D), normal(N, R), normal(N, D),
                  rng.integers(-1, Vd, N).astype(np.int32), weights(), weights())
  head, w2 = rng.normal(size=(Vd, D)) * 0.5, rng.normal(size=(Vd, R)) * 0.5
  if "kl" in extras:
    tokens = tokens._replace(d_kl_N=weights())
  if "lk" in extras:
    tokens = tokens._replace(d_lk_N=weights())
  if "lse" in extras:  # the vocabulary is larger by a row of unknown logits
    lse_N = special.logsumexp(tokens.target_NxD @ head.T, axis=1)
    tokens = tokens._replace(target_lse_N=np.logaddexp(lse_N, rng.normal(size=N) + 1))
  if "copy" in extras:
    tokens = tokens._replace(copy_index_N=rng.integers(-1, Vd, N).astype(np.int32),
                             copy_bias_N=rng.normal(size=N) * 2)
  return tokens, head, w2, is_kept_N


def compute_by_hand(tokens, head, w2, lk_eta=None):
  """Terms and gradients in float64, from the definitions."""
  t, row_N = tokens, np.arange(len(tokens.labels_N))
  logits = t.hidden_NxD @ head.T + t.bias_in_NxR @ w2.T
  if t.copy_index_N is not None:
    logits[row_N, t.copy_index_N] += np.where(t.copy_index_N < 0, 0, t.copy_bias_N)
  log_p = logits - special.logsumexp(logits, axis=1, keepdims=True)
  target_logits = t.target_NxD @ head.T
  lse_N = t.target_lse_N
  lse_N = special.logsumexp(target_logits, axis=1) if lse_N is None else lse_N
  log_q = target_logits - lse_N[:, None]
  p, q = np.exp(log_p), np.exp(log_q)
  tv = np.abs(p - q).sum(1) + (0 if t.target_lse_N is None else 1 - q.sum(1))
  is_known_N = t.labels_N >= 0
  ce = np.where(is_known_N, -log_p[row_N, t.labels_N], 0.0)
  kl = np.zeros(len(row_N)) if t.d_kl_N is None else (q * (log_q - log_p)).sum(1)
  # Chain rule by the Jacobian of softmax, d p_v / d l_u = p_v ([u = v] - p_u).
  pull = lambda d_p: p * (d_p - (p * d_p).sum(1, keepdims=True))
  d_logits = t.d_tv_N[:, None] * pull(np.sign(p - q))
  d_ce_N = np.where(is_known_N, t.d_ce_N, 0)
  d_logits += d_ce_N[:, None] * p
  d_logits[row_N, t.labels_N] -= d_ce_N
  if t.d_kl_N is not None:
    d_logits += t.d_kl_N[:, None] * pull(-q / p)
  if t.d_lk_N is not None:
    accept = (np.minimum(p, q)).sum(1)
    d_accept = np.where(p < q, 1.0, 0.0)
    d_p = -d_accept / accept[:, None]
    if lk_eta is not None:
      share = np.exp(-lk_eta * accept)[:, None]
      d_p = -share * q / p - (1 - share) * d_accept
    d_logits += t.d_lk_N[:, None] * pull(d_p)
  d_copy = None
  if t.copy_index_N is not None:
    d_copy = np.where(t.copy_index_N < 0, 0, d_logits[row_N, t.copy_index_N])
  return ((ce, tv, 1 - tv / 2, kl), d_logits @ head, d_logits @ w2, d_logits.T @ t.bias_in_NxR,
          d_copy)


def to_float32(case):
  return jax.tree.map(
      lambda a: jnp.asarray(a, jnp.float32) if a.dtype == np.float64 else jnp.asarray(a), case)


def check(case, implementation, tiles=SMALL, scale=1.0, lk_eta=None):
  # float32 sums of up to 12 products of O(scale) values, their exp and log, then sums over the
  # vocabulary of terms that add up to O(1): a few 1e-6 of the logits' size. Gradients add the
  # laws' errors over D or N such terms. A p = q crossing (sign flips) has probability about 0
  # and a weight of |p - q|.
  run = jax.jit(functools.partial(IMPLEMENTATIONS[implementation], tiles=tiles, lk_eta=lk_eta))
  with jax.default_matmul_precision("highest"):
    found_terms, *found = run(*to_float32(case))
  terms, *gradients = compute_by_hand(*case[:3], lk_eta)
  keep_N = case[3]
  for a, b in zip(found_terms, terms):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a[keep_N], b[keep_N], atol=2e-5 * scale, rtol=1e-5)
  for a, b in zip(found, gradients):
    assert (a is None) == (b is None)
    if b is not None:
      np.testing.assert_allclose(a, b, atol=5e-5 * scale, rtol=1e-4)


CASES = {  # (N, D, Vd, R), what is there besides the plain terms
    "smaller than a tile": ((37, 12, 50, 5), ()),
    "everything, last tile partial": ((40, 12, 300, 3), ("lse", "kl", "copy")),
    "7 tokens, no head": ((5, 16, 7, 0), ("kl", "copy")),
    "whole tiles": ((32, 8, 384, 4), ("lse",)),
    # What the GPU takes: widths of a multiple of 16; three tiles a span, the last one partial.
    "widths of 16": ((40, 48, 333, 32), ("lse", "kl", "copy")),
    "widths of 16, no head": ((5, 16, 17, 0), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_table(implementation, name):
  (N, D, Vd, R), extras = CASES[name]
  check(make_case(N, D, Vd, R, extras=extras), implementation)


@pytest.mark.parametrize("lk_eta, extras", [(None, ("lk", "lse")), (3.0, ("lk", "kl", "copy"))])
def test_lk_is_folded_into_the_weights_of_the_others(implementation, lk_eta, extras):
  # 37 tokens in chunks of 16: the last one is filled up with tokens of weight 0.
  check(make_case(37, 12, 300, 3, extras=extras), implementation, lk_eta=lk_eta)


@pytest.mark.parametrize("Vd, tile", [
    (49_152, 8192), (129_280, 16384), (151_936, 16384), (262_144, 16384)])
def test_vocabularies_of_real_models(implementation, Vd, tile):
  # 151,936 = 128 * 1187 has no other divisor; its last tile of 16,384 holds 4,480 rows.
  check(make_case(5, 16, Vd, 16, extras=("kl", "copy")), implementation, Tiles(16, tile))


def test_equal_laws_have_no_distance_and_no_gradient(implementation):
  # p_d = p_t bit for bit, uniform over 4 dyadic ties: |p - q| and its sign are exactly 0.
  hidden = np.zeros((16, 4))
  head = np.eye(4)
  weights = np.ones(16)
  tokens = Tokens(hidden, np.zeros((16, 2)), hidden, np.zeros(16, np.int32), 0 * weights, weights)
  terms, *gradients = IMPLEMENTATIONS[implementation](
      *to_float32((tokens, head, np.zeros((4, 2)), weights > 0)))
  np.testing.assert_array_equal(terms[1], 0)
  np.testing.assert_array_equal(terms[2], 1)
  np.testing.assert_allclose(terms[0], np.log(4), rtol=1e-6)
  for gradient in gradients[:3]:
    np.testing.assert_array_equal(gradient, 0)


def test_laws_without_overlap(implementation):
  # Logits of 1e4 at different tokens: p = (1, 0), q = (0, 1): TV 2, accept 0, CE of the other 1e4.
  tokens = Tokens(np.float64([[1e4, 0]]), np.zeros((1, 1)), np.float64([[0, 1e4]]),
                  np.int32([1]), np.ones(1), np.ones(1))
  terms, d_hidden, *_ = IMPLEMENTATIONS[implementation](
      *to_float32((tokens, np.eye(2), np.zeros((2, 1)), np.ones(1) > 0)))
  np.testing.assert_array_equal(np.ravel(terms[:3]), [1e4, 2, 0])
  np.testing.assert_array_equal(d_hidden, [[1, -1]])  # of CE; TV is flat there


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.01, 1.0, 20.0]))
def test_random_cases(implementation, seed, scale):
  # One shape, so that it compiles once: 131 = a tile of 128 and 3.
  case = make_case(16, 16, 131, 16, extras=("kl", "copy", "lse"), seed=seed, scale=scale)
  terms, *found = _jit_random(implementation)(*to_float32(case))
  expected, *gradients = compute_by_hand(*case[:3])
  keep_N = case[3]
  # Logits of up to 40 * scale carry errors of 40 * scale * 6e-8 times a few; KL and CE are as
  # large as the logits, the rest O(1).
  tolerance = 2e-5 * max(scale, 1)
  for a, b in zip(terms, expected):
    np.testing.assert_allclose(a[keep_N], b[keep_N], atol=tolerance, rtol=tolerance)
  for a, b in zip(found, gradients):
    np.testing.assert_allclose(a, b, atol=20 * tolerance, rtol=20 * tolerance)


@functools.cache
def _jit_random(implementation):
  with jax.default_matmul_precision("highest"):
    return jax.jit(IMPLEMENTATIONS[implementation]).lower(*to_float32(
        make_case(16, 16, 131, 16, extras=("kl", "copy", "lse")))).compile()


def test_bfloat16(implementation):
  """bfloat16 products into float32: terms of the rounded inputs; gradients in bfloat16's step."""
  rounded = jax.tree.map(
      lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) if a.ndim == 2 else a,
      make_case(24, 8, 200, 4))
  tokens, head, w2, keep_N = jax.tree.map(
      lambda a: a.astype(jnp.bfloat16) if a.ndim == 2 else a, to_float32(rounded))
  terms, *found = IMPLEMENTATIONS[implementation](tokens, head, w2, keep_N)
  expected, *gradients = compute_by_hand(*rounded[:3])
  for a, b in zip(terms, expected):
    np.testing.assert_allclose(a[keep_N], b[keep_N], atol=2e-5, rtol=1e-5)
  for a, b in zip(found[:3], gradients):
    assert a.dtype == jnp.bfloat16
    # Both d_logits and the result are rounded to 8 bits.
    np.testing.assert_allclose(np.float64(a), b, atol=2**-8 * np.abs(b).max(), rtol=2**-7)


@pytest.mark.parametrize("num_tokens, vocab, width, rank, dtype", [
    (448, 151_936, 2560, 256, jnp.bfloat16), (4096, 151_936, 5120, 256, jnp.float32),
    (3, 7, 12, 0, jnp.float32), (896, 49_152, 576, 64, jnp.float32)])
def test_tiles_fit_the_memory(implementation, num_tokens, vocab, width, rank, dtype):
  if implementation != "tpu":
    return
  tiles = kernel_tpu.fit_tiles(num_tokens, vocab, width, rank, dtype)
  assert tiles.tokens % 16 == 0 and tiles.vocab % 128 == 0
  size = jnp.dtype(dtype).itemsize
  # Hidden states, target and gradient; the head's tile twice; logits, laws and their gradient.
  need = (tiles.tokens * width * (2 * size + 4) + 2 * tiles.vocab * width * size
          + 5 * tiles.tokens * tiles.vocab * 4)
  assert need < tiles.vmem_bytes


@pytest.mark.parametrize("width, is_default", [(128, True), (2048, False)])
def test_platform_and_width_decide(implementation, width, is_default):
  """The kernel comes in when the step is lowered for a TPU; for a wide model on request only."""
  if implementation != "tpu":
    return
  case = to_float32(make_case(16, width, 256, 128))

  def has_kernel(name, platform):
    run = functools.partial(api._run, (name, 16, None), with_gradients=True)
    return "tpu_custom_call" in jax.jit(run).trace(*case).lower(
        lowering_platforms=(platform,)).as_text()

  assert has_kernel("auto", "tpu") == is_default
  assert has_kernel("pallas", "tpu") and not has_kernel("auto", "cpu")


def test_gpu_kernel_lowers_for_cuda(implementation):
  if implementation != "gpu":
    return
  shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
  args = (shape(896, 2560), shape(896, 2560), shape(151_936, 2560), shape(896, 256),
          shape(151_936, 256), shape(896, dtype=jnp.int32))
  run = lambda name: devices.lower_for_cuda(
      functools.partial(api.distillation_loss, implementation=name), *args)
  assert run("pallas").count("__gpu$xla.gpu.triton") == 2  # log-sum-exps, then terms
  assert "triton" not in run("auto")
