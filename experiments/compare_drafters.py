"""Trains drafters on the same rows and budget, and compares them on the same prompts.

  python -m experiments.compare_drafters --config=configs/compare_drafters.py \
      --config.data=data.jsonl --config.workdir=runs/compare

Started again, it goes on where it was: what is finished is kept in WORKDIR/cells.
"""

import json

import jax

from experiments import _cli, _figures, _timing
from experiments._comparison import PLAIN, Comparison


def main(config):
  recipes, depth, length = _figures.plan_recipes(config)
  _timing.use_compilation_cache(config.compilation_cache)
  comparison = Comparison(config, recipes)
  for name in recipes:
    found = comparison.train(name)
    if found is not None:
      print(f"{name}: {found['parameters'] / 1e6:.1f}M parameters, {found['steps']} steps of "
            f"{found['positions'] // found['steps']} positions, tau_prob on held-out rows "
            f"{found['metrics'].get('eval_tau_prob', float('nan')):.2f}")
  times = {}
  if {"table", "length", "head_share"} & set(config.figures):
    times = comparison.time([PLAIN, *recipes, *config.untrained])
  for figure in config.figures:
    _figures.FIGURES[figure](comparison, times=times, depth=depth, length=length)
  (comparison.workdir / "about.json").write_text(json.dumps(dict(
      config=config.to_dict(), laws=comparison.laws, jax=jax.__version__,
      device=jax.devices()[0].device_kind), indent=1) + "\n")
  print(f"\n-> {comparison.workdir}" + (
      "" if comparison.is_complete else "; time is up, start again to go on"))


if __name__ == "__main__":
  _cli.run(main, config="configs/compare_drafters.py")
