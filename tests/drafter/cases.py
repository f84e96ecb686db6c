"""Small drafters and inputs that the drafter's tests share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

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
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: dspark.init_params(config, jax.random.key(0)))
  draw = lambda x: (x.ndim == 1) + 0.4 * rng.standard_normal(x.shape)
  return jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)


def make_features(config: DrafterConfig, batch: int, length: int) -> jax.Array:
  rng = np.random.default_rng(1)
  return jnp.asarray(rng.standard_normal((batch, length, config.num_features)), jnp.float32)


def make_borrowed(config: DrafterConfig, draft_ids=None):
  rng = np.random.default_rng(2)
  embed, head = (jnp.asarray(rng.standard_normal((config.vocab_size, config.hidden_size)),
                             jnp.float32) for _ in range(2))
  return dspark.borrow(config, embed, head, draft_ids=draft_ids)


def apply(config: DrafterConfig, params, method: str, *args, dtype=jnp.float32):
  return dspark.DSparkDrafter(config, dtype).apply({"params": params}, *args, method=method)
