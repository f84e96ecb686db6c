"""A sequential head from the target alone: which token follows which, by a low-rank bigram table.

The Markov bias is the logarithm of how much likelier v becomes when the previous token is u. The
target answers that for every u of the draft vocabulary in one short pass a token, no text needed;
the centred table's best rank-r factors are W1 and W2.
"""

from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.target.config import TransformerConfig
from dspark_jax.target.transformer import Transformer

LOG_FLOOR = float(np.log(1e-6))  # laws are compared above this; below, log-probabilities are noise


def bigram_table(config: TransformerConfig, params: Any, token_ids: np.ndarray, *,
                 prefix_ids: Sequence[int] = (), chunk: int = 128) -> np.ndarray:
  """Returns log p(v | prefix, u) for u, v in `token_ids`, float32 [Vd, Vd], floored."""
  model = Transformer(config)
  head_VxD = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
  ids_Vd = jnp.asarray(token_ids)
  prefix_P = jnp.asarray(list(prefix_ids), jnp.int32)

  @jax.jit
  def run(params, head_VxD, u_C):
    tokens_CxT = jnp.concatenate(
        [jnp.broadcast_to(prefix_P[None, :], (chunk, prefix_P.shape[0])), u_C[:, None]], axis=1)
    hidden_CxD = model.apply({"params": params}, tokens_CxT).hidden_BxTxD[:, -1]
    logits_CxV = hidden_CxD @ head_VxD.T
    logp_CxVd = jax.nn.log_softmax(logits_CxV)[:, ids_Vd]
    return jnp.maximum(logp_CxVd, LOG_FLOOR)

  size = len(token_ids)
  padded = np.concatenate([token_ids, np.full(-size % chunk, token_ids[0])]).astype(np.int32)
  rows = [np.asarray(run(params, head_VxD, jnp.asarray(padded[i:i + chunk])))
          for i in range(0, len(padded), chunk)]
  return np.concatenate(rows)[:size]


def factor(table_VdxVd: np.ndarray, rank: int, *, seed: int = 0,
           num_iterations: int = 4) -> tuple[np.ndarray, np.ndarray]:
  """Returns (W1, W2), each float32 [Vd, rank], of the doubly centred table: W1 @ W2.T ~ table.

  A row's mean changes no softmax, a column's mean is the unigram law, which is not the bias's
  business. Randomised subspace iteration; exact up to the spectrum's tail.
  """
  table = table_VdxVd - table_VdxVd.mean(0, keepdims=True)
  table = table - table.mean(1, keepdims=True)
  rng = np.random.default_rng(seed)
  basis = rng.normal(size=(table.shape[1], min(rank + 16, table.shape[1]))).astype(np.float32)
  for _ in range(num_iterations):
    basis, _ = np.linalg.qr(table.T @ (table @ basis))
  left, scale, right = np.linalg.svd(table @ basis, full_matrices=False)
  root = np.sqrt(scale[:rank])
  return left[:, :rank] * root, (basis @ right.T)[:, :rank] * root


def markov_weights(config: TransformerConfig, params: Any, *, rank: int,
                   draft_ids: np.ndarray | None, prefix_ids: Sequence[int] = ()
                   ) -> dict[str, jax.Array]:
  """Returns {markov_w1 [V, r], markov_w2 [Vd, r]}; tokens outside the draft vocabulary get 0."""
  ids = np.arange(config.vocab_size) if draft_ids is None else np.asarray(draft_ids)
  inner_w1, w2 = factor(bigram_table(config, params, ids, prefix_ids=prefix_ids), rank)
  w1 = np.zeros((config.vocab_size, rank), np.float32)
  w1[ids] = inner_w1
  return {"markov_w1": jnp.asarray(w1), "markov_w2": jnp.asarray(w2)}
