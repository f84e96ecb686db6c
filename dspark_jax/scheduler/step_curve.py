"""The step curve: measured milliseconds of a round by the tokens it verifies.

Verification runs in buckets (`verification.pack`), so the measured time is a staircase over a few
shapes (tokens, rows). Two views of it serve two policies: a search over the shapes themselves, and,
for a rule that stops at the first step that does not pay, a smoothed curve. A staircase would
stop such a rule before its first draft, because the first token of a new stair already pays for all
of it. The smoothed curve is the greatest convex, rising curve below the measured milliseconds: it
touches the staircase at the full end of buckets, and charges each token its share of the next one.
(As tokens over time that is the least concave curve above the measured one. The concave envelope of
steps per second itself would not do: where time grows linearly, 1 / time is convex, and its chord
makes long rounds look cheap.)
"""

import dataclasses
import warnings

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Ladder = tuple[tuple[int, int], ...]  # shapes (tokens of the packed row, rows a request may have)
FLAT = 1.02  # largest over smallest time, up to which a curve says nothing


@flax.struct.dataclass
class StepCurve:
  """The curve on the device.

  Attributes:
    verify_ms_N: float32, milliseconds of a verify pass in each shape of the ladder.
    draft_ms: float32 [], milliseconds of drafting the full block for the whole batch.
    steps_per_ms_C: float32, rounds per smoothed millisecond, drafting included, by the number of
      verified tokens (0..largest bucket; entry 0 is not used).
  """
  verify_ms_N: jax.Array
  draft_ms: jax.Array
  steps_per_ms_C: jax.Array


@dataclasses.dataclass(frozen=True)
class Timings:
  """Measured milliseconds for one batch size; `verify_ms` has one number a shape of `ladder`."""
  ladder: Ladder
  verify_ms: tuple[float, ...]
  draft_ms: float

  def __post_init__(self):
    if len(self.verify_ms) != len(self.ladder):
      raise ValueError(f"verify_ms: found {len(self.verify_ms)} numbers, expected one for each of "
                       f"the {len(self.ladder)} buckets")
    for tokens_rows, ms in zip(self.ladder, self.verify_ms):
      if not (np.isfinite(ms) and ms > 0):
        raise ValueError(f"verify_ms of bucket {tokens_rows}: found {ms}, expected a number > 0")
    if not (np.isfinite(self.draft_ms) and self.draft_ms >= 0):
      raise ValueError(f"draft_ms: found {self.draft_ms}, expected a number >= 0")


def make_step_curve(timings: Timings) -> StepCurve:
  """Puts timings on the device; warns where they are flat, since then every draft is free."""
  if len(timings.verify_ms) > 1 and max(timings.verify_ms) <= FLAT * min(timings.verify_ms):
    warnings.warn("step curve: the time of a verify pass does not grow with its tokens "
                  f"(all within {FLAT:g}x), so the scheduler will verify all it may", stacklevel=2)
  steps_C = 1.0 / (timings.draft_ms + smooth(spread_stairs(timings)))
  return StepCurve(verify_ms_N=jnp.asarray(timings.verify_ms, jnp.float32),
                   draft_ms=jnp.float32(timings.draft_ms),
                   steps_per_ms_C=jnp.asarray(steps_C, jnp.float32))


def spread_stairs(timings: Timings) -> np.ndarray:
  """Returns float64 [C] milliseconds for 0..largest bucket tokens: each total's own bucket's.

  Where buckets differ in rows alone, the widest counts, which holds any split of the tokens.
  """
  widest = {}
  for (tokens, rows), ms in zip(timings.ladder, timings.verify_ms):
    if tokens not in widest or rows >= widest[tokens][0]:
      widest[tokens] = rows, ms
  ms_C = np.empty(max(widest) + 1)
  for tokens in sorted(widest, reverse=True):
    ms_C[:tokens + 1] = widest[tokens][1]
  return ms_C


def smooth(ms_C: np.ndarray) -> np.ndarray:
  """Returns the greatest convex, rising curve below times by tokens; entry 0 is that of 1 token.

  Expected tokens are concave along the order of admission; divided by a convex time they have one
  peak, so stopping at the first step down stops at the top.
  """
  # More tokens never run faster: a bucket that was measured faster than a smaller one shows noise,
  # and the smaller total could have run in it.
  rising_C = np.minimum.accumulate(np.asarray(ms_C, np.float64)[::-1])[::-1]
  hull = [min(1, len(rising_C) - 1)]
  slope = lambda a, b: (rising_C[b] - rising_C[a]) / (b - a)
  for c in range(2, len(rising_C)):
    while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-1], c):
      hull.pop()
    hull.append(c)
  smoothed_C = np.interp(np.arange(len(rising_C)), hull, rising_C[hull])
  return np.minimum(smoothed_C, rising_C)  # not above by a rounding error where they touch
