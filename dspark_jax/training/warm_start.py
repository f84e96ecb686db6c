"""Starts a drafter from its target: layers copied, context = the last tap, instead of noise.

A drafter whose layers are the target's last ones already speaks the language of the LM head, and
its context keys and values are nearly those that the copied layers saw in the target.

Measured on SmolLM2-135M (2 layers, 5 drafts, taps 1, 10, 19, 28, peak rate 2e-3; held-out tau_prob
after 60 steps of 128 blocks, loss weights 1 / 0.9 / 1): target layers (28, 29) 1.090, layers
(0, 29) 1.055, fresh 1.055; with CE weight 0.1, (28, 29) reached 1.113. One seed each, 8 held-out
rows, and a very short run: a first choice, not a ranking of what training ends with.
"""

import dataclasses
from typing import Any, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.drafter import dspark
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.target.config import TransformerConfig
from dspark_jax.training import bigram


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
  """What is copied.

  Attributes:
    layer_ids: target layer that each draft layer is copied from; () = fresh parameters.
    other_taps_scale: standard deviation of the fc block of every tap but the last, times the
      usual 1 / sqrt(inputs).
    head_scale: standard deviation of the sequential head's W1 and W2, unless a bigram table
      makes them.
    use_bigrams: W1 and W2 from the target's own bigram table (`bigram.py`; vanilla head only).
    bigram_prefix: token ids before the bigram, e.g. the header of an assistant's turn.
    output_scale: factor on the final norm. Copied layers, fed with embeddings that they never
      saw, begin with confidently wrong logits; a small factor begins with the bias alone.
  """
  layer_ids: tuple[int, ...] = ()
  other_taps_scale: float = 0.1
  head_scale: float = 0.02
  use_bigrams: bool = False
  bigram_prefix: tuple[int, ...] = ()
  output_scale: float = 1.0

  def __post_init__(self):
    object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
    object.__setattr__(self, "bigram_prefix", tuple(self.bigram_prefix))


def init_drafter(config: DrafterConfig, key: jax.Array, *, target_config: TransformerConfig,
                 target_params: Mapping[str, Any], warm_start: WarmStartConfig,
                 draft_ids: np.ndarray | None = None) -> Any:
  """Returns the drafter's parameters at step 0.

  Attention, MLP and norm weights of draft layer i are those of target layer layer_ids[i]; q/k
  norms that the target lacks stay 1 (a drafter with `qk_norm=False` keeps the copied attention
  exact). fc passes the last tap through, plus a little of the others; the context norm takes the
  mean input norm of the copied layers, because the target applied that norm to the same states.

  Raises:
    ValueError: layer_ids of another number than the draft layers, out of range, or a drafter
      whose layers have another shape than the target's.
  """
  params = jax.tree.map(lambda a: a, dict(dspark.init_params(config, key)))
  if not warm_start.layer_ids:
    return params
  _check(config, target_config, warm_start)
  backbone = dict(params["backbone"])
  for i, layer_id in enumerate(warm_start.layer_ids):
    backbone[f"layers_{i}"] = _copy_layer(backbone[f"layers_{i}"],
                                          target_params[f"layers_{layer_id}"])
  backbone["norm"] = jax.tree.map(lambda a: a * warm_start.output_scale,
                                  _copy(target_params["norm"]))
  norms = [target_params[f"layers_{i}"]["input_layernorm"]["weight"]
           for i in warm_start.layer_ids]
  backbone["hidden_norm"] = {"weight": jnp.mean(jnp.stack(norms), axis=0, dtype=jnp.float32)}
  backbone["fc"] = {"weight": _pass_last_tap(config, jax.random.fold_in(key, 1),
                                             scale=warm_start.other_taps_scale)}
  params["backbone"] = backbone
  if config.markov_rank:
    head = dict(params["markov_head"])
    for i, name in enumerate(("markov_w1", "markov_w2")):
      head[name] = warm_start.head_scale * jax.random.normal(
          jax.random.fold_in(key, 2 + i), head[name].shape)
    if warm_start.use_bigrams:
      head |= bigram.markov_weights(target_config, target_params, rank=config.markov_rank,
                                    draft_ids=draft_ids, prefix_ids=warm_start.bigram_prefix)
    params["markov_head"] = head
  return params


def add_heads(config: DrafterConfig, params: Mapping[str, Any], key: jax.Array) -> dict[str, Any]:
  """Returns parameters of `config` made of a drafter's that lacks heads, such as DFlash.

  A new sequential head has W2 = 0, so the drafter starts with the law that it had; W1 is random, or
  W2 would have no gradient either. A new confidence head is a fresh one: no law depends on it.
  """
  fresh = dict(dspark.init_params(config, key))
  if "markov_head" in fresh:
    head = dict(fresh["markov_head"])
    fresh["markov_head"] = head | {"markov_w2": jnp.zeros_like(head["markov_w2"])}
  return {name: params.get(name, value) for name, value in fresh.items()}


def _copy(tree):
  return jax.tree.map(lambda a: jnp.array(a, jnp.float32), dict(tree))


def _copy_layer(fresh: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
  """Takes from `source` what `fresh` has, else keeps the fresh value (q/k norms = 1)."""
  out = {}
  for name, value in fresh.items():
    if isinstance(value, Mapping):
      out[name] = _copy_layer(value, source.get(name, {}))
    else:
      out[name] = jnp.array(source[name], jnp.float32) if name in source else value
  return out


def _pass_last_tap(config: DrafterConfig, key: jax.Array, *, scale: float) -> jax.Array:
  """fc [D, M*D] = [noise, ..., noise, identity]."""
  width = config.hidden_size
  num_others = config.num_features - width
  noise = scale * jax.random.normal(key, (width, num_others)) / max(num_others, 1) ** 0.5
  return jnp.concatenate([noise, jnp.eye(width)], axis=1)


def _check(config: DrafterConfig, target_config: TransformerConfig,
           warm_start: WarmStartConfig) -> None:
  ids = warm_start.layer_ids
  if len(ids) != config.num_layers:
    raise ValueError(f"warm_start.layer_ids: found {len(ids)} ids, expected one for each of the "
                     f"{config.num_layers} draft layers")
  if any(not 0 <= i < target_config.num_layers for i in ids):
    raise ValueError(f"warm_start.layer_ids: found {ids}, expected ids within "
                     f"0..{target_config.num_layers - 1}")
  for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
    if getattr(config, name) != getattr(target_config, name):
      raise ValueError(f"{name}: found {getattr(config, name)} in the drafter, expected the "
                       f"target's {getattr(target_config, name)} for a warm start")
