"""Drafters compared on the same prompts: the paper's table 1, and leads with their intervals."""

import dataclasses
from typing import Any, Mapping, Sequence

import numpy as np

from dspark_jax.metrics.evaluation import Counts, Evaluation, evaluate_counts
from dspark_jax.metrics.intervals import Estimate, estimate, resample_ratio
from dspark_jax.metrics.tables import format_rows, show

MACRO = "macro"  # the mean over domains, in the place of a domain


@dataclasses.dataclass(frozen=True)
class Cell:
  """One drafter's answers to the prompts of one domain; `num_decoded` tokens in `seconds`."""
  counts: list[Counts]
  seconds: float
  num_decoded: int

  def evaluate(self, seed: int = 0) -> Evaluation:
    return evaluate_counts(self.counts, seconds=self.seconds, num_decoded=self.num_decoded,
                           seed=seed)


Cells = Mapping[str, Cell]  # domain -> cell


def sample_tau(cells: Cells, *, seed: int = 0) -> np.ndarray:
  """Returns [1 + S]: the mean of the domains' tau, and of S draws of prompts in each domain.

  Domains weigh the same, however long their answers are. Two drafters on the same prompts draw the
  same ones.
  """
  taus = [resample_ratio([c.num_committed for c in cell.counts],
                         [c.num_rounds for c in cell.counts], seed=seed + d)
          for d, cell in enumerate(cells.values())]
  return np.mean(taus, axis=0)


def estimate_tau(cells: Cells, *, seed: int = 0) -> Estimate:
  return estimate(sample_tau(cells, seed=seed), num_prompts=_fewest(cells))


def estimate_lead(cells: Cells, other: Cells, *, seed: int = 0) -> Estimate:
  """Returns how much longer `cells` accepts than `other`, 0.16 = 16%, paired by prompts."""
  if list(cells) != list(other) or any(
      len(cells[d].counts) != len(other[d].counts) for d in cells):
    raise ValueError("cells: found other domains or prompts, expected the same for both drafters")
  return estimate(sample_tau(cells, seed=seed) / sample_tau(other, seed=seed) - 1,
                  num_prompts=_fewest(cells))


def _fewest(cells: Cells) -> int:
  return min(len(cell.counts) for cell in cells.values())


def make_rows(law: str, drafter: str, cells: Cells, *, about: Mapping[str, Any],
              seed: int = 0) -> list[dict[str, Any]]:
  """Returns one row a domain and one of their mean; `about` is added to each."""
  rows = []
  for domain, cell in cells.items():
    e = cell.evaluate(seed)
    rows.append(dict(
        law=law, drafter=drafter, domain=domain, tau=e.accepted_len.value, low=e.accepted_len.low,
        high=e.accepted_len.high, proposal_len=e.acceptance.verify_len, verify_rate=e.verify_rate,
        tokens_per_s=e.tokens_per_s, answers=e.num_answers, rounds=e.acceptance.num_rounds,
        **about))
  tau = estimate_tau(cells, seed=seed)
  mean = lambda name: float(np.mean([row[name] for row in rows]))
  total = lambda name: sum(row[name] for row in rows)
  rows.append(dict(
      law=law, drafter=drafter, domain=MACRO, tau=tau.value, low=tau.low, high=tau.high,
      proposal_len=mean("proposal_len"), verify_rate=mean("verify_rate"),
      tokens_per_s=mean("tokens_per_s"), answers=total("answers"), rounds=total("rounds"), **about))
  return rows


def format_comparison(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns a table for a terminal from `make_rows` of one law, one row a drafter."""
  domains = list(dict.fromkeys(row["domain"] for row in rows))
  table = [("drafter", "M params", *(f"tau {d}" for d in domains), "tok/s", "draft ms",
            "verify ms")]
  for drafter in dict.fromkeys(row["drafter"] for row in rows):
    by_domain = {row["domain"]: row for row in rows if row["drafter"] == drafter}
    macro = by_domain[MACRO]
    taus = [str(Estimate(r["tau"], r["low"], r["high"])) if (r := by_domain.get(d)) else "-"
            for d in domains]
    size = macro["parameters"]
    table.append((drafter, show(None if size is None else size / 1e6, 1), *taus,
                  show(macro["tokens_per_s"], 1), show(macro["draft_ms"]),
                  show(macro["verify_ms"])))
  return format_rows(table)
