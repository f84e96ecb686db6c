"""How near to a tie a greedy choice was: what a first difference between two decodings means."""

import functools
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.target.config import TransformerConfig
from dspark_jax.target.transformer import Transformer


def measure_logit_gap(config: TransformerConfig, params: Any, tokens: Sequence[int], *,
                      dtype: str = "float32",
                      vocab_limit: int | None = None) -> tuple[list[int], float]:
  """Returns the two likeliest next ids below `vocab_limit` and the difference of their logits.

  Where two greedy decodings part, a gap within rounding of the logits is a tie that summation
  order decided; a larger one is a fault.
  """
  logits_V = np.asarray(_last_logits(config, params, jnp.asarray([tokens], jnp.int32),
                                    dtype))[:vocab_limit]
  first, second = np.argsort(-logits_V, kind="stable")[:2].tolist()
  return [first, second], float(logits_V[first] - logits_V[second])


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _last_logits(config, params, tokens_BxT, dtype):
  model = Transformer(config, dtype)
  out = model.apply({"params": params}, tokens_BxT)
  return model.apply({"params": params}, out.hidden_BxTxD[0, -1:],
                     method=model.head)[0].astype(jnp.float32)
