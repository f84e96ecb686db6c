"""The decoder against a NumPy float64 oracle, with and without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache
from dspark_jax.interop import hf
from dspark_jax.target.config import config_from_hf
from dspark_jax.target.transformer import Transformer
from tests.target import cases, oracle

# float32 sums of up to 48 terms through 2 layers; logits of up to 10 (measured 1e-5).
TOL = 5e-5
TOKENS = np.random.default_rng(5).integers(0, 41, (2, 11))


@functools.partial(jax.jit, static_argnames=("config", "taps", "dtype"))
def run(config, params, tokens, cache=None, cache_lens=None, *, taps=(), dtype="float32"):
  """Returns (logits [B, T, V], TargetOutput)."""
  model = Transformer(config, dtype)
  out = model.apply({"params": params}, tokens, cache=cache, cache_lens_B=cache_lens,
                    tap_layer_ids=taps)
  return model.apply({"params": params}, out.hidden_BxTxD, method="head"), out


def init_cache(config, batch, slots):
  return kv_cache.init_cache(batch, slots, num_layers=config.num_layers,
                             num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)


@pytest.mark.parametrize("family, fields", [
    ("llama", {}),
    ("llama", dict(attention_bias=True, mlp_bias=True, head_dim=6, tie_word_embeddings=True)),
    ("qwen3", dict(attention_bias=True, num_key_value_heads=4)),
    ("qwen3", dict(tie_word_embeddings=True, num_key_value_heads=1)),
])
def test_against_the_oracle(family, fields):
  raw = cases.make_raw(family, **fields)
  tensors, config = cases.make_tensors(raw), config_from_hf(raw)
  params = hf.target_params(tensors, config, origin="toy")
  logits, out = run(config, params, jnp.asarray(TOKENS), taps=(-1, 0, 1))
  assert logits.dtype == jnp.float32 and logits.shape == (2, 11, 41)
  for b, tokens in enumerate(TOKENS):
    expected, hidden, streams = oracle.run_decoder(raw, tensors, tokens)
    np.testing.assert_allclose(logits[b], expected, rtol=0, atol=TOL)
    np.testing.assert_allclose(out.hidden_BxTxD[b], hidden, rtol=0, atol=TOL)
    np.testing.assert_allclose(out.features_BxTxMD[b], np.concatenate(streams, axis=-1), rtol=0,
                               atol=TOL)


@pytest.fixture(scope="module")
def qwen3():
  return cases.make_target("qwen3")


def test_new_tokens_over_a_cache_equal_one_pass(qwen3):
  """Requests with 3 and 7 cached rows, in a cache whose dead rows are poison (fault B20)."""
  config, params = qwen3
  whole, out = run(config, params, jnp.asarray(TOKENS))
  lens = np.array([3, 7])
  cache = jax.tree.map(lambda x: x.at[:, :, :11].set(0), init_cache(config, 2, 16))
  cache = kv_cache.write_rows(cache, out.rows, jnp.zeros(2, jnp.int32))
  is_dead = jnp.arange(16)[None, None, :, None] >= lens[:, None, None, None]
  poison = lambda layers, value: tuple(jnp.where(is_dead, value, x) for x in layers)
  cache = kv_cache.KVCache(poison(cache.keys, jnp.nan), poison(cache.values, 1e38))
  new = np.stack([TOKENS[b, n:n + 4] for b, n in enumerate(lens)])
  logits, after = run(config, params, jnp.asarray(new), cache, jnp.asarray(lens))
  for b, n in enumerate(lens):
    np.testing.assert_allclose(logits[b], whole[b, n:n + 4], rtol=0, atol=TOL)
    for found, expected in zip(jax.tree.leaves(after.rows), jax.tree.leaves(out.rows)):
      np.testing.assert_allclose(found[b], expected[b, :, n:n + 4], rtol=0, atol=TOL)


@pytest.mark.parametrize("width", [6, 16])
def test_b27_right_padding_changes_nothing(qwen3, width):
  """Prompts of 3 and 6 tokens; the first token's position is 0 whatever comes after."""
  config, params = qwen3
  for n in (3, 6):
    alone, _ = run(config, params, jnp.asarray(TOKENS[:1, :n]))
    padded = np.full((2, width), 40)
    padded[0, :n], padded[1] = TOKENS[0, :n], np.arange(width)
    logits, _ = run(config, params, jnp.asarray(padded))
    np.testing.assert_allclose(logits[0, :n], alone[0], rtol=0, atol=1e-5)


def test_b38_raw_layer_outputs_are_tapped():
  """Embedding 1, layer i adds 10^(i+1): taps -1 and 1 are 1 and 111."""
  raw = cases.make_raw("llama", num_hidden_layers=4, mlp_bias=True)
  tensors = {n: np.zeros_like(t) for n, t in cases.make_tensors(raw).items()}
  tensors["model.embed_tokens.weight"] += 1
  for i in range(4):
    tensors[f"model.layers.{i}.mlp.down_proj.bias"] += 10 ** (i + 1)
  config = config_from_hf(raw)
  params = hf.target_params(tensors, config, origin="toy")
  _, out = run(config, params, jnp.asarray(TOKENS[:1, :2]), taps=(-1, 1))
  np.testing.assert_array_equal(out.features_BxTxMD[0, 0], [1.0] * 32 + [111.0] * 32)


def test_b38_the_head_reads_the_normed_state():
  """h = (3, 4), norm weight (2, 1), head = I: law (0.638, 0.362); un-normed (0.269, 0.731)."""
  raw = cases.make_raw("llama", vocab_size=2, hidden_size=2, num_attention_heads=1, head_dim=2,
                       num_key_value_heads=1, num_hidden_layers=1, rms_norm_eps=1e-12)
  tensors = {n: np.zeros_like(t) for n, t in cases.make_tensors(raw).items()}
  tensors["model.embed_tokens.weight"][:] = [3, 4]
  tensors["model.norm.weight"][:] = [2, 1]
  tensors["lm_head.weight"][:] = np.eye(2)
  config = config_from_hf(raw)
  logits, _ = run(config, hf.target_params(tensors, config, origin="toy"), jnp.zeros((1, 1), int))
  np.testing.assert_allclose(jax.nn.softmax(logits[0, 0]), [0.638, 0.362], atol=5e-4)


def test_bfloat16_activations(qwen3):
  """Weights and activations in bfloat16, logits float32: 8 bits of 2 layers, not more."""
  config, params = qwen3
  exact, _ = run(config, params, jnp.asarray(TOKENS))
  low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  logits, out = run(config, low, jnp.asarray(TOKENS), dtype="bfloat16")
  assert logits.dtype == jnp.float32 and out.hidden_BxTxD.dtype == jnp.bfloat16
  assert out.rows.keys[0].dtype == jnp.bfloat16
  error = np.abs(np.asarray(logits) - exact)
  assert 1e-4 < error.max() < 0.05 * np.abs(exact).max()
