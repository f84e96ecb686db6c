"""The paper's figures 7 and 8 from load reports, as PNG."""

import pathlib
from typing import Sequence

from dspark_jax.metrics.load_report import LoadReport, find_at_speed
from dspark_jax.metrics.plots import _make_figure, _save


def plot_throughput_by_speed(reports: Sequence[LoadReport], path: str | pathlib.Path, *,
                             speeds: Sequence[float] = ()) -> pathlib.Path:
  """Draws throughput against speed per user, one line a method, one point a load (figure 7).

  `speeds` are promises to users in tokens per second: a vertical line each, with every method's
  throughput under it.
  """
  figure, ax = _make_figure()
  for method, group in _by_method(reports).items():
    points = [(r.user_tokens_per_s, r.tokens_per_s, r.load) for r in group if r.user_tokens_per_s]
    if not points:
      continue
    [line] = ax.plot([p[0] for p in points], [p[1] for p in points], "o-", label=method)
    for x, y, load in points:
      ax.annotate(f"{load:g}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7,
                  color=line.get_color())
    for speed in speeds:
      rate = find_at_speed(group, speed)
      if rate is not None:
        ax.plot([speed], [rate], "*", markersize=11, color=line.get_color())
  for speed in speeds:
    ax.axvline(speed, color="grey", linestyle=":", linewidth=1)
  ax.set(xlabel="tokens per second and user", ylabel="tokens per second, all users",
         title="Throughput against speed per user (number: concurrent users)")
  if ax.lines:
    ax.legend()
  return _save(figure, path)


def plot_by_concurrency(reports: Sequence[LoadReport], path: str | pathlib.Path) -> pathlib.Path:
  """Draws throughput and verify budget against concurrency (figure 8)."""
  figure, left = _make_figure(num_panels=2)
  right = figure.axes[1]
  for method, group in _by_method(reports).items():
    loads = [r.load for r in group]
    left.plot(loads, [r.tokens_per_s for r in group], "o-", label=method)
    right.plot(loads, [1 + r.verify_len for r in group], "o-", label=method)
  for ax, label in ((left, "tokens per second, all users"),
                    (right, "rows verified a request and round")):
    ax.set(xlabel="concurrent users", ylabel=label, xscale="log")
    ticks = sorted({r.load for r in reports})
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
  left.legend()
  figure.suptitle("Throughput and verify budget by concurrency")
  return _save(figure, path)


def _by_method(reports: Sequence[LoadReport]) -> dict[str, list[LoadReport]]:
  groups: dict[str, list[LoadReport]] = {}
  for report in sorted(reports, key=lambda r: r.load):
    groups.setdefault(report.method, []).append(report)
  return {method: groups[method] for method in dict.fromkeys(r.method for r in reports)}
