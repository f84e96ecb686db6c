"""The target's pass over an anchor and its drafts."""

import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.target.config import TransformerConfig
from dspark_jax.target.transformer import TargetOutput, Transformer


def verify(config: TransformerConfig, params, cache: kv_cache.KVCache, anchor_B: jax.Array,
           drafts_BxG: jax.Array, *, cache_lens_B: jax.Array, tap_layer_ids: tuple[int, ...],
           dtype: str = "float32") -> tuple[TargetOutput, jax.Array]:
  """Runs [anchor, drafts] through the target, reading the cache only.

  Drafts beyond a request's verify length ride along in the rectangle: attention is causal, so
  no earlier row sees them, and acceptance ignores their own.

  Returns:
    (TargetOutput of the W = G + 1 rows, raw logits [B, W, V] float32); logits row j is the
    target's law for position cache_len + j + 1.
  """
  tokens_BxW = jnp.concatenate([anchor_B[:, None], drafts_BxG], axis=1)
  model = Transformer(config, dtype)
  out = model.apply({"params": params}, tokens_BxW, cache=cache, cache_lens_B=cache_lens_B,
                    tap_layer_ids=tap_layer_ids)
  return out, model.apply({"params": params}, out.hidden_BxTxD, method=model.head)
