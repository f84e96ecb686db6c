"""What the TPU kernels say they move is what their blocks move.

The compiler takes a kernel's cost estimate on trust, and so does the table in the README. Here the
traffic is counted from the grid: a block is copied when its index changes, and only the part that
lies inside its array. What a kernel copies by itself is added by hand.
"""

import jax
import numpy as np
import pytest
from jax.extend import core

from experiments._compile_cases import B, CASES, G, R, V

ROWS = 2 * B * V * 4  # one row a request of target and drafter: what `draw_tokens` fetches
W1_ROWS = (G - 1) * B * 16 * R * 2  # 16 rows around each token but the last


def find_kernels(jaxpr):
  """Yields the pallas_calls of a jaxpr, those in loops and branches too."""
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "pallas_call":
      yield eqn
      continue
    for value in eqn.params.values():
      for inner in value if isinstance(value, (tuple, list)) else (value,):
        if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
          yield from find_kernels(inner)


def count_block_bytes(eqn) -> int:
  """Returns the bytes that the grid copies into and out of VMEM."""
  grid_mapping = eqn.params["grid_mapping"]
  points = np.indices(grid_mapping.grid).reshape(len(grid_mapping.grid), -1).astype(np.int32)
  scalars = [None] * grid_mapping.num_index_operands
  total = 0
  for mapping in grid_mapping.block_mappings:
    if "any" in str(mapping.transformed_block_aval):
      continue
    in_axes = (0,) * len(points) + (None,) * len(scalars)
    index_PxN = np.stack(np.broadcast_arrays(*jax.vmap(
        core.jaxpr_as_fun(mapping.index_map_jaxpr), in_axes)(*points, *scalars)), axis=1)
    array = mapping.array_aval
    block_N = np.array([getattr(size, "block_size", 1) for size in mapping.block_shape])
    inside_PxN = np.minimum(block_N, np.array(array.shape) - index_PxN * block_N)
    is_new_P = np.concatenate([[True], (index_PxN[1:] != index_PxN[:-1]).any(axis=1)])
    total += int((inside_PxN.prod(axis=1) * is_new_P).sum()) * array.dtype.itemsize
  return total


@pytest.mark.parametrize("name, by_hand", [
    ("rejection_sampling", (0, 0, ROWS)),
    ("markov_sampling, 64 MiB of VMEM", (W1_ROWS,)),
    ("markov_sampling, 128 MiB of VMEM", (W1_ROWS,)),
    ("markov_sampling, rnn, with logits", (W1_ROWS,)),
    ("distillation_loss, 512 tokens, gradients", (0, 0)),
])
def test_estimate(name, by_hand):
  f, args = CASES[name].build()
  kernels = list(find_kernels(jax.make_jaxpr(f)(*args)))
  assert len(kernels) == len(by_hand)
  for eqn, copied in zip(kernels, by_hand):
    estimate = eqn.params["cost_estimate"]
    moved = count_block_bytes(eqn) + copied
    # Scalars and tails are counted roughly.
    assert estimate.bytes_accessed == pytest.approx(moved, rel=0.005), eqn.params["name"]
    assert estimate.flops > 0


def test_a_block_that_stays_is_counted_once():
  """64 MiB hold 117 of 149 tiles of W2: it is read once and its last 32 tiles six times more."""
  f, args = CASES["markov_sampling, 64 MiB of VMEM"].build()
  (eqn,) = find_kernels(jax.make_jaxpr(f)(*args))
  tile_bytes = 1024 * R * 2
  once = 4 * G * B * V + 2 * V * R + 4 * G * V  # base logits, W2; ids, a row each slot
  again = 6 * (32 * tile_bytes - (149 * 1024 - V) * R * 2)
  assert count_block_bytes(eqn) == pytest.approx(once + again, rel=0.002)
