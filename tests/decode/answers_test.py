"""What counts of the rounds of an answer, by hand."""

import numpy as np

from dspark_jax.decode.answers import count_whole_rounds
from dspark_jax.decode.record import Records


def make_rounds(verify_lens, accepted, new):
  num = len(new)
  empty = np.zeros((num, 0), np.float32)
  return Records(empty, empty, *(np.array(x) for x in (verify_lens, accepted, new)),
                 np.arange(num), np.zeros(num, int))


def test_a_round_counts_whole_or_not_at_all():
  """1 token of the prefill, then 3, 4, 2: the rounds begin at 1, 4 and 8 tokens."""
  rounds = make_rounds([3, 3, 3], [2, 3, 1], [3, 4, 2])
  assert count_whole_rounds(rounds, 8).num_new_N.tolist() == [3, 4, 2]
  assert count_whole_rounds(rounds, 7).num_new_N.tolist() == [3, 4]
  assert count_whole_rounds(rounds, 4).num_new_N.tolist() == [3, 4]  # 8 tokens in the end
  assert count_whole_rounds(rounds, 3).num_new_N.tolist() == [3]


def test_drafts_behind_an_accepted_stop_token_are_none():
  """All three drafts passed, the second is a stop token: two were verified, two accepted."""
  found = count_whole_rounds(make_rounds([3, 3], [1, 3], [2, 2]), 9)
  assert found.verify_lens_N.tolist() == [3, 2] and found.num_accepted_N.tolist() == [1, 2]
  # A stop token of the target's own follows its accepted drafts: nothing is cut.
  found = count_whole_rounds(make_rounds([3], [1], [2]), 9)
  assert found.verify_lens_N.tolist() == [3] and found.num_accepted_N.tolist() == [1]
