"""The step curve: measured milliseconds of a round by the tokens it verifies.

Verification runs in buckets (`ladder`), so the measured time is a staircase over a few
shapes (tokens, rows). Two views of it serve two policies: a search over the shapes themselves, and,
for a rule that stops at the first step that does not pay, a smoothed curve. A staircase would
stop such a rule before its first draft, because the first token of a new stair already pays for all
of it. The smoothed curve is the greatest convex, rising curve below the measured milliseconds: it
touches the staircase at the full end of buckets, and charges each token its share of the next one.
(As tokens over time that is the least concave curve above the measured one. The concave envelope of
steps per second itself would not do: where time grows linearly, 1 / time is convex, and its chord
makes long rounds look cheap.)

Drafting costs by the drafts that are drawn, and a shape has room for `rows - 1` of a request: each
shape comes with the draft time of that many, and each draft length with its own smoothed curve.
"""

import dataclasses
import warnings

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.ladder import Ladder, draft_lens

FLAT = 1.02  # largest over smallest time, up to which a curve says nothing


@flax.struct.dataclass
class StepCurve:
  """The curve on the device.

  Attributes:
    verify_ms_N: float32, milliseconds of a verify pass in each shape of the ladder.
    draft_ms_D: float32, milliseconds of drafting nothing (0), and each of `ladder.draft_lens`, for
      the whole batch.
    steps_per_ms_DxC: float32, rounds per smoothed millisecond, drafting included, by draft length
      and number of verified tokens (0..largest bucket; column 0 is not used).
  """
  verify_ms_N: jax.Array
  draft_ms_D: jax.Array
  steps_per_ms_DxC: jax.Array


@dataclasses.dataclass(frozen=True)
class Timings:
  """Measured milliseconds for one batch size.

  `verify_ms` has one number a shape of `ladder`, `draft_ms` one a length of `ladder.draft_lens`.
  """
  ladder: Ladder
  verify_ms: tuple[float, ...]
  draft_ms: tuple[float, ...]

  def __post_init__(self):
    if len(self.verify_ms) != len(self.ladder):
      raise ValueError(f"verify_ms: found {len(self.verify_ms)} numbers, expected one for each of "
                       f"the {len(self.ladder)} buckets")
    for tokens_rows, ms in zip(self.ladder, self.verify_ms):
      if not (np.isfinite(ms) and ms > 0):
        raise ValueError(f"verify_ms of bucket {tokens_rows}: found {ms}, expected a number > 0")
    lens = draft_lens(self.ladder)
    if len(self.draft_ms) != len(lens):
      raise ValueError(f"draft_ms: found {len(self.draft_ms)} numbers, expected one for each of "
                       f"{lens} drafts")
    for num_drafts, ms in zip(lens, self.draft_ms):
      if not (np.isfinite(ms) and ms >= 0):
        raise ValueError(f"draft_ms of {num_drafts} drafts: found {ms}, expected a number >= 0")


def make_step_curve(timings: Timings) -> StepCurve:
  """Puts timings on the device; warns where they are flat, since then every draft is free."""
  if len(timings.verify_ms) > 1 and max(timings.verify_ms) <= FLAT * min(timings.verify_ms):
    warnings.warn("step curve: the time of a verify pass does not grow with its tokens "
                  f"(all within {FLAT:g}x), so the scheduler will verify all it may", stacklevel=2)
  draft_ms = (0.0, *timings.draft_ms)
  steps_DxC = [1.0 / (ms + smooth(spread_stairs(timings, num_drafts=num_drafts)))
               for ms, num_drafts in zip(draft_ms, (0, *draft_lens(timings.ladder)))]
  return StepCurve(verify_ms_N=jnp.asarray(timings.verify_ms, jnp.float32),
                   draft_ms_D=jnp.asarray(draft_ms, jnp.float32),
                   steps_per_ms_DxC=jnp.asarray(steps_DxC, jnp.float32))


def spread_stairs(timings: Timings, *, num_drafts: int) -> np.ndarray:
  """Returns float64 [C] milliseconds for 0..largest bucket tokens, at most `num_drafts` a request.

  Each total counts the first shape that holds it however it is split, or without any drafts.
  """
  def find_ms(total):
    widest = min(num_drafts + 1, total)
    return next(ms for (tokens, rows), ms in zip(timings.ladder, timings.verify_ms)
                if tokens >= total and (rows >= widest or rows == 1))
  return np.array([find_ms(n) for n in range(timings.ladder[-1][0] + 1)], np.float64)


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
