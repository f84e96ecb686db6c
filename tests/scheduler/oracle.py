"""Schedules in NumPy float64, by the paper's text and by brute force; imports nothing of ours."""

import itertools

import numpy as np


def expected_tokens(survival, lens):
  """Live requests + survivals of the first `lens` drafts of each."""
  return len(survival) + sum(row[:n].sum() for row, n in zip(np.asarray(survival), lens))


def run_algorithm_1(survival, steps, *, min_lens=None, max_lens=None):
  """Verify lengths by Algorithm 1: admit by falling survival, stop at the first fall of Theta.

  `steps[c]` is the steps per second of c tokens; totals beyond the table are never used.
  """
  survival = np.minimum.accumulate(np.asarray(survival, np.float64), axis=1)
  num_requests, num_drafts = survival.shape
  lens = [0] * num_requests if min_lens is None else list(min_lens)
  most = [num_drafts] * num_requests if max_lens is None else list(max_lens)
  candidates = sorted((-survival[r, k], k, r) for r in range(num_requests)
                      for k in range(lens[r], most[r]))
  rate = lambda: expected_tokens(survival, lens) * (
      steps[num_requests + sum(lens)] if num_requests + sum(lens) < len(steps) else 0.0)
  best = rate()
  for _, _, r in candidates:
    lens[r] += 1
    if rate() <= best:
      lens[r] -= 1
      break
    best = rate()
  return lens


def find_best_rate(survival, cost_ms, *, min_lens=None, max_lens=None):
  """Returns the highest expected tokens per millisecond over all verify lengths.

  `cost_ms(lens)` is the time of a round, inf where it is impossible.
  """
  num_requests, num_drafts = np.shape(survival)
  low = [0] * num_requests if min_lens is None else min_lens
  high = [num_drafts] * num_requests if max_lens is None else max_lens
  return max(expected_tokens(survival, lens) / cost_ms(lens)
             for lens in itertools.product(*(range(a, b + 1) for a, b in zip(low, high))))


def run_staircase(ladder, verify_ms, draft_ms):
  """Returns the cost function of a ladder of (tokens, rows): the cheapest bucket that fits.

  `draft_ms` maps rows - 1 to the milliseconds of drafting so much.
  """
  draft_ms = {0: 0.0} | draft_ms
  def cost_ms(lens):
    return min((ms + draft_ms[rows - 1] for (tokens, rows), ms in zip(ladder, verify_ms)
                if tokens >= len(lens) + sum(lens) and rows >= 1 + max(lens)), default=np.inf)
  return cost_ms


def find_envelope(ms):
  """Greatest convex rising curve below ms[1:], from its definition: the lowest of all chords."""
  ms = np.asarray(ms, np.float64)
  rising = np.array([ms[c:].min() for c in range(len(ms))])
  found = rising.copy()
  for c in range(1, len(ms)):
    for a in range(1, c + 1):
      for b in range(c, len(ms)):
        if a < b:
          chord = rising[a] + (rising[b] - rising[a]) * (c - a) / (b - a)
          found[c] = min(found[c], chord)
  return found
