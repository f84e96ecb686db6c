"""Load reports by hand, tables and figures."""

import dataclasses
from types import SimpleNamespace

import pytest

from dspark_jax.metrics import load_plots
from dspark_jax.metrics.load_report import (find_at_speed, format_load_table, measure_percentiles,
                                            summarize_load, take_medians)


def served(arrival_s, first_s, finished_s, num_tokens, reason="length"):
  return SimpleNamespace(arrival_s=arrival_s, first_token_s=first_s, finished_s=finished_s,
                         tokens=[0] * num_tokens, finish_reason=reason)


TOTALS = SimpleNamespace(num_rounds=10, num_request_rounds=25, num_verified=50, num_tokens=53,
                         num_prefills=3, num_refused=2)


def test_percentiles():
  """0..100: the q-th percentile is q. Of two numbers, 95% of the way from one to the other."""
  assert measure_percentiles(range(101)) == {50: 50.0, 95: 95.0, 99: 99.0}
  assert measure_percentiles([0.0, 10.0]) == pytest.approx({50: 5.0, 95: 9.5, 99: 9.9})
  assert measure_percentiles([]) == {50: None, 95: None, 99: None}


def test_summary_by_hand():
  """First tokens 1 s and 3 s after arrival; 4 tokens in 6 s after the first, 1.5 s apart on
  average, and 3 in 1 s; the third was cancelled, the fourth has one token and no gap."""
  requests = [served(0, 1, 7, 5), served(2, 5, 6, 4), served(1, 2, 3, 2, "cancelled"),
              served(0, 2, 2, 1)]
  report = summarize_load("m", 4, requests, TOTALS, seconds=2.5)
  assert report.num_requests == 4 and report.num_failed == 1 and report.num_refused == 2
  assert report.first_token_ms[50] == 2000.0  # of 1, 2 and 3 s
  assert report.token_ms[50] == pytest.approx((1500 + 1000 / 3) / 2)
  assert report.user_tokens_per_s == pytest.approx(1e3 / report.token_ms[50])
  assert report.tokens_per_s == pytest.approx(53 / 2.5)
  assert report.accepted_len == 2.0 and report.verify_len == 2.0  # 50 of 25 each
  assert report.budget_tokens == 7.5 and report.batch == 2.5


def test_summary_of_nothing():
  zeros = SimpleNamespace(**dict.fromkeys(vars(TOTALS), 0))
  report = summarize_load("m", 1, [], zeros, seconds=1.0)
  assert report.user_tokens_per_s is None and report.token_ms[99] is None
  assert report.tokens_per_s == report.accepted_len == report.budget_tokens == 0.0


def make_report(method, load, tokens_per_s, user_tokens_per_s, verify_len=2.0):
  report = summarize_load(method, load, [], TOTALS, seconds=1.0)
  return dataclasses.replace(report, tokens_per_s=tokens_per_s, verify_len=verify_len,
                             user_tokens_per_s=user_tokens_per_s)


CURVE = [make_report("a", 1, 20.0, 20.0), make_report("a", 2, 30.0, 15.0),
         make_report("a", 4, 40.0, 10.0)]


def test_throughput_at_a_promise():
  """Half way between 15 and 10 tokens/s a user lies half way between 30 and 40 tokens/s."""
  assert find_at_speed(CURVE, 12.5) == 35.0
  assert find_at_speed(CURVE, 15.0) == 30.0
  assert find_at_speed(CURVE, 3.0) == 40.0  # the heaviest load measured
  assert find_at_speed(CURVE, 21.0) is None and find_at_speed([], 1.0) is None
  # A load that is slower for everybody and in sum is no point of the curve.
  assert find_at_speed(CURVE + [make_report("a", 8, 25.0, 8.0)], 8.0) == 40.0


def test_medians():
  reports = [make_report("a", 1, x, 1.0) for x in (3.0, 9.0, 1.0)]
  assert take_medians(reports) is reports[0]
  with pytest.raises(ValueError, match="several methods or loads"):
    take_medians([CURVE[0], CURVE[1]])


def test_table():
  plain = [make_report("plain", 1, 10.0, None), make_report("plain", 4, 32.0, 8.0)]
  lines = format_load_table(CURVE + plain, baseline="plain").splitlines()
  assert len(lines) == 6 and lines[0].split()[:4] == ["load", "method", "tok/s", "ratio"]
  rows = [line.split()[:5] for line in lines[1:]]
  assert rows == [["1", "a", "20.0", "2.00x", "20.0"], ["1", "plain", "10.0", "1.00x", "-"],
                  ["2", "a", "30.0", "-", "15.0"], ["4", "a", "40.0", "1.25x", "10.0"],
                  ["4", "plain", "32.0", "1.00x", "8.0"]]
  assert lines[1].endswith("2/2")  # two were refused


@pytest.mark.parametrize("reports", [CURVE + [make_report("plain", 1, 10.0, None)], []])
def test_figures(tmp_path, reports):
  first = load_plots.plot_throughput_by_speed(reports, tmp_path / "a" / "7.png", speeds=(12.5,))
  assert first.read_bytes().startswith(b"\x89PNG")
  if reports:
    second = load_plots.plot_by_concurrency(reports, tmp_path / "8.png")
    assert second.read_bytes().startswith(b"\x89PNG") and second.stat().st_size > 5000
