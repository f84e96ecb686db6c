"""PNG curves of a run, drawn from its metrics.jsonl."""

import json
import pathlib

PANELS = (("loss", ("loss", "loss_ce", "loss_tv", "loss_confidence")),
          ("tau_prob", ("tau_prob",)), ("grad_norm", ("grad_norm",)),
          ("learning_rate", ("learning_rate",)))


def plot(metrics_path: pathlib.Path, directory: pathlib.Path) -> pathlib.Path | None:
  """Writes `curves.png` (losses, tau, accept rate by position, gradient norm, learning rate)."""
  rows = [json.loads(line) for line in metrics_path.read_text().splitlines()]
  if not rows:
    return None
  import matplotlib
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt
  accept = tuple(sorted((n for n in rows[0] if n.startswith("accept_rate_")),
                        key=lambda n: int(n.rsplit("_", 1)[1])))
  panels = PANELS + (("accept rate by draft position", accept),)
  figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
  for ax, (title, names) in zip(axes.flat, panels):
    for name in names:
      for split, style in (("train", "-"), ("eval", "o--")):
        points = [(r["step"], r[name]) for r in rows if r["split"] == split and name in r]
        if points:
          ax.plot(*zip(*points), style, label=f"{split} {name}", markersize=3, linewidth=1)
    ax.set(title=title, xlabel="optimiser step")
    if ax.lines:
      ax.legend(fontsize=7)
  for ax in axes.flat[len(panels):]:
    ax.axis("off")
  path = directory / "curves.png"
  figure.savefig(path, dpi=100)
  plt.close(figure)
  return path
