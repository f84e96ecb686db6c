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


def plot_reliability(panels: Mapping[str, Sequence[Sequence[tuple]]],
                     path: str | pathlib.Path) -> pathlib.Path:
  """Draws reliability diagrams side by side, one line a draft position (paper figure 6).

  Args:
    panels: title -> for each position the points of `reliability.make_diagram`, none where there
      is no data.
  """
  figure, _ = _make_figure(num_panels=len(panels))
  for ax, (title, diagrams) in zip(figure.axes, panels.items()):
    ax.plot([0, 1], [0, 1], ":", color="grey")
    for k, points in enumerate(diagrams):
      if points:
        predicted, happened, counts = zip(*points)
        sizes = [5 + 95 * n / max(counts) for n in counts]
        line, = ax.plot(predicted, happened, lw=1, label=f"draft {k + 1}")
        ax.scatter(predicted, happened, s=sizes, color=line.get_color())
    ax.set(xlabel="predicted survival", ylabel="accepted", xlim=(0, 1), ylim=(0, 1), title=title)
    if len(ax.lines) > 1:
      ax.legend(fontsize=8)
  return _save(figure, path)


def plot_step_curve(points: Sequence[tuple[float, float]], smoothed: Sequence[tuple[float, float]],
                    path: str | pathlib.Path, *, title: str) -> pathlib.Path:
  """Draws milliseconds of a round over verified tokens: measured buckets, smoothed curve."""
  figure, ax = _make_figure()
  ax.step(*zip(*points), where="pre", label="buckets")
  ax.plot(*zip(*points), "o", color="C0")
  ax.plot(*zip(*smoothed), "--", label="as early_stop reads it")
  ax.set(xlabel="verified tokens", ylabel="milliseconds a round, drafting included", ylim=(0, None),
         title=title)
  ax.legend()
  return _save(figure, path)


def _make_figure(num_panels: int = 1):
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure
  figure = Figure(figsize=(7 if num_panels == 1 else 5 * num_panels, 4.5), layout="constrained")
  FigureCanvasAgg(figure)  # draws without a display, and leaves a notebook's own backend alone
  figure.subplots(1, num_panels)
  return figure, figure.axes[0]


def _save(figure, path: str | pathlib.Path) -> pathlib.Path:
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
  return path
