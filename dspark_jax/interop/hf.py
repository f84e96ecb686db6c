"""Targets in the Hugging Face layout: `config.json` and safetensors, one file or sharded."""

import json
import os
import pathlib
from typing import Any, Iterable, Mapping

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors

from dspark_jax.target.config import TransformerConfig

_FLOATS = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def read_json(path: str | os.PathLike) -> dict[str, Any]:
  """Reads a JSON object; a missing or broken file is named."""
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file")
  try:
    raw = json.loads(path.read_text())
  except json.JSONDecodeError as e:
    raise ValueError(f"{path}: found broken JSON ({e}), expected an object") from None
  if not isinstance(raw, dict):
    raise ValueError(f"{path}: found a {type(raw).__name__}, expected a JSON object")
  return raw


def read_weight_map(directory: str | os.PathLike) -> dict[str, str]:
  """Returns {tensor name: file name} of a sharded checkpoint's index; empty without an index."""
  index = pathlib.Path(directory) / "model.safetensors.index.json"
  if not index.is_file():
    return {}
  weight_map = read_json(index).get("weight_map", {})
  if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
    raise ValueError(f"{index}: weight_map: expected an object of file names by tensor")
  return weight_map


def tensor_files(directory: str | os.PathLike) -> list[pathlib.Path]:
  """Lists the safetensors files of a directory, all of them present.

  Raises:
    FileNotFoundError: no weights at all, or the index names a shard that is not there.
  """
  directory = pathlib.Path(directory)
  names = sorted(set(read_weight_map(directory).values()))
  for name in names:
    if not (directory / name).is_file():
      raise FileNotFoundError(f"{directory / name}: shard named by model.safetensors.index.json is "
                              "missing")
  if names:
    return [directory / name for name in names]
  single = directory / "model.safetensors"
  if single.is_file():
    return [single]
  raise FileNotFoundError(f"{directory}: found no model.safetensors and no usable "
                          "model.safetensors.index.json")


def read_tensors(directory: str | os.PathLike) -> dict[str, np.ndarray]:
  """Reads every tensor of a checkpoint directory as NumPy arrays (bfloat16 by ml_dtypes).

  With an index, the tensors of each shard must be exactly those that the index places there.
  """
  weight_map = read_weight_map(directory)
  files = tensor_files(directory)
  tensors: dict[str, np.ndarray] = {}
  for path in files:
    try:
      with safetensors.safe_open(str(path), framework="np") as f:
        names = set(f.keys())
        if weight_map:
          _check_shard(path, names, weight_map, file=path.relative_to(directory).as_posix())
        for name in names:
          tensors[name] = f.get_tensor(name)
    # The other two are raised for a dtype that NumPy has not.
    except (safetensors.SafetensorError, AttributeError, TypeError) as e:
      raise ValueError(f"{path}: found a broken safetensors file or dtype ({e})") from None
  return tensors


def _check_shard(path: pathlib.Path, found: set[str], weight_map: Mapping[str, str], *,
                 file: str) -> None:
  expected = {name for name, place in weight_map.items() if place == file}
  for name in sorted(expected - found):
    raise ValueError(f"{path}: tensor {name} is missing, expected by the index")
  for name in sorted(found - expected):
    raise ValueError(f"{path}: tensor {name} is found here, but the index "
                     f"{'places it in ' + weight_map[name] if name in weight_map else 'lacks it'}")


def target_tensor_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
  """Names and shapes of every tensor a target checkpoint must hold (HF names)."""
  c = config
  q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  shapes = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
            "model.norm.weight": (c.hidden_size,)}
  if not c.tie_word_embeddings:
    shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
  linear = [("self_attn.q_proj", q, c.hidden_size, c.attention_bias),
            ("self_attn.k_proj", kv, c.hidden_size, c.attention_bias),
            ("self_attn.v_proj", kv, c.hidden_size, c.attention_bias),
            ("self_attn.o_proj", c.hidden_size, q, c.attention_bias),
            ("mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            ("mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
            ("mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias)]
  norms = [("input_layernorm", c.hidden_size), ("post_attention_layernorm", c.hidden_size)]
  if c.qk_norm:
    norms += [("self_attn.q_norm", c.head_dim), ("self_attn.k_norm", c.head_dim)]
  for i in range(c.num_layers):
    for name, out, in_, bias in linear:
      shapes[f"model.layers.{i}.{name}.weight"] = (out, in_)
      if bias:
        shapes[f"model.layers.{i}.{name}.bias"] = (out,)
    for name, width in norms:
      shapes[f"model.layers.{i}.{name}.weight"] = (width,)
  return shapes


def check_tensors(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], *,
                  origin: str) -> None:
  """Raises ValueError naming the first missing, unexpected or misshapen tensor."""
  for name in sorted(set(shapes) - set(tensors)):
    raise ValueError(f"{origin}: tensor {name} is missing, expected shape {shapes[name]}")
  for name in sorted(set(tensors) - set(shapes)):
    raise ValueError(f"{origin}: tensor {name} is unexpected, found shape {tensors[name].shape}")
  for name, shape in shapes.items():
    if tuple(tensors[name].shape) != tuple(shape):
      raise ValueError(f"{origin}: tensor {name} has shape {tuple(tensors[name].shape)}, "
                       f"expected {tuple(shape)}")


def target_params(tensors: Mapping[str, np.ndarray], config: TransformerConfig, *, origin: str,
                  dtype=jnp.float32) -> dict[str, Any]:
  """Turns HF-named tensors into the parameters of `Transformer`, checking all of them first."""
  tensors = dict(tensors)
  drop_ignored(tensors, config)
  check_tensors(tensors, target_tensor_shapes(config), origin=origin)
  for name, value in tensors.items():
    if value.dtype not in _FLOATS:  # quantized weights need scales that nobody here applies
      raise ValueError(f"{origin}: tensor {name} has dtype {value.dtype}, expected a float")
  params: dict[str, Any] = {}
  for name, value in tensors.items():
    path = name.removeprefix("model.").split(".")
    if path[0] == "layers":
      path = [f"layers_{path[1]}"] + path[2:]
    if path[0] in ("embed_tokens", "lm_head"):
      path = path[:1]
    node = params
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = jax.device_put(np.asarray(value).astype(dtype))
  return params


def drop_ignored(tensors: dict[str, np.ndarray], config: TransformerConfig) -> None:
  """Removes what carries no information: a stored copy of a tied head, old RoPE buffers.

  A tied model that stores an `lm_head` different from its embedding is refused.
  """
  for name in [n for n in tensors if n.endswith("rotary_emb.inv_freq")]:
    del tensors[name]
  if config.tie_word_embeddings and "lm_head.weight" in tensors:
    head, embed = tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")
    if embed is None or head.shape != embed.shape or not np.array_equal(head, embed):
      raise ValueError("lm_head.weight: found a head that differs from the embedding, expected "
                       "none or a copy, since tie_word_embeddings is true")
    del tensors["lm_head.weight"]


def stop_ids_from(configs: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
  """Collects `eos_token_id` (int, list or absent) over configs, in order, without repeats."""
  ids: list[int] = []
  for raw in configs:
    eos = raw.get("eos_token_id")
    for token in eos if isinstance(eos, list) else [eos]:
      if isinstance(token, int) and token not in ids:
        ids.append(token)
  return tuple(ids)
