"""Ways of decoding compared fairly: interleaved in one process, medians of per-prompt ratios.

A machine drifts (heat, neighbours), so methods take turns on every prompt and a speed-up is the
ratio of two runs that stood side by side.
"""

import dataclasses
import statistics
from typing import Any, Callable, Mapping, Protocol, Sequence

import tqdm

from dspark_jax.metrics.acceptance import Acceptance, measure_acceptance
from dspark_jax.metrics.tables import format_rows


class Decoded(Protocol):
  """What is read of one answer (`api.Generation` has it)."""
  tokens: list[int]
  seconds: float
  prefill_seconds: float
  num_rounds: int
  num_verified: list[int]
  num_accepted: list[int]


@dataclasses.dataclass(frozen=True)
class Run:
  """One answer by one method; `prompt` is the index of the prompt."""
  method: str
  prompt: int
  repeat: int
  result: Decoded

  @property
  def tokens_per_s(self) -> float:
    return len(self.result.tokens) / self.result.seconds

  @property
  def ms_per_round(self) -> float | None:
    """Milliseconds of a round, without the prefill; None where the prefill was all."""
    r = self.result
    return 1e3 * (r.seconds - r.prefill_seconds) / r.num_rounds if r.num_rounds else None


@dataclasses.dataclass(frozen=True)
class Report:
  """One method over all its runs.

  Attributes:
    tokens_per_s: median over runs, prefill included.
    speed_up: median over (prompt, repeat) of tokens/s against the baseline's run beside it.
    prefill_ms, ms_per_round: medians; the latter None without a round.
    acceptance: of all rounds.
    num_prompts: prompts run.
    different: first differing token index of each prompt whose tokens are not the baseline's.
  """
  method: str
  tokens_per_s: float
  speed_up: float
  prefill_ms: float
  ms_per_round: float | None
  acceptance: Acceptance
  num_prompts: int
  different: dict[int, int]


def run_interleaved(methods: Mapping[str, Callable[[Any], Decoded]], prompts: Sequence[Any], *,
                    repeats: int = 1) -> list[Run]:
  """Decodes every prompt by every method, the methods in turn and in rotating order.

  Shows a progress bar. Compile the methods before, or their first runs are slow.
  """
  names, runs = list(methods), []
  with tqdm.tqdm(total=repeats * len(prompts) * len(names), desc="decode", unit="answer") as bar:
    for repeat in range(repeats):
      for i, prompt in enumerate(prompts):
        first = (repeat + i) % len(names)  # nobody always runs after the same neighbour
        for name in names[first:] + names[:first]:
          runs.append(Run(name, i, repeat, methods[name](prompt)))
          bar.set_postfix_str(f"{name} {runs[-1].tokens_per_s:.1f} tok/s")
          bar.update()
  return runs


def summarize(runs: Sequence[Run], *, baseline: str,
              order: Sequence[str] = ()) -> list[Report]:
  """Returns a report for each method: the baseline, those of `order`, the rest as they appear."""
  by_method: dict[str, dict[tuple[int, int], Run]] = {baseline: {}}
  by_method |= {name: {} for name in order if any(run.method == name for run in runs)}
  for run in runs:
    by_method.setdefault(run.method, {})[run.prompt, run.repeat] = run
  base = by_method[baseline]
  if not base:
    raise ValueError(f"baseline: found no run of {baseline!r}")
  return [_report(name, group, base) for name, group in by_method.items()]


def summarize_domains(runs: Sequence[Run], domains: Sequence[str], *,
                      baseline: str) -> dict[str, list[Report]]:
  """Returns reports of all runs ("all") and of each domain; `domains` has one name a prompt."""
  tables = {"all": summarize(runs, baseline=baseline)}
  for domain in dict.fromkeys(domains):
    tables[domain] = summarize([r for r in runs if domains[r.prompt] == domain],
                               baseline=baseline, order=[r.method for r in tables["all"]])
  return tables


def find_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
  """Returns the first index where two answers differ, None where they are the same."""
  for i, (a, b) in enumerate(zip(tokens, expected)):
    if a != b:
      return i
  return None if len(tokens) == len(expected) else min(len(tokens), len(expected))


def format_table(reports: Sequence[Report]) -> str:
  """Returns a table for a terminal: one row a method."""
  rows = [("method", "tok/s", "speed-up", "tau", "verify rate", "ms/round", "prefill ms",
           "identical", "accept rate by position")]
  for r in reports:
    same = r.num_prompts - len(r.different)
    rate = r.acceptance.verify_rate
    rows.append((
        r.method, f"{r.tokens_per_s:.1f}", f"{r.speed_up:.2f}x",
        f"{r.acceptance.accepted_len:.2f}" if r.acceptance.num_rounds else "-",
        "-" if rate is None else f"{rate:.2f}",
        "-" if r.ms_per_round is None else f"{r.ms_per_round:.1f}", f"{r.prefill_ms:.0f}",
        f"{same}/{r.num_prompts}",
        " ".join(f"{a:.2f}" for a in r.acceptance.accept_rate if a is not None) or "-"))
  return format_rows(rows, left=(0, -1))


def _report(name: str, group: Mapping[tuple[int, int], Run],
            base: Mapping[tuple[int, int], Run]) -> Report:
  results = [run.result for run in group.values()]
  rounds_ms = [ms for run in group.values() if (ms := run.ms_per_round) is not None]
  ratios = [run.tokens_per_s / base[key].tokens_per_s for key, run in group.items()]
  different: dict[int, int] = {}
  for key, run in group.items():
    where = find_difference(run.result.tokens, base[key].result.tokens)
    if where is not None:
      different.setdefault(run.prompt, where)
  return Report(
      method=name, tokens_per_s=statistics.median(run.tokens_per_s for run in group.values()),
      speed_up=statistics.median(ratios),
      prefill_ms=1e3 * statistics.median(r.prefill_seconds for r in results),
      ms_per_round=statistics.median(rounds_ms) if rounds_ms else None,
      acceptance=measure_acceptance(
          [r.num_rounds for r in results],
          # The first token comes from the prefill.
          [len(r.tokens) - 1 if r.num_rounds else 0 for r in results],
          num_verified_xG=[r.num_verified for r in results],
          num_accepted_xG=[r.num_accepted for r in results]),
      num_prompts=len({run.prompt for run in group.values()}), different=different)
