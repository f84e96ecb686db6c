"""Replaying recorded rounds: costs by hand, and that the oracle is the best."""

import numpy as np
import pytest

from dspark_jax.decode.record import Records, join_records
from dspark_jax.decode.replay import Oracle, replay
from dspark_jax.scheduler.estimator import OnlineSts, TrainedHead
from dspark_jax.scheduler.policies import EarlyStop
from dspark_jax.scheduler.step_curve import Timings, make_step_curve

LADDER = ((1, 1), (2, 2), (3, 3), (6, 3))
POLICY = EarlyStop(may_skip_draft=False, explore_every=0, fills_bucket=False)


def make_curve():
  return make_step_curve(Timings(LADDER, (4.0, 5.0, 6.0, 9.0), (1.0, 1.0)))


def make_records(logits, accepted):
  num = len(accepted)
  return Records(np.float32(logits), np.zeros((num, 0), np.float32), np.full(num, 2),
                 np.array(accepted, np.int32), np.array(accepted, np.int32) + 1, np.arange(num),
                 np.zeros(num, np.int32))


def test_by_hand():
  """Saturated confidence: rounds verify 2, 0, 1 drafts in buckets of 3, 1, 2 tokens, 1 ms for
  drafting; of those 1, 0, 1 are accepted, and each round adds one token of its own."""
  records = make_records([[40, 40], [-40, 40], [40, -40]], [1, 2, 2])
  found = replay(records, TrainedHead(), POLICY, curve=make_curve(), ladder=LADDER, num_requests=1)
  assert found.verify_lens_TxR[:, 0].tolist() == [2, 0, 1]
  assert found.tokens == 2 + 1 + 2 and found.ms == pytest.approx(7 + 5 + 6)
  np.testing.assert_allclose(found.survival_TxRxG[:, 0], [[1, 1], [0, 0], [1, 0]], atol=1e-6)
  best = replay(records, Oracle(), POLICY, curve=make_curve(), ladder=LADDER, num_requests=1)
  assert best.verify_lens_TxR[:, 0].tolist() == [1, 2, 2]
  assert best.tokens == 2 + 3 + 3 and best.tokens_per_s > found.tokens_per_s


def test_estimators_learn_while_replaying():
  rng = np.random.default_rng(0)
  records = make_records(np.full((160, 2), 3.0), rng.integers(0, 2, 160))  # sure, and half wrong
  found = replay(records, OnlineSts(), POLICY, curve=make_curve(), ladder=LADDER,
                 num_requests=2)
  assert found.survival_TxRxG.shape == (80, 2, 2)
  assert found.survival_TxRxG[0, 0, 0] > .9 and found.survival_TxRxG[-1, 0, 0] < .7
  with pytest.raises(ValueError, match="records: found 160, expected at least 161"):
    replay(records, TrainedHead(), POLICY, curve=make_curve(), ladder=LADDER, num_requests=161)


def test_join_counts_rounds_on():
  a, b = make_records(np.zeros((2, 2)), [0, 1]), make_records(np.zeros((3, 2)), [2, 2, 2])
  joined = join_records([a, b])
  assert joined.round_N.tolist() == [0, 1, 2, 3, 4]
  assert joined.request_N.tolist() == [0, 0, 1, 1, 1]
  assert joined.select(joined.num_accepted_N == 2).round_N.tolist() == [2, 3, 4]
  with pytest.raises(ValueError, match="records: found none"):
    join_records([])
