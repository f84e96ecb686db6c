"""PNG plots of a comparison of decoding methods."""

import pathlib
from typing import Mapping, Sequence

from dspark_jax.metrics.compare import Report


def plot_accept_rate(reports: Sequence[Report], path: str | pathlib.Path) -> pathlib.Path:
  """Draws the accept rate by draft position, one line a method that drafts."""
  figure, ax = _make_figure()
  for report in reports:
    points = [(k + 1, rate) for k, rate in enumerate(report.acceptance.accept_rate)
              if rate is not None]
    if points:
      ax.plot(*zip(*points), "o-",
              label=f"{report.method}, tau {report.acceptance.accepted_len:.2f}")
  ax.set(xlabel="draft position", ylabel="accepted of the verified drafts", ylim=(0, 1),
         title="Accept rate by draft position")
  ax.xaxis.get_major_locator().set_params(integer=True)
  if ax.lines:
    ax.legend()
  return _save(figure, path)


def plot_speed(reports_by_domain: Mapping[str, Sequence[Report]],
               path: str | pathlib.Path) -> pathlib.Path:
  """Draws tokens per second, one group of bars a domain, one bar a method with its speed-up."""
  figure, ax = _make_figure()
  methods = list(dict.fromkeys(r.method for rs in reports_by_domain.values() for r in rs))
  width = 0.8 / max(len(methods), 1)
  for m, method in enumerate(methods):
    found = [(d, r) for d, rs in enumerate(reports_by_domain.values()) for r in rs
             if r.method == method]
    bars = ax.bar([d + m * width for d, _ in found], [r.tokens_per_s for _, r in found], width,
                  label=method)
    ax.bar_label(bars, [f"{r.speed_up:.2f}x" for _, r in found], fontsize=8)
  ax.set_xticks([d + (len(methods) - 1) * width / 2 for d in range(len(reports_by_domain))],
                list(reports_by_domain))
  ax.set(ylabel="tokens per second", title="Speed by domain (speed-up over plain decoding)")
  ax.legend()
  return _save(figure, path)


def _make_figure():
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure
  figure = Figure(figsize=(7, 4.5), layout="constrained")
  FigureCanvasAgg(figure)  # draws without a display, and leaves a notebook's own backend alone
  return figure, figure.add_subplot()


def _save(figure, path: str | pathlib.Path) -> pathlib.Path:
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
  return path
