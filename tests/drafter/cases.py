"""Small drafters and inputs that the drafter's tests share."""

import functools

import jax
import jax.numpy as jnp

from dspark_jax.drafter import dspark
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.layers import RopeConfig

KINDS = ("vanilla", "gated", "rnn")


def make_config(**overrides) -> DrafterConfig:
  """GQA, head_dim that is not width / heads, more taps than layers: no two sizes alike."""
  fields = dict(
      vocab_size=37, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4,
      num_kv_heads=2, head_dim=6, target_layer_ids=(-1, 2, 4), num_target_layers=6,
      proposal_len=4, mask_token_id=36, sample_from_anchor=True, markov_rank=5,
      rms_norm_eps=1e-6, rope=RopeConfig(rope_theta=100.0))
  return DrafterConfig(**(fields | overrides))


@functools.lru_cache
def make_params(config: DrafterConfig):
  """Random parameters, norms and biases included, large enough to make attention selective."""
  params = dspark.init_params(config, jax.random.key(0))
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  return tree.unflatten([x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


def make_features(config: DrafterConfig, batch: int, length: int) -> jax.Array:
  return jax.random.normal(jax.random.key(2), (batch, length, config.num_features))


def make_borrowed(config: DrafterConfig, draft_ids=None):
  shape = (config.vocab_size, config.hidden_size)
  embed = jax.random.normal(jax.random.key(3), shape)
  return dspark.borrow(config, embed, jax.random.normal(jax.random.key(4), shape),
                       draft_ids=draft_ids)


def apply(config: DrafterConfig, params, method: str, *args, dtype=jnp.float32):
  return dspark.DSparkDrafter(config, dtype).apply({"params": params}, *args, method=method)
