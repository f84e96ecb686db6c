"""EAGLE-3 (arXiv 2503.01840), as the public reference deepseek-ai/DeepSpec builds it.

Several of the target's layers are joined by `fc` to the hidden state of a position. Queries, keys
and values read [norm(embedding of the next token); norm(hidden state)], twice the model's width;
the residual stream is the hidden state alone, without its norm.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.drafter.config import TargetShape, spread_layer_ids
from dspark_jax.drafter.recurrent import RecurrentBlock, RecurrentConfig, RecurrentDrafter
from dspark_jax.drafter.recurrent import fields_from_target


@dataclasses.dataclass(frozen=True)
class Eagle3Config(RecurrentConfig):
  """See RecurrentConfig.

  Attributes:
    step_loss_decay: weight of step s + 1 over that of step s, which the drafter was trained with.
      Carried for checkpoints; a run's own is `loss.loss_decay`.
  """
  step_loss_decay: float = 0.8

  def make_network(self, dtype: Any = jnp.float32) -> "Eagle3Drafter":
    return Eagle3Drafter(self, dtype)


class Eagle3Block(RecurrentBlock):
  """Adds the norms of both inputs: `input_layernorm` of embeddings, `hidden_norm`."""

  def setup(self):
    super().setup()
    self.input_layernorm = layers.RMSNorm(self.config.rms_norm_eps)
    self.hidden_norm = layers.RMSNorm(self.config.rms_norm_eps)

  def mix(self, embeds_BxTxD: jax.Array, hidden_BxTxD: jax.Array):
    return hidden_BxTxD, jnp.concatenate(
        [self.input_layernorm(embeds_BxTxD), self.hidden_norm(hidden_BxTxD)], axis=-1)


class Eagle3Drafter(RecurrentDrafter):
  """Parameters: fc [D, M*D], layers_0, norm."""

  def setup(self):
    self.fc = layers.Linear(self.config.hidden_size, dtype=self.dtype)
    self.layers = [Eagle3Block(self.config, self.dtype)]
    self.norm = layers.RMSNorm(self.config.rms_norm_eps)

  def encode(self, features_BxTxMD: jax.Array) -> jax.Array:
    return self.fc(features_BxTxMD)


def config_for_target(target_config: TargetShape, **overrides: Any) -> Eagle3Config:
  """Returns an EAGLE-3 of the target's shape: 7 steps, 5 spread taps; `overrides` are fields."""
  fields = fields_from_target(target_config)
  fields["target_layer_ids"] = spread_layer_ids(target_config.num_layers)
  return Eagle3Config(**(fields | overrides))
