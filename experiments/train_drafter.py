"""Trains a DSpark drafter on text that its target wrote.

  python -m experiments.train_drafter --config=configs/smollm2_dspark.py \
      --config.data=data.jsonl --workdir=runs/smollm2

Started again with the same flags, it goes on from its last checkpoint. The drafter is exported to
WORKDIR/drafter in the layout of the public reference.
"""

import pathlib

import jax.numpy as jnp
from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from dspark_jax.checkpoints import Checkpointer
from dspark_jax.data.jsonl import read_rows
from dspark_jax.interop.deepspec import save_drafter
from dspark_jax.interop.load import load_target
from dspark_jax.training.run import run, run_config_from_dict

_CONFIG = config_flags.DEFINE_config_file("config", "configs/smollm2_dspark.py",
                                          "What to train.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Checkpoints, logs, curves and the drafter.",
                               required=True)


def main(argv):
  logging.set_verbosity(logging.WARNING)  # orbax tells its every move
  if len(argv) > 1:
    raise app.UsageError(f"unknown arguments: {argv[1:]}")
  fields = _CONFIG.value.to_dict()
  data, export_dtype = fields.pop("data"), fields.pop("export_dtype")
  try:
    target = load_target(fields.pop("target"))
    config = run_config_from_dict(fields, target.config)
    rows = read_rows(data, vocab_size=target.config.vocab_size)
    workdir = pathlib.Path(_WORKDIR.value)
    checkpointer = Checkpointer(workdir / "checkpoints", config=config.fingerprint(),
                                keep=config.train.keep_checkpoints)
    result = run(config, target_config=target.config, target_params=target.params,
                 stop_token_ids=target.stop_token_ids, rows=rows, checkpointer=checkpointer,
                 workdir=workdir)
  except (ValueError, FileNotFoundError) as e:
    raise app.UsageError(str(e)) from None
  save_drafter(workdir / "drafter", config.drafter, result.params, draft_ids=result.draft_ids,
               dtype=jnp.dtype(export_dtype))
  state = "finished" if result.train.is_finished else "stopped early, start again to go on"
  print(f"step {result.train.num_steps}, {state}; drafter in {workdir / 'drafter'}")
  for name, value in sorted(result.train.metrics.items()):
    print(f"  {name:24s} {value:.4f}")


if __name__ == "__main__":
  app.run(main)
