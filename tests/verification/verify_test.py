"""The verify pass against one pass over the whole sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache
from dspark_jax.target.transformer import Transformer
from dspark_jax.verification.verify import verify
from tests.target import cases

TOL = 5e-5  # as in the decoder's own test
LENS = np.array([4, 7])
TOKENS = np.random.default_rng(8).integers(0, 41, (2, 12))


@functools.lru_cache
def prepare():
  """Returns (config, params, cache of LENS rows, logits and features of the whole sequences)."""
  config, params = cases.make_target("qwen3", num_hidden_layers=3)
  model = Transformer(config)

  @jax.jit
  def run(params):
    out = model.apply({"params": params}, jnp.asarray(TOKENS), tap_layer_ids=(0, 1))
    cache = kv_cache.init_cache(2, 20, num_layers=3, num_kv_heads=2, head_dim=12)
    cache = kv_cache.write_rows(cache, out.rows, jnp.zeros(2, jnp.int32))
    logits = model.apply({"params": params}, out.hidden_BxTxD, method="head")
    return cache, logits, out

  return config, params, *run(params)


verify_jit = jax.jit(verify, static_argnames=("config", "tap_layer_ids", "dtype"))


def run_verify(config, params, cache, num_drafts, tokens=TOKENS):
  block = np.stack([tokens[b, n:n + num_drafts + 1] for b, n in enumerate(LENS)])
  return verify_jit(config, params, cache, jnp.asarray(block[:, 0]), jnp.asarray(block[:, 1:]),
                    cache_lens_B=jnp.asarray(LENS), tap_layer_ids=(0, 1))


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_rows_are_those_of_the_whole_sequence(num_drafts):
  """Row j decides position cache_len + j + 1. Rows of the cache past its length are of the very
  tokens verified here: a pass that saw them would see everything twice."""
  config, params, cache, logits, whole = prepare()
  out, found = run_verify(config, params, cache, num_drafts)
  assert found.shape == (2, num_drafts + 1, 41) and found.dtype == jnp.float32
  for b, n in enumerate(LENS):
    rows = slice(n, n + num_drafts + 1)
    np.testing.assert_allclose(found[b], logits[b, rows], rtol=0, atol=TOL)
    np.testing.assert_allclose(out.features_BxTxMD[b], whole.features_BxTxMD[b, rows], rtol=0,
                               atol=TOL)
    for new, old in zip(jax.tree.leaves(out.rows), jax.tree.leaves(whole.rows)):
      np.testing.assert_allclose(new[b], old[b, :, rows], rtol=0, atol=TOL)


def test_a_later_draft_changes_no_earlier_row():
  config, params, cache, _, _ = prepare()
  _, before = run_verify(config, params, cache, 4)
  changed = TOKENS.copy()
  for b, n in enumerate(LENS):
    changed[b, n + 3] = (changed[b, n + 3] + 1) % 41
  _, after = run_verify(config, params, cache, 4, changed)
  np.testing.assert_array_equal(before[:, :3], after[:, :3])
  assert np.abs(before[:, 3:] - after[:, 3:]).max(axis=-1).min() > 1e-2
