"""The paper's figures 2 to 5 as PNG: curves with intervals, and where a round's time goes."""

import pathlib
from typing import Any, Mapping, Sequence

from dspark_jax.metrics.plots import _make_figure, _save

Point = tuple[float, float, float | None, float | None]  # x, y, and its interval where there is one


def plot_curves(panels: Mapping[str, Mapping[str, Sequence[Point]]], path: str | pathlib.Path, *,
                xlabel: str, ylabels: Sequence[str], title: str) -> pathlib.Path:
  """Draws panels side by side, one line a label, with error bars where points have intervals.

  Args:
    panels: title -> label -> points. A label has the same colour in every panel.
    ylabels: one a panel.
  """
  figure, _ = _make_figure(num_panels=len(panels))
  labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
  for ax, ylabel, (name, lines) in zip(figure.axes, ylabels, panels.items()):
    for label, points in lines.items():
      color = f"C{labels.index(label)}"
      x, y, low, high = zip(*points)
      ax.plot(x, y, "o-", color=color, label=label)
      # A percentile interval need not hold the figure itself.
      known = [(a, b, max(b - lo, 0), max(hi - b, 0)) for a, b, lo, hi in points if lo is not None]
      if known:
        a, b, below, above = zip(*known)
        ax.errorbar(a, b, yerr=(below, above), fmt="none", ecolor=color, capsize=3, alpha=0.6)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=name)
    if ax.lines:
      ax.legend(fontsize=8)
  figure.suptitle(title)
  return _save(figure, path)


def plot_round_time(rows: Sequence[Mapping[str, Any]], path: str | pathlib.Path) -> pathlib.Path:
  """Draws a round's milliseconds as stacked bars, the sequential head's share written above.

  Args:
    rows: with `drafter`, `backbone_ms`, `head_ms`, `verify_ms`, `share`.
  """
  figure, ax = _make_figure()
  names, bottoms = [row["drafter"] for row in rows], [0.0] * len(rows)
  for part in ("verify_ms", "backbone_ms", "head_ms"):
    heights = [max(row[part], 0.0) for row in rows]  # a head within the noise may come out below 0
    bars = ax.bar(names, heights, bottom=bottoms, label=part.removesuffix("_ms"))
    bottoms = [b + h for b, h in zip(bottoms, heights)]
  ax.bar_label(bars, [f"{100 * row['share']:.1f}%" for row in rows], fontsize=8)
  ax.set(ylabel="milliseconds a round", title="Share of the sequential head in a round")
  ax.tick_params(axis="x", labelrotation=20)
  ax.legend()
  return _save(figure, path)
