"""`load_target`: the one way a target comes into memory."""

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp

from dspark_jax.interop import gguf
from dspark_jax.interop import hf
from dspark_jax.target.config import TransformerConfig, config_from_hf

PACKAGED = {"smollm2-135m-instruct": gguf.packaged_smollm2}

# GGUF files carry no generation config; these are the model cards' recommendations.
_PACKAGED_SAMPLING = {"smollm2-135m-instruct": dict(temperature=0.2, top_p=0.9)}


@dataclasses.dataclass(frozen=True)
class Target:
  """A loaded target.

  Attributes:
    config: architecture.
    params: parameters of `Transformer`.
    path: the HF directory or GGUF file; the tokenizer is read from the same place.
    stop_token_ids: end-of-sequence ids of generation config and config, in that order.
    sampling: recommended sampling parameters (temperature, top_k, top_p, min_p), maybe empty.
  """
  config: TransformerConfig
  params: Any
  path: pathlib.Path
  stop_token_ids: tuple[int, ...]
  sampling: dict[str, float]


def load_target(path: str, *, dtype=jnp.float32) -> Target:
  """Loads a target by packaged name, HF directory, GGUF file, or hub id (with a network).

  Everything is checked before anything is returned: config, shards, names, shapes.

  Raises:
    FileNotFoundError, ValueError: one line naming what was wrong.
  """
  name = str(path)
  if name.lower() in PACKAGED:
    return _load_gguf(PACKAGED[name.lower()](), dtype, _PACKAGED_SAMPLING.get(name.lower(), {}))
  local = pathlib.Path(name)
  if local.is_file() and local.suffix == ".gguf":
    return _load_gguf(local, dtype, {})
  return _load_hf(resolve_directory(name), dtype)


def resolve_directory(name: str) -> pathlib.Path:
  """Returns the local directory of a path or hub id."""
  local = pathlib.Path(name)
  if local.is_dir():
    return local
  known = ", ".join(sorted(PACKAGED))
  if name.count("/") != 1 or name.startswith((".", "/", "~")):
    raise FileNotFoundError(f"model: found {name!r}, expected a directory, a .gguf file, a hub id "
                            f"'owner/name', or one of: {known}")
  import huggingface_hub
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(
        name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
  except Exception as e:  # no network, no such model, no access: one line for a person
    reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
    raise FileNotFoundError(f"model: {name!r} is no local directory and could not be fetched from "
                            f"the hub ({reason}); packaged names: {known}") from None


def _load_hf(directory: pathlib.Path, dtype) -> Target:
  if not (directory / "config.json").is_file():
    raise FileNotFoundError(f"{directory}: found no config.json")
  raw = hf.read_json(directory / "config.json")
  try:
    config = config_from_hf(raw)
  except ValueError as e:
    raise ValueError(f"{directory / 'config.json'}: {e}") from None
  generation = {}
  if (directory / "generation_config.json").is_file():
    generation = hf.read_json(directory / "generation_config.json")
  params = hf.target_params(hf.read_tensors(directory), config, origin=str(directory), dtype=dtype)
  sampling = {k: generation[k] for k in ("temperature", "top_k", "top_p", "min_p")
              if generation.get(k) is not None} if generation.get("do_sample") else {}
  return Target(config=config, params=params, path=directory,
                stop_token_ids=hf.stop_ids_from([generation, raw]), sampling=sampling)


def _load_gguf(path: pathlib.Path, dtype, sampling) -> Target:
  raw, tensors = gguf.read_gguf(path)
  try:
    config = config_from_hf(raw)
  except ValueError as e:
    raise ValueError(f"{path}: {e}") from None
  params = hf.target_params(tensors, config, origin=str(path), dtype=dtype)
  return Target(config=config, params=params, path=path,
                stop_token_ids=hf.stop_ids_from([raw]), sampling=dict(sampling))
