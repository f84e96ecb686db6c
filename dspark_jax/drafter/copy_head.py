"""The copy head: a bias towards the token that followed the same words before.

Not in the paper. Small models repeat themselves, and code repeats its names: on the greedy answers
of SmolLM2-135M, the token after the last earlier occurrence of the same two tokens is right 74% of
the time, and exists for 45% of the tokens. Prompt look-up drafts such tokens outright; here the
candidate only gets a bias, whose size is learned by the length of the match and read from the
hidden state, so that backbone and Markov head can overrule it. It looks at tokens before the one
drafted only, and the drafted law is the reported law, so exactness is untouched.
"""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import layers


@flax.struct.dataclass
class Copies:
  """What a copy would predict; leading dimensions are those of the positions asked about.

  Attributes:
    token: int32 target id that followed the most recent longest match; 0 where there is none.
    level: int32, length of the match in tokens, 0..max_ngram; 0 = none.
  """
  token: jax.Array
  level: jax.Array


def find_copy(tokens_S: jax.Array, position: jax.Array, max_ngram: int) -> Copies:
  """Finds the copy for one position of one sequence.

  Args:
    tokens_S: int32; entries at and beyond `position` are not looked at.
    position: int32 scalar, index of the token to be predicted.
    max_ngram: matches are at most this long.
  Returns:
    Copies of scalars: among earlier positions preceded by the same tokens, that with the longest
    match, the most recent one where several are equally long.
  """
  S = tokens_S.shape[0]
  index_S = jnp.arange(S)
  level_S = jnp.zeros(S, jnp.int32)
  is_match_S = index_S < position
  for n in range(1, max_ngram + 1):
    previous = tokens_S[jnp.maximum(position - n, 0)]
    shifted_S = jnp.pad(tokens_S, (n, 0), constant_values=-1)[:S]
    is_match_S &= (shifted_S == previous) & (index_S >= n) & (position >= n)
    level_S += is_match_S
  best = jnp.max(jnp.where(level_S > 0, level_S * S + index_S, -1))
  has_match = best >= 0
  at = jnp.where(has_match, best % S, 0)
  return Copies(token=jnp.where(has_match, tokens_S[at], 0).astype(jnp.int32),
                level=jnp.where(has_match, best // S, 0).astype(jnp.int32))


def find_copies(tokens_BxT: jax.Array, max_ngram: int) -> Copies:
  """Finds the copy for every position of every sequence: Copies of [B, T] (teacher forcing)."""
  positions_T = jnp.arange(tokens_BxT.shape[1])
  find_row = jax.vmap(lambda tokens_T, p: find_copy(tokens_T, p, max_ngram), in_axes=(None, 0))
  return jax.vmap(lambda tokens_T: find_row(tokens_T, positions_T))(tokens_BxT)


def find_column(copies: Copies, draft_ids: jax.Array | None) -> jax.Array:
  """Returns the column of each copied token, -1 without a copy or outside the draft vocabulary."""
  token_B = column_B = copies.token
  is_known_B = copies.level > 0
  if draft_ids is not None:
    column_B = jnp.minimum(jnp.searchsorted(draft_ids, token_B), draft_ids.shape[0] - 1)
    is_known_B &= draft_ids[column_B] == token_B
  return jnp.where(is_known_B, column_B, -1)


class CopyHead(nn.Module):
  """Bias of a copy: gate_n . h_k + b_n for a match of n tokens; and its say in the confidence.

  Attributes:
    max_ngram: longest match told apart.
  """
  max_ngram: int

  @nn.compact
  def __call__(self, hidden_xD: jax.Array, level_x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[..., D] and levels [...] -> (bias of the copy's logit, addition to the confidence logit).

    Both are float32 [...]; the bias is 0 where there is no copy.
    """
    N, D = self.max_ngram, hidden_xD.shape[-1]
    weight_NxD = self.param("gate_weight", nn.initializers.zeros, (N, D), jnp.float32)
    start = lambda key, shape: 2.0 + jnp.arange(N, dtype=jnp.float32)
    bias_N = self.param("gate_bias", start, (N,))
    confidence_N = self.param("confidence", nn.initializers.zeros, (N + 1,), jnp.float32)
    gates_xN = layers.linear(hidden_xD.astype(jnp.float32), weight_NxD, bias_N)
    is_level_xN = jax.nn.one_hot(level_x - 1, N, dtype=jnp.float32)
    return jnp.sum(gates_xN * is_level_xN, axis=-1), confidence_N[level_x]
