"""Medusa heads (arXiv 2401.10774): draft k from the last hidden state alone, all k at once.

Head k predicts the token k + 2 positions after the one that it reads (the anchor is the first), by
a residual block, h + silu(W_k h + b_k), and the target's LM head. (The paper gives every head an LM
head of its own, of which each would be larger than many a small target; ours share the frozen one.)
W_k and b_k start at 0, where the head says what the target says of the next token. Drafts are
verified as a chain; they do not depend on each other.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax import sampling
from dspark_jax.drafter import drafting
from dspark_jax.drafter.config import TargetShape
from dspark_jax.types import Proposal
from pallas_kernels import counter_rng


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
  """Shape of the heads; hashable.

  Attributes:
    target_layer_ids: the one layer read, the target's last by default; its raw output.
    proposal_len: G, the number of heads.
    draft_vocab_size: Vd of a reduced draft vocabulary; None = the target's whole vocabulary.
  """
  vocab_size: int
  hidden_size: int
  target_layer_ids: tuple[int, ...]
  num_target_layers: int
  proposal_len: int
  rms_norm_eps: float = 1e-6
  draft_vocab_size: int | None = None

  def __post_init__(self):
    object.__setattr__(self, "target_layer_ids", tuple(int(i) for i in self.target_layer_ids))
    for name in ("vocab_size", "hidden_size", "num_target_layers", "proposal_len"):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: found {value!r}, expected a positive integer")
    ids = self.target_layer_ids
    if len(ids) != 1 or not -1 <= ids[0] < self.num_target_layers:
      raise ValueError(f"target_layer_ids: found {ids}, expected one id within "
                       f"-1..{self.num_target_layers - 1}")
    if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
      raise ValueError(f"draft_vocab_size: found {self.draft_vocab_size}, expected None or within "
                       f"1..{self.vocab_size}")

  @property
  def draft_vocab(self) -> int:
    return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


class MedusaDrafter(nn.Module):
  """[..., D] -> [..., G, D], what the LM head applies to. Parameters: hidden_norm, heads."""
  config: MedusaConfig
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, hidden_xD: jax.Array) -> jax.Array:
    G, D = self.config.proposal_len, self.config.hidden_size
    norm = layers.RMSNorm(self.config.rms_norm_eps, name="hidden_norm")
    hidden_xD = norm(hidden_xD.astype(self.dtype))
    out = layers.Linear(G * D, True, self.dtype, name="heads")(hidden_xD)
    out_xGxD = out.reshape(*hidden_xD.shape[:-1], G, D)
    return hidden_xD[..., None, :] + nn.silu(out_xGxD)


@dataclasses.dataclass(frozen=True)
class MedusaProposer:
  """The heads as decoding sees them (`interface.Drafter`).

  The state is the hidden state of the position before the anchor, [B, D].

  Attributes:
    vocab_limit: ids at and beyond it (padded rows of the LM head) are never drafted.
  """
  config: MedusaConfig
  dtype: Any = jnp.float32
  vocab_limit: int | None = None

  has_confidence = False

  @property
  def proposal_len(self) -> int:
    return self.config.proposal_len

  @property
  def target_layer_ids(self) -> tuple[int, ...]:
    return self.config.target_layer_ids

  def with_len(self, num_drafts: int) -> "MedusaProposer":
    return self  # the heads cost next to nothing

  def init_state(self, batch: int, num_slots: int) -> jax.Array:
    return jnp.zeros((batch, self.config.hidden_size), self.dtype)

  def prefill(self, params, state: jax.Array, features_BxTxD, lens_B, **unused) -> jax.Array:
    return self.observe(params, state, features_BxTxD, None, num_new_B=lens_B)

  def observe(self, params, state: jax.Array, features_BxWxD: jax.Array, starts_B, *,
              num_new_B: jax.Array, **unused) -> jax.Array:
    last_Bx1x1 = jnp.clip(num_new_B - 1, 0, features_BxWxD.shape[1] - 1)[:, None, None]
    last_BxD = jnp.take_along_axis(features_BxWxD, last_Bx1x1, axis=1)[:, 0].astype(state.dtype)
    return jnp.where(num_new_B[:, None] > 0, last_BxD, state)

  def propose(self, params, state: jax.Array, anchor_B: jax.Array, anchor_positions_B: jax.Array,
              sampling_params: sampling.SamplingParams, *, lm_head_VdxD: jax.Array,
              embed_VxD: jax.Array | None = None, draft_ids: jax.Array | None = None,
              tokens_BxS: jax.Array | None = None) -> Proposal:
    hidden_BxGxD = MedusaDrafter(self.config, self.dtype).apply({"params": params}, state)
    logits_BxGxV = layers.linear(hidden_BxGxD.astype(lm_head_VdxD.dtype), lm_head_VdxD,
                                 dtype=jnp.float32)
    law_BxGxV = sampling.law_logits(logits_BxGxV, sampling_params, vocab_limit=self.vocab_limit,
                                    ids=draft_ids)
    slots_BxG = jnp.broadcast_to(jnp.arange(self.proposal_len)[None], logits_BxGxV.shape[:2])
    words = counter_rng.noise_words(sampling_params.seed, counter_rng.DRAFT, anchor_positions_B,
                                    slots_BxG)
    return drafting.make_proposal(sampling.sample(law_BxGxV, words, ids=draft_ids), law_BxGxV,
                                  drafting.top_margin(logits_BxGxV))


def init_params(config: MedusaConfig, key: jax.Array):
  """Returns float32 parameters whose heads add nothing yet."""
  params = MedusaDrafter(config).init(key, jnp.zeros((1, config.hidden_size)))["params"]
  return params | {"heads": jax.tree.map(jnp.zeros_like, params["heads"])}


def config_for_target(target_config: TargetShape, **overrides: Any) -> MedusaConfig:
  """Returns 7 heads on the target's last layer; `overrides` are fields."""
  t = target_config
  fields = dict(vocab_size=t.vocab_size, hidden_size=t.hidden_size, proposal_len=7,
                target_layer_ids=(t.num_layers - 1,), num_target_layers=t.num_layers,
                rms_norm_eps=t.rms_norm_eps)
  return MedusaConfig(**(fields | overrides))
