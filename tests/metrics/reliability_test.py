import numpy as np
import pytest

from dspark_jax.metrics.reliability import make_diagram, measure_reliability


def test_by_hand():
  """Bins of 0.5: {.2, .4} happened 0, 1; {.5, 1} happened 1, 1. Gaps |.3 - .5|, |.75 - 1|."""
  found = measure_reliability([.2, .4, .5, 1.0], [0, 1, 1, 1], num_bins=2)
  assert found.ece == pytest.approx((2 * .2 + 2 * .25) / 4)
  assert found.brier == pytest.approx((.04 + .36 + .25 + 0) / 4)
  assert found.auroc == 1.0 and found.num == 4
  assert make_diagram([.2, .4, .5, 1.0], [0, 1, 1, 1], num_bins=2) == [
      (pytest.approx(.3), .5, 2), (.75, 1.0, 2)]


def test_auroc_counts_pairs():
  rng = np.random.default_rng(0)
  predicted, outcome = rng.choice([.1, .3, .5, .9], 60), rng.random(60) < .4
  pairs = [(p > q) + (p == q) / 2 for p in predicted[outcome] for q in predicted[~outcome]]
  assert measure_reliability(predicted, outcome).auroc == pytest.approx(np.mean(pairs))


def test_b51_tiny_data():
  """One record: ECE 0.7; AUROC missing, not 0.5. None: everything missing."""
  one = measure_reliability([.3], [True], num_bins=20)
  assert one.ece == pytest.approx(.7) and one.auroc is None and one.num == 1
  none = measure_reliability([], [])
  assert none.num == 0 and none.ece is None and none.brier is None and none.auroc is None
  assert make_diagram([], []) == []


@pytest.mark.parametrize("predicted, outcome, name", [
    ([.5, 1.2], [0, 1], "outside"), ([.5, np.nan], [0, 1], "outside"), ([.5], [0, 1], "shape")])
def test_bad_input(predicted, outcome, name):
  with pytest.raises(ValueError, match=name):
    measure_reliability(predicted, outcome)
