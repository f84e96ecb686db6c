"""What an evaluation tells of a drafter: the public reference's columns, from counts by answer."""

import dataclasses
from typing import Any, Mapping, Sequence

import numpy as np

from dspark_jax.metrics.acceptance import Acceptance, measure_acceptance
from dspark_jax.metrics.intervals import Estimate, estimate, resample_ratio
from dspark_jax.metrics.reliability import Reliability, compute_survival, measure_reliability
from dspark_jax.metrics.tables import format_rows, show


@dataclasses.dataclass(frozen=True)
class Counts:
  """The rounds of one answer; JSON-able by `dataclasses.asdict`.

  Attributes:
    num_tokens: of the answer, that of the prefill included.
    num_rounds, num_committed: rounds, and the tokens they committed.
    verified_G: rounds that verified draft k.
    reached_G: of which those that accepted all drafts before it.
    accepted_G: of which those that accepted it too.
  """
  num_tokens: int
  num_rounds: int
  num_committed: int
  verified_G: list[int]
  reached_G: list[int]
  accepted_G: list[int]


def count_rounds(num_tokens: int, *, verify_lens_N, num_accepted_N, num_new_N,
                 proposal_len: int) -> Counts:
  """Counts the rounds of one answer: drafts verified, accepted, tokens committed by each."""
  position_1xG = np.arange(proposal_len)[None]
  verified_N, accepted_N = (np.asarray(x)[:, None] for x in (verify_lens_N, num_accepted_N))
  is_verified_NxG = position_1xG < verified_N
  count = lambda is_NxG: is_NxG.sum(axis=0).tolist()
  return Counts(
      num_tokens=num_tokens, num_rounds=len(verified_N), num_committed=int(np.sum(num_new_N)),
      verified_G=count(is_verified_NxG),
      reached_G=count(is_verified_NxG & (position_1xG <= accepted_N)),
      accepted_G=count(is_verified_NxG & (position_1xG < accepted_N)))


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Answers to one set of prompts.

  Attributes:
    acceptance: of all rounds. `accepted_len` is tau, `verify_len` the reference's proposal length
      without the "+1", `accept_rate` its accept rate by position.
    accepted_len: tau with its interval over prompts.
    verify_rate: the reference's: tokens committed among rows that the target read,
      tau / (verify_len + 1). (`acceptance.verify_rate` is accepted among verified drafts.)
    conditional_rate: for each draft position, accepted among the verified ones with all before it
      accepted (paper figure 2); None where there is none.
    num_answers, num_tokens: answers and their tokens.
    seconds: of decoding. tokens_per_s, rounds_per_s: of what was decoded in it, prefill included.
  """
  acceptance: Acceptance
  accepted_len: Estimate
  verify_rate: float
  conditional_rate: list[float | None]
  num_answers: int
  num_tokens: int
  seconds: float
  tokens_per_s: float
  rounds_per_s: float


def evaluate_counts(counts: Sequence[Counts], *, seconds: float, num_decoded: int,
                    seed: int = 0) -> Evaluation:
  """Pools answers: ratios of sums. `num_decoded` tokens were decoded in `seconds`."""
  rounds, committed = ([getattr(c, name) for c in counts] for name in
                       ("num_rounds", "num_committed"))
  reached_G, accepted_G = (np.sum([getattr(c, name) for c in counts], axis=0, dtype=int)
                           for name in ("reached_G", "accepted_G"))
  acceptance = measure_acceptance(rounds, committed,
                                  num_verified_xG=[c.verified_G for c in counts],
                                  num_accepted_xG=[c.accepted_G for c in counts])
  interval = Estimate(0.0, None, None)
  if acceptance.num_rounds:
    interval = estimate(resample_ratio(committed, rounds, seed=seed), num_prompts=len(counts))
  return Evaluation(
      acceptance=acceptance, accepted_len=interval,
      verify_rate=acceptance.accepted_len / (acceptance.verify_len + 1),
      conditional_rate=[int(a) / int(n) if n else None for a, n in zip(accepted_G, reached_G)],
      num_answers=len(counts), num_tokens=sum(c.num_tokens for c in counts), seconds=seconds,
      tokens_per_s=num_decoded / seconds, rounds_per_s=acceptance.num_rounds / seconds)


def measure_positions(logits_NxG, verify_lens_N, num_accepted_N) -> list[Reliability]:
  """Returns for each draft position how reliable its raw survival is, over verified drafts."""
  survival_NxG = compute_survival(logits_NxG, np.ones(np.shape(logits_NxG)[1]))
  verified_N, accepted_N = np.asarray(verify_lens_N), np.asarray(num_accepted_N)
  return [measure_reliability(survival_NxG[verified_N > k, k], accepted_N[verified_N > k] > k)
          for k in range(survival_NxG.shape[1])]


def format_evaluations(evaluations: Mapping[str, Evaluation]) -> str:
  """Returns a table for a terminal, one row a data set."""
  rows = [("data set", "proposal", "tau", "95% interval", "verify rate", "answers", "tokens",
           "tok/s", "rounds/s", "accept rate by position")]
  for name, e in evaluations.items():
    tau = e.accepted_len
    rows.append((
        name, f"{e.acceptance.verify_len:.2f}+1", f"{tau.value:.2f}",
        "-" if tau.low is None else f"{tau.low:.2f}-{tau.high:.2f}", f"{e.verify_rate:.4f}",
        str(e.num_answers), str(e.num_tokens), f"{e.tokens_per_s:.2f}", f"{e.rounds_per_s:.2f}",
        " ".join(show(rate, 4) for rate in e.acceptance.accept_rate) or "-"))
  return format_rows(rows, left=(0, -1))


def format_positions(title: str, positions: Sequence[Reliability]) -> str:
  """Returns a table for a terminal of `measure_positions`, and the means weighted by drafts."""
  names = ("ece", "auroc", "brier", "mean_predicted", "mean_outcome")
  rows = [(title, "drafts", "ECE", "AUROC", "Brier", "predicted", "accepted")]
  rows += [(f"draft {k + 1}", str(p.num), *(show(getattr(p, name), 4) for name in names))
           for k, p in enumerate(positions)]
  means = mean_positions(positions)
  rows.append(("mean", str(sum(p.num for p in positions)),
               *(show(means[name], 4) for name in names)))
  return format_rows(rows)


def mean_positions(positions: Sequence[Reliability]) -> dict[str, Any]:
  """Returns each figure's mean over positions, weighted by their drafts; None without any."""
  means = {}
  for name in ("ece", "auroc", "brier", "mean_predicted", "mean_outcome"):
    known = [(getattr(p, name), p.num) for p in positions if getattr(p, name) is not None]
    means[name] = sum(v * n for v, n in known) / sum(n for _, n in known) if known else None
  return means
