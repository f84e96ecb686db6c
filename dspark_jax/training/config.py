"""Static configuration of a training run, with errors that name the field."""

import dataclasses
from typing import Any, Mapping

import jax.numpy as jnp

from dspark_jax.training.losses import LossConfig
from dspark_jax.training.step import OptimizerConfig

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

# Options of the loss that came later: left out of the fingerprint at their defaults, so that runs
# from before can be resumed.
LATER_FIELDS = ("lk_weight", "lk_form", "lk_eta", "weighting", "dpace_smoothing")

# How a run is watched and when it pauses; a resumed run may change these.
FREE_FIELDS = ("max_minutes", "log_every", "checkpoint_every", "keep_checkpoints", "eval_every")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """One run of the trainer.

  Attributes:
    seed: of anchors (and of fresh parameters, where the caller makes them).
    batch_size: sequences of a micro-batch.
    accumulation: micro-batches of an optimiser step.
    num_anchors: blocks drawn from a sequence.
    dtype, target_dtype: 'float32' or 'bfloat16', matmuls of drafter and target.
    max_minutes: wall clock of this process, 0 = no limit; the run can be resumed afterwards.
    log_every, checkpoint_every, eval_every: in steps; 0 = never (checkpoints: only at the end).
  """
  seed: int = 0
  batch_size: int = 4
  accumulation: int = 1
  num_anchors: int = 128
  dtype: str = "float32"
  target_dtype: str = "float32"
  loss: LossConfig = LossConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  max_minutes: float = 0.0
  log_every: int = 10
  checkpoint_every: int = 200
  keep_checkpoints: int = 2
  eval_every: int = 0

  def __post_init__(self):
    for name in ("batch_size", "accumulation", "num_anchors", "log_every", "keep_checkpoints"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}: found {getattr(self, name)}, expected a positive integer")
    for name in ("dtype", "target_dtype"):
      if getattr(self, name) not in DTYPES:
        raise ValueError(f"{name}: found {getattr(self, name)!r}, expected one of "
                         f"{sorted(DTYPES)}")

  def to_dict(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  def fingerprint(self) -> dict[str, Any]:
    """Fields that decide the result; a checkpoint belongs to exactly one fingerprint."""
    fields = {k: v for k, v in self.to_dict().items() if k not in FREE_FIELDS}
    defaults = dataclasses.asdict(LossConfig())
    fields["loss"] = {k: v for k, v in fields["loss"].items()
                      if k not in LATER_FIELDS or v != defaults[k]}
    return fields


def train_config_from_dict(fields: Mapping[str, Any]) -> TrainConfig:
  """Builds a TrainConfig from nested dicts; an unknown field raises ValueError with its name."""
  fields = dict(fields)
  for name, section in (("loss", LossConfig), ("optimizer", OptimizerConfig)):
    if isinstance(fields.get(name), Mapping):
      fields[name] = build_section(section, fields[name], f"{name}.")
  return build_section(TrainConfig, fields, "")


def build_section(cls, fields: Mapping[str, Any], prefix: str):
  """Builds the dataclass `cls`; errors name `prefix` + field."""
  known = [f.name for f in dataclasses.fields(cls)]
  for name in fields:
    if name not in known:
      raise ValueError(f"{prefix}{name}: found an unknown field, expected one of {known}")
  return cls(**fields)
