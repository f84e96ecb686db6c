"""The step curve: staircase, envelope, what is refused and what is warned about."""

import warnings

import numpy as np
import pytest

from dspark_jax.scheduler.step_curve import Timings, make_step_curve, smooth, spread_stairs
from tests.scheduler import oracle

LADDER = ((2, 1), (4, 4), (8, 3), (8, 4))


def test_stairs():
  """Totals 0..2 run in the first bucket, 3..4 in the second, 5..8 in the wider of the two of 8,
  unless no request may have 4 rows."""
  timings = Timings(LADDER, (10.0, 12.0, 14.0, 15.0), (1.0, 1.5))
  np.testing.assert_array_equal(spread_stairs(timings, num_drafts=3),
                                [10] * 3 + [12] * 2 + [15] * 4)
  np.testing.assert_array_equal(spread_stairs(timings, num_drafts=2),
                                [10] * 3 + [12] * 2 + [14] * 4)


@pytest.mark.parametrize("ms", [
    [9, 1, 2, 2, 2],  # fault B54's staircase: chord from 1 to 2
    [9, 1, 1.1, 1.3, 2], [9, 1, 1, 1], [9, 1], [9, 2, 1.5, 3, 2.5, 9],
    list(np.random.default_rng(0).uniform(1, 3, 17)), [9] + [1] * 8 + [2] * 8 + [2.5] * 8])
def test_envelope_is_the_lowest_chord(ms):
  found = smooth(np.array(ms, np.float64))
  np.testing.assert_allclose(found[1:], oracle.find_envelope(ms)[1:], rtol=1e-12)
  assert (found <= ms)[1:].all()
  slopes = np.diff(found[1:])
  assert (slopes >= -1e-12).all() and (np.diff(slopes) >= -1e-12).all()


def test_curve_on_the_device():
  curve = make_step_curve(Timings(((1, 1), (2, 2), (4, 4)), (1.0, 2.0, 2.0), (.5, 1.0)))
  np.testing.assert_array_equal(curve.verify_ms_N, np.float32([1, 2, 2]))
  np.testing.assert_array_equal(curve.draft_ms_D, np.float32([0, .5, 1]))
  # Milliseconds 1, 2, 2, 2 at 1..4 tokens; the chord from 1 to 4, and 1 for drafting in full.
  np.testing.assert_allclose(curve.steps_per_ms_DxC[:, 1:], 1 / np.array(
      [[1, 4 / 3, 5 / 3, 2], [3 / 2, 11 / 6, 13 / 6, 5 / 2], [2, 7 / 3, 8 / 3, 3]]), rtol=1e-6)


def test_linear_time_stays_as_it_is():
  """Where every token costs the same the smoothed curve is the measured one."""
  ms = 2.0 + np.arange(20)
  np.testing.assert_array_equal(smooth(ms)[1:], ms[1:])


@pytest.mark.parametrize("ms, draft_ms, name", [
    ((1.0, 2.0), (1.0, 1.0), "verify_ms: found 2 numbers"),
    ((1.0, 2.0, np.nan, 3.0), (1.0, 1.0), "found nan"),
    ((1.0, 0.0, 1.0, 3.0), (1.0, 1.0), r"bucket \(4, 4\): found 0.0"),
    ((1.0, 2.0, 3.0, 4.0), (1.0,), r"draft_ms: found 1 numbers, expected .* \(2, 3\) drafts"),
    ((1.0, 2.0, 3.0, 4.0), (1.0, -1.0), "draft_ms of 3 drafts: found -1.0")])
def test_bad_timings_are_named(ms, draft_ms, name):
  with pytest.raises(ValueError, match=name):
    Timings(LADDER, ms, draft_ms)


def test_a_flat_curve_is_told():
  """Fault B54 (b): with a table that is flat every draft looks free."""
  with pytest.warns(UserWarning, match="does not grow with its tokens"):
    make_step_curve(Timings(LADDER, (10.0, 10.1, 10.0, 10.05), (1.0, 1.0)))
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    make_step_curve(Timings(LADDER, (10.0, 10.1, 10.0, 12.0), (1.0, 1.0)))
    make_step_curve(Timings(((1, 1),), (10.0,), ()))
