"""Cases for every implementation of the family, against Algorithm 1 and top-K in exact numbers.

"tpu" is the kernel in interpret mode: its arithmetic; that it lowers is shown in tests/aot_test.py.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.length_selection import api, length_selection

pytestmark = pytest.mark.parametrize("implementation", ["auto", "tpu"])  # auto: the reference


def interpret(implementation, *args, kernels, **_):
  return kernels["tpu"](*args, interpret=True)


@functools.partial(jax.jit, static_argnames="implementation")
def select(*args, implementation, **kwargs):
  if implementation == "tpu":  # dispatch never interprets
    with mock.patch.object(api, "dispatch", interpret):
      return length_selection(*args, **kwargs)
  return length_selection(*args, implementation=implementation, **kwargs)


def select_stretched(survival, *, step_curve_C=None, budget=None, implementation):
  """Runs a small case inside one shape, so that all cases are compiled once."""
  batch, num_drafts = survival.shape
  arrays = {"is_live_B": jnp.arange(3) < batch, "max_lens_B": jnp.full(3, num_drafts)}
  survival = jnp.pad(survival, ((0, 3 - batch), (0, 3 - num_drafts)), constant_values=1.0)
  if budget is not None:
    return select(survival, budget=budget, implementation=implementation, **arrays)[:batch]
  curve = jnp.pad(step_curve_C, (0, 13 - step_curve_C.size))  # a rate of 0 raises nothing
  return select(survival, step_curve_C=curve, implementation=implementation, **arrays)[:batch]


def select_by_hand(survival, *, curve=None, budget=None, is_live=None, min_lens=None,
                   max_lens=None):
  """Returns verify lengths: the paper's Algorithm 1, or the best `budget` drafts, in float64."""
  survival = np.minimum.accumulate(np.clip(np.float64(survival), 0, 1), axis=1)
  batch, num_drafts = survival.shape
  is_live = np.ones(batch, bool) if is_live is None else is_live
  most = [min(m, num_drafts) if live else 0 for m, live in
          zip([num_drafts] * batch if max_lens is None else max_lens, is_live, strict=True)]
  lens = [min(n, m) for n, m in zip([0] * batch if min_lens is None else min_lens, most,
                                    strict=True)]
  order = sorted((-survival[b, k], k, b) for b in range(batch) for k in range(lens[b], most[b])
                 if not np.isnan(survival[b, :k + 1]).any())
  if curve is None:
    order = order[:max(budget - sum(lens), 0)]
  expected = sum(is_live) + sum(survival[b, k] for b in range(batch) for k in range(lens[b]))
  tokens = sum(is_live) + sum(lens)
  rate = lambda: expected * curve[tokens] if tokens < len(curve) else 0.0
  for minus_survival, _, b in order:
    before = curve is not None and rate()
    expected, tokens = expected - minus_survival, tokens + 1
    if curve is not None and not rate() > before:
      break
    lens[b] += 1
  return np.array(lens)


def cumulate(confidence):
  return jnp.cumprod(jnp.asarray(confidence, jnp.float32), axis=1)


def curve_from(first, *entries):
  """Returns a step curve whose entry `first` is the first of `entries`."""
  return jnp.asarray((0,) * first + entries, jnp.float32)


@pytest.mark.parametrize("name, survival, rule, expected", [
  # theta: 1 * 1 = 1, then 1.8 * 0.5 = 0.9: stop, whatever c_2 is (paper, appendix A).
  ("appendix A, x_1 = A", cumulate([[0.8, 0.9]]), curve_from(1, 1, 0.5, 0.45), [0]),
  ("appendix A, x_1 = B", cumulate([[0.8, 0.0]]), curve_from(1, 1, 0.5, 0.45), [0]),
  ("B53: 1, 1.6 * 0.55 = 0.88", cumulate([[0.6, 0.95]]), curve_from(1, 1, 0.55, 0.5), [0]),
  ("B54a: a stair stops at once", [[0.9, 0.8, 0.7]], curve_from(1, 1, 0.5, 0.5, 0.5), [0]),
  ("B54b: a flat curve admits all", [[0.9, 0.8, 0.7]], curve_from(1, 1, 1, 1, 1), [3]),
  ("B54c", [[0.9, 0.8, 0.7]], 2, [2]),
  # theta 2, 2.9 * 0.9 = 2.61, 3.5 * 0.75 = 2.625, 3.95 * 0.65 = 2.5675.
  ("B54d", cumulate([[0.9, 0.5], [0.6, 0.6]]), curve_from(2, 1, 0.9, 0.75, 0.65, 0.5), [1, 1]),
  ("B56: the curve ends at 4 tokens", cumulate([[0.5] * 3] * 3), curve_from(1, 1, 0.9, 0.8, 0.7),
   [1, 0, 0]),
  ("the curve ends before the batch", [[1.0]] * 3, curve_from(1, 1.0), [0, 0, 0]),
  ("a rate that only stays is no raise", [[0.5]], curve_from(1, 3, 2), [0]),
  ("survival 0 never raises a falling rate", [[0.0, 0.0]], curve_from(1, 1, 0.9, 0.8), [0]),
  ("a rising curve admits survival 0", [[0.0, 0.0]], curve_from(1, 1, 2, 3), [2]),
  ("ties by position, then by request", [[1.0] * 3] * 3, 5, [2, 2, 1]),
  ("saturated at 0: the same order", [[0.0] * 3] * 3, 4, [2, 1, 1]),
  ("fresh top-K", [[0.9, 0.5, 0.4], [0.8, 0.7, 0.1]], 4, [2, 2]),
  ("no budget", [[0.9]], 0, [0]),
  ("a budget below 0", [[0.9]], -3, [0]),
  ("more budget than drafts", [[0.9, 0.1], [0.3, 0.2]], 99, [2, 2]),
  ("a NaN ends a request", [[0.9, np.nan, 0.9], [0.1, 0.1, 0.1]], 99, [1, 3]),
  ("a prefix is never broken", [[0.1, 0.9], [0.5, 0.2]], 2, [0, 2]),
  ("beyond [0, 1]", [[7.0, -2.0], [1.0, 0.0]], 3, [2, 1]),
])
def test_cases_by_hand(name, survival, rule, expected, implementation):
  survival = jnp.asarray(survival, jnp.float32)
  is_budget = isinstance(rule, int)
  found = select_stretched(survival, **{"budget" if is_budget else "step_curve_C": rule},
                           implementation=implementation)
  assert found.dtype == jnp.int32
  np.testing.assert_array_equal(found, expected, err_msg=name)
  by_hand = select_by_hand(survival, **{"budget" if is_budget else "curve": rule})
  np.testing.assert_array_equal(by_hand, expected, err_msg=f"oracle: {name}")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_dyadic_cases_equal_the_oracle_exactly(data, implementation):
  # Survivals k/16 and curve entries k/64: every sum and product below is exact in float32, so ties
  # of survival and of rate are real ties.
  batch, num_drafts = data.draw(st.sampled_from([(1, 5), (3, 4), (6, 2)]))
  draw = lambda low, high, size: np.array(
    data.draw(st.lists(st.integers(low, high), min_size=size, max_size=size)))
  survival = np.float32(draw(0, 16, batch * num_drafts).reshape(batch, num_drafts) / 16)
  options = {"is_live": draw(0, 3, batch) > 0, "min_lens": draw(0, 1, batch),
             "max_lens": draw(0, num_drafts + 1, batch)}
  num_entries = batch * (num_drafts + 1) + 1
  curve = np.float32(draw(40, 64, num_entries)[::-1] / 64)
  if data.draw(st.booleans()):
    curve = np.sort(curve)[::-1].copy()
  budget = data.draw(st.integers(0, num_entries))
  for rule in ({"curve": curve}, {"budget": budget}):
    found = select(survival, **{"step_curve_C" if k == "curve" else k: v for k, v in rule.items()},
                   **{f"{k}_B": jnp.asarray(v) for k, v in options.items()},
                   implementation=implementation)
    np.testing.assert_array_equal(found, select_by_hand(survival, **rule, **options))


def test_a_total_beyond_the_curve_is_never_used(implementation):
  survival = jnp.full((3, 2), 0.5)
  for entries, expected in ((3, [0, 0, 0]), (4, [0, 0, 0]), (5, [1, 0, 0]), (6, [1, 1, 0])):
    found = select(survival, step_curve_C=jnp.ones(entries), implementation=implementation)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("is_dyadic", [True, False])
def test_the_largest_batch_equals_the_reference(is_dyadic, implementation):
  # 512 requests of 16 drafts, where sums are no longer exact: the order of adding is the same.
  rng = np.random.default_rng(0)
  survival = np.cumprod(rng.beta(8, 1, (512, 16)), axis=1)
  survival = np.float32(np.round(survival * 16) / 16 if is_dyadic else survival)
  curve = np.float32(1 / (1 + np.maximum(np.arange(8705) - 512, 0) / 1024))
  for rule in ({"step_curve_C": curve}, {"budget": 3000}):
    found = np.asarray(select(survival, **rule, implementation=implementation))
    expected = np.asarray(select(survival, **rule, implementation="reference"))
    np.testing.assert_array_equal(found, expected)
    by_hand = select_by_hand(survival, curve=rule.get("step_curve_C"), budget=rule.get("budget"))
    # float32 may stop at another of the path's last drafts, where rates differ by rounding alone.
    assert 1000 < found.sum() and abs(int(found.sum()) - int(by_hand.sum())) < 20
    if "budget" in rule:
      np.testing.assert_array_equal(found, by_hand)


def test_bad_arguments_are_refused_by_name(implementation):
  del implementation
  survival, curve = jnp.ones((2, 3)), jnp.ones(9)
  for args, kwargs, message in (
    ((survival,), {}, "both or neither of step_curve and budget"),
    ((survival,), {"step_curve_C": curve, "budget": 3}, "both or neither"),
    ((survival[0],), {"budget": 3}, "survival: found float32"),
    ((survival.astype(jnp.bfloat16),), {"budget": 3}, "survival: found bfloat16"),
    ((survival,), {"step_curve_C": curve[:0]}, "step_curve: found float32"),
    ((survival,), {"budget": jnp.ones(2, jnp.int32)}, "budget: found shape"),
    ((survival,), {"budget": 3, "max_lens_B": jnp.ones(3, jnp.int32)}, "max_lens: found shape"),
  ):
    with pytest.raises(ValueError, match=message):
      length_selection(*args, **kwargs, implementation="auto")
