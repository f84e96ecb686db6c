"""A whole training run from rows of text: vocabulary, initial parameters, batches, loop."""

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import sys
import time
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data.pipeline import Batches, PipelineConfig
from dspark_jax.drafter import kinds
from dspark_jax.drafter.config import DrafterConfig, config_for_target
from dspark_jax.target.config import TransformerConfig
from dspark_jax.training import draft_vocabulary
from dspark_jax.training import step as step_lib
from dspark_jax.training import trainer
from dspark_jax.training import warm_start
from dspark_jax.training.config import TrainConfig, build_section, train_config_from_dict

VERSIONED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """What makes a run, beside its target and rows.

  Attributes:
    max_len: tokens a sequence; longer rows are cut.
    num_eval_rows: rows held out for evaluation, spread evenly over the file.
    drafter: a config of any kind (`drafter.kinds`).
    start_drafter: name of the drafter that the run starts from, '' = a new one. Kept so that a
      checkpoint knows where it came from; `run` gets the drafter itself.
  """
  max_len: int
  num_eval_rows: int
  drafter: Any
  train: TrainConfig
  warm_start: warm_start.WarmStartConfig
  start_drafter: str = ""

  def fingerprint(self) -> dict[str, Any]:
    """JSON-able; what a checkpoint must agree with."""
    return {"max_len": self.max_len, "num_eval_rows": self.num_eval_rows,
            "drafter": self._drafter_fields(), "train": self.train.fingerprint(),
            "warm_start": dataclasses.asdict(self.warm_start),
            "start_drafter": self.start_drafter}

  def _drafter_fields(self) -> dict[str, Any]:
    kind = kinds.kind_of(self.drafter)
    fields = dataclasses.asdict(self.drafter)
    fields.pop("markov_candidates", None)  # of serving alone
    return fields | ({} if kind == "dspark" else {"kind": kind})


def run_config_from_dict(fields: Mapping[str, Any], target_config: TransformerConfig) -> RunConfig:
  """Reads the fields of `RunConfig` from nested dicts; unknown ones are named.

  `drafter.kind` names the kind of drafter (default "dspark"); its other fields are overrides of the
  kind's `config_for_target`.
  """
  fields = dict(fields)
  fields["train"] = train_config_from_dict(fields.get("train", {}))
  fields["warm_start"] = build_section(warm_start.WarmStartConfig, fields.get("warm_start", {}),
                                       "warm_start.")
  overrides = {k: tuple(v) if isinstance(v, list) else v
               for k, v in fields.get("drafter", {}).items()}
  kind = overrides.pop("kind", "dspark")
  if kind == "dspark":
    fields["drafter"] = config_for_target(target_config, num_anchors=fields["train"].num_anchors,
                                          **overrides)
  else:
    fields["drafter"] = kinds.config_for_target(kind, target_config, **overrides)
  return build_section(RunConfig, fields, "")


@dataclasses.dataclass(frozen=True)
class RunResult:
  """The trained drafter: `draft_ids` is None without a reduced vocabulary."""
  params: Any
  draft_ids: np.ndarray | None
  train: trainer.TrainResult


def run(config: RunConfig, *, target_config: TransformerConfig, target_params: Any,
        stop_token_ids: Sequence[int], rows: Sequence[Mapping[str, Any]],
        checkpointer: trainer.Saver, workdir: str | pathlib.Path,
        start: tuple[Any, Any, Mapping[str, Any] | None] | None = None,
        on_step: Callable[[int], None] | None = None) -> RunResult:
  """Trains a drafter on rows {input_ids, loss_mask}; goes on where `checkpointer` left off.

  Everything is derived from config, rows and `start`, so a resumed run rebuilds the same
  vocabulary, batches and initial parameters.

  Args:
    start: (config, params, stored) of a drafter to train further, as `load_drafter` returns
      them. Its draft vocabulary is kept, embedding and LM head are the target's as in every run,
      and `config.warm_start` is not used. A DSpark that lacks the sequential or confidence head of
      `config.drafter` (a DFlash lacks both) gets them, its law unchanged (`warm_start.add_heads`).

  Raises:
    ValueError: `start` is a drafter of another shape than `config.drafter`, heads aside.
  """
  if start is not None:
    _check_start(start[0], config.drafter)
  workdir = pathlib.Path(workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  train_rows, eval_rows = split_rows(rows, config.num_eval_rows)
  draft_ids = None
  if start is not None and config.drafter.draft_vocab_size is not None:
    draft_ids = np.asarray(start[2]["draft_ids"])
  elif config.drafter.draft_vocab_size is not None:
    counts_V = draft_vocabulary.count_labels(train_rows, vocab_size=target_config.vocab_size)
    draft_ids = draft_vocabulary.choose_draft_ids(
        counts_V, size=config.drafter.draft_vocab_size, always=stop_token_ids)
  batch_size = config.train.batch_size
  batches = Batches(train_rows, config=PipelineConfig(
      batch_size=batch_size, max_len=config.max_len, seed=config.train.seed))
  eval_batches = []
  if eval_rows:
    eval_batches = list(Batches(eval_rows, config=PipelineConfig(
        batch_size=min(batch_size, len(eval_rows)), max_len=config.max_len, num_epochs=1,
        is_shuffled=False)))
  if start is None:
    params = _init_params(config, target_config, target_params, draft_ids)
  else:
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), dict(start[1]))
    if isinstance(config.drafter, DrafterConfig):
      params = warm_start.add_heads(config.drafter, params, jax.random.key(config.train.seed))
  frozen = step_lib.Frozen(target_params=target_params,
                           draft_ids_Vd=None if draft_ids is None else jnp.asarray(draft_ids))
  write_provenance(workdir / "provenance.jsonl", config, num_rows=batches.num_rows)
  result = trainer.train(
      config.train, target_config=target_config, drafter_config=config.drafter, frozen=frozen,
      params=params, batches=batches, checkpointer=checkpointer, workdir=workdir,
      eval_batches=eval_batches, on_step=on_step)
  return RunResult(params=result.params, draft_ids=draft_ids, train=result)


def _init_params(config: RunConfig, target_config: TransformerConfig, target_params: Any,
                 draft_ids: np.ndarray | None) -> Any:
  """Returns the drafter's parameters at step 0."""
  key, kind = jax.random.key(config.train.seed), kinds.kind_of(config.drafter)
  if kind == "dspark":
    return warm_start.init_drafter(
        config.drafter, key, target_config=target_config, target_params=target_params,
        warm_start=config.warm_start, draft_ids=draft_ids)
  if config.warm_start.layer_ids:
    raise ValueError(f"warm_start.layer_ids: found {config.warm_start.layer_ids} for {kind}, "
                     "expected none: only dspark starts from the target's layers")
  params = kinds.KINDS[kind].init_params(config.drafter, key)
  # Its output goes to the target's LM head, which was trained behind this norm.
  name = "hidden_norm" if kind == "medusa" else "norm"
  norm = jax.tree.map(lambda a: jnp.array(a, jnp.float32), dict(target_params["norm"]))
  return {**params, name: norm}


def _check_start(found: Any, expected: Any) -> None:
  if type(found) is not type(expected):
    raise ValueError(f"start_drafter: found the kind {kinds.kind_of(found)}, expected "
                     f"{kinds.kind_of(expected)} as in config.drafter")
  free = {"num_anchors", "markov_candidates"}  # no parameter and no training depends on them
  if isinstance(expected, DrafterConfig):
    if not found.markov_rank:  # a head that is not there can become any
      free |= {"markov_rank", "markov_head_type"}
    if not found.enable_confidence_head:
      free |= {"enable_confidence_head", "confidence_head_with_markov", "confidence_stop_gradient"}
  for field in dataclasses.fields(expected):
    values = getattr(found, field.name), getattr(expected, field.name)
    if field.name not in free and values[0] != values[1]:
      raise ValueError(f"start_drafter: found {field.name} = {values[0]}, expected {values[1]} as "
                       "in config.drafter")


def split_rows(rows: Sequence[Any], num_eval_rows: int) -> tuple[list, list]:
  """Returns (training rows, `num_eval_rows` rows spread evenly over the input)."""
  if not 0 <= num_eval_rows < len(rows):
    raise ValueError(f"num_eval_rows: found {num_eval_rows}, expected 0..{len(rows) - 1}")
  held_out = set(np.linspace(0, len(rows) - 1, num_eval_rows).astype(int).tolist())
  return ([r for i, r in enumerate(rows) if i not in held_out],
          [r for i, r in enumerate(rows) if i in held_out])


def write_provenance(path: pathlib.Path, config: RunConfig, **facts: Any) -> None:
  """Appends one JSON line: command, versions, machine, configuration. One line a start."""
  versions = {}
  for name in VERSIONED:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  line = {"time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": sys.argv,
          "python": platform.python_version(), "machine": platform.machine(),
          "devices": [d.device_kind for d in jax.devices()], "versions": versions,
          "config": config.fingerprint(), **facts}
  with path.open("a") as stream:
    stream.write(json.dumps(line) + "\n")
