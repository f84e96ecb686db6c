"""What a verdict becomes: tokens, lengths, stops. All cases by hand; PAD = -1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.types import Verdict
from dspark_jax.verification import commit as commit_lib

PAD = -1
EOS = 2
commit_tokens = jax.jit(commit_lib.commit_tokens)


def commit(committed, drafts, accepted, next_token, *, limit=99, stops=((EOS,),), slots=16,
           is_done=None, is_valid=None):
  """`committed` are lists of tokens; returns (lists of tokens, is_done, num_new)."""
  batch = len(committed)
  tokens = np.full((batch, slots), PAD)
  for row, found in zip(tokens, committed):
    row[:len(found)] = found
  out = commit_tokens(
      jnp.asarray(tokens), jnp.array([len(c) for c in committed]), jnp.asarray(drafts),
      Verdict(jnp.asarray(accepted), jnp.asarray(next_token),
              jnp.asarray([True] * batch if is_valid is None else is_valid)),
      limits_B=jnp.broadcast_to(jnp.asarray(limit), (batch,)),
      stop_ids_BxE=jnp.broadcast_to(jnp.asarray(stops), (batch, len(stops[0]))),
      is_done_B=jnp.asarray([False] * batch if is_done is None else is_done))
  lens = np.asarray(out.lens_B)
  rows = np.asarray(out.tokens_BxS)
  for row, n in zip(rows, lens):
    assert (row[n:] == PAD).all()  # a rejected draft never stays behind
  assert (lens - [len(c) for c in committed] == np.asarray(out.num_new_B)).all()
  return ([row[:n].tolist() for row, n in zip(rows, lens)], np.asarray(out.is_done_B).tolist(),
          np.asarray(out.num_new_B).tolist())


@pytest.mark.parametrize("accepted, expected", [
    (0, [7, 9]), (1, [7, 3, 9]), (2, [7, 3, 4, 9]), (3, [7, 3, 4, 5, 9])])
def test_accepted_drafts_then_the_next_token(accepted, expected):
  assert commit([[7]], [[3, 4, 5]], [accepted], [9]) == ([expected], [False], [accepted + 1])


@pytest.mark.parametrize("slot", range(5))
def test_b16_a_stop_id_ends_the_row_wherever_it_stands(slot):
  """Drafts and bonus (5, 6, 7, 8, 9) with the stop id at each slot; row 1 is unaffected."""
  row = [5, 6, 7, 8, 9]
  row[slot] = EOS
  tokens, is_done, num_new = commit([[1, 1], [1]], [row[:4], [5, 6, 7, 8]], [4, 1], [row[4], 3])
  assert tokens == [[1, 1, *row[:slot], EOS], [1, 5, 3]]
  assert is_done == [True, False] and num_new == [slot + 1, 2]


def test_b16_a_stop_id_among_rejected_drafts_means_nothing():
  assert commit([[1]], [[5, EOS, EOS]], [1], [4]) == ([[1, 5, 4]], [False], [2])


def test_a_finished_row_commits_nothing():
  tokens, is_done, num_new = commit([[1, EOS], [1]], [[5, 6], [5, 6]], [2, 2], [7, 7],
                                    is_done=[True, False])
  assert (tokens, is_done, num_new) == ([[1, EOS], [1, 5, 6, 7]], [True, False], [0, 3])


def test_an_invalid_verdict_commits_nothing():
  tokens, _, num_new = commit([[1], [1]], [[5, 6], [5, 6]], [2, 1], [0, 7], is_valid=[False, True])
  assert (tokens, num_new) == ([[1], [1, 5, 7]], [0, 2])


def test_several_stop_ids_and_the_first_one_wins():
  stops = [[EOS, 6], [PAD, PAD]]
  tokens, is_done, _ = commit([[1], [1]], [[5, 6, EOS], [5, 6, EOS]], [3, 3], [4, 4], stops=stops)
  assert tokens == [[1, 5, 6], [1, 5, 6, EOS, 4]] and is_done == [True, False]


@pytest.mark.parametrize("limit, expected", [
    (2, [1, 5]), (3, [1, 5, 6]), (4, [1, 5, 6, 7]), (5, [1, 5, 6, 7, 8]), (9, [1, 5, 6, 7, 8])])
def test_b19_never_beyond_the_limit(limit, expected):
  tokens, is_done, num_new = commit([[1]], [[5, 6, 7]], [3], [8], limit=[limit])
  assert tokens == [expected] and is_done == [limit <= 5] and num_new == [len(expected) - 1]


def test_a_stop_id_cut_off_by_the_limit_is_not_committed():
  tokens, is_done, _ = commit([[1]], [[5, 6, EOS]], [3], [8], limit=[3])
  assert tokens == [[1, 5, 6]] and is_done == [True]


def test_ragged_rows_do_not_cross():
  """Drafts [[3,4,5],[3,4,5]], first rejected at once, resampled 7, bonus 9: [7] and [3,4,5,9]."""
  tokens, _, _ = commit([[8, 8, 8, 8], [8]], [[3, 4, 5]] * 2, [0, 3], [7, 9])
  assert tokens == [[8, 8, 8, 8, 7], [8, 3, 4, 5, 9]]


def test_the_last_slots_of_the_buffer_are_usable():
  """A full block at the limit, with exactly G + 1 slots past it, moves nothing (fault B24)."""
  filled = list(range(10, 23))
  tokens, is_done, _ = commit([filled], [[3, 4]], [2], [5], limit=[14], slots=17)
  assert tokens == [filled + [3]] and is_done == [True]


def test_no_drafts_is_plain_decoding():
  assert commit([[1]], np.zeros((1, 0), np.int32), [0], [4]) == ([[1, 4]], [False], [1])
