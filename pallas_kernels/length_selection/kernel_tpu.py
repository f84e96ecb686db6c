"""Length selection on TPU, where there is no sort inside a kernel: the drafts stay in registers.

Drafts lie position-major, [G, B], so that a draft's flat index is its place among ties. What is
admitted is described by the last draft alone (everything before it in the order), so neither loop
stores anything: Algorithm 1 takes out one maximum after the other and ends at the first refusal;
the budget's last draft is found by bisection over the bits of its survival, then over its index.
Both are one launch. XLA's program for the reference is a sort, a scatter and, for Algorithm 1, a
loop of small launches: 1 + admitted drafts rounds of them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
_BEFORE_ALL = 2.0  # above every survival: nothing is admitted yet


def stop_early_tpu(keys_BxG, expected_tokens, num_tokens, step_curve_C, *, interpret=False):
  """Same as `reference.stop_early`; `step_curve_C` must fit the scalar memory (to 100,000 entries).
  """
  return _select(_stop_early_kernel, keys_BxG, expected_tokens.reshape(1), num_tokens.reshape(1),
                 step_curve_C, num_rounds=keys_BxG.size // 2, interpret=interpret)


def fill_budget_tpu(keys_BxG, room, *, interpret=False):
  """Same as `reference.fill_budget`."""
  return _select(_fill_budget_kernel, keys_BxG, room.reshape(1), num_rounds=45,
                 interpret=interpret)


def _select(kernel, keys_BxG, *scalars, num_rounds: int, interpret):
  batch, num_drafts = keys_BxG.shape
  if not keys_BxG.size:
    return jnp.zeros(batch, jnp.int32)
  rows, columns = (pl.cdiv(n, m) * m for n, m in ((num_drafts, SUBLANES), (batch, LANES)))
  keys_GxB = jnp.pad(keys_BxG.T, ((0, rows - num_drafts), (0, columns - batch)),
                     constant_values=-1.0)
  lens_1xB = pl.pallas_call(
      kernel,
      in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars)
      + [pl.BlockSpec(memory_space=pltpu.VMEM)],
      out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
      out_shape=jax.ShapeDtypeStruct((1, columns), jnp.int32),
      cost_estimate=pl.CostEstimate(
          flops=8 * keys_GxB.size * num_rounds, transcendentals=0,
          bytes_accessed=4 * (keys_GxB.size + columns + sum(a.size for a in scalars))),
      interpret=interpret, name=kernel.__name__.strip("_"))(*scalars, keys_GxB)
  return lens_1xB[0, :batch]


def _index(shape):
  """Returns each draft's flat index, int32: its place among equal survivals."""
  return (lax.broadcasted_iota(jnp.int32, shape, 0) * shape[1]
          + lax.broadcasted_iota(jnp.int32, shape, 1))


def _write_lens(lens_ref, is_admitted):
  lens_ref[...] = jnp.sum(jnp.where(is_admitted, 1.0, 0.0), axis=0, keepdims=True).astype(jnp.int32)


def _stop_early_kernel(expected_ref, num_tokens_ref, curve_ref, keys_ref, lens_ref):
  keys = keys_ref[...]
  index = _index(keys.shape)
  last_entry = curve_ref.shape[0] - 1

  def read_curve(num_tokens):
    entry = curve_ref[jnp.clip(num_tokens, 0, last_entry)]
    return jnp.where(num_tokens <= last_entry, entry, 0.0)

  def admit_next(walk):
    last_key, last_index, expected, num_tokens, rate, _ = walk
    is_left = (keys < last_key) | ((keys == last_key) & (index > last_index))
    key = jnp.max(jnp.where(is_left, keys, -1.0))
    first = jnp.min(jnp.where(is_left & (keys == key), index, keys.size))
    new_expected, new_tokens = expected + key, num_tokens + 1
    new_rate = new_expected * read_curve(new_tokens)
    admits = (key >= 0) & (new_rate > rate)
    keep = lambda new, old: jnp.where(admits, new, old)
    return (keep(key, last_key), keep(first, last_index), keep(new_expected, expected),
            keep(new_tokens, num_tokens), keep(new_rate, rate), admits)

  expected, num_tokens = expected_ref[0], num_tokens_ref[0]
  start = (jnp.float32(_BEFORE_ALL), jnp.int32(-1), expected, num_tokens,
           expected * read_curve(num_tokens), True)
  last_key, last_index, *_ = lax.while_loop(lambda walk: walk[-1], admit_next, start)
  _write_lens(lens_ref, (keys > last_key) | ((keys == last_key) & (index <= last_index)))


def _fill_budget_kernel(room_ref, keys_ref, lens_ref):
  # Survivals are not negative, so their bits order as they do; no candidate has a negative word.
  bits = lax.bitcast_convert_type(keys_ref[...], jnp.int32)
  index = _index(bits.shape)
  count = lambda mask: jnp.sum(jnp.where(mask, 1.0, 0.0)).astype(jnp.int32)
  room = jnp.minimum(room_ref[0], count(bits >= 0))

  def set_bit(i, last):
    larger = last | lax.shift_left(jnp.int32(1), 29 - i)  # 1.0 is 0x3F800000, 30 bits
    return jnp.where(count(bits >= larger) >= room, larger, last)

  last = lax.fori_loop(0, 30, set_bit, jnp.int32(0))
  is_tied = bits == last
  num_tied = room - count(bits > last)
  num_index_bits = (bits.size - 1).bit_length()

  def set_index_bit(i, last_index):
    larger = last_index | lax.shift_left(jnp.int32(1), num_index_bits - 1 - i)
    return jnp.where(count(is_tied & (index < larger)) < num_tied, larger, last_index)

  last_index = lax.fori_loop(0, num_index_bits, set_index_bit, jnp.int32(0))
  _write_lens(lens_ref, (room > 0) & ((bits > last) | (is_tied & (index <= last_index))))
