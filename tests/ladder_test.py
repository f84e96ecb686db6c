"""The ladder: its shapes, which is taken, which ladders are refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.ladder import (check_ladder, choose_bucket, draft_lens, fill_shape, make_ladder,
                               measure_padding)


@pytest.mark.parametrize("batch, max_draft, shapes, lens", [
    (1, 7, [(1, 1), (2, 2), (4, 4), (8, 8)], (1, 3, 7)), (1, 0, [(1, 1)], ()),
    (2, 3, [(2, 1), (4, 2), (4, 4), (8, 4)], (1, 3)),
    (4, 7, [(4, 1), (8, 2), (8, 4), (16, 4), (16, 8), (24, 8), (32, 8)], (1, 3, 7)),
    (32, 7, [(8, 8), (16, 8), (32, 1), (48, 2), (64, 2), (64, 4), (96, 4), (128, 4), (128, 8),
             (192, 8), (256, 8)], (1, 3, 7)),
    (3, 4, [(3, 1), (4, 2), (6, 2), (8, 4), (8, 5), (12, 4), (15, 5)], (1, 3, 4))])
def test_ladder(batch, max_draft, shapes, lens):
  ladder = make_ladder(batch, max_draft)
  assert list(ladder) == shapes and draft_lens(ladder) == lens
  check_ladder(ladder, batch, max_draft)
  assert (batch, 1) in ladder  # plain decoding of the whole batch
  assert ladder[-1] == (batch * (max_draft + 1), max_draft + 1)


@pytest.mark.parametrize("ladder, name", [
    ((), "found a last bucket"), (((4, 1), (8, 3)), "at least 8 tokens and 4 rows"),
    (((4, 4), (7, 4)), "at least 8 tokens"), (((8, 4), (4, 4), (8, 4)), "growing"),
    (((0, 1), (8, 4)), r"bucket \(0, 1\)"), (((2.0, 1), (8, 4)), r"bucket \(2.0, 1\)")])
def test_bad_ladder(ladder, name):
  with pytest.raises(ValueError, match=name):
    check_ladder(ladder, 2, 3)
  with pytest.raises(ValueError, match="batch: found 0"):
    make_ladder(0, 3)


def test_bucket_is_the_first_that_holds_tokens_and_rows():
  ladder = ((2, 1), (4, 2), (6, 4), (8, 4))
  for lens, is_live, expected in (
      ([0, 0], [1, 1], 0), ([1, 0], [1, 1], 1), ([1, 1], [1, 1], 1), ([2, 0], [1, 1], 2),
      ([3, 1], [1, 1], 2), ([3, 2], [1, 1], 3), ([3, 3], [1, 1], 3), ([3, 3], [0, 0], 0),
      ([3, 0], [0, 1], 0), ([3, 3], [1, 0], 2)):
    found = choose_bucket(ladder, jnp.array(lens), jnp.array(is_live, bool))
    assert int(found) == expected and found.dtype == jnp.int32


def test_padding_by_hand():
  """Totals 2..8 in buckets of 2, 4, 8: 0, 1/4, 0, 3/8, 2/8, 1/8, 0."""
  assert measure_padding(((2, 1), (4, 4), (8, 4)), 2) == pytest.approx(1 / 7)
  assert measure_padding(make_ladder(32, 7), 32) < .15


@pytest.mark.parametrize("batch, max_draft", [(1, 7), (4, 3), (32, 7), (5, 4), (3, 2), (2, 7),
                                              (16, 15), (6, 1)])
def test_fills_reach_their_buckets(batch, max_draft):
  """Every bucket of a default ladder is reached, and full but for rounding up."""
  ladder = make_ladder(batch, max_draft)
  for n, (tokens, rows) in enumerate(ladder):
    lens, is_live = fill_shape(batch, (tokens, rows))
    assert int(choose_bucket(ladder, lens, is_live)) == n
    assert int(np.where(is_live, lens + 1, 0).sum()) == tokens
