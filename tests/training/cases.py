"""A tiny target and drafter for the training tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import layers
from dspark_jax.drafter import dspark
from dspark_jax.drafter.config import config_for_target
from dspark_jax.target.config import TransformerConfig
from dspark_jax.target.transformer import Transformer
from dspark_jax.training import losses
from dspark_jax.training import step as step_lib

TARGET = TransformerConfig(
    model_type="llama", vocab_size=60, hidden_size=16, intermediate_size=24, num_layers=3,
    num_heads=4, num_kv_heads=2, head_dim=4, tie_word_embeddings=True,
    rope=layers.RopeConfig(rope_theta=100.0))


@functools.lru_cache
def make_target_params():
  """Weights large enough that the target's laws are not uniform."""
  params = Transformer(TARGET).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
  return jax.tree.map(lambda a: a * (8 if a.shape == (60, 16) else 1), params)


def make_drafter_config(**overrides):
  fields = dict(num_layers=1, proposal_len=4, markov_rank=3, mask_token_id=59,
                target_layer_ids=(0, 1))
  return config_for_target(TARGET, **{**fields, **overrides})


LOSS = losses.LossConfig(chunk=16)


def make_objective(*, num_anchors=6, loss=LOSS, **overrides):
  return step_lib.Objective(target_config=TARGET, drafter_config=make_drafter_config(**overrides),
                            loss=loss, num_anchors=num_anchors)


def make_frozen(num_draft_ids=None):
  ids = None if num_draft_ids is None else jnp.arange(num_draft_ids, dtype=jnp.int32) * 2
  return step_lib.Frozen(target_params=make_target_params(), draft_ids_Vd=ids)


def make_params(objective, seed=1):
  """Fresh parameters with a sequential head that is not nearly zero."""
  params = dspark.init_params(objective.drafter_config, jax.random.key(seed))
  if "markov_head" in params:
    head = {k: v * 20 for k, v in params["markov_head"].items() if k.startswith("markov_w")}
    params = {**params, "markov_head": {**params["markov_head"], **head}}
  return params


def make_batch(B=3, T=14, *, seed=0, num_prompt=4):
  rng = np.random.default_rng(seed)
  mask = np.ones((B, T), np.int32)
  mask[:, :num_prompt] = 0
  return {"input_ids": jnp.asarray(rng.integers(0, 58, (B, T)), jnp.int32),
          "loss_mask": jnp.asarray(mask)}
