"""Drafters of one layer that feeds itself: what EAGLE-3 and MTP have in common.

The layer reads, for position t, a hidden state of t and the embedding of token t + 1, and predicts
token t + 2. Where the target has been, the hidden state is made of its features. Beyond, it is the
layer's own output of the position before: token after token, G of them a round.

Two forms of the same map. Serving keeps keys and values of all committed positions; step s is the
position anchor - 1 + s. Training runs all positions of a sequence at once, G steps deep
("training-time test", EAGLE-3, arXiv 2503.01840): at step s the query of position t stands for
position t + s, sees the keys of step 0 up to t, and its own chain of steps 1..s.
One layer only: a key of a deeper layer would depend on how the positions before it were drafted,
and cutting the cache back after a rejection would not be exact.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax import layers
from dspark_jax.drafter import drafting
from dspark_jax.drafter.backbone import DraftAttention
from dspark_jax.drafter.config import TargetShape
from dspark_jax.types import Proposal


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
  """Shape of a recurrent drafter; hashable. Subclasses say what its layer is.

  Attributes:
    target_layer_ids: 0-based decoder layers whose raw outputs are read, strictly increasing.
    proposal_len: G, steps of a round, and of training (`ttt_length` in the reference).
    draft_vocab_size: Vd of a reduced draft vocabulary; None = the target's whole vocabulary.
    max_position_embeddings: carried for checkpoints; no computation reads it.
  """
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  target_layer_ids: tuple[int, ...]
  num_target_layers: int
  proposal_len: int
  rms_norm_eps: float = 1e-6
  rope: layers.RopeConfig = layers.RopeConfig()
  qk_norm: bool = True
  draft_vocab_size: int | None = None
  max_position_embeddings: int = 2048

  def __post_init__(self):
    object.__setattr__(self, "target_layer_ids", tuple(int(i) for i in self.target_layer_ids))
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads",
                 "head_dim", "num_target_layers", "proposal_len"):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: found {value!r}, expected a positive integer")
    if self.num_heads % self.num_kv_heads or self.head_dim % 2:
      raise ValueError(f"num_kv_heads, head_dim: found {self.num_kv_heads}, {self.head_dim}, "
                       f"expected a divisor of num_heads = {self.num_heads}, and an even number")
    ids = self.target_layer_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1 or ids[-1] >= self.num_target_layers:
      raise ValueError(f"target_layer_ids: found {ids}, expected strictly increasing ids within "
                       f"-1..{self.num_target_layers - 1}")
    if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
      raise ValueError(f"draft_vocab_size: found {self.draft_vocab_size}, expected None or within "
                       f"1..{self.vocab_size}")

  @property
  def num_features(self) -> int:
    """Width of the concatenated taps, M * D."""
    return len(self.target_layer_ids) * self.hidden_size

  @property
  def draft_vocab(self) -> int:
    """Vd: width of the draft logits."""
    return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

  def make_network(self, dtype: Any = jnp.float32) -> "RecurrentDrafter":
    """Returns the network, a subclass of RecurrentDrafter."""
    raise NotImplementedError


def fields_from_target(target_config: TargetShape) -> dict[str, Any]:
  """Fields of a config whose layer has the target's shape, with 7 steps; taps are left out."""
  t = target_config
  names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads",
           "head_dim", "rms_norm_eps", "rope", "max_position_embeddings")
  return {name: getattr(t, name) for name in names} | dict(
      num_target_layers=t.num_layers, proposal_len=7)


class RecurrentBlock(nn.Module):
  """Attention over given queries' input, then SwiGLU, both added to a residual stream.

  A subclass has `mix`: (embeddings of tokens t + 1, hidden states of t) -> (residual, input of
  attention), each [B, T, .]; it owns the norms and maps that come before attention.
  """
  config: RecurrentConfig
  dtype: Any = jnp.float32

  def setup(self):
    c = self.config
    self.self_attn = DraftAttention(c, self.dtype)
    self.post_attention_layernorm = layers.RMSNorm(c.rms_norm_eps)
    self.mlp = layers.MLP(c.intermediate_size, dtype=self.dtype)

  def mix(self, embeds_BxTxD: jax.Array, hidden_BxTxD: jax.Array):
    raise NotImplementedError

  def finish(self, residual_BxTxD: jax.Array, heads_BxTxNxH: jax.Array) -> jax.Array:
    x_BxTxD = residual_BxTxD + self.self_attn.o_proj(
        heads_BxTxNxH.reshape(heads_BxTxNxH.shape[:2] + (-1,)))
    return x_BxTxD + self.mlp(self.post_attention_layernorm(x_BxTxD))


class RecurrentDrafter(nn.Module):
  """The network: `encode` (of a subclass), one RecurrentBlock `layers_0`, final `norm`.

  Embedding and LM head are the target's and come as arguments.
  """
  config: RecurrentConfig
  dtype: Any = jnp.float32

  def encode(self, features_BxTxMD: jax.Array) -> jax.Array:
    """Hidden states of step 0 from the target's features: [B, T, M*D] -> [B, T, D]."""
    raise NotImplementedError

  def rows(self, embeds_BxTxD, hidden_BxTxD, positions_BxT) -> kv_cache.KVCache:
    """Keys and values of positions, one layer of [B, K, T, H]."""
    _, input_BxTxE = self.layers[0].mix(embeds_BxTxD, hidden_BxTxD)
    k, v = self.layers[0].self_attn.rows(input_BxTxE, self._tables(positions_BxT))
    return kv_cache.KVCache(keys=(k,), values=(v,))

  def step(self, embeds_BxD, hidden_BxD, positions_B, cache, cache_lens_B, chain):
    """One draft in serving.

    Args:
      embeds_BxD, hidden_BxD, positions_B: of the position that is fed.
      cache: rows of committed positions; those at and beyond cache_lens_B are not seen.
      chain: keys and values of the steps before in this round, a list of pairs [B, K, 1, H].
    Returns:
      (hidden of the next step [B, D], final-normed hidden [B, D], chain with this step's pair).
    """
    block, tables = self.layers[0], self._tables(positions_B[:, None])
    residual, x_Bx1xE = block.mix(embeds_BxD[:, None].astype(self.dtype), hidden_BxD[:, None])
    chain = [*chain, block.self_attn.rows(x_Bx1xE, tables)]
    live_Bx1xS = (jnp.arange(cache.num_slots)[None, :] < cache_lens_B[:, None])[:, None]
    keys, values = zip((cache.keys[0], cache.values[0]), *chain)
    heads = layers.attend(block.self_attn.queries(x_Bx1xE, tables), keys, values,
                          [live_Bx1xS] + [jnp.ones((1, 1, 1), bool)] * len(chain),
                          scale=self.config.head_dim**-0.5)
    hidden_Bx1xD = block.finish(residual, heads)
    return hidden_Bx1xD[:, 0], self.norm(hidden_Bx1xD)[:, 0], chain

  def train_hidden(self, features_BxTxMD: jax.Array, embeds: list[jax.Array]) -> jax.Array:
    """Training form: all positions, all steps.

    Args:
      features_BxTxMD: of a whole sequence.
      embeds: for each step s, the embeddings of tokens t + 1 + s, [B, T, D].
    Returns:
      Final-normed hidden states [B, T, G, D]; that of (t, s) predicts token t + 2 + s.
    """
    block, T = self.layers[0], features_BxTxMD.shape[1]
    hidden_BxTxD, out, rows = self.encode(features_BxTxMD), [], []
    for s, embeds_BxTxD in enumerate(embeds):
      tables = self._tables(jnp.arange(T)[None, :] + s)
      residual, x_BxTxE = block.mix(embeds_BxTxD.astype(self.dtype), hidden_BxTxD)
      rows.append(block.self_attn.rows(x_BxTxE, tables))
      heads = attend_chain(block.self_attn.queries(x_BxTxE, tables), rows,
                           scale=self.config.head_dim**-0.5)
      hidden_BxTxD = block.finish(residual, heads)
      out.append(self.norm(hidden_BxTxD))
    return jnp.stack(out, axis=2)

  def _tables(self, positions_BxT: jax.Array):
    return layers.rope_tables(self.config.rope, self.config.head_dim, positions_BxT)


def attend_chain(q_BxTxNxH: jax.Array, rows, *, scale: float) -> jax.Array:
  """Attention of step s = len(rows) - 1: causal over step 0, and query t over t of steps 1..s.

  Args:
    rows: for each step up to this one, keys and values [B, K, T, H].
  Returns:
    [B, T, N, H]. Scores and softmax are float32.
  """
  (B, T, N, H), K = q_BxTxNxH.shape, rows[0][0].shape[1]
  q = q_BxTxNxH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)  # B K n T H
  dot = lambda spec, x, y: jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
  causal = jnp.tril(jnp.ones((T, T), bool)).reshape(1, 1, 1, T, T)
  scores = [jnp.where(causal, dot("bkntd,bksd->bknts", q, rows[0][0]) * scale, -jnp.inf)]
  scores += [dot("bkntd,bktd->bknt", q, k)[..., None] * scale for k, _ in rows[1:]]
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
  out = dot("bknts,bksd->bkntd", weights[..., :T].astype(rows[0][1].dtype), rows[0][1])
  for s, (_, v) in enumerate(rows[1:]):
    out = out + weights[..., T + s, None] * v[:, :, None].astype(jnp.float32)
  return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BxTxNxH.dtype)


@flax.struct.dataclass
class RecurrentState:
  """What a recurrent drafter keeps: rows of committed positions, and where the chain starts.

  Attributes:
    cache: one layer; row t needs token t + 1, so the last valid row is that before the anchor.
    hidden_BxD: hidden state of the position before the anchor.
  """
  cache: kv_cache.KVCache
  hidden_BxD: jax.Array


@dataclasses.dataclass(frozen=True)
class RecurrentProposer:
  """A recurrent drafter as decoding sees it (`interface.Drafter`).

  Attributes:
    vocab_limit: ids at and beyond it (padded rows of the LM head) are never drafted.
    num_steps: drafts of a round, None = as many as it was trained for.
  """
  config: RecurrentConfig
  dtype: Any = jnp.float32
  vocab_limit: int | None = None
  num_steps: int | None = None

  has_confidence = False

  @property
  def proposal_len(self) -> int:
    return self.config.proposal_len if self.num_steps is None else self.num_steps

  def with_len(self, num_drafts: int) -> "RecurrentProposer":
    num_steps = min(max(num_drafts, 1), self.config.proposal_len)
    return dataclasses.replace(self, num_steps=num_steps)

  @property
  def target_layer_ids(self) -> tuple[int, ...]:
    return self.config.target_layer_ids

  def init_state(self, batch: int, num_slots: int) -> RecurrentState:
    c = self.config
    cache = kv_cache.init_cache(batch, num_slots, num_layers=1, num_kv_heads=c.num_kv_heads,
                                head_dim=c.head_dim, dtype=self.dtype)
    return RecurrentState(cache, jnp.zeros((batch, c.hidden_size), self.dtype))

  def prefill(self, params, state: RecurrentState, features_BxTxMD, lens_B, *, tokens_BxW1,
              **borrowed) -> RecurrentState:
    return self.observe(params, state, features_BxTxMD, jnp.zeros_like(lens_B),
                        tokens_BxW1=tokens_BxW1, num_new_B=lens_B, **borrowed)

  def observe(self, params, state: RecurrentState, features_BxWxMD: jax.Array,
              starts_B: jax.Array, *, tokens_BxW1: jax.Array, num_new_B: jax.Array,
              embed_VxD: jax.Array, **unused) -> RecurrentState:
    W, found = features_BxWxMD.shape[1:]
    if found != self.config.num_features:
      raise ValueError(f"features: found width {found}, expected {self.config.num_features} = "
                       f"{len(self.config.target_layer_ids)} taps of {self.config.hidden_size}")
    hidden_BxWxD = self._apply(params, "encode", features_BxWxMD)
    embed_BxWxD = layers.embed(embed_VxD, tokens_BxW1[:, 1:]).astype(self.dtype)
    rows = self._apply(params, "rows", embed_BxWxD, hidden_BxWxD,
                       starts_B[:, None] + jnp.arange(W)[None, :])
    last_Bx1x1 = jnp.clip(num_new_B - 1, 0, W - 1)[:, None, None]
    last_BxD = jnp.take_along_axis(hidden_BxWxD, last_Bx1x1, axis=1)[:, 0]
    return RecurrentState(cache=kv_cache.write_rows(state.cache, rows, starts_B),
                          hidden_BxD=jnp.where(num_new_B[:, None] > 0, last_BxD, state.hidden_BxD))

  def propose(self, params, state: RecurrentState, anchor_B: jax.Array,
              anchor_positions_B: jax.Array, sampling_params, *, embed_VxD: jax.Array,
              lm_head_VdxD: jax.Array, draft_ids: jax.Array | None = None,
              tokens_BxS: jax.Array | None = None) -> Proposal:
    token_B, hidden_BxD, chain, drafts = anchor_B, state.hidden_BxD, [], []
    for k in range(self.proposal_len):
      hidden_BxD, out_BxD, chain = self._apply(
          params, "step", layers.embed(embed_VxD, token_B), hidden_BxD,
          anchor_positions_B - 1 + k, state.cache, anchor_positions_B - 1, chain)
      logits_BxV = layers.linear(out_BxD.astype(lm_head_VdxD.dtype), lm_head_VdxD,
                                dtype=jnp.float32)
      token_B, *more = drafting.draw(
          logits_BxV, k, sampling_params, anchor_positions_B,
          vocab_limit=self.vocab_limit, draft_ids=draft_ids)
      drafts.append((token_B, *more))
    return drafting.make_proposal(*(jnp.stack(parts, axis=1) for parts in zip(*drafts)))

  def _apply(self, params, method: str, *args):
    return self.config.make_network(self.dtype).apply({"params": params}, *args, method=method)


def init_params(config: RecurrentConfig, key: jax.Array):
  """Returns fresh float32 parameters of the config's network."""
  def init(key):
    embeds = [jnp.zeros((1, 1, config.hidden_size))]
    return config.make_network().init(key, jnp.zeros((1, 1, config.num_features)), embeds,
                                      method="train_hidden")["params"]
  return jax.jit(init)(key)
