"""Intervals over prompts, by bootstrap: how far a figure would move with other prompts.

Figures here are ratios of sums over prompts (tokens a round, tokens a second), so whole prompts are
drawn, with all their rounds: rounds of one answer are alike, and drawing rounds would promise too
much. Source: Efron 1979; percentile intervals.
"""

import dataclasses

import numpy as np

NUM_SAMPLES = 2000
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A figure and its interval; `low` and `high` are None where one prompt is all there is."""
  value: float
  low: float | None
  high: float | None

  def __str__(self):
    if self.low is None:
      return f"{self.value:.2f}"
    return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def resample_ratio(numerator_N, denominator_N, *, seed: int = 0,
                   num_samples: int = NUM_SAMPLES) -> np.ndarray:
  """Returns float64 [1 + num_samples]: sum / sum of all N prompts, then of N drawn from them.

  Two methods on the same prompts with the same seed draw the same prompts, so that the ratio of
  their arrays is paired. NaN where a draw has nothing to divide by.
  """
  numerator_N, denominator_N = (np.asarray(x, np.float64) for x in (numerator_N, denominator_N))
  num = len(numerator_N)
  if not num or numerator_N.shape != (num,) or denominator_N.shape != (num,):
    raise ValueError(f"prompts: found shapes {numerator_N.shape} and {denominator_N.shape}, "
                     "expected one number a prompt in both")
  times_SxN = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), num_samples)
  times_SxN = np.concatenate([np.ones((1, num), int), times_SxN])
  below_S = times_SxN @ denominator_N
  return np.where(below_S > 0, times_SxN @ numerator_N / np.where(below_S > 0, below_S, 1), np.nan)


def estimate(samples_S: np.ndarray, *, num_prompts: int, level: float = LEVEL) -> Estimate:
  """Returns the first of `samples_S` with the percentile interval of the others."""
  value, drawn_S = float(samples_S[0]), samples_S[1:][np.isfinite(samples_S[1:])]
  if num_prompts < 2 or not len(drawn_S):
    return Estimate(value, None, None)
  low, high = np.quantile(drawn_S, [(1 - level) / 2, (1 + level) / 2])
  return Estimate(value, float(low), float(high))
