"""Packing: where every row goes, and that it comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.verification.pack import make_packing


@pytest.mark.parametrize("lens, is_live, num_tokens", [
    ([2, 6], [1, 1], 10),  # fault B25: widths 3 and 7, no rectangle
    ([0, 5], [1, 1], 8), ([3, 0, 1, 2], [1, 0, 1, 1], 16), ([0, 0], [0, 0], 4), ([6], [1], 7)])
def test_every_row_is_packed_once_and_comes_back(lens, is_live, num_tokens):
  rows, batch = 7, len(lens)
  packing = jax.jit(make_packing, static_argnames=("num_tokens", "num_rows"))(
      jnp.array(lens), jnp.array(is_live, bool), num_tokens=num_tokens, num_rows=rows)
  values = np.arange(1, batch * rows * 2 + 1, dtype=np.float32).reshape(batch, rows, 2)
  packed = np.array(packing.pack(jnp.asarray(values)))
  assert packed.shape == (1, num_tokens, 2)
  expected = [values[b, w] for b in range(batch) if is_live[b] for w in range(lens[b] + 1)]
  np.testing.assert_array_equal(packed[0, :len(expected)],
                                np.reshape(expected, (len(expected), 2)))
  packed[0, len(expected):] = np.nan  # padding slots reach nobody
  back = packing.unpack(jnp.asarray(packed))
  counts = (np.array(lens) + 1) * np.array(is_live)
  exists = np.arange(rows)[None] < counts[:, None]
  np.testing.assert_array_equal(back, np.where(exists[..., None], values, 0))


def test_b13_one_requests_nan_stays_with_it():
  packing = make_packing(jnp.array([1, 0, 2]), jnp.array([True, False, True]), num_tokens=8,
                         num_rows=3)
  x = jnp.zeros((1, 8, 1)).at[0, 0].set(jnp.nan)  # the anchor of request 0
  np.testing.assert_array_equal(jnp.isnan(packing.unpack(x)).any(axis=(1, 2)),
                                [True, False, False])
