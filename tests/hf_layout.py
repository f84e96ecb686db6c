"""A target written down as Hugging Face does: the inverse of `interop.hf`."""

import numpy as np

from dspark_jax.interop import hf
from dspark_jax.target.config import TransformerConfig


def make_tensors(config: TransformerConfig, params) -> dict[str, np.ndarray]:
  """Parameters of `Transformer` under their Hugging Face names."""
  tensors = {}
  for name in hf.target_tensor_shapes(config):
    path = name.removeprefix("model.").split(".")
    if path[0] == "layers":
      path = [f"layers_{path[1]}", *path[2:]]
    node = params
    for key in path[:1] if path[0] in ("embed_tokens", "lm_head") else path:
      node = node[key]
    tensors[name] = np.asarray(node)
  return tensors


def make_config(config: TransformerConfig, **more) -> dict:
  """config.json of a target with plain RoPE, and `more` fields."""
  return {
      "model_type": config.model_type, "vocab_size": config.vocab_size,
      "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
      "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
      "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
      "rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope.rope_theta,
      "max_position_embeddings": config.max_position_embeddings,
      "tie_word_embeddings": config.tie_word_embeddings} | more
