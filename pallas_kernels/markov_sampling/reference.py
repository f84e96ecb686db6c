"""Plain jnp: the definition of the sequential walk, and the path on CPU.

Everything is position first, [G, B, ...]: a step reads and writes one contiguous [B, V] slab.
`walk` is the loop, with the law left to the caller (decoding has filters and a copy bias); the
other two functions are that loop with the tempered law, over all columns or the best few.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.counter_rng import gumbel, gumbel_argmax
from pallas_kernels.rows import find_laws, first_argmax

KINDS = ("vanilla", "gated", "rnn")


class Draws(NamedTuple):
  """What a walk drew.

  The law of slot g is softmax(logits / t), t the temperature; a greedy row has t = 1 here, all its
  mass on the argmax, and its largest logit as `lse`.

  Attributes:
    tokens_GxB: int32 target ids.
    logp_GxB: float32 log-probability of each token under its law; 0 in greedy rows.
    lse_GxB: float32 log sum exp(logits / t); NaN where the row is no law.
    embeds_GxBxR: W1 rows of the previous tokens, which the confidence head reads.
    bias_in_GxBxR: what W2 turned into each slot's bias; embeds_GxBxR itself in the vanilla head.
    logits_GxBxV: float32 base logits + bias; None unless asked for.
  """
  tokens_GxB: jax.Array
  logp_GxB: jax.Array
  lse_GxB: jax.Array
  embeds_GxBxR: jax.Array
  bias_in_GxBxR: jax.Array
  logits_GxBxV: jax.Array | None = None


def walk(base_logits_GxBxV, words_GxBx2, first_token_B, carry, step):
  """Draws G tokens in order; returns (tokens_GxB, whatever `step` returned beside them, stacked).

  `step(carry, slot, previous_token_B, base_logits_BxV, words_Bx2) -> (carry, token_B, extra)` draws
  one slot's int32 tokens. One loop body, not G of them: on CPU a third of the compile time of a
  decoding step was G copies of the sampling code.
  """
  def one_slot(state, inputs):
    previous_B, carry = state
    slot, base_BxV, words_Bx2 = inputs
    carry, token_B, extra = step(carry, slot, previous_B, base_BxV, words_Bx2)
    return (token_B, carry), (token_B, extra)

  slots_G = jnp.arange(base_logits_GxBxV.shape[0])
  first = (first_token_B.astype(jnp.int32), carry)
  return lax.scan(one_slot, first, (slots_G, base_logits_GxBxV, words_GxBx2))[1]


def advance(kind: str, carry_BxR, embed_BxR, pre_BxE, cell_ExI):
  """One step of the sequential head's r-vector: (next carry, bias_in), both [B, R].

  `pre` is the cell's affine map of the hidden state, bias included, `cell` its weight on the rest:
  vanilla: neither. gated: sigmoid(cell @ e + pre) * e. rnn: [g; c; o] = cell @ [s; e] + pre,
  s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c), bias_in = tanh(o).
  """
  if kind == "vanilla":
    return carry_BxR, embed_BxR
  rest = embed_BxR if kind == "gated" else jnp.concatenate([carry_BxR, embed_BxR], axis=-1)
  joint_BxE = pre_BxE.astype(jnp.float32) + lax.dot_general(
      rest, cell_ExI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
  if kind == "gated":
    return carry_BxR, (jax.nn.sigmoid(joint_BxE) * embed_BxR).astype(embed_BxR.dtype)
  gate, candidate, output = jnp.split(joint_BxE, 3, axis=-1)
  keep = jax.nn.sigmoid(gate)
  carry = keep * carry_BxR + (1 - keep) * jnp.tanh(candidate)
  return carry.astype(carry_BxR.dtype), jnp.tanh(output).astype(embed_BxR.dtype)


def _multiply(x_BxR, w_VxR):
  return lax.dot_general(x_BxR, w_VxR, (((1,), (1,)), ((), ())),
                         preferred_element_type=jnp.float32)


def markov_sampling_reference(base_logits_GxBxV, w1_UxR, w2_VxR, first_token_B, words_GxBx2,
                              temperature_B, pre_GxBxE=None, cell_ExI=None, ids_V=None, *,
                              kind: str = "vanilla", with_logits: bool = False):
  """Same as `api.markov_sampling`."""
  is_greedy_B, scale_Bx1 = _split_temperature(temperature_B)

  def step(carry, slot, previous_B, base_BxV, words_Bx2):
    embed_BxR = w1_UxR[previous_B]
    pre_BxE = None if pre_GxBxE is None else pre_GxBxE[slot]
    carry, bias_in_BxR = advance(kind, carry, embed_BxR, pre_BxE, cell_ExI)
    logits_BxV = base_BxV + _multiply(bias_in_BxR, w2_VxR)
    column_B = lax.cond(
        jnp.all(is_greedy_B),
        lambda: first_argmax(logits_BxV),
        lambda: jnp.where(is_greedy_B, first_argmax(logits_BxV),
                          gumbel_argmax(_temper(logits_BxV, scale_Bx1), words_Bx2, ids_V)))
    logp_B, lse_B = _describe(logits_BxV, column_B, is_greedy_B, scale_Bx1)
    token_B = column_B if ids_V is None else ids_V[column_B].astype(jnp.int32)
    return carry, token_B, (logp_B, lse_B, embed_BxR, bias_in_BxR,
                            logits_BxV if with_logits else None)

  carry = jnp.zeros((base_logits_GxBxV.shape[1], w1_UxR.shape[1]), w1_UxR.dtype)
  tokens_GxB, extras = walk(base_logits_GxBxV, words_GxBx2, first_token_B, carry, step)
  return Draws(tokens_GxB, *extras)


def pruned_markov_sampling(base_logits_GxBxV, w1_UxR, w2_VxR, first_token_B, words_GxBx2,
                           temperature_B, pre_GxBxE=None, cell_ExI=None, ids_V=None, *,
                           num_candidates: int, kind: str = "vanilla"):
  """The walk over each slot's `num_candidates` best base logits: (Draws, columns_GxBxC).

  The law is the softmax over the candidates alone and is what is reported: `logits` are [G, B, C]
  of the columns returned (int32, by base logit), every other column has probability 0. So
  acceptance stays exact; what the bias would have lifted from outside is merely never drafted. W2
  rows of all candidates are gathered beforehand, since they do not depend on the tokens: no step
  touches anything as wide as V, which is why this form needs no kernel.
  """
  num_candidates = min(num_candidates, base_logits_GxBxV.shape[-1])
  best_GxBxC, columns_GxBxC = lax.top_k(base_logits_GxBxV, num_candidates)
  rows_GxBxCxR = w2_VxR[columns_GxBxC]
  ids_GxBxC = columns_GxBxC if ids_V is None else ids_V[columns_GxBxC].astype(jnp.int32)
  is_greedy_B, scale_Bx1 = _split_temperature(temperature_B)

  def step(carry, slot, previous_B, best_BxC, words_Bx2):
    embed_BxR = w1_UxR[previous_B]
    pre_BxE = None if pre_GxBxE is None else pre_GxBxE[slot]
    carry, bias_in_BxR = advance(kind, carry, embed_BxR, pre_BxE, cell_ExI)
    logits_BxC = best_BxC + jnp.einsum("bcr,br->bc", rows_GxBxCxR[slot], bias_in_BxR,
                                       preferred_element_type=jnp.float32)
    ids_BxC = ids_GxBxC[slot]
    noise_BxC = jnp.where(is_greedy_B[:, None], 0.0, gumbel(words_Bx2, ids_BxC))
    scores_BxC = _temper(logits_BxC, scale_Bx1) + noise_BxC
    # The lowest id, not the first candidate, at ties; the first where the row is no law.
    is_best_BxC = scores_BxC == jnp.max(scores_BxC, axis=-1, keepdims=True)
    found_B = first_argmax(jnp.where(is_best_BxC, -ids_BxC, jnp.iinfo(jnp.int32).min))
    logp_B, lse_B = _describe(logits_BxC, found_B, is_greedy_B, scale_Bx1)
    token_B = jnp.take_along_axis(ids_BxC, found_B[:, None], axis=1)[:, 0]
    return carry, token_B, (logp_B, lse_B, embed_BxR, bias_in_BxR, logits_BxC)

  carry = jnp.zeros((base_logits_GxBxV.shape[1], w1_UxR.shape[1]), w1_UxR.dtype)
  tokens_GxB, extras = walk(best_GxBxC, words_GxBx2, first_token_B, carry, step)
  return Draws(tokens_GxB, *extras), columns_GxBxC


def _split_temperature(temperature_B):
  """Returns (is_greedy [B], the divisor of the logits [B, 1]: 1 in greedy rows)."""
  is_greedy_B = ~(temperature_B > 0)
  return is_greedy_B, jnp.where(is_greedy_B, 1.0, temperature_B)[:, None]


def _temper(logits_BxV, scale_Bx1):
  # The maximum goes first: logits / t of a small t would lose what tells the best tokens apart.
  return (logits_BxV - jnp.max(logits_BxV, axis=-1, keepdims=True)) / scale_Bx1


def _describe(logits_BxV, column_B, is_greedy_B, scale_Bx1):
  """Returns (log-probability of the column drawn, log-normaliser), float32 [B]."""
  shifted_BxV = _temper(logits_BxV, scale_Bx1)
  log_sum_B = jnp.where(is_greedy_B, 0.0, jnp.log(jnp.sum(jnp.exp(shifted_BxV), axis=-1)))
  drawn_B = jnp.take_along_axis(shifted_BxV, column_B[:, None], axis=-1)[:, 0]
  lse_B = jnp.max(logits_BxV, axis=-1) / scale_Bx1[:, 0] + log_sum_B
  is_law_B = find_laws(logits_BxV)
  return tuple(jnp.where(is_law_B, x_B, jnp.nan) for x_B in (drawn_B - log_sum_B, lse_B))
