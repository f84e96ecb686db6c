"""Architecture of a decoder, read from an HF `config.json`."""

import dataclasses
from typing import Any, Mapping

from dspark_jax import layers

# What a family adds to the plain pre-norm decoder. A later family is one more row.
FAMILIES = {
    "llama": dict(qk_norm=False),
    "qwen3": dict(qk_norm=True),
}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Static shape of a decoder; hashable, so it can be closed over or passed to jit."""
  model_type: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rms_norm_eps: float = 1e-6
  rope: layers.RopeConfig = layers.RopeConfig()
  tie_word_embeddings: bool = False
  attention_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  max_position_embeddings: int = 2048


def config_from_hf(raw: Mapping[str, Any]) -> TransformerConfig:
  """Translates an HF config dict.

  Raises:
    ValueError: naming the field, for a missing field, an unknown `model_type`, an activation
      other than SiLU, a sliding window in use, head counts that do not divide, an odd head width,
      or an unknown RoPE.
  """
  model_type = raw.get("model_type")
  if model_type not in FAMILIES:
    raise ValueError(f"model_type: found {model_type!r}, expected one of {sorted(FAMILIES)}")
  for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
               "num_attention_heads"):
    if not isinstance(raw.get(name), int) or raw[name] < 1:
      raise ValueError(f"{name}: found {raw.get(name)!r}, expected a positive integer")
  if raw.get("hidden_act", "silu") not in ("silu", "swish"):
    raise ValueError(f"hidden_act: found {raw['hidden_act']!r}, expected 'silu'")
  layer_types = raw.get("layer_types") or []
  if raw.get("use_sliding_window") or any(t != "full_attention" for t in layer_types):
    raise ValueError("layer_types: found sliding-window layers, expected only 'full_attention'")
  num_heads = raw["num_attention_heads"]
  num_kv_heads = raw.get("num_key_value_heads") or num_heads
  if num_heads % num_kv_heads:
    raise ValueError(f"num_key_value_heads: found {num_kv_heads}, expected a divisor of "
                     f"num_attention_heads = {num_heads}")
  head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
  if head_dim < 2 or head_dim % 2:
    raise ValueError(f"head_dim: found {head_dim}, expected an even number, since RoPE rotates "
                     "pairs")
  return TransformerConfig(
      model_type=model_type, vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"],
      intermediate_size=raw["intermediate_size"], num_layers=raw["num_hidden_layers"],
      num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
      rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)), rope=layers.rope_config_from_hf(raw),
      tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
      attention_bias=bool(raw.get("attention_bias", False)),
      mlp_bias=bool(raw.get("mlp_bias", False)),
      max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
      **FAMILIES[model_type])
