"""Multi-token prediction, one module fed again and again (DeepSeek-V3, arXiv 2412.19437, sec. 2.2).

The hidden state of a position (the target's last layer; later the module's own output) and the
embedding of the next token are normed, joined and mapped to the model's width; one block of the
target's shape follows. Proposal length 1 is the published use ("MTP-1"); the module drafts further
tokens from its own output, for which it should be trained with as many steps.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.drafter.config import TargetShape
from dspark_jax.drafter.recurrent import RecurrentBlock, RecurrentConfig, RecurrentDrafter
from dspark_jax.drafter.recurrent import fields_from_target


@dataclasses.dataclass(frozen=True)
class MTPConfig(RecurrentConfig):
  """See RecurrentConfig; `target_layer_ids` is one layer, the target's last by default."""

  def __post_init__(self):
    super().__post_init__()
    if len(self.target_layer_ids) != 1:
      raise ValueError(f"target_layer_ids: found {self.target_layer_ids}, expected one layer")

  def make_network(self, dtype: Any = jnp.float32) -> "MTPDrafter":
    return MTPDrafter(self, dtype)


class MTPBlock(RecurrentBlock):
  """Adds `hnorm`, `enorm` and `eh_proj` [D, 2 D], whose output is the residual stream."""

  def setup(self):
    super().setup()
    self.hnorm = layers.RMSNorm(self.config.rms_norm_eps)
    self.enorm = layers.RMSNorm(self.config.rms_norm_eps)
    self.eh_proj = layers.Linear(self.config.hidden_size, dtype=self.dtype)
    self.input_layernorm = layers.RMSNorm(self.config.rms_norm_eps)

  def mix(self, embeds_BxTxD: jax.Array, hidden_BxTxD: jax.Array):
    joined_BxTx2D = jnp.concatenate([self.hnorm(hidden_BxTxD), self.enorm(embeds_BxTxD)], axis=-1)
    x_BxTxD = self.eh_proj(joined_BxTx2D)
    return x_BxTxD, self.input_layernorm(x_BxTxD)


class MTPDrafter(RecurrentDrafter):
  """Parameters: layers_0, norm."""

  def setup(self):
    self.layers = [MTPBlock(self.config, self.dtype)]
    self.norm = layers.RMSNorm(self.config.rms_norm_eps)

  def encode(self, features_BxTxMD: jax.Array) -> jax.Array:
    return features_BxTxMD.astype(self.dtype)


def config_for_target(target_config: TargetShape, **overrides: Any) -> MTPConfig:
  """Returns an MTP module of the target's shape on its last layer; `overrides` are fields."""
  fields = fields_from_target(target_config)
  fields["target_layer_ids"] = (target_config.num_layers - 1,)
  return MTPConfig(**(fields | overrides))
