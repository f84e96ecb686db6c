"""The target's pass over an anchor and its drafts."""

import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.target.config import TransformerConfig
from dspark_jax.target.transformer import TargetOutput, Transformer
from dspark_jax.types import Packing


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


def verify_packed(config: TransformerConfig, params, cache: kv_cache.KVCache, anchor_B: jax.Array,
                  drafts_BxG: jax.Array, packing: Packing, *, cache_lens_B: jax.Array,
                  tap_layer_ids: tuple[int, ...],
                  dtype: str = "float32") -> tuple[TargetOutput, jax.Array]:
  """Runs only the rows that `packing` has a slot for; `verify` without the rectangle.

  Returns:
    (TargetOutput, raw logits [1, P, V] float32). Hidden states and features are packed, [1, P, ..],
    keys and values are rectangles [B, K, W, H] of the packing's W.
  """
  rows_BxW = jnp.concatenate([anchor_B[:, None], drafts_BxG], axis=1)
  tokens_1xP = packing.pack(rows_BxW[:, :packing.slots_BxW.shape[1]])
  model = Transformer(config, dtype)
  out = model.apply({"params": params}, tokens_1xP, cache=cache, cache_lens_B=cache_lens_B,
                    tap_layer_ids=tap_layer_ids, packing=packing)
  return out, model.apply({"params": params}, out.hidden_BxTxD, method=model.head)
