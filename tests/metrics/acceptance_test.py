import numpy as np
import pytest

from dspark_jax.metrics.acceptance import measure_acceptance


def test_counts_by_hand():
  # Three rounds of three drafts: 3, 1 and 0 accepted -> 4 + 2 + 1 tokens.
  found = measure_acceptance(3, 7, num_verified_xG=[3, 3, 3], num_accepted_xG=[2, 1, 1])
  assert found.accepted_len == pytest.approx(7 / 3)
  assert found.accept_rate == pytest.approx([2 / 3, 1 / 3, 1 / 3])
  assert found.verify_rate == pytest.approx(4 / 9)
  assert found.verify_len == 3 and found.num_rounds == 3


def test_pools_requests_by_their_counts():
  # The mean of the two rates, (1 + 0.5) / 2, would be wrong: the first request had one round.
  found = measure_acceptance([1, 4], [2, 6], num_verified_xG=[[1, 0], [4, 2]],
                             num_accepted_xG=[[1, 0], [2, 0]])
  assert found.accept_rate == [3 / 5, 0.0]
  assert found.accepted_len == 8 / 5


def test_nothing_verified_is_not_zero():
  found = measure_acceptance([2], [2], num_verified_xG=[[0, 0]], num_accepted_xG=[[0, 0]])
  assert found.accept_rate == [None, None] and found.verify_rate is None
  assert found.accepted_len == 1.0


def test_no_round_and_no_draft():
  found = measure_acceptance(0, 0, num_verified_xG=np.zeros((0,), int),
                             num_accepted_xG=np.zeros((0,), int))
  assert found.accepted_len == 0.0 and found.accept_rate == []


def test_more_accepted_than_verified_is_refused():
  with pytest.raises(ValueError, match="num_accepted"):
    measure_acceptance(1, 1, num_verified_xG=[1], num_accepted_xG=[2])
