"""Length selection in plain jnp: the definition of correct, and the fast path on CPU.

Both rules sort the drafts once. The walk of Algorithm 1 is a loop over scalars that ends at its
first refusal: a vectorised prefix sum would add in an order of its own, and near-ties would fall
differently from one backend to the next.
"""

import jax
import jax.numpy as jnp
from jax import lax


def stop_early(keys_BxG, expected_tokens, num_tokens, step_curve_C):
  """Returns how many candidates of each request Algorithm 1 admits, int32 [B].

  `keys_BxG` is float32, falling along G from each request's first candidate on: survival of a
  candidate, negative where there is none. `expected_tokens` (float32 []) and `num_tokens` (int32
  []) are those of the round before any candidate is admitted.
  """
  order_N = _order(keys_BxG)
  sorted_N = keys_BxG.T.reshape(-1)[order_N]
  if not sorted_N.size:
    return jnp.zeros(keys_BxG.shape[0], jnp.int32)

  def try_next(walk):
    """Returns (candidate's expected tokens, rate) after one more admission."""
    num_admitted, expected, _ = walk
    survival = sorted_N[jnp.minimum(num_admitted, sorted_N.size - 1)]
    expected = expected + survival
    rate = expected * read_curve(step_curve_C, num_tokens + num_admitted + 1)
    return survival, expected, rate

  def admits(walk):
    survival, _, rate = try_next(walk)
    return (walk[0] < sorted_N.size) & (survival >= 0) & (rate > walk[2])

  def admit(walk):
    _, expected, rate = try_next(walk)
    return walk[0] + 1, expected, rate

  rate = expected_tokens * read_curve(step_curve_C, num_tokens)
  num_admitted, _, _ = lax.while_loop(admits, admit, (jnp.int32(0), expected_tokens, rate))
  return _count_first(order_N, num_admitted, keys_BxG.shape)


def fill_budget(keys_BxG, room):
  """Returns how many candidates of each request are among the first `room`, int32 [B].

  `keys_BxG` as for `stop_early`; `room` is int32 [], anything below 0 is 0.
  """
  num_candidates = jnp.sum(keys_BxG >= 0, dtype=jnp.int32)
  return _count_first(_order(keys_BxG), jnp.minimum(room, num_candidates), keys_BxG.shape)


def read_curve(step_curve_C: jax.Array, num_tokens) -> jax.Array:
  """Returns the curve's entry, float32; 0 beyond its end: such a total never raises a rate."""
  last = step_curve_C.shape[0] - 1
  return jnp.where(num_tokens <= last, step_curve_C[jnp.clip(num_tokens, 0, last)], 0.0)


def _order(keys_BxG):
  """Returns the order of admission, int32 [G * B], as indices into the position-major drafts."""
  # Stable on position-major order: ties go by position, then by request.
  return jnp.argsort(-keys_BxG.T.reshape(-1), stable=True)


def _count_first(order_N, num_admitted, shape):
  batch, num_drafts = shape
  is_first_N = jnp.arange(order_N.size) < num_admitted
  is_admitted_N = jnp.zeros(order_N.size, bool).at[order_N].set(is_first_N, unique_indices=True)
  return jnp.sum(is_admitted_N.reshape(num_drafts, batch), axis=0, dtype=jnp.int32)
