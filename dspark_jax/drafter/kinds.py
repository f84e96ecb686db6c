"""The drafters that are trained, by name: their configs for a target, and fresh parameters."""

import dataclasses
from typing import Any, Callable, Mapping

import jax

from dspark_jax.drafter import config as dspark_config
from dspark_jax.drafter import dspark
from dspark_jax.drafter import eagle3
from dspark_jax.drafter import medusa
from dspark_jax.drafter import mtp
from dspark_jax.drafter import recurrent


@dataclasses.dataclass(frozen=True)
class Kind:
  """One kind of drafter.

  Attributes:
    config: class of its static configuration.
    config_for_target: (target's config, **fields) -> a config whose shape is the target's.
    init_params: (config, key) -> fresh float32 parameters.
  """
  config: type
  config_for_target: Callable[..., Any]
  init_params: Callable[[Any, jax.Array], Any]


KINDS: Mapping[str, Kind] = {
    "dspark": Kind(dspark_config.DrafterConfig, dspark_config.config_for_target,
                   dspark.init_params),
    "eagle3": Kind(eagle3.Eagle3Config, eagle3.config_for_target, recurrent.init_params),
    "mtp": Kind(mtp.MTPConfig, mtp.config_for_target, recurrent.init_params),
    "medusa": Kind(medusa.MedusaConfig, medusa.config_for_target, medusa.init_params)}


def kind_of(config: Any) -> str:
  """Returns the name of a config's kind."""
  return next(name for name, kind in KINDS.items() if type(config) is kind.config)


def config_for_target(name: str, target_config: dspark_config.TargetShape, **fields: Any) -> Any:
  """Returns a config of the named kind; an unknown kind or field raises ValueError naming it."""
  if name not in KINDS:
    raise ValueError(f"drafter.kind: found {name!r}, expected one of {', '.join(KINDS)}")
  known = [f.name for f in dataclasses.fields(KINDS[name].config)]
  for field in fields:
    if field not in known:
      raise ValueError(f"drafter.{field}: found an unknown field of {name}, expected one of "
                       f"{known}")
  return KINDS[name].config_for_target(target_config, **fields)
