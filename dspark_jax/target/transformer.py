"""The target: one config-driven pre-norm decoder (Llama, Qwen3).

A pass takes new tokens and a read-only cache, and returns the final hidden states, the tapped
features and the new tokens' keys and values. Prefill is the pass with no cache, verification the
pass over an anchor and its drafts, plain decoding the pass over one token.

Layers are unrolled, not scanned: `lax.scan` over stacked weights copies every layer's weights on
CPU (measured 2x slower at one token), and separate arrays keep each layer's buffers in place.
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax import layers
from dspark_jax.target.config import TransformerConfig
from dspark_jax.types import Packing


@flax.struct.dataclass
class TargetOutput:
  """What a pass returns.

  Attributes:
    hidden_BxTxD: final-normed hidden states; the LM head applies to these.
    features_BxTxMD: raw outputs of the tapped layers, concatenated in tap order (None = no taps).
    rows: keys and values of the new tokens, to be committed by `kv_cache.write_rows`.
  """
  hidden_BxTxD: jax.Array
  features_BxTxMD: jax.Array | None
  rows: kv_cache.KVCache


class Attention(nn.Module):
  """Self-attention of the new tokens over (cache prefix, read-only) + (themselves, causal)."""
  config: TransformerConfig
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BxTxD, tables, cached, masks, packing: Packing | None = None):
    c = self.config
    B, T, _ = x_BxTxD.shape
    project = lambda heads, name: layers.Linear(
        heads * c.head_dim, c.attention_bias, self.dtype, name=name)(x_BxTxD).reshape(
            B, T, heads, c.head_dim)
    q = project(c.num_heads, "q_proj")
    k = project(c.num_kv_heads, "k_proj")
    v = project(c.num_kv_heads, "v_proj")
    if c.qk_norm:
      q = layers.RMSNorm(c.rms_norm_eps, name="q_norm")(q)
      k = layers.RMSNorm(c.rms_norm_eps, name="k_norm")(k)
    q, k = layers.apply_rope(q, tables), layers.apply_rope(k, tables)
    if packing is not None:  # a rectangle a request, for attention alone
      q, k, v = packing.unpack(q), packing.unpack(k), packing.unpack(v)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    cached_keys, cached_values = ([cached[0]], [cached[1]]) if cached is not None else ([], [])
    out = layers.attend(q, cached_keys + [k], cached_values + [v], masks, scale=c.head_dim**-0.5)
    if packing is not None:
      out = packing.pack(out)
    out = layers.Linear(c.hidden_size, c.attention_bias, self.dtype, name="o_proj")(
        out.reshape(B, T, -1))
    return out, (k, v)


class Block(nn.Module):
  """Pre-norm residual block: attention, then SwiGLU."""
  config: TransformerConfig
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BxTxD, tables, cached, masks, packing: Packing | None = None):
    c = self.config
    normed = layers.RMSNorm(c.rms_norm_eps, name="input_layernorm")(x_BxTxD)
    out, rows = Attention(c, self.dtype, name="self_attn")(normed, tables, cached, masks, packing)
    x_BxTxD = x_BxTxD + out
    normed = layers.RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(x_BxTxD)
    return x_BxTxD + layers.MLP(c.intermediate_size, c.mlp_bias, self.dtype, name="mlp")(
        normed), rows


class Transformer(nn.Module):
  """The whole decoder. Parameters: embed_tokens, layers_{i}, norm, and lm_head when untied."""
  config: TransformerConfig
  dtype: Any = jnp.float32

  def setup(self):
    c = self.config
    init = nn.initializers.normal(0.02)
    self.embed_tokens = self.param("embed_tokens", init, (c.vocab_size, c.hidden_size))
    self.layers = [Block(c, self.dtype) for _ in range(c.num_layers)]
    self.norm = layers.RMSNorm(c.rms_norm_eps)
    if not c.tie_word_embeddings:
      self.lm_head = self.param("lm_head", init, (c.vocab_size, c.hidden_size))

  def __call__(self, tokens_BxT: jax.Array, *, cache: kv_cache.KVCache | None = None,
               cache_lens_B: jax.Array | None = None, tap_layer_ids: tuple[int, ...] = (),
               packing: Packing | None = None) -> TargetOutput:
    """Runs the new tokens at positions cache_lens_B + (0..T-1).

    Args:
      tokens_BxT: ids in [0, V); right padding is harmless, since attention is causal.
      cache: read-only; its rows at and beyond cache_lens_B are never seen.
      cache_lens_B: int32, valid rows of the cache; required with a cache.
      tap_layer_ids: 0-based decoder layers whose raw outputs become features (-1 = embedding).
      packing: with it the tokens are one packed row [1, P] of rows of up to W tokens a request;
        hidden states and features are packed too, keys and values [B, K, W, H] as without. Needs
        a cache.
    """
    c = self.config
    rows_BxT, starts_BxT = jnp.arange(tokens_BxT.shape[1])[None], jnp.zeros((1, 1), jnp.int32)
    T = tokens_BxT.shape[1]
    if packing is not None:
      rows_BxT, starts_BxT = packing.row_P[None], cache_lens_B[packing.request_P][None]
      T = packing.slots_BxW.shape[1]
    elif cache is not None:
      starts_BxT = cache_lens_B[:, None]
    masks = [jnp.tril(jnp.ones((T, T), bool))[None]]
    if cache is not None:
      live_BxS = jnp.arange(cache.num_slots)[None, :] < cache_lens_B[:, None]
      live_BxTxS = jnp.broadcast_to(live_BxS[:, None, :], (live_BxS.shape[0], T, cache.num_slots))
      masks = [live_BxTxS] + masks
    positions_BxT = jnp.broadcast_to(starts_BxT + rows_BxT, tokens_BxT.shape)
    tables = layers.rope_tables(c.rope, c.head_dim, positions_BxT)

    x_BxTxD = layers.embed(self.embed_tokens, tokens_BxT).astype(self.dtype)
    taps = {-1: x_BxTxD}
    keys, values = [], []
    for i, block in enumerate(self.layers):
      cached = None if cache is None else (cache.keys[i], cache.values[i])
      x_BxTxD, (k, v) = block(x_BxTxD, tables, cached, masks, packing)
      keys.append(k)
      values.append(v)
      if i in tap_layer_ids:
        taps[i] = x_BxTxD
    features = None
    if tap_layer_ids:
      features = jnp.concatenate([taps[i] for i in tap_layer_ids], axis=-1)
    return TargetOutput(hidden_BxTxD=self.norm(x_BxTxD), features_BxTxMD=features,
                        rows=kv_cache.KVCache(tuple(keys), tuple(values)))

  def head(self, hidden_xD: jax.Array) -> jax.Array:
    """LM head: final-normed hidden states [..., D] -> float32 logits [..., V]."""
    w_VxD = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
    return layers.linear(hidden_xD.astype(self.dtype), w_VxD.astype(self.dtype),
                         dtype=jnp.float32)
