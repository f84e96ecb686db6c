"""Reliability of probabilities: expected calibration error, AUROC, Brier score, and the diagram."""

import dataclasses

import numpy as np

NUM_BINS = 20


@dataclasses.dataclass(frozen=True)
class Reliability:
  """How far predictions can be trusted.

  Attributes:
    num: predictions; everything below is None without any.
    ece: expected calibration error over equal bins: mean |predicted - happened| of a bin.
    auroc: probability that something that happened was given more than something that did not,
      ties half; None where only one of the two occurred.
    brier: mean squared error.
    mean_predicted, mean_outcome: means of both.
  """
  num: int
  ece: float | None
  auroc: float | None
  brier: float | None
  mean_predicted: float | None
  mean_outcome: float | None


def measure_reliability(predicted_N, outcome_N, *, num_bins: int = NUM_BINS) -> Reliability:
  """Compares probabilities with what happened (bool or 0/1)."""
  predicted_N, outcome_N = _check(predicted_N, outcome_N)
  if not len(predicted_N):
    return Reliability(0, None, None, None, None, None)
  _, _, counts, gaps = _bin(predicted_N, outcome_N, num_bins)
  return Reliability(
      num=len(predicted_N), ece=float(np.abs(gaps).sum() / counts.sum()),
      auroc=_auroc(predicted_N, outcome_N),
      brier=float(np.mean((predicted_N - outcome_N)**2)),
      mean_predicted=float(predicted_N.mean()), mean_outcome=float(outcome_N.mean()))


def make_diagram(predicted_N, outcome_N, *, num_bins: int = NUM_BINS) -> list[tuple]:
  """Returns (mean predicted, share that happened, number) of every bin that is not empty."""
  predicted_N, outcome_N = _check(predicted_N, outcome_N)
  predicted, happened, counts, _ = _bin(predicted_N, outcome_N, num_bins)
  return [(float(p / n), float(h / n), int(n))
          for p, h, n in zip(predicted, happened, counts) if n]


def compute_survival(logits_NxG, temperatures) -> np.ndarray:
  """Returns float64 [N, G]: the cumulative product of sigmoid(logit / temperature)."""
  with np.errstate(over="ignore"):
    return np.cumprod(1 / (1 + np.exp(-np.float64(logits_NxG) / np.asarray(temperatures))), axis=1)


def compare_calibration(logits_NxG, num_accepted_N, temperatures) -> list[dict]:
  """Returns figures of each draft position's survival with and without temperatures."""
  before, after = (compute_survival(logits_NxG, t)
                   for t in (np.ones(len(temperatures)), temperatures))
  figures = []
  for k, temperature in enumerate(temperatures):
    outcome_N = np.asarray(num_accepted_N) > k
    b, a = (measure_reliability(s[:, k], outcome_N) for s in (before, after))
    figures.append(dict(
        position=k + 1, temperature=temperature, num=b.num, survived=b.mean_outcome,
        ece_before=b.ece, ece_after=a.ece, auroc_before=b.auroc, auroc_after=a.auroc,
        brier_before=b.brier, brier_after=a.brier))
  return figures


def format_calibration(title: str, figures: list[dict]) -> str:
  """Returns a table for a terminal, of `compare_calibration`; - where there is no figure."""
  show = lambda x: "-" if x is None else f"{x:.3f}"
  rows = [f"{title}: {figures[0]['num']} rounds",
          "draft  temperature  survived  ECE before  after  AUROC before  after"]
  rows += [f"{f['position']:<5}  {f['temperature']:11.3f}  {show(f['survived']):>8}  "
           f"{show(f['ece_before']):>10}  {show(f['ece_after']):>5}  "
           f"{show(f['auroc_before']):>12}  {show(f['auroc_after']):>5}" for f in figures]
  for name in ("before", "after"):
    values = [f[f"ece_{name}"] for f in figures if f[f"ece_{name}"] is not None]
    rows.append(f"mean ECE {name}: " + (f"{100 * np.mean(values):.2f}%" if values else "-"))
  return "\n".join(rows)


def _check(predicted_N, outcome_N):
  predicted_N = np.asarray(predicted_N, np.float64)
  outcome_N = np.asarray(outcome_N, np.float64)
  if predicted_N.ndim != 1 or predicted_N.shape != outcome_N.shape:
    raise ValueError(f"outcome: found shape {outcome_N.shape}, expected {predicted_N.shape} of "
                     "rank 1, as predicted")
  if not ((predicted_N >= 0) & (predicted_N <= 1)).all():
    raise ValueError("predicted: found numbers outside [0, 1]")
  return predicted_N, outcome_N


def _bin(predicted_N, outcome_N, num_bins: int):
  bin_N = np.minimum((predicted_N * num_bins).astype(int), num_bins - 1)
  total = lambda weights=None: np.bincount(bin_N, weights, minlength=num_bins)
  return total(predicted_N), total(outcome_N), total(), total(predicted_N - outcome_N)


def _auroc(predicted_N, outcome_N) -> float | None:
  num_yes = int(outcome_N.sum())
  num_no = len(outcome_N) - num_yes
  if not num_yes or not num_no:
    return None
  _, inverse, counts = np.unique(predicted_N, return_inverse=True, return_counts=True)
  rank = np.cumsum(counts) - (counts - 1) / 2  # the mean rank of equal values
  rank_sum = rank[inverse][outcome_N > 0].sum()
  return float((rank_sum - num_yes * (num_yes + 1) / 2) / (num_yes * num_no))
