import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from pallas_kernels import distillation_loss as dl
from pallas_kernels.distillation_loss import reference

# float32 rounding (6e-8) through sums over D <= 20 and Vd <= 300 terms of O(1), and exp/log of
# logits of a few: a few 1e-6 on a term; gradients are sums over up to 40 tokens of such terms.
TOL = 2e-5


def make_case(N=37, D=12, Vd=50, R=5, *, seed=0, num_outside=3):
  rng = np.random.default_rng(seed)
  case = dict(
      hidden=rng.normal(size=(N, D)), target=rng.normal(size=(N, D)),
      head=rng.normal(size=(Vd, D)) * 0.5, bias_in=rng.normal(size=(N, R)),
      w2=rng.normal(size=(Vd, R)) * 0.5, labels=rng.integers(0, Vd, N).astype(np.int32),
      ce_weights=rng.uniform(size=N), tv_weights=rng.uniform(size=N))
  case["labels"][:num_outside] = -1
  return case


def compute_terms(case, *, lse_N=None):
  """(ce, tv) in float64, from the definition."""
  logits = case["hidden"] @ case["head"].T + case["bias_in"] @ case["w2"].T
  log_draft = logits - special.logsumexp(logits, axis=1, keepdims=True)
  target_logits = case["target"] @ case["head"].T
  if lse_N is None:
    lse_N = special.logsumexp(target_logits, axis=1)
  target = np.exp(target_logits - lse_N[:, None])
  tv = np.abs(np.exp(log_draft) - target).sum(1) + (1 - target.sum(1))
  labels = case["labels"]
  ce = np.where(labels < 0, 0.0, -log_draft[np.arange(len(labels)), np.maximum(labels, 0)])
  return ce, tv


def compute_weighted(case, *, lse_N=None):
  ce, tv = compute_terms(case, lse_N=lse_N)
  return (case["ce_weights"] * ce).sum() + (case["tv_weights"] * tv).sum()


def differentiate(case, name, *, lse_N=None, step=1e-6):
  """Central differences in float64; a kink of |.| within `step` has probability about 0."""
  gradient = np.zeros_like(case[name])
  for at in np.ndindex(gradient.shape):
    moved = {sign: {**case, name: case[name].copy()} for sign in (1, -1)}
    for sign in moved:
      moved[sign][name][at] += sign * step
    gradient[at] = (compute_weighted(moved[1], lse_N=lse_N)
                    - compute_weighted(moved[-1], lse_N=lse_N)) / (2 * step)
  return gradient


def arguments(case, dtype=jnp.float32):
  floats = [jnp.asarray(case[k], dtype) for k in ("hidden", "target", "head", "bias_in", "w2")]
  return (*floats, jnp.asarray(case["labels"]))


def run_per_token(case, args, lse_N, chunk):
  ce, tv, accept = dl.distillation_loss(*args, target_lse_N=lse_N, chunk=chunk)
  loss = jnp.sum(jnp.float32(case["ce_weights"]) * ce)
  return loss + jnp.sum(jnp.float32(case["tv_weights"]) * tv), (ce, tv, accept)


def run_weighted(case, args, lse_N, chunk):
  return dl.weighted_distillation_loss(
      *args, jnp.asarray(case["ce_weights"], jnp.float32),
      jnp.asarray(case["tv_weights"], jnp.float32), target_lse_N=lse_N, chunk=chunk)


FORMS = {"per_token": run_per_token, "weighted": run_weighted}


def make_lse(case, is_reduced):
  """Log-normaliser of a vocabulary that is larger by a row of unknown logits."""
  if not is_reduced:
    return None
  rest = np.random.default_rng(9).normal(size=len(case["labels"]))
  return np.logaddexp(special.logsumexp(case["target"] @ case["head"].T, axis=1), rest + 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("N, Vd, R, chunk", [(37, 50, 5, 8), (16, 256, 3, 16), (5, 300, 0, 64)])
def test_values_and_gradients(form, is_reduced, N, Vd, R, chunk):
  case = make_case(N, 12, Vd, R)
  lse_N = make_lse(case, is_reduced)
  args = arguments(case)
  as_jnp = None if lse_N is None else jnp.asarray(lse_N, jnp.float32)

  def loss(hidden, bias_in, w2):
    return FORMS[form](case, (hidden, *args[1:3], bias_in, w2, args[5]), as_jnp, chunk)

  with jax.default_matmul_precision("highest"):
    (value, terms), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(
        args[0], args[3], args[4])
  ce, tv = compute_terms(case, lse_N=lse_N)
  for found, expected in zip(terms, (ce, tv, 1 - tv / 2)):
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=TOL)
  np.testing.assert_allclose(value, compute_weighted(case, lse_N=lse_N), rtol=1e-5)
  for found, name in zip(gradients, ("hidden", "bias_in", "w2")):
    np.testing.assert_allclose(found, differentiate(case, name, lse_N=lse_N), atol=TOL * 5)


def test_hand_worked():
  # p_d = (.7, .2, .1), p_t = (.5, .3, .2): L1 = .2 + .1 + .1, accept = 1 - .2 = .8 (fault B42).
  head = jnp.eye(3)
  ce, tv, accept = dl.distillation_loss(
      jnp.log(jnp.array([[.7, .2, .1]])), jnp.log(jnp.array([[.5, .3, .2]])), head,
      jnp.zeros((1, 0)), jnp.zeros((3, 0)), jnp.array([1]))
  np.testing.assert_allclose([ce[0], tv[0], accept[0]], [-np.log(.2), .4, .8], rtol=1e-6)
  # The same laws seen through the first two rows: p_d = (7/9, 2/9), the target keeps (.5, .3)
  # and .2 is missing: L1 = 5/18 + 7/90 + .2 = 5/9.
  _, tv, _ = dl.distillation_loss(
      jnp.log(jnp.array([[.7, .2, .1]])), jnp.log(jnp.array([[.5, .3, .2]])), head[:2],
      jnp.zeros((1, 0)), jnp.zeros((2, 0)), jnp.array([1]), target_lse_N=jnp.zeros(1))
  np.testing.assert_allclose(tv[0], 5 / 9, rtol=1e-6)


def test_frozen_inputs_and_outside_labels_have_no_gradient():
  case = make_case()
  args = arguments(case)

  def ce_only(*args):
    ce, _, accept = dl.distillation_loss(*args, args_labels, chunk=8)
    return ce.sum() + accept.sum()

  args_labels = args[5]
  d_hidden, d_target, d_head, *_ = jax.grad(ce_only, (0, 1, 2, 3, 4))(*args[:5])
  assert not d_target.any() and not d_head.any()
  assert not d_hidden[:3].any() and d_hidden[3:].any(axis=1).all()


def test_skips_dropped_tokens():
  case = make_case(N=40)
  live = np.arange(40) % 5 == 0  # 8 live tokens, all in one chunk after sorting
  args = arguments(case)
  poisoned = jnp.where(jnp.asarray(live)[:, None], args[0], jnp.nan)
  weights = [jnp.asarray(case[k], jnp.float32) for k in ("ce_weights", "tv_weights")]
  loss = lambda hidden, w2: dl.weighted_distillation_loss(
      hidden, *args[1:4], w2, args[5], *weights, keep_N=jnp.asarray(live), chunk=8)
  with jax.default_matmul_precision("highest"):
    (value, terms), (d_hidden, d_w2) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        poisoned, args[4])
  for name in ("ce_weights", "tv_weights"):
    case[name] = np.where(live, case[name], 0.0)
  np.testing.assert_allclose(value, compute_weighted(case), rtol=1e-5)
  for found, expected in zip(terms, compute_terms(case)):
    np.testing.assert_allclose(found[live], expected[live], atol=TOL)
  assert not d_hidden[~live].any() and jnp.isfinite(d_w2).all()


@pytest.mark.parametrize("is_reduced", [False, True])
def test_kl_term(is_reduced):
  case = make_case(37, 12, 50, 5)
  lse_N = make_lse(case, is_reduced)
  args = arguments(case)
  weights_N = np.random.default_rng(3).uniform(0, 2, 37)
  zeros_N = jnp.zeros(37)

  def loss(hidden, bias_in, w2):
    return dl.weighted_distillation_loss(
        hidden, *args[1:3], bias_in, w2, args[5], zeros_N, zeros_N, chunk=8,
        kl_weights_N=jnp.asarray(weights_N, jnp.float32),
        target_lse_N=None if lse_N is None else jnp.asarray(lse_N, jnp.float32))[0]

  def compute(hidden, bias_in, w2):  # float64, by autodiff-free differences
    logits = hidden @ case["head"].T + bias_in @ w2.T
    log_d = logits - special.logsumexp(logits, axis=1, keepdims=True)
    target = case["target"] @ case["head"].T
    log_t = target - (special.logsumexp(target, axis=1) if lse_N is None else lse_N)[:, None]
    return np.sum(weights_N[:, None] * np.exp(log_t) * (log_t - log_d))

  with jax.default_matmul_precision("highest"):
    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(args[0], args[3], args[4])
  point = [case["hidden"], case["bias_in"], case["w2"]]
  np.testing.assert_allclose(value, compute(*point), rtol=1e-5)
  rng, step = np.random.default_rng(4), 1e-5
  for i, found in enumerate(gradients):
    direction = rng.normal(size=point[i].shape)
    ahead, behind = ([p + s * step * direction if j == i else p for j, p in enumerate(point)]
                     for s in (1, -1))
    expected = (compute(*ahead) - compute(*behind)) / (2 * step)
    np.testing.assert_allclose(np.sum(np.asarray(found, np.float64) * direction), expected,
                               rtol=1e-4)


def compute_lk(case, point, weights_N, lk_eta, shares_N=None, lse_N=None):
  """Weighted LK loss in float64 by its definition; `shares_N` = the shares of KL held constant."""
  hidden, bias_in, w2 = point
  logits = hidden @ case["head"].T + bias_in @ w2.T
  log_d = logits - special.logsumexp(logits, axis=1, keepdims=True)
  target = case["target"] @ case["head"].T
  log_t = target - (special.logsumexp(target, axis=1) if lse_N is None else lse_N)[:, None]
  accept = np.minimum(np.exp(log_d), np.exp(log_t)).sum(1)
  if lk_eta is None:
    return np.sum(weights_N * -np.log(accept))
  shares_N = np.exp(-lk_eta * accept) if shares_N is None else shares_N
  kl = np.sum(np.exp(log_t) * (log_t - log_d), axis=1)
  return np.sum(weights_N * (shares_N * kl + (1 - shares_N) * (1 - accept))), shares_N


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("lk_eta", [None, 3.0])
def test_lk_term(lk_eta, is_reduced):
  case = make_case(37, 12, 50, 5)
  lse_N, args = make_lse(case, is_reduced), arguments(case)
  weights_N, zeros_N = np.random.default_rng(3).uniform(0, 2, 37), jnp.zeros(37)

  def loss(hidden, bias_in, w2):
    return dl.weighted_distillation_loss(
        hidden, *args[1:3], bias_in, w2, args[5], zeros_N, zeros_N, chunk=8, lk_eta=lk_eta,
        lk_weights_N=jnp.asarray(weights_N, jnp.float32),
        target_lse_N=None if lse_N is None else jnp.asarray(lse_N, jnp.float32))[0]

  with jax.default_matmul_precision("highest"):
    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(args[0], args[3], args[4])
  point = [case["hidden"], case["bias_in"], case["w2"]]
  compute = functools.partial(compute_lk, case, weights_N=weights_N, lk_eta=lk_eta, lse_N=lse_N)
  if lk_eta is not None:
    expected, shares_N = compute(point)
    assert shares_N.min() < 0.4 and shares_N.max() > 0.6  # both parts count
    compute = lambda at: compute_lk(case, at, weights_N, lk_eta, shares_N, lse_N)[0]
  np.testing.assert_allclose(value, compute(point), rtol=1e-5)
  rng, step = np.random.default_rng(4), 1e-5
  for i, found in enumerate(gradients):
    direction = rng.normal(size=point[i].shape)
    ahead, behind = ([p + s * step * direction if j == i else p for j, p in enumerate(point)]
                     for s in (1, -1))
    np.testing.assert_allclose(np.sum(np.asarray(found, np.float64) * direction),
                               (compute(ahead) - compute(behind)) / (2 * step), rtol=1e-4)


def test_lk_at_the_ends():
  """A blend of share 1 is KL and of share 0 is TV / 2; -log(accept) of a point mass is CE."""
  case = make_case(num_outside=0)
  args, zeros_N, ones_N = arguments(case), jnp.zeros(37), jnp.ones(37)
  run = lambda hidden, ce=zeros_N, tv=zeros_N, target=args[1], **more: (
      dl.weighted_distillation_loss(hidden, target, *args[2:], ce, tv, chunk=8, **more)[0])
  sure = args[2][args[5]] * 200  # logits that put all of the target's mass on some token
  best_N = jnp.argmax(sure @ args[2].T, axis=1).astype(jnp.int32)
  ce = lambda hidden: dl.weighted_distillation_loss(hidden, sure, *args[2:5], best_N, ones_N,
                                                    zeros_N, chunk=8)[0]
  pairs = [
      (lambda h: run(h, lk_weights_N=ones_N, lk_eta=0.0), lambda h: run(h, kl_weights_N=ones_N)),
      (lambda h: run(h, lk_weights_N=ones_N, lk_eta=1e9), lambda h: run(h, tv=0.5 * ones_N)),
      (lambda h: run(h, lk_weights_N=ones_N, target=sure), ce)]
  for lk, other in pairs:
    found, expected = (jax.value_and_grad(f)(args[0]) for f in (lk, other))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)


def test_lk_stays_finite_where_nothing_is_accepted():
  hidden, target = jnp.array([[200.0, 0.0]]), jnp.array([[0.0, 200.0]])
  loss = lambda hidden: dl.weighted_distillation_loss(
      hidden, target, jnp.eye(2), jnp.zeros((1, 0)), jnp.zeros((2, 0)), jnp.array([1]),
      jnp.zeros(1), jnp.zeros(1), lk_weights_N=jnp.ones(1))[0]
  value, gradient = jax.value_and_grad(loss)(hidden)
  np.testing.assert_allclose(value, -np.log(1e-12), rtol=1e-5)
  assert jnp.isfinite(gradient).all()


def test_copy_bias():
  case = make_case(37, 12, 50, 5)
  args = arguments(case)
  rng = np.random.default_rng(5)
  index_N = jnp.asarray(rng.integers(-1, 50, 37))
  copy_bias_N = jnp.asarray(rng.normal(size=37) * 2, jnp.float32)
  weights = [jnp.asarray(case[k], jnp.float32) for k in ("ce_weights", "tv_weights")]

  def loss(hidden, w2, copy_bias):
    return dl.weighted_distillation_loss(hidden, *args[1:4], w2, args[5], *weights, chunk=8,
                                         copy_index_N=index_N, copy_bias_N=copy_bias)[0]

  def naive(hidden, w2, copy_bias):
    logits = hidden @ args[2].T + args[3] @ w2.T
    logits += jax.nn.one_hot(index_N, 50) * copy_bias[:, None]  # index -1 is no column
    log_d = jax.nn.log_softmax(logits)
    p_t = jax.nn.softmax(args[1] @ args[2].T)
    ce = -jnp.take_along_axis(log_d, jnp.maximum(args[5], 0)[:, None], 1)[:, 0]
    tv = jnp.abs(jnp.exp(log_d) - p_t).sum(1)
    return jnp.sum(weights[0] * jnp.where(args[5] >= 0, ce, 0)) + jnp.sum(weights[1] * tv)

  point = (args[0], args[4], copy_bias_N)
  with jax.default_matmul_precision("highest"):
    found = jax.value_and_grad(loss, (0, 1, 2))(*point)
    expected = jax.value_and_grad(naive, (0, 1, 2))(*point)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, atol=5 * TOL, rtol=1e-4)


def test_weight_0_is_not_dropped():
  # A confidence loss alone still needs the accept rates.
  case = make_case()
  case["ce_weights"], case["tv_weights"] = np.zeros(37), np.zeros(37)
  value, terms = run_weighted(case, arguments(case), None, 8)
  assert value == 0
  np.testing.assert_allclose(terms[2], 1 - compute_terms(case)[1] / 2, atol=TOL)


def test_saturated_logits_stay_finite():
  case = make_case()
  case["hidden"] = case["hidden"] * 1e4
  args = arguments(case)
  loss = lambda hidden: run_weighted(case, (hidden, *args[1:]), None, 8)
  (value, terms), gradient = jax.value_and_grad(loss, has_aux=True)(args[0])
  assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
  assert (terms[1] <= 2 + 1e-5).all() and (terms[1] >= 0).all()


def test_bfloat16_inputs_give_float32_terms():
  case = make_case()
  _, terms = run_weighted(case, arguments(case, jnp.bfloat16), None, 8)
  rounded = {k: np.asarray(jnp.asarray(v, jnp.bfloat16), np.float64) if v.ndim == 2 else v
             for k, v in case.items()}
  for found, expected in zip(terms, compute_terms(rounded)):
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=TOL)



def _temp_bytes(loss, N, Vd, D=16, R=4):
  return _temp_bytes_forward(jax.grad(loss, (0, 1, 2)), N, Vd, D, R)


def _temp_bytes_forward(function, N, Vd, D=16, R=4):
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  compiled = jax.jit(function).lower(
      shape(N, D), shape(N, R), shape(Vd, R), shape(N, D), shape(Vd, D),
      jax.ShapeDtypeStruct((N,), jnp.int32), shape(N)).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def _loss_weighted(hidden, bias_in, w2, target, head, labels, weights):
  return dl.weighted_distillation_loss(hidden, target, head, bias_in, w2, labels, weights,
                                       weights, chunk=64)[0]


def _loss_per_token(hidden, bias_in, w2, target, head, labels, weights):
  ce, tv, _ = dl.distillation_loss(hidden, target, head, bias_in, w2, labels, chunk=64)
  return jnp.sum(weights * (ce + tv))


def _terms_naive(hidden, bias_in, w2, target, head, labels, weights):
  log_draft = jax.nn.log_softmax(hidden @ head.T + bias_in @ w2.T)
  tv = jnp.abs(jnp.exp(log_draft) - jax.nn.softmax(target @ head.T)).sum(-1)
  return -jnp.take_along_axis(log_draft, labels[:, None], 1)[:, 0], tv


def _loss_naive(hidden, bias_in, w2, target, head, labels, weights):
  return jnp.sum(weights * sum(_terms_naive(hidden, bias_in, w2, target, head, labels, weights)))


SMOLLM2_SIZES = dict(N=896, Vd=49_152, D=576, R=64)
SMOLLM2_INPUT_BYTES = 4 * (896 * 576 * 2 + 49_152 * (576 + 64) + 896 * 64 + 2 * 896)


def test_memory_does_not_grow_with_tokens_times_vocabulary():
  # From 1024 to 8192 tokens: one more [N, Vd] float32 array would be 7168 * 4096 * 4 = 117 MB.
  one_array = 7168 * 4096 * 4
  grow = lambda loss: _temp_bytes(loss, 8192, 4096) - _temp_bytes(loss, 1024, 4096)
  assert grow(_loss_naive) > one_array  # so the measure sees such arrays
  # What may grow: some dozens of float32 arrays [N, D + R] and [N].
  for loss in (_loss_weighted, _loss_per_token):
    assert grow(loss) < 7168 * 4 * 20 * 40 < one_array / 4


def test_peak_memory_of_a_training_step():
  # SmolLM2, 128 blocks of 7 drafts, whole vocabulary: 81 MB against 881 MB, inputs 145 MB in both.
  def loss(hidden, bias_in, w2, target, head, labels, weights):
    return dl.weighted_distillation_loss(hidden, target, head, bias_in, w2, labels, weights,
                                         weights)[0]

  inputs, sizes = SMOLLM2_INPUT_BYTES, SMOLLM2_SIZES
  peak = lambda f: inputs + _temp_bytes(f, **sizes)
  assert peak(loss) < 0.3 * peak(_loss_naive)


def test_peak_memory_of_the_terms_alone():
  # Two buffers [128, 49_152] of 25 MB: the draft's logits, then the target's, never the bias too.
  def terms(hidden, bias_in, w2, target, head, labels, weights):
    return dl.distillation_loss(hidden, target, head, bias_in, w2, labels)[:2]

  temporaries = _temp_bytes_forward(terms, **SMOLLM2_SIZES)
  assert 2 * 128 * 49_152 * 4 <= temporaries < 2.5 * 128 * 49_152 * 4
  naive = _temp_bytes_forward(_terms_naive, **SMOLLM2_SIZES)
  assert SMOLLM2_INPUT_BYTES + temporaries < 0.3 * (SMOLLM2_INPUT_BYTES + naive)


@pytest.mark.parametrize("num_tokens, chunk, expected", [
    (896, 256, 224), (896, 128, 128), (300, 128, 112), (37, 8, 8), (37, 64, 37), (257, 256, 144),
    (0, 128, 1)])
def test_chunks_are_even(num_tokens, chunk, expected):
  # Multiples of 16 that need as many chunks as the largest would.
  assert reference.fit_chunk(num_tokens, chunk) == expected


@pytest.mark.parametrize("V, chunk", [(300, 64), (128, 4096), (256, 256)])
def test_target_lse(V, chunk):
  rng = np.random.default_rng(0)
  hidden, head = rng.normal(size=(7, 6)), rng.normal(size=(V, 6)) * 3
  with jax.default_matmul_precision("highest"):
    found = dl.target_lse(jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32),
                          chunk=chunk)
  np.testing.assert_allclose(found, special.logsumexp(hidden @ head.T, axis=1), rtol=1e-5)
  gradient = jax.grad(lambda h: dl.target_lse(h, jnp.float32(head)).sum())(jnp.float32(hidden))
  assert not gradient.any()


@pytest.mark.parametrize("field, change", [
    ("target_hidden_NxD", {1: jnp.zeros((37, 3))}), ("lm_head_VdxD", {2: jnp.zeros((50, 3))}),
    ("bias_in_NxR", {3: jnp.zeros((37, 4))}), ("w2_VdxR", {4: jnp.zeros((49, 5))}),
    ("labels_N", {5: jnp.zeros(36, jnp.int32)}), ("labels_N", {5: jnp.zeros(37)})])
def test_names_what_does_not_fit(field, change):
  args = list(arguments(make_case()))
  for at, value in change.items():
    args[at] = value
  with pytest.raises(ValueError, match=field):
    dl.distillation_loss(*args)
  with pytest.raises(ValueError, match="implementation"):
    dl.distillation_loss(*arguments(make_case()), implementation="cuda")
