"""The sequential head (arXiv 2607.05147, eq. 4-6): a bias from the tokens drafted so far.

All three kinds have one form: an r-vector `bias_in` of each draft, which W2 [Vd, r] turns into
logits. Keeping the two apart lets training run W2 in chunks, with no [tokens, V] array.

| kind | bias_in of draft k, with e_k = W1[previous token] |
|---|---|
| vanilla | e_k |
| gated | sigmoid(Wg [h_k; e_k] + bg) * e_k |
| rnn | tanh(o) of [g; c; o] = Wj [s; e_k; h_k] + bj; s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c) |
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.drafter.config import DrafterConfig


class SequentialHead(nn.Module):
  """Parameters: markov_w1 [V, r], markov_w2 [Vd, r], and gate_proj or joint_proj."""
  config: DrafterConfig
  dtype: Any = jnp.float32

  def setup(self):
    c = self.config
    init = nn.initializers.normal(0.02)
    self.markov_w1 = self.param("markov_w1", init, (c.vocab_size, c.markov_rank), jnp.float32)
    self.markov_w2 = self.param("markov_w2", init, (c.draft_vocab, c.markov_rank), jnp.float32)
    if c.markov_head_type == "gated":
      self.gate_proj = layers.Linear(c.markov_rank, True, self.dtype)
    elif c.markov_head_type == "rnn":
      self.joint_proj = layers.Linear(3 * c.markov_rank, True, self.dtype)

  def embed_previous(self, prev_tokens_x: jax.Array) -> jax.Array:
    """W1 rows of target ids: [...] -> [..., r]."""
    return layers.embed(self.markov_w1, prev_tokens_x).astype(self.dtype)

  def init_carry(self, *lead: int) -> jax.Array:
    """State before the first draft of a block: zeros [..., r]; zero-width without recurrence."""
    width = self.config.markov_rank if self.config.markov_head_type == "rnn" else 0
    return jnp.zeros((*lead, width), self.dtype)

  def step(self, carry_xR, hidden_xD, embed_xR) -> tuple[jax.Array, jax.Array]:
    """One draft: (state, h_k, e_k) -> (next state, bias_in [..., r])."""
    kind = self.config.markov_head_type
    if kind == "vanilla":
      return carry_xR, embed_xR
    hidden_xD = hidden_xD.astype(self.dtype)
    if kind == "gated":
      gate_xR = self.gate_proj(jnp.concatenate([hidden_xD, embed_xR], axis=-1))
      return carry_xR, nn.sigmoid(gate_xR) * embed_xR
    joint = self.joint_proj(jnp.concatenate([carry_xR, embed_xR, hidden_xD], axis=-1))
    gate_xR, candidate_xR, output_xR = jnp.split(joint, 3, axis=-1)
    keep_xR = nn.sigmoid(gate_xR)
    return keep_xR * carry_xR + (1 - keep_xR) * jnp.tanh(candidate_xR), jnp.tanh(output_xR)

  def forced(self, hidden_xGxD: jax.Array, embed_xGxR: jax.Array) -> jax.Array:
    """Teacher-forced bias_in [..., G, r] of whole blocks."""
    if self.config.markov_head_type != "rnn":
      return self.step(None, hidden_xGxD, embed_xGxR)[1]
    carry, outputs = self.init_carry(*hidden_xGxD.shape[:-2]), []
    for k in range(hidden_xGxD.shape[-2]):  # unrolled: G is small and each step tiny
      carry, bias_in_xR = self.step(carry, hidden_xGxD[..., k, :], embed_xGxR[..., k, :])
      outputs.append(bias_in_xR)
    return jnp.stack(outputs, axis=-2)


def split_cell(config: DrafterConfig, head_params, hidden_xD: jax.Array, dtype):
  """Splits a head's cell as `markov_sampling` takes it: (map of the hidden states, other weights).

  The first is float32 [..., r] (gated) or [..., 3r] (rnn), bias included, for whole blocks at once
  since it does not depend on the drafts; the second acts on [e] or [s; e]. Both None for vanilla.
  """
  kind, rank = config.markov_head_type, config.markov_rank
  if kind == "vanilla":
    return None, None
  layer = head_params["gate_proj" if kind == "gated" else "joint_proj"]
  weight = layer["weight"].astype(dtype)
  width = weight.shape[1] - (rank if kind == "gated" else 2 * rank)
  on_hidden, on_rest = ((weight[:, :width], weight[:, width:]) if kind == "gated"
                        else (weight[:, -width:], weight[:, :-width]))
  pre = layers.linear(hidden_xD.astype(dtype), on_hidden).astype(jnp.float32)
  bias = layer["bias"].astype(jnp.float32)
  return pre + bias.reshape((1,) * (pre.ndim - 1) + (-1,)), on_rest
