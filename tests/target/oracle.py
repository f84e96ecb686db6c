"""A decoder in NumPy float64, one sequence at a time, from HF configs and tensors; nothing of ours.

RoPE of the default type only: the other types are tables tested by themselves.
"""

import numpy as np


def run_decoder(raw, tensors, tokens):
  """Returns (logits [T, V], final-normed hidden [T, D], outputs of embedding and each layer)."""
  eps, heads = raw["rms_norm_eps"], raw["num_attention_heads"]
  kv_heads = raw["num_key_value_heads"]
  head_dim = raw.get("head_dim", raw["hidden_size"] // heads)
  get = lambda name: tensors[name].astype(np.float64)

  def norm(x, name):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * get(name)

  def linear(x, name):
    y = x @ get(name + ".weight").T
    return y + get(name + ".bias") if name + ".bias" in tensors else y

  def rotate(x):  # [T, heads, head_dim]
    frequency = raw["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    angle = np.arange(len(x))[:, None] * frequency
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  T = len(tokens)
  x = get("model.embed_tokens.weight")[tokens]
  streams = [x]
  for i in range(raw["num_hidden_layers"]):
    at = f"model.layers.{i}."
    h = norm(x, at + "input_layernorm.weight")
    q = linear(h, at + "self_attn.q_proj").reshape(T, heads, head_dim)
    k = linear(h, at + "self_attn.k_proj").reshape(T, kv_heads, head_dim)
    v = linear(h, at + "self_attn.v_proj").reshape(T, kv_heads, head_dim)
    if raw["model_type"] == "qwen3":
      q = norm(q, at + "self_attn.q_norm.weight")
      k = norm(k, at + "self_attn.k_norm.weight")
    q, k = rotate(q), rotate(k)
    out = np.zeros((T, heads, head_dim))
    for t in range(T):
      for n in range(heads):
        group = n // (heads // kv_heads)
        scores = k[:t + 1, group] @ q[t, n] / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        out[t, n] = weights / weights.sum() @ v[:t + 1, group]
    x = x + linear(out.reshape(T, -1), at + "self_attn.o_proj")
    h = norm(x, at + "post_attention_layernorm.weight")
    gate = linear(h, at + "mlp.gate_proj")
    x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    streams.append(x)
  hidden = norm(x, "model.norm.weight")
  head = "model.embed_tokens.weight" if raw["tie_word_embeddings"] else "lm_head.weight"
  return hidden @ get(head).T, hidden, streams
