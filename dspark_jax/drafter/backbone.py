"""The parallel backbone (arXiv 2607.05147, eq. 2-3): all slots of a block in one pass.

Block slots query (the target's features of everything before the anchor) + (their own block, in
both directions). The context enters each layer's keys and values as it is; only the block's own
stream passes through the layers. Two forms of the same map: one block a request over a cache
(serving), and all anchors of a sequence at once (training).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax import layers
from dspark_jax.drafter.config import DrafterConfig


class DraftAttention(nn.Module):
  """Attention of block slots over context and block; q/k norm and RoPE on both sides."""
  config: DrafterConfig
  dtype: Any = jnp.float32

  def setup(self):
    c = self.config
    make = lambda features: layers.Linear(features, dtype=self.dtype)
    self.q_proj = make(c.num_heads * c.head_dim)
    self.k_proj = make(c.num_kv_heads * c.head_dim)
    self.v_proj = make(c.num_kv_heads * c.head_dim)
    self.o_proj = make(c.hidden_size)
    if c.qk_norm:
      self.q_norm = layers.RMSNorm(c.rms_norm_eps)
      self.k_norm = layers.RMSNorm(c.rms_norm_eps)

  def rows(self, x_BxTxD: jax.Array, tables) -> tuple[jax.Array, jax.Array]:
    """Keys (after norm and RoPE) and values of context or block tokens, each [B, K, T, H]."""
    c = self.config
    shape = x_BxTxD.shape[:2] + (c.num_kv_heads, c.head_dim)
    k = self.k_proj(x_BxTxD).reshape(shape)
    v = self.v_proj(x_BxTxD).reshape(shape)
    if c.qk_norm:
      k = self.k_norm(k)
    return layers.apply_rope(k, tables).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

  def queries(self, x_BxTxD: jax.Array, tables) -> jax.Array:
    """Queries [B, T, N, H] after norm and RoPE."""
    c = self.config
    q = self.q_proj(x_BxTxD).reshape(x_BxTxD.shape[:2] + (c.num_heads, c.head_dim))
    return layers.apply_rope(self.q_norm(q) if c.qk_norm else q, tables)

  def serve(self, x_BxJxD, tables, cached, num_out: int) -> jax.Array:
    """One block a request, of which the first `num_out` slots ask.

    Args:
      cached: this layer's (keys, values, live rows [B, S]) of the context.
    """
    keys, values, live_BxS = cached
    k, v = self.rows(x_BxJxD, tables)
    q = self.queries(x_BxJxD[:, :num_out], jax.tree.map(lambda t: t[:, :num_out], tables))
    masks = [live_BxS[:, None, :], jnp.ones((1, num_out, k.shape[2]), bool)]
    out = layers.attend(q, [keys, k], [values, v], masks, scale=self.config.head_dim**-0.5)
    return self.o_proj(out.reshape(out.shape[:2] + (-1,)))

  def train(self, x_BxAxJxD, tables, context_rows, visible_BxAxT) -> jax.Array:
    """All blocks of a sequence; `tables` for [B, A*J], `context_rows` = (keys, values)."""
    B, A, J, D = x_BxAxJxD.shape
    flat = x_BxAxJxD.reshape(B, A * J, D)
    k, v = (r.reshape(B, -1, A, J, r.shape[-1]) for r in self.rows(flat, tables))
    q = self.queries(flat, tables)
    out = attend_blocks(q.reshape(B, A, J, *q.shape[2:]), context_rows, (k, v), visible_BxAxT,
                        scale=self.config.head_dim**-0.5)
    return self.o_proj(out.reshape(B, A * J, -1)).reshape(B, A, J, D)


def attend_blocks(q_BxAxJxNxH: jax.Array, context, block, visible_BxAxT: jax.Array, *,
                  scale: float) -> jax.Array:
  """Attention of many blocks over one shared context, each block seeing itself besides.

  The context's scores are one matmul of all A*J queries against T keys; the block's scores are
  [J, J] an anchor, so blocks cannot see each other and nothing of size (A*J)^2 exists.

  Args:
    q_BxAxJxNxH: queries.
    context: keys and values, each [B, K, T, H].
    block: keys and values, each [B, K, A, J, H].
    visible_BxAxT: bool, context rows that an anchor's block sees; none at all is fine.
    scale: multiplies the scores.
  Returns:
    [B, A, J, N, H]. Scores and softmax are float32.
  """
  B, A, J, N, H = q_BxAxJxNxH.shape
  K = context[0].shape[1]
  q = q_BxAxJxNxH.reshape(B, A, J, K, N // K, H).transpose(0, 3, 1, 4, 2, 5)  # B K A n J H
  q = q.reshape(B, K, A, -1, H)
  dot = lambda spec, x, y: jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
  s_context = dot("bkaqh,bkth->bkaqt", q, context[0]) * scale
  s_context = jnp.where(visible_BxAxT[:, None, :, None, :], s_context, -jnp.inf)
  s_block = dot("bkaqh,bkajh->bkaqj", q, block[0]) * scale
  top = jax.lax.stop_gradient(jnp.maximum(s_context.max(-1, keepdims=True),
                                          s_block.max(-1, keepdims=True)))
  w_context, w_block = jnp.exp(s_context - top), jnp.exp(s_block - top)
  total = w_context.sum(-1, keepdims=True) + w_block.sum(-1, keepdims=True)
  out = dot("bkaqt,bkth->bkaqh", w_context.astype(context[1].dtype), context[1])
  out = out + dot("bkaqj,bkajh->bkaqh", w_block.astype(block[1].dtype), block[1])
  out = (out / total).reshape(B, K, A, N // K, J, H).transpose(0, 2, 4, 1, 3, 5)
  return out.reshape(B, A, J, N, H).astype(q_BxAxJxNxH.dtype)


class DraftBlock(nn.Module):
  """Pre-norm residual block of the target's family; the context is not normed by it."""
  config: DrafterConfig
  dtype: Any = jnp.float32

  def setup(self):
    c = self.config
    self.input_layernorm = layers.RMSNorm(c.rms_norm_eps)
    self.self_attn = DraftAttention(c, self.dtype)
    self.post_attention_layernorm = layers.RMSNorm(c.rms_norm_eps)
    self.mlp = layers.MLP(c.intermediate_size, dtype=self.dtype)

  def serve(self, x_BxJxD, tables, cached, num_out: int):
    attended = self.self_attn.serve(self.input_layernorm(x_BxJxD), tables, cached, num_out)
    x_BxJxD = x_BxJxD[:, :num_out] + attended
    return x_BxJxD + self.mlp(self.post_attention_layernorm(x_BxJxD))

  def train(self, x_BxAxJxD, tables, context_BxTxD, context_tables, visible_BxAxT):
    context_rows = self.self_attn.rows(context_BxTxD, context_tables)
    x_BxAxJxD = x_BxAxJxD + self.self_attn.train(
        self.input_layernorm(x_BxAxJxD), tables, context_rows, visible_BxAxT)
    return x_BxAxJxD + self.mlp(self.post_attention_layernorm(x_BxAxJxD))


class Backbone(nn.Module):
  """fc and norm of the features, the draft layers, the final norm.

  Its methods return the *drafting* slots only: where slot 0 just conditions it is dropped, so
  draft g always stands for position anchor + g + 1, whatever the slot convention.
  """
  config: DrafterConfig
  dtype: Any = jnp.float32

  def setup(self):
    c = self.config
    self.fc = layers.Linear(c.hidden_size, dtype=self.dtype)
    self.hidden_norm = layers.RMSNorm(c.rms_norm_eps)
    self.layers = [DraftBlock(c, self.dtype) for _ in range(c.num_layers)]
    self.norm = layers.RMSNorm(c.rms_norm_eps)

  def encode_context(self, features_BxTxMD: jax.Array) -> jax.Array:
    return self.hidden_norm(self.fc(features_BxTxMD))

  def context_rows(self, context_BxTxD: jax.Array, positions_BxT: jax.Array) -> kv_cache.KVCache:
    tables = self._tables(positions_BxT)
    rows = [layer.self_attn.rows(context_BxTxD, tables) for layer in self.layers]
    return kv_cache.KVCache(keys=tuple(k for k, _ in rows), values=tuple(v for _, v in rows))

  def draft_hidden(self, block_embeds_BxJxD, positions_BxJ, cache, cache_lens_B,
                   num_drafts: int | None = None) -> jax.Array:
    self._check_slots(block_embeds_BxJxD)
    J = block_embeds_BxJxD.shape[1]
    live_BxS = jnp.arange(cache.num_slots)[None, :] < cache_lens_B[:, None]
    tables = self._tables(positions_BxJ)
    x_BxJxD = block_embeds_BxJxD.astype(self.dtype)
    for i, layer in enumerate(self.layers):
      # Slots see each other, so only the last layer may leave some out.
      is_last = num_drafts is not None and i == len(self.layers) - 1
      num_out = self._first_slot + num_drafts if is_last else J
      cached = cache.keys[i], cache.values[i], live_BxS
      x_BxJxD = layer.serve(x_BxJxD, tables, cached, num_out)
    return self.norm(x_BxJxD[:, self._first_slot:])

  def train_hidden(self, features_BxTxMD, anchor_positions_BxA, block_embeds_BxAxJxD):
    self._check_slots(block_embeds_BxAxJxD)
    B, A, J, _ = block_embeds_BxAxJxD.shape
    context_BxTxD = self.encode_context(features_BxTxMD)
    offsets_T = jnp.arange(context_BxTxD.shape[1])
    visible_BxAxT = offsets_T[None, None, :] < anchor_positions_BxA[:, :, None]
    positions_BxAxJ = anchor_positions_BxA[:, :, None] + jnp.arange(J)[None, None, :]
    tables = self._tables(positions_BxAxJ.reshape(B, A * J))
    context_tables = self._tables(offsets_T[None, :])
    x_BxAxJxD = block_embeds_BxAxJxD.astype(self.dtype)
    for layer in self.layers:
      x_BxAxJxD = layer.train(x_BxAxJxD, tables, context_BxTxD, context_tables, visible_BxAxT)
    return self.norm(x_BxAxJxD[:, :, self._first_slot:])

  @property
  def _first_slot(self) -> int:
    return self.config.num_slots - self.config.proposal_len

  def _tables(self, positions_BxT: jax.Array):
    return layers.rope_tables(self.config.rope, self.config.head_dim, positions_BxT)

  def _check_slots(self, block_embeds: jax.Array) -> None:
    if block_embeds.shape[-2] != self.config.num_slots:
      raise ValueError(f"block_embeds: found {block_embeds.shape[-2]} slots, expected "
                       f"{self.config.num_slots}; a shorter block is not the start of a longer one")
