"""Trains a drafter on text that its target wrote: DSpark, or another kind (drafter.kind).

  python -m experiments.train_drafter --config=configs/smollm2_dspark.py \
      --config.data=data.jsonl --config.workdir=runs/smollm2

Started again with the same flags, it goes on from its last checkpoint. The drafter is exported to
WORKDIR/drafter in the layout of the public reference. --config.start_drafter=DIR trains a drafter
further, e.g. the shipped one on your own domain.
"""

import pathlib

import jax.numpy as jnp

from dspark_jax.data.jsonl import read_rows
from dspark_jax.interop.drafters import load_drafter
from dspark_jax.interop.load import load_target
from dspark_jax.training.run import run_config_from_dict
from experiments import _cli, _training


def main(config):
  fields = config.to_dict()
  data, workdir = fields.pop("data"), pathlib.Path(fields.pop("workdir"))
  export_dtype = jnp.dtype(fields.pop("export_dtype"))
  target = load_target(fields.pop("target"))
  run_config = run_config_from_dict(fields, target.config)
  start = load_drafter(run_config.start_drafter) if run_config.start_drafter else None
  rows = read_rows(data, vocab_size=target.config.vocab_size)
  result = _training.train(run_config, target, rows, workdir, export_dtype=export_dtype,
                           start=start)
  state = "finished" if result.train.is_finished else "stopped early, start again to go on"
  print(f"step {result.train.num_steps}, {state}; drafter in {workdir / 'drafter'}")
  for name, value in sorted(result.train.metrics.items()):
    print(f"  {name:24s} {value:.4f}")


if __name__ == "__main__":
  _cli.run(main, config="configs/smollm2_dspark.py")
