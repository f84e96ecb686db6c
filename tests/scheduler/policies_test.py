import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduler.policies import (ConfidenceThreshold, FixedLength, choose_verify_lens,
                                           max_verify_len)

CONFIDENCE = jnp.array([[0.9, 0.5, 0.7, 0.9], [0.4, 0.9, 0.9, 0.9], [1.0, 1.0, 1.0, 1.0]])


@pytest.mark.parametrize("policy, expected", [
    (None, [4, 4, 4]),
    (FixedLength(0), [0, 0, 0]), (FixedLength(3), [3, 3, 3]), (FixedLength(9), [4, 4, 4]),
    (ConfidenceThreshold(0.0), [4, 4, 4]),
    (ConfidenceThreshold(0.5), [4, 0, 4]),  # 0.5 itself is kept: cut at the first below
    (ConfidenceThreshold(0.6), [1, 0, 4]),  # the later 0.7 and 0.9 are not reached
    (ConfidenceThreshold(1.0), [0, 0, 4]),
    (ConfidenceThreshold(0.5, 2), [2, 0, 2]), (ConfidenceThreshold(0.0, 0), [0, 0, 0]),
])
def test_lengths(policy, expected):
  found = jax.jit(choose_verify_lens, static_argnums=0)(policy, CONFIDENCE)
  assert found.dtype == jnp.int32
  np.testing.assert_array_equal(found, expected)
  assert max(expected) <= max_verify_len(policy, 4)


@pytest.mark.parametrize("policy, expected", [
    (None, 4), (FixedLength(2), 2), (FixedLength(9), 4), (ConfidenceThreshold(0.5), 4),
    (ConfidenceThreshold(0.5, 3), 3)])
def test_static_width(policy, expected):
  assert max_verify_len(policy, 4) == expected


def test_a_length_looks_at_no_later_confidence():
  """Losslessness: whether draft k is verified depends on confidences 0..k only (fault B53)."""
  policy = ConfidenceThreshold(0.5)
  for k in range(4):
    changed = CONFIDENCE.at[:, k + 1:].set(jax.random.uniform(jax.random.key(k), (3, 3 - k)))
    before, after = (choose_verify_lens(policy, c) for c in (CONFIDENCE, changed))
    np.testing.assert_array_equal(before > k, after > k)


def test_nan_confidence_verifies_no_further():
  found = choose_verify_lens(ConfidenceThreshold(0.0), CONFIDENCE.at[0, 1].set(jnp.nan))
  np.testing.assert_array_equal(found, [1, 4, 4])


@pytest.mark.parametrize("make, name", [
    (lambda: FixedLength(-1), "length: found -1"), (lambda: FixedLength(2.5), "length: found 2.5"),
    (lambda: ConfidenceThreshold(0.5, -1), "length: found -1"),
    (lambda: ConfidenceThreshold(1.5), "confidence_threshold: found 1.5"),
    (lambda: ConfidenceThreshold(-0.1), "confidence_threshold: found -0.1"),
    (lambda: ConfidenceThreshold(float("nan")), "confidence_threshold: found nan")])
def test_bad_field_is_named(make, name):
  with pytest.raises(ValueError, match=name):
    make()


@pytest.mark.parametrize("policy", ["fixed", 3, object()])
def test_unknown_policy_is_named(policy):
  for ask in (lambda: choose_verify_lens(policy, CONFIDENCE), lambda: max_verify_len(policy, 4)):
    with pytest.raises(TypeError, match="policy: found .* expected FixedLength, ConfidenceThr"):
      ask()
