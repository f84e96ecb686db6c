import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training import anchors
from tests import oracles


def candidates(mask):
  return np.flatnonzero(anchors.find_candidates(jnp.array([mask]))[0]).tolist()


# Faults B35 and B36, with their exact inputs.
@pytest.mark.parametrize("mask, expected", [
    ([0, 0, 0, 0, 0, 0], []), ([0, 0, 0, 0, 0, 1], []), ([0, 0, 0, 0, 1, 1], [4]),
    ([1, 0, 1, 0, 1], []), ([1], []), ([0, 0, 1, 1, 1, 0], [2, 3])])
def test_candidates(mask, expected):
  assert candidates(mask) == expected
  positions, keep = anchors.sample_anchors(jax.random.key(0), jnp.array([mask]), num_anchors=4)
  assert positions.shape == keep.shape == (1, 4)
  assert positions[0][keep[0]].tolist() == expected
  assert keep[0].tolist() == [True] * len(expected) + [False] * (4 - len(expected))
  assert not positions[0][~keep[0]].any()


def gather(mask, anchor, *, ids=None, proposal_len=4):
  ids = jnp.arange(10, 10 + len(mask))[None] if ids is None else ids
  blocks = anchors.gather_blocks(ids, jnp.array([mask]), jnp.array([[anchor]]),
                                 jnp.array([[True]]), proposal_len=proposal_len)
  return jax.tree.map(lambda a: a[0, 0].tolist(), blocks)


def test_eval_mask_stops_at_the_end_of_a_span():
  assert gather([0, 0, 1, 1, 1, 0], 2).eval_mask_BxAxG == [True, True, False, False]
  # Position 4 is supervised again, but the block broke at 3.
  assert gather([0, 1, 1, 0, 1, 1], 1).eval_mask_BxAxG == [True, False, False, False]
  assert gather([1, 1, 1, 1, 1, 1], 3).eval_mask_BxAxG == [True, True, False, False]


def test_labels_teacher_tokens_and_law_positions():
  block = gather([1, 1, 1, 1, 1, 1], 3)
  assert block.anchors_BxA == 13
  assert block.labels_BxAxG == [14, 15, 0, 0]
  assert block.prev_tokens_BxAxG == [13, 14, 15, 0]
  # Label k = 1.. is predicted by the target at anchor + k - 1 (clipped where the mask is off).
  assert block.law_positions_BxAxG == [3, 4, 5, 5]


def test_dummies_are_out_of_the_mask():
  blocks = anchors.gather_blocks(jnp.ones((1, 6), jnp.int32), jnp.ones((1, 6)),
                                 jnp.array([[1, 0]]), jnp.array([[True, False]]), proposal_len=3)
  assert blocks.eval_mask_BxAxG[0, 0].all() and not blocks.eval_mask_BxAxG[0, 1].any()


def test_sorted_distinct_and_uniform():
  mask = jnp.array([[1] * 7 + [0] * 3])  # candidates 0..5
  draw = jax.jit(jax.vmap(lambda key: anchors.sample_anchors(key, mask, num_anchors=3)))
  positions, keep = draw(jax.random.split(jax.random.key(1), 20000))
  positions = np.asarray(positions[:, 0])
  assert keep.all() and (np.diff(positions, axis=1) > 0).all()
  # All C(6, 3) = 20 subsets are equally likely.
  subsets, counts = np.unique(positions, axis=0, return_counts=True)
  assert len(subsets) == 20 and positions.max() == 5
  assert oracles.compute_p_value(counts, np.full(20, 1 / 20)) > 1e-4


def test_more_anchors_than_positions():
  positions, keep = anchors.sample_anchors(jax.random.key(0), jnp.ones((2, 3)), num_anchors=5)
  assert positions.tolist() == [[0, 1, 0, 0, 0]] * 2
  assert keep.tolist() == [[True, True, False, False, False]] * 2


def test_rows_are_drawn_independently():
  positions, _ = anchors.sample_anchors(jax.random.key(0), jnp.ones((8, 64)), num_anchors=4)
  assert len({tuple(row) for row in positions.tolist()}) == 8
