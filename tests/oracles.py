"""Right answers in NumPy float64, written from the mathematics; imports nothing of ours."""

import functools
import itertools

import numpy as np
from scipy import stats


def compute_law(
  logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, vocab_limit=None
):
  """Returns the sampling law of one row of logits, float64 [V].

  Temperature, then top-k, top-p, min-p; order of tokens (logit descending, id ascending).
  """
  logits = np.asarray(logits, np.float64)
  logits = np.where(np.arange(len(logits)) < (vocab_limit or len(logits)), logits, -np.inf)
  order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
  if temperature == 0:
    return np.eye(len(logits))[order[0]]
  with np.errstate(over="ignore"):
    weights = np.exp((logits - logits.max()) / temperature)
  kept = order[:top_k] if top_k else order
  if top_p < 1:
    goal, mass, nucleus = top_p * weights[kept].sum(), 0.0, []
    for v in kept:
      nucleus.append(v)
      mass += weights[v]
      if mass >= goal:
        break
    kept = nucleus
  best = max(weights[v] for v in kept)
  kept = [v for v in kept if weights[v] >= min_p * best]
  law = np.zeros(len(logits))
  law[kept] = weights[kept]
  return law / law.sum()


def compute_residual(p, q):
  """Returns max(p - q, 0) normalised, or p where nothing is left."""
  rest = np.maximum(np.asarray(p, np.float64) - q, 0.0)
  return rest / rest.sum() if rest.sum() > 1e-8 else np.asarray(p, np.float64)


def compute_accept_rate(p, q):
  """Returns the probability that a draft from q is accepted: sum min(p, q) = 1 - TV."""
  return np.minimum(p, q).sum()


def compute_sequence_law(target, num_tokens, vocab):
  """Returns the law of the first tokens of plain sampling, float64 [vocab] * num_tokens.

  `target(prefix)` is the law of the token after the tuple `prefix`.
  """
  law = np.zeros((vocab,) * num_tokens)
  for tokens in itertools.product(range(vocab), repeat=num_tokens):
    law[tokens] = np.prod([target(tokens[:i])[tokens[i]] for i in range(num_tokens)])
  return law


def compute_speculative_law(target, drafter, verify_len, *, num_tokens, num_drafts, vocab):
  """Returns the law of the first tokens of speculative decoding by enumerating every event.

  `target(prefix)` and `drafter(prefix)` are laws [vocab]; `verify_len(prefix, drafts)` is the
  number of the `num_drafts` drafts verified after `prefix`. It may look at any draft, which is how
  a scheduler that peeks shows its bias here.
  """

  @functools.cache
  def continue_from(prefix):
    """Returns {sequence of num_tokens: probability} given that `prefix` was committed."""
    if len(prefix) >= num_tokens:
      return {prefix[:num_tokens]: 1.0}
    found = {}

    def commit(tokens, weight):
      for sequence, p in continue_from(prefix + tokens).items():
        found[sequence] = found.get(sequence, 0.0) + weight * p

    for drafts in itertools.product(range(vocab), repeat=num_drafts):
      weight = np.prod([drafter(prefix + drafts[:k])[drafts[k]] for k in range(num_drafts)])
      if weight == 0:
        continue
      length = verify_len(prefix, drafts)
      for k in range(length):
        p, q = target(prefix + drafts[:k]), drafter(prefix + drafts[:k])
        accept = min(1.0, p[drafts[k]] / q[drafts[k]])
        for token, r in enumerate(compute_residual(p, q)):
          if r * (1 - accept) > 0:
            commit(drafts[:k] + (token,), weight * (1 - accept) * r)
        weight *= accept
      for token, r in enumerate(target(prefix + drafts[:length])):
        if weight * r > 0:
          commit(drafts[:length] + (token,), weight * r)
    return found

  law = np.zeros((vocab,) * num_tokens)
  for sequence, p in continue_from(()).items():
    law[sequence] = p
  return law


def compute_p_value(counts, law):
  """Returns the chi-square p-value of `counts` under `law`, arrays of one shape.

  It is 0 if anything of probability 0 was counted. Cells expecting fewer than 5 are pooled, so that
  the chi-square approximation holds.
  """
  counts, law = np.asarray(counts, np.float64).ravel(), np.asarray(law, np.float64).ravel()
  if counts[law == 0].sum() > 0:
    return 0.0
  expected = law * counts.sum()
  is_small = expected < 5
  counts = np.append(counts[~is_small], counts[is_small].sum())
  expected = np.append(expected[~is_small], expected[is_small].sum())
  counts, expected = counts[expected > 0], expected[expected > 0]
  if len(counts) < 2:
    return 1.0
  return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))
