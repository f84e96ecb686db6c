"""Building blocks by hand: values worked out in the comments, or NumPy float64."""

import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers
from dspark_jax.layers import RopeConfig

LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8192)


attend = jax.jit(layers.attend, static_argnames="scale")
rope_tables = jax.jit(layers.rope_tables, static_argnums=(0, 1))


def normal(seed, *shape):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- linear ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(1,), (3,), (5,), (2, 4), (32,), (33,), (0,), (2, 3, 8)])
def test_linear_is_one_map_for_few_and_many_tokens(lead):
  """Few tokens take another path (columns padded to 8 and cut again); values must not tell."""
  x, w, bias = normal(0, *lead, 12), normal(1, 7, 12), normal(2, 7)
  expected = x.astype(np.float64) @ w.T + bias
  found = layers.linear(jnp.asarray(x), jnp.asarray(w), jnp.asarray(bias))
  # Sums of 12 float32 products of size about 1.
  np.testing.assert_allclose(found, expected, rtol=0, atol=12 * 1e-6)
  np.testing.assert_allclose(layers.linear(jnp.asarray(x), jnp.asarray(w)), expected - bias, rtol=0,
                             atol=12 * 1e-6)


@pytest.mark.parametrize("num_tokens", [5, 40])
def test_linear_gradient(num_tokens):
  x, w, weight = normal(0, num_tokens, 12), normal(1, 7, 12), normal(2, num_tokens, 7)
  loss = lambda x, w: jnp.sum(layers.linear(x, w) * weight)
  dx, dw = jax.grad(loss, argnums=(0, 1))(jnp.asarray(x), jnp.asarray(w))
  np.testing.assert_allclose(dx, weight @ w, rtol=0, atol=1e-5)
  np.testing.assert_allclose(dw, weight.T @ x, rtol=0, atol=4e-5)


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 40])
def test_linear_in_bfloat16(num_tokens):
  """Products of bfloat16 are summed in float32 and rounded once, or not at all on request."""
  x = jnp.asarray(normal(0, num_tokens, 64), jnp.bfloat16)
  w = jnp.asarray(normal(1, 5, 64), jnp.bfloat16)
  exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
  for dtype, error in ((None, 2.0**-8), (jnp.float32, 64 * 2.0**-24)):
    found = layers.linear(x, w, dtype=dtype)
    assert found.dtype == (dtype or jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=error, atol=64 * 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 9, 40])
@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_linear_gradient_in_bfloat16(num_tokens, dtype):
  x, w, weight = (jnp.asarray(normal(seed, *shape), jnp.bfloat16) for seed, shape in (
      (0, (num_tokens, 64)), (1, (5, 64)), (2, (num_tokens, 5))))
  loss = lambda x, w: jnp.sum(layers.linear(x, w, dtype=dtype).astype(jnp.float32) * weight)
  dx, dw = jax.grad(loss, argnums=(0, 1))(x, w)
  assert dx.dtype == dw.dtype == jnp.bfloat16
  x, w, weight = (np.asarray(a, np.float64) for a in (x, w, weight))
  np.testing.assert_allclose(np.asarray(dx, np.float64), weight @ w, rtol=2.0**-8, atol=1e-5)
  np.testing.assert_allclose(np.asarray(dw, np.float64), weight.T @ x, rtol=2.0**-8, atol=1e-5)


def has_bfloat16_kernel() -> bool:
  info = pathlib.Path("/proc/cpuinfo")
  return info.is_file() and "avx512_bf16" in info.read_text()


@pytest.mark.skipif(not has_bfloat16_kernel(), reason="a CPU without AVX512-BF16")
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 16])
def test_few_bfloat16_tokens_do_not_widen_the_weights(num_tokens):
  """XLA's CPU compiler otherwise makes a float32 copy of them, which takes four times as long."""
  shape = jax.ShapeDtypeStruct
  text = jax.jit(layers.linear).lower(
      shape((num_tokens, 48), jnp.bfloat16), shape((96, 48), jnp.bfloat16)).compile().as_text()
  assert "f32[96,48]" not in text and "f32[48,96]" not in text


@pytest.mark.skipif(not has_bfloat16_kernel(), reason="a CPU without AVX512-BF16")
def test_bfloat16_gradients_widen_neither_factor():
  """A factor that XLA's CPU compiler makes float32 is multiplied in float32, at half the speed."""
  shape = jax.ShapeDtypeStruct
  text = jax.jit(lambda *args: jax.vjp(layers.linear, *args[:2])[1](args[2])).lower(
      shape((160, 48), jnp.bfloat16), shape((96, 48), jnp.bfloat16),
      shape((160, 96), jnp.bfloat16)).compile().as_text()
  assert " dot(" in text
  assert not re.findall(r"= f32\S* convert\(", text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embed(dtype):
  table, ids = jnp.asarray(normal(0, 9, 4), dtype), jnp.asarray([[3, 0], [8, 3]])
  np.testing.assert_array_equal(layers.embed(table, ids), np.asarray(table)[np.asarray(ids)])
  grad = jax.grad(lambda t: jnp.sum(layers.embed(t, ids).astype(jnp.float32)))(table)
  np.testing.assert_array_equal(np.asarray(grad[:, 0], np.float32), [1, 0, 0, 2, 0, 0, 0, 0, 1])


def test_a_loop_does_not_widen_the_embedding():
  def decode(table, ids):
    body = lambda _, ids: jnp.argmax(layers.embed(table, ids).astype(jnp.float32), axis=-1)
    return jax.lax.fori_loop(0, ids[0], body, ids)
  text = jax.jit(decode).lower(jax.ShapeDtypeStruct((96, 48), jnp.bfloat16),
                               jax.ShapeDtypeStruct((2,), jnp.int32)).compile().as_text()
  whole = [line for line in text.splitlines() if "= f32[96,48]" in line and " fusion(" in line]
  assert not whole


# --- norm ------------------------------------------------------------------------------------


def rms_norm(x, weight, eps=0.0):
  return layers.RMSNorm(eps).apply({"params": {"weight": jnp.asarray(weight)}}, x)


def test_rms_norm_by_hand():
  # mean((3, 4)^2) = 12.5; (3, 4) / 3.5355 = (0.84853, 1.13137); times (1, 2).
  np.testing.assert_allclose(rms_norm(jnp.array([[3.0, 4.0]]), [1.0, 2.0]), [[0.84853, 2.26274]],
                             rtol=1e-5)
  # eps is added to the mean square: 12.5 + 3.5 = 16.
  np.testing.assert_allclose(rms_norm(jnp.array([[3.0, 4.0]]), [1.0, 1.0], 3.5), [[0.75, 1.0]])


def test_rms_norm_is_float32_inside():
  """bfloat16 squares of 300 elements of 1.01 would lose the 0.01."""
  x = jnp.full((1, 300), 1.0078125, jnp.bfloat16).at[0, 0].set(100.0)
  expected = float(x[0, 1]) / math.sqrt((299 * float(x[0, 1]) ** 2 + 100.0**2) / 300)
  found = rms_norm(x, np.ones(300, np.float32))
  assert found.dtype == jnp.bfloat16
  assert float(found[0, 1]) == float(jnp.bfloat16(expected))


# --- RoPE ------------------------------------------------------------------------------------


def test_b48_norm_then_rope():
  """Head width 2, x = (3, 4), weight (1, 2), position angle 90 degrees, eps 0.

  Norm: (0.84853, 2.26274); rotated by 90 degrees: (-2.26274, 0.84853). The wrong order,
  rotation first, gives (-1.1314, 1.6971).
  """
  normed = rms_norm(jnp.array([3.0, 4.0]).reshape(1, 1, 1, 2), [1.0, 2.0])
  quarter = (jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)))
  np.testing.assert_allclose(layers.apply_rope(normed, quarter)[0, 0, 0], [-2.2627, 0.8485],
                             atol=1e-4)


def test_rope_rotates_halves_not_neighbours():
  """Head width 4, angles (90, 0) degrees: pair (0, 2) turns, pair (1, 3) stays."""
  tables = (jnp.array([[[0.0, 1.0]]]), jnp.array([[[1.0, 0.0]]]))
  x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
  np.testing.assert_allclose(layers.apply_rope(x, tables)[0, 0, 0], [-3.0, 2.0, 1.0, 4.0])


def test_default_frequencies_and_tables():
  # Head width 4, theta 100: frequencies 1 and 100^-0.5 = 0.1.
  inv, scale = layers.rope_frequencies(RopeConfig(rope_theta=100.0), 4)
  np.testing.assert_allclose(inv, [1.0, 0.1], rtol=1e-6)
  assert scale == 1.0 and inv.dtype == np.float32
  cos, sin = rope_tables(RopeConfig(rope_theta=100.0), 4, jnp.array([[0, 3]]))
  np.testing.assert_allclose(cos[0], [[1, 1], [math.cos(3), math.cos(0.3)]], rtol=1e-6)
  np.testing.assert_allclose(sin[0], [[0, 0], [math.sin(3), math.sin(0.3)]], rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
  inv, scale = layers.rope_frequencies(RopeConfig("linear", 100.0, factor=2.5), 4)
  np.testing.assert_allclose(inv, [0.4, 0.04], rtol=1e-6)
  assert scale == 1.0


def test_b47_llama3():
  """Base 500000, head width 64: pairs 0..14 stay, 15..17 are blended, 18..31 divided by 32."""
  plain, _ = layers.rope_frequencies(RopeConfig(rope_theta=5e5), 64)
  inv, scale = layers.rope_frequencies(RopeConfig(rope_theta=5e5, **LLAMA3), 64)
  ratio = inv / plain
  np.testing.assert_array_equal(ratio[:15], 1.0)
  assert ((ratio[15:18] > 1 / 32 * 1.01) & (ratio[15:18] < 0.99)).all()
  np.testing.assert_allclose(ratio[18:], 1 / 32, rtol=1e-6)
  np.testing.assert_allclose([plain[15], inv[15], plain[31], inv[31]],
                             [0.00213112, 0.00129055, 3.01386e-6, 9.41833e-8], rtol=3e-6)
  assert scale == 1.0


@pytest.mark.parametrize("factor, attention_factor, scale", [
    (4.0, None, 1.138629), (32.0, None, 1.346574), (4.0, 1.0, 1.0), (32.0, 1.0, 1.0),
    (1.0, None, 1.0)])
def test_b47_yarn_scale(factor, attention_factor, scale):
  """0.1 ln(factor) + 1, or the explicit value; it multiplies cos and sin."""
  rope = RopeConfig("yarn", 5e5, factor, original_max_position_embeddings=8192,
                    attention_factor=attention_factor)
  assert layers.rope_frequencies(rope, 64)[1] == pytest.approx(scale, abs=5e-7)
  cos, _ = rope_tables(rope, 64, jnp.zeros((1, 1), jnp.int32))
  np.testing.assert_allclose(cos, scale, rtol=1e-6)


def test_yarn_frequencies():
  """Head width 64, base 5e5, 8192 tokens, beta 32 and 1.

  Pair i turns 8192 * 5e5^(-i/32) / 2 pi times; it turns beta times at
  i = 64 ln(8192 / (2 pi beta)) / (2 ln 5e5): 9.04 for 32, 17.49 for 1. Cut to 9 and 18.
  """
  rope = RopeConfig("yarn", 5e5, 4.0, original_max_position_embeddings=8192)
  plain, _ = layers.rope_frequencies(RopeConfig(rope_theta=5e5), 64)
  inv, _ = layers.rope_frequencies(rope, 64)
  ramp = np.clip((np.arange(32) - 9) / 9, 0, 1)
  np.testing.assert_allclose(inv / plain, 1 - ramp * 3 / 4, rtol=1e-6)
  smooth, _ = layers.rope_frequencies(
      RopeConfig("yarn", 5e5, 4.0, original_max_position_embeddings=8192, truncate=False), 64)
  low, high = (64 * math.log(8192 / (2 * math.pi * beta)) / (2 * math.log(5e5)) for beta in (32, 1))
  assert (low, high) == (pytest.approx(9.04, abs=0.01), pytest.approx(17.49, abs=0.01))
  ramp = np.clip((np.arange(32) - low) / (high - low), 0, 1)
  np.testing.assert_allclose(smooth / plain, 1 - ramp * 3 / 4, rtol=1e-6)
  mscale = RopeConfig("yarn", 5e5, 4.0, original_max_position_embeddings=8192, mscale=0.707,
                      mscale_all_dim=0.5)
  assert layers.rope_frequencies(mscale, 64)[1] == pytest.approx(
      (0.0707 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


SCALING = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("raw", [
    {"rope_theta": 5e5, "rope_scaling": SCALING | {"rope_type": "llama3"}},
    {"rope_theta": 5e5, "rope_scaling": SCALING | {"type": "llama3"}},
    {"rope_theta": 5e5, "rope_scaling": SCALING | {"type": "llama3", "rope_type": "llama3"}},
    {"rope_parameters": SCALING | {"rope_type": "llama3", "rope_theta": 5e5}},
    {"rope_parameters": SCALING | {"type": "llama3", "rope_theta": 5e5}, "rope_theta": 1e4},
    {"rope_parameters": SCALING | {"rope_type": "llama3", "rope_theta": 5e5},
     "rope_scaling": SCALING | {"type": "llama3"}},
    {"rope_theta": 5e5, "max_position_embeddings": 8192, "rope_scaling": {
        k: v for k, v in (SCALING | {"type": "llama3"}).items() if not k.startswith("original")}},
    {"rope_theta": 5e5, "max_position_embeddings": 131072, "original_max_position_embeddings": 8192,
     "rope_scaling": SCALING | {"type": "llama3", "original_max_position_embeddings": None}},
])
def test_both_places_and_both_spellings(raw):
  rope = layers.rope_config_from_hf(raw)
  assert rope == RopeConfig(rope_theta=5e5, **LLAMA3)


def test_absent_rope_is_the_default():
  assert layers.rope_config_from_hf({}) == RopeConfig()
  rope = layers.rope_config_from_hf({"rope_theta": 1e6, "rope_scaling": None})
  assert (rope.rope_type, rope.rope_theta) == ("default", 1e6)
  rope = layers.rope_config_from_hf({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7})
  assert (rope.rope_type, rope.rope_theta) == ("default", 7)


@pytest.mark.parametrize("raw, name", [
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: found 'dynamic'"),
    ({"rope_parameters": {"type": "longrope"}}, "rope_type: found 'longrope'"),
    ({"rope_scaling": {"type": "linear"}}, r"rope_parameters\.factor: missing"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}},
     r"rope_parameters\.original_max_position_embeddings: missing"),
    # Someone adds yarn to a file of the newer kind, as model cards of the older kind advise.
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
      "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"scaling\.rope_type: found 'yarn'"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0},
      "rope_scaling": {"type": "linear", "factor": 4.0}}, r"rope_scaling\.factor: found 4\.0"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}},
     r"rope_parameters\.full_attention: found parameters by layer type"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "partial_rotary_factor: found 0.5"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor: found 0.25"),
])
def test_rope_that_would_be_dropped_is_refused(raw, name):
  with pytest.raises(ValueError, match=name) as error:
    layers.rope_config_from_hf(raw)
  assert "\n" not in str(error.value)


def test_unknown_type_is_refused_by_frequencies_too():
  with pytest.raises(ValueError, match="rope_type: found 'su'"):
    layers.rope_frequencies(RopeConfig("su"), 4)


# --- attention -------------------------------------------------------------------------------


def attend_in_numpy(q, k, v, mask, scale):
  """q [B, T, N, H], k and v [B, K, S, H], mask [B, T, S]; float64, one head at a time."""
  B, T, N, H = q.shape
  group = N // k.shape[1]
  out = np.zeros((B, T, N, H))
  for b in range(B):
    for n in range(N):
      scores = q[b, :, n].astype(np.float64) @ k[b, n // group].T.astype(np.float64) * scale
      scores = np.where(mask[b], scores, -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      out[b, :, n] = weights / weights.sum(-1, keepdims=True) @ v[b, n // group]
  return out


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_over_two_stretches(num_kv_heads):
  q = normal(0, 2, 3, 4, 6)
  k, v = normal(1, 2, num_kv_heads, 9, 6), normal(2, 2, num_kv_heads, 9, 6)
  mask = np.random.default_rng(3).random((2, 3, 9)) < 0.6
  mask[..., 7] = True
  found = attend(jnp.asarray(q), [k[:, :, :5], k[:, :, 5:]], [v[:, :, :5], v[:, :, 5:]],
                        [jnp.asarray(mask[..., :5]), jnp.asarray(mask[..., 5:])], scale=0.3)
  np.testing.assert_allclose(found, attend_in_numpy(q, k, v, mask, 0.3), rtol=0, atol=2e-6)


def test_attention_over_keys_read_in_place(monkeypatch):
  """The form for many large requests, forced on small ones; both must not be one program."""
  q, k, v = normal(0, 2, 3, 4, 8), normal(1, 2, 2, 9, 8), normal(2, 2, 2, 9, 8)
  mask = np.tril(np.ones((3, 9), bool), 6)[None].repeat(2, axis=0)
  args = jnp.asarray(q), [k], [v], [mask]
  usual = str(jax.make_jaxpr(lambda *a: layers.attend(*a, scale=0.3))(*args))
  monkeypatch.setattr(layers, "_KEYS_READ_IN_PLACE", 0)
  forced = lambda *a: layers.attend(*a, scale=0.3)
  assert "optimization_barrier" in str(jax.make_jaxpr(forced)(*args))
  assert "optimization_barrier" not in usual
  np.testing.assert_allclose(jax.jit(forced)(*args), attend_in_numpy(q, k, v, mask, 0.3),
                             rtol=0, atol=2e-6)


def test_unseen_rows_may_hold_garbage():
  """The contract of dead cache rows (fault B20): keys anything, values anything finite."""
  q, k, v = normal(0, 1, 2, 4, 6), normal(1, 1, 2, 8, 6), normal(2, 1, 2, 8, 6)
  mask = jnp.asarray(np.arange(8)[None, None] < 5).repeat(2, axis=1)
  clean = attend(jnp.asarray(q), [k], [v], [mask], scale=0.4)
  k[:, :, 5:], v[:, :, 5:] = np.nan, 3e38
  found = attend(jnp.asarray(q), [k], [v], [mask], scale=0.4)
  np.testing.assert_array_equal(found, clean)
  k[:, :, 5:] = np.inf
  np.testing.assert_array_equal(
      attend(jnp.asarray(q), [k], [v], [mask], scale=0.4), clean)


def test_a_query_with_nothing_to_see_is_zero():
  """No NaN (fault B27), and its neighbours are untouched."""
  q, k, v = normal(0, 1, 2, 2, 4), normal(1, 1, 2, 3, 4), normal(2, 1, 2, 3, 4)
  mask = np.array([[[False] * 3, [True] * 3]])
  found = np.asarray(attend(jnp.asarray(q), [k], [v], [jnp.asarray(mask)], scale=1.0))
  np.testing.assert_array_equal(found[:, 0], 0.0)
  np.testing.assert_allclose(found[:, 1:], attend_in_numpy(
      q[:, 1:], k, v, np.ones((1, 1, 3), bool), 1.0), rtol=0, atol=1e-6)


def test_huge_scores_do_not_overflow():
  q, k = np.full((1, 1, 1, 2), 1e4, np.float32), np.eye(2, dtype=np.float32).reshape(1, 1, 2, 2)
  k[0, 0, 1] *= -1
  v = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32).reshape(1, 1, 2, 2)
  found = attend(jnp.asarray(q), [k], [v], [jnp.ones((1, 1, 2), bool)], scale=1.0)
  np.testing.assert_array_equal(found[0, 0, 0], [1.0, 0.0])


def test_mlp_by_hand():
  # gate = 2, up = 3, silu(2) = 2 / (1 + e^-2) = 1.761594; times 3, times down 0.5.
  params = {n: {"weight": jnp.array([[w]])} for n, w in
            (("gate_proj", 2.0), ("up_proj", 3.0), ("down_proj", 0.5))}
  np.testing.assert_allclose(layers.MLP(1).apply({"params": params}, jnp.ones((1, 1))),
                             [[2.642391]], rtol=1e-6)
