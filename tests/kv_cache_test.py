import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache


def make_cache(batch, slots):
  return kv_cache.init_cache(batch, slots, num_layers=2, num_kv_heads=3, head_dim=4)


def make_rows(batch, width, dtype=jnp.float32):
  shape = (batch, 3, width, 4)
  part = lambda i: jax.random.normal(jax.random.key(i), shape).astype(dtype)
  return kv_cache.KVCache(keys=(part(0), part(1)), values=(part(2), part(3)))


def test_empty_cache():
  cache = kv_cache.init_cache(5, 7, num_layers=2, num_kv_heads=3, head_dim=4)
  assert cache.num_slots == 7
  leaves = jax.tree.leaves(cache)
  assert len(leaves) == 4
  assert all(x.shape == (5, 3, 7, 4) and x.dtype == jnp.float32 and not x.any() for x in leaves)


@pytest.mark.parametrize("backend, kept", [("cpu", jnp.float32), ("gpu", jnp.bfloat16)])
def test_bfloat16_rows_are_kept_as_float32_on_cpu(monkeypatch, backend, kept):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  cache = kv_cache.init_cache(5, 7, num_layers=2, num_kv_heads=3, head_dim=4, dtype=jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype(kept)}


@pytest.mark.parametrize("batch, width", [(1, 1), (1, 4), (3, 4), (3, 1)])
def test_rows_land_at_each_request_start_and_nowhere_else(batch, width):
  """Fault B21: one start a request. The last row may be written, none past it."""
  starts = np.array([8 - width, 0, 3])[:batch]
  cache = jax.tree.map(lambda x: x + 7.0, make_cache(batch, 8))
  rows = make_rows(batch, width)
  written = jax.jit(kv_cache.write_rows)(cache, rows, jnp.asarray(starts))
  for found, new in zip(jax.tree.leaves(written), jax.tree.leaves(rows)):
    expected = np.full(found.shape, 7.0, np.float32)
    for b, start in enumerate(starts):
      expected[b, :, start:start + width] = new[b]
    np.testing.assert_array_equal(found, expected)


def test_rows_are_cast_to_the_cache():
  rows = make_rows(1, 2)
  cache = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_cache(1, 4))
  written = kv_cache.write_rows(cache, rows, jnp.array([1]))
  np.testing.assert_array_equal(written.keys[0][:, :, 1:3], rows.keys[0].astype(jnp.bfloat16))
  assert written.keys[0].dtype == jnp.bfloat16
