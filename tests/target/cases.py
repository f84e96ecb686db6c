"""Tiny random targets in the Hugging Face layout, shared by the tests of everything above them."""

import json
import pathlib

import numpy as np
import safetensors.numpy

from dspark_jax.interop import hf
from dspark_jax.target.config import config_from_hf

_RAW = dict(
    vocab_size=41, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, hidden_act="silu", rms_norm_eps=1e-5,
    max_position_embeddings=256, rope_theta=100.0, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2)


def make_raw(family: str = "llama", **fields):
  """Returns an HF config; head_dim of qwen3 is not width / heads. A field of None is left out."""
  own = {"llama": {}, "qwen3": {"head_dim": 12}}[family]
  raw = _RAW | {"model_type": family} | own | fields
  return {k: v for k, v in raw.items() if v is not None}


def make_tensors(raw, *, seed: int = 0):
  """Random float32 tensors under HF names; norms and biases are random too (fault B48)."""
  rng = np.random.default_rng(seed)
  scales = {"embed_tokens": 1.0, "lm_head": 0.5, "bias": 0.3}
  tensors = {}
  for name, shape in hf.target_tensor_shapes(config_from_hf(raw)).items():
    value = rng.standard_normal(shape)
    if "norm" in name:
      value = 1 + 0.3 * value
    else:
      scale = [s for key, s in scales.items() if key in name] or [shape[-1] ** -0.5]
      value = value * scale[0]
    tensors[name] = value.astype(np.float32)
  return tensors


def write_target(path: pathlib.Path, raw, tensors, *, num_shards: int = 1, generation=None):
  """Writes config.json and safetensors, with an index when there are several shards."""
  path.mkdir(parents=True, exist_ok=True)
  (path / "config.json").write_text(json.dumps(raw))
  if generation is not None:
    (path / "generation_config.json").write_text(json.dumps(generation))
  if num_shards == 1:
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path
  weight_map = {}
  for i in range(num_shards):
    file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
    part = {n: tensors[n] for n in sorted(tensors)[i::num_shards]}
    safetensors.numpy.save_file(part, path / file)
    weight_map |= dict.fromkeys(part, file)
  (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
  return path


def make_target(family: str = "llama", *, seed: int = 0, **fields):
  """Returns (config, params) without files."""
  raw = make_raw(family, **fields)
  config = config_from_hf(raw)
  return config, hf.target_params(make_tensors(raw, seed=seed), config, origin="toy")
