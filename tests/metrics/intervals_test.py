import numpy as np
import pytest

from dspark_jax.metrics.intervals import Estimate, estimate, resample_ratio


def test_first_is_the_ratio_of_sums():
  samples = resample_ratio([6, 2], [2, 2], num_samples=50)
  assert samples.shape == (51,) and samples[0] == 2.0  # the mean of ratios would be the same,
  assert resample_ratio([6, 2], [1, 4], num_samples=1)[0] == 8 / 5  # here it would be 3.25
  # Of two prompts a draw is one twice, or both.
  assert set(samples) == {1.0, 2.0, 3.0}


def test_interval_covers_the_truth():
  """100 repeats of 40 prompts with rounds 10..40 and tau 3 + noise: the interval holds the true
  ratio in about 95 of them; a bootstrap of the wrong unit (rounds as if independent) would be five
  times too narrow and hold it in about 30."""
  hits = 0
  for repeat in range(100):
    rng = np.random.default_rng(repeat)
    rounds = rng.integers(10, 41, 40)
    tokens = rounds * (3 + rng.normal(size=40))
    found = estimate(resample_ratio(tokens, rounds, num_samples=400, seed=repeat), num_prompts=40)
    hits += found.low <= 3 <= found.high
    assert found.low < found.value < found.high
  assert 85 <= hits <= 100  # 95 +- 4.6 standard deviations of 2.2


def test_pairs_share_their_draws():
  """Twice the tokens on every prompt is a ratio of exactly 2 in every draw."""
  rng = np.random.default_rng(0)
  tokens, rounds = rng.integers(1, 90, 12), rng.integers(1, 30, 12)
  lead = resample_ratio(2 * tokens, rounds, seed=3) / resample_ratio(tokens, rounds, seed=3)
  np.testing.assert_allclose(lead, 2.0)
  assert estimate(lead, num_prompts=12).low == pytest.approx(2.0)


def test_one_prompt_has_no_interval():
  found = estimate(resample_ratio([5], [2]), num_prompts=1)
  assert found == Estimate(2.5, None, None) and str(found) == "2.50"
  assert str(Estimate(2.5, 2.25, 3.0)) == "2.50 [2.25, 3.00]"


def test_prompts_without_a_round():
  """An answer of one token has no round; a draw of such prompts alone has nothing to divide by."""
  samples = resample_ratio([0, 6], [0, 2], num_samples=200)
  assert np.isnan(samples).any() and samples[0] == 3.0
  assert estimate(samples, num_prompts=2) == Estimate(3.0, 3.0, 3.0)


@pytest.mark.parametrize("numerator, denominator", [([], []), ([1, 2], [1]), ([[1]], [[1]])])
def test_bad_input(numerator, denominator):
  with pytest.raises(ValueError, match="one number a prompt"):
    resample_ratio(numerator, denominator)
