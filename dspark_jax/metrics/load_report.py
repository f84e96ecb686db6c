"""What users of a loaded engine saw: throughput, speed for each, and tails of latency."""

import dataclasses
from typing import Protocol, Sequence

import numpy as np

from dspark_jax.metrics.tables import format_rows

QUANTILES = (50, 95, 99)


class Served(Protocol):
  """What is read of one request (`serving.request.Request` has it)."""
  tokens: list[int]
  finish_reason: str | None
  arrival_s: float
  first_token_s: float | None
  finished_s: float | None


class Totals(Protocol):
  """What is read of an engine's totals over a window (`serving.engine.Counts` has it)."""
  num_rounds: int
  num_request_rounds: int
  num_verified: int
  num_tokens: int
  num_prefills: int
  num_refused: int


@dataclasses.dataclass(frozen=True)
class LoadReport:
  """One method under one load.

  Attributes:
    method: name.
    load: number of users of a closed loop, or requests per second of an open one.
    num_requests, num_failed, num_refused: measured requests; of which ended by an error, a deadline
      or a cancellation; and those that the queue had no room for.
    seconds: length of the window.
    tokens_per_s: all tokens of the window, whoever's, by its length.
    user_tokens_per_s: median over requests of tokens per second after the first token; None where
      no answer has two tokens.
    first_token_ms, token_ms: {50: .., 95: .., 99: ..}, milliseconds from arrival to first token,
      and between tokens (a request's mean); None without any.
    accepted_len: tokens of a request's round (tau).
    verify_len: drafts verified of a request in a round.
    budget_tokens: rows verified in a round, anchors included.
    batch: requests that took part in a round, on average.
    num_rounds: rounds in the window.
  """
  method: str
  load: float
  num_requests: int
  num_failed: int
  num_refused: int
  seconds: float
  tokens_per_s: float
  user_tokens_per_s: float | None
  first_token_ms: dict[int, float | None]
  token_ms: dict[int, float | None]
  accepted_len: float
  verify_len: float
  budget_tokens: float
  batch: float
  num_rounds: int


def measure_percentiles(values: Sequence[float]) -> dict[int, float | None]:
  """Returns {50: .., 95: .., 99: ..}, linear between neighbours, None of nothing."""
  if not len(values):
    return dict.fromkeys(QUANTILES)
  return {q: float(v) for q, v in zip(QUANTILES, np.percentile(values, QUANTILES))}


def summarize_load(method: str, load: float, requests: Sequence[Served], totals: Totals, *,
                   seconds: float) -> LoadReport:
  """Returns the report of a window: `requests` are the measured ones, `totals` count everything."""
  served = [r for r in requests if r.finish_reason in ("stop", "length")]
  # Latency counts from the arrival, not from when the engine took notice.
  first_ms = [1e3 * (r.first_token_s - r.arrival_s) for r in served]
  token_ms = [1e3 * (r.finished_s - r.first_token_s) / (len(r.tokens) - 1) for r in served
              if len(r.tokens) > 1]
  rounds = max(totals.num_request_rounds, 1)
  middle_ms = measure_percentiles(token_ms)[50]
  return LoadReport(
      method=method, load=load, num_requests=len(requests),
      num_failed=len(requests) - len(served), num_refused=totals.num_refused, seconds=seconds,
      tokens_per_s=totals.num_tokens / seconds,
      user_tokens_per_s=1e3 / middle_ms if middle_ms else None,
      first_token_ms=measure_percentiles(first_ms), token_ms=measure_percentiles(token_ms),
      accepted_len=(totals.num_tokens - totals.num_prefills) / rounds,
      verify_len=totals.num_verified / rounds,
      budget_tokens=(totals.num_verified + totals.num_request_rounds) / max(totals.num_rounds, 1),
      batch=totals.num_request_rounds / max(totals.num_rounds, 1), num_rounds=totals.num_rounds)


def take_medians(reports: Sequence[LoadReport]) -> LoadReport:
  """Returns one report of several of the same method and load: the middle one by tokens_per_s."""
  if len({(r.method, r.load) for r in reports}) != 1:
    raise ValueError("reports: found several methods or loads, expected repeats of one")
  return sorted(reports, key=lambda r: r.tokens_per_s)[(len(reports) - 1) // 2]


def find_at_speed(reports: Sequence[LoadReport], user_tokens_per_s: float) -> float | None:
  """Returns the throughput that a method reaches while every user gets this speed.

  Linear between the two neighbouring loads of the curve (paper figure 7); where users of the
  heaviest load are faster still, that load's; None where even the lightest is slower.
  """
  points = sorted((r.user_tokens_per_s, r.tokens_per_s) for r in reports if r.user_tokens_per_s)
  if not points or points[-1][0] < user_tokens_per_s:
    return None
  speeds, rates = zip(*points)
  # A faster point that also carries more makes a slower one pointless.
  best = [max(rates[i:]) for i in range(len(rates))]
  return float(np.interp(user_tokens_per_s, speeds, best))


def format_load_table(reports: Sequence[LoadReport], *, baseline: str | None = None) -> str:
  """Returns a table for a terminal, one row a method and load, with ratios to the baseline's."""
  base = {r.load: r.tokens_per_s for r in reports if r.method == baseline}
  rows = [("load", "method", "tok/s", "ratio", "tok/s/user", "first ms 50/95/99",
           "token ms 50/95/99", "tau", "verify len", "budget", "batch", "failed")]
  for r in sorted(reports, key=lambda r: r.load):  # stable: methods stay in order
    ratio = f"{r.tokens_per_s / base[r.load]:.2f}x" if base.get(r.load) else "-"
    user = "-" if r.user_tokens_per_s is None else f"{r.user_tokens_per_s:.1f}"
    rows.append((f"{r.load:g}", r.method, f"{r.tokens_per_s:.1f}", ratio, user,
                 _join(r.first_token_ms), _join(r.token_ms), f"{r.accepted_len:.2f}",
                 f"{r.verify_len:.2f}", f"{r.budget_tokens:.1f}", f"{r.batch:.1f}",
                 f"{r.num_failed + r.num_refused}/{r.num_requests + r.num_refused}"))
  return format_rows(rows, left=(1,))


def _join(quantiles: dict[int, float | None]) -> str:
  return "/".join("-" if v is None else f"{v:.0f}" for v in quantiles.values())
