"""What the scripts that train share: a run with its checkpoints, and the drafter it leaves."""

import pathlib
from typing import Any, Mapping, Sequence

from dspark_jax.checkpoints import Checkpointer
from dspark_jax.interop.drafters import save_drafter
from dspark_jax.interop.load import Target
from dspark_jax.training.run import RunConfig, RunResult, run


def train(config: RunConfig, target: Target, rows: Sequence[Mapping[str, Any]],
          workdir: pathlib.Path, *, export_dtype, start=None) -> RunResult:
  """Trains, or goes on, in `workdir`; the drafter is written to WORKDIR/drafter."""
  checkpointer = Checkpointer(workdir / "checkpoints", config=config.fingerprint(),
                              keep=config.train.keep_checkpoints)
  result = run(config, target_config=target.config, target_params=target.params,
               stop_token_ids=target.stop_token_ids, rows=rows, checkpointer=checkpointer,
               workdir=workdir, start=start)
  checkpointer.close()
  save_drafter(workdir / "drafter", config.drafter, result.params, draft_ids=result.draft_ids,
               dtype=export_dtype)
  return result
