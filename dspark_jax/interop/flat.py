"""Drafters other than DSpark as directories: flat config.json and safetensors, as `deepspec.py`.

EAGLE-3 is read and written in the layout of the public reference (`Qwen3Eagle3Model`); one that the
reference could not compute (no q/k norm, a reduced vocabulary) is written under a name of our own,
as are the drafters that the reference has not. There the fields are those of our config.
"""

import dataclasses
import functools
import os
import pathlib
from typing import Any, Mapping

import jax
import numpy as np

from dspark_jax.drafter import medusa
from dspark_jax.drafter import recurrent
from dspark_jax.drafter.eagle3 import Eagle3Config
from dspark_jax.drafter.mtp import MTPConfig
from dspark_jax.interop import deepspec
from dspark_jax.interop import hf

EAGLE3_REFERENCE = "Qwen3Eagle3Model"
# Architecture -> (config class, function that makes fresh parameters).
KINDS = {EAGLE3_REFERENCE: (Eagle3Config, recurrent.init_params),
         "Eagle3JaxModel": (Eagle3Config, recurrent.init_params),
         "MTPJaxModel": (MTPConfig, recurrent.init_params),
         "MedusaJaxModel": (medusa.MedusaConfig, medusa.init_params)}

# Besides those of deepspec.RENAMED. Names of the reference.
_RENAMED_EAGLE3 = {"proposal_len": "ttt_length"}
_CONSTANT_EAGLE3 = {"draft_num_hidden_layers": 1, "num_hidden_layers": 1}
_UNREAD_EAGLE3 = ("target_model_name_or_path",)


def load_drafter(path: str | os.PathLike, *, dtype=None):
  """Loads a drafter directory of one of KINDS; arguments and results as `deepspec.load_drafter`."""
  path = pathlib.Path(path)
  raw = hf.read_json(path / "config.json")
  try:
    config = config_from_json(raw)
  except ValueError as e:
    raise ValueError(f"{path / 'config.json'}: {e}") from None
  params, stored = deepspec.read_params(
      path, config, tensor_shapes(config), _param_path,
      is_tied=bool(raw.get("tie_word_embeddings", False)), dtype=dtype)
  return config, params, stored


def save_drafter(path: str | os.PathLike, config, params: Mapping[str, Any], *, embed_VxD=None,
                 lm_head_VdxD=None, draft_ids=None, dtype=None,
                 extra: Mapping[str, Any] | None = None) -> None:
  """Writes a drafter directory; arguments as `deepspec.save_drafter`."""
  path = pathlib.Path(path)
  tensors = {_tensor_name(keys): np.asarray(x) for keys, x in deepspec.flatten(params)}
  hf.check_tensors(tensors, tensor_shapes(config), origin="params")
  for key, value in (("embed_VxD", embed_VxD), ("lm_head_VdxD", lm_head_VdxD)):
    if value is not None:
      name = deepspec.STORED[key]
      tensors[name] = np.asarray(value)
      deepspec.check_shape(name, tensors[name], deepspec.stored_shape(config, key),
                           origin="arguments")
  tensors = {name: deepspec.cast_tensor(name, x, dtype) for name, x in tensors.items()}
  tensors |= deepspec.draft_id_tensors(config, draft_ids)
  raw = config_to_json(config, extra=extra)
  raw["dtype"] = str(next(iter(tensors.values())).dtype)
  deepspec.write_checkpoint(path, raw, tensors)


def config_from_json(raw: Mapping[str, Any]):
  """Reads a config.json of one of KINDS; unknown, missing and unsupported fields are named."""
  architecture = (raw.get("architectures") or [None])[0]
  if architecture not in KINDS:
    raise ValueError(f"architectures: found {raw.get('architectures')!r}, expected one of "
                     f"{sorted(KINDS)}")
  kind = KINDS[architecture][0]
  is_reference = architecture == EAGLE3_REFERENCE
  names = {f.name: f for f in dataclasses.fields(kind) if f.name != "rope"}
  rename = _names(kind)
  known = tuple(rename.values()) + (
      (*_CONSTANT_EAGLE3, *_UNREAD_EAGLE3) if kind is Eagle3Config else ())
  deepspec.check_unknown(raw, known)
  deepspec.check_unsupported(dict(raw) | {"num_hidden_layers": 1})
  for field, expected in (_CONSTANT_EAGLE3 if kind is Eagle3Config else {}).items():
    if raw.get(field, expected) != expected:
      raise ValueError(f"{field}: found {raw[field]}, expected {expected}: the cache of a deeper "
                       "drafter cannot be cut back exactly")
  fields = {}
  for name, field in names.items():
    value = raw.get(rename[name])
    if value is not None:
      fields[name] = tuple(value) if isinstance(value, list) else value
    elif field.default is dataclasses.MISSING or (name == "qk_norm" and not is_reference):
      raise ValueError(f"{rename[name]}: missing, expected a value for architecture {architecture}")
  if any(f.name == "rope" for f in dataclasses.fields(kind)):
    fields["rope"] = deepspec.read_rope(raw)
  return kind(**fields)


def config_to_json(config, *, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
  """Writes the flat config, with every field of ours stated."""
  kind, rename = type(config), _names(type(config))
  is_eagle3 = isinstance(config, Eagle3Config)
  is_reference = is_eagle3 and config.qk_norm and config.draft_vocab_size is None
  architecture = EAGLE3_REFERENCE if is_reference else next(
      name for name, (cls, _) in KINDS.items() if cls is kind and name != EAGLE3_REFERENCE)
  raw = {k: v for k, v in (extra or {}).items() if k in deepspec.IGNORED}
  for field in dataclasses.fields(kind):
    if field.name != "rope":
      value = getattr(config, field.name)
      raw[rename[field.name]] = list(value) if isinstance(value, tuple) else value
  if is_eagle3:
    raw |= _CONSTANT_EAGLE3 | {"layer_types": ["full_attention"]}
  if hasattr(config, "rope"):
    raw["rope_parameters"] = deepspec.write_rope(config.rope)
  return raw | {
      "architectures": [architecture], "model_type": "qwen3" if is_reference else "dspark_jax",
      "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
      "use_sliding_window": False}


@functools.lru_cache
def tensor_shapes(config) -> dict[str, tuple[int, ...]]:
  """Names and shapes of every tensor of the drafter itself, from the network's own parameters."""
  init = next(init for cls, init in KINDS.values() if cls is type(config))
  tree = jax.eval_shape(lambda: init(config, jax.random.key(0)))
  return {_tensor_name(keys): tuple(x.shape) for keys, x in deepspec.flatten(tree)}


def _names(kind) -> dict[str, str]:
  """Our field -> its name in config.json."""
  rename = deepspec.RENAMED | (_RENAMED_EAGLE3 if kind is Eagle3Config else {})
  return {f.name: rename.get(f.name, f.name) for f in dataclasses.fields(kind)}


def _param_path(name: str) -> list[str]:
  """Tensor name -> path in the parameter tree: `layers.0.x` is `layers_0/x`."""
  parts = name.split(".")
  return [f"{parts[0]}_{parts[1]}", *parts[2:]] if parts[1].isdigit() else parts


def _tensor_name(keys: tuple[str, ...]) -> str:
  head, _, index = keys[0].rpartition("_")
  return ".".join((head, index, *keys[1:]) if index.isdigit() else keys)
