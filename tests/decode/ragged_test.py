"""Ragged rounds against the rectangle: the same tokens and caches, whatever lengths and buckets."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import loop
from dspark_jax.decode.record import record_rounds
from dspark_jax.ladder import draft_lens
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler import schedule
from dspark_jax.scheduler.estimator import OnlineLogistic, OnlineSts
from dspark_jax.scheduler.policies import ConfidenceThreshold, EarlyStop, FixedLength, Lagged
from dspark_jax.scheduler.step_curve import Timings, make_step_curve
from tests.decode import cases
from tests.decode.cases import BATCH, PROMPTS
from tests.tiny import fast_compile  # noqa: F401

G = 3
LADDER = ((4, 4), (6, 1), (12, 4), (24, 4))
# XLA's matmuls on CPU add up in an order that depends on the number of rows, so logits of the
# packed and the rectangular pass differ by roundings: tokens are compared, and states by this.
TOL = 5e-5


def make_curve(ladder=LADDER):
  draft_ms = tuple(.1 + n / 8 for n in draft_lens(ladder))
  return make_step_curve(
      Timings(ladder, tuple(3.0 + tokens / 4 for tokens, _ in ladder), draft_ms))


def decode(frame, params, *, curve=None, temperature=0.0, max_new_tokens=20):
  return loop.generate(
      frame, params, PROMPTS, max_new_tokens=max_new_tokens, curve=curve,
      sampling=make_sampling_params(BATCH, temperature=temperature, seed=np.arange(BATCH)))


POLICIES = [EarlyStop(explore_every=4, explore_share=1e9),
            Lagged(explore_every=5, explore_share=1e9)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_greedy_tokens_are_those_of_plain_decoding(policy):
  """Requests of different lengths, through every bucket, one by one leaving the batch."""
  frame, params = cases.make_pair(G)
  frame = dataclasses.replace(frame, policy=policy, ladder=LADDER, estimator=OnlineSts())
  state = decode(frame, params, curve=make_curve())
  plain = [p[:len(q) + 20] for p, q in zip(cases.plain_tokens(), PROMPTS)]
  assert cases.tokens_of(state) == plain
  scheduler = state.scheduler
  counts = np.asarray(scheduler.bucket_counts_N)
  assert counts.sum() == int(scheduler.num_rounds) and (counts > 0).sum() >= 3
  verified = int(state.stats.num_rounds_B.sum() + state.stats.verified_BxG.sum())
  assert int(scheduler.num_tokens) == verified
  assert 0 <= schedule.measure_waste(scheduler, LADDER) < 1
  assert 0 < int(state.stats.accepted_BxG.sum()) < int(state.stats.verified_BxG.sum()) + 1


def test_sampled_tokens_are_those_of_the_rectangle():
  """The same lengths, so the same noise meets the same laws but for roundings."""
  frame, params = cases.make_pair(G)
  frame = dataclasses.replace(frame, policy=ConfidenceThreshold(0.6))
  ragged = dataclasses.replace(frame, ladder=LADDER)
  rectangle, packed = (decode(f, params, temperature=0.8) for f in (frame, ragged))
  assert cases.tokens_of(rectangle) == cases.tokens_of(packed)
  for x, y in zip(jax.tree.leaves(rectangle.stats), jax.tree.leaves(packed.stats)):
    np.testing.assert_array_equal(x, y)


def test_one_round_of_the_rectangle():
  """Right drafts and verify lengths of every kind, two requests done: the same state after."""
  plain = cases.plain_tokens()
  config, _ = cases.make_target()
  params = cases.scripted_params(plain, right=[0, 1, 2, 3, 3, 2], sure=[3, 0, 3, 2, 3, 1])
  frame = cases.Frame(config, cases.ScriptedProposer(G), ConfidenceThreshold(0.5))
  before = loop.start(frame, params, PROMPTS, max_new_tokens=30,
                      sampling=make_sampling_params(BATCH))
  before = before.replace(is_done_B=jnp.array([False, True, False, False, True, False]))
  # What a request that broke down leaves in the batch.
  before = before.replace(cache=jax.tree.map(lambda x: x.at[1].set(jnp.nan), before.cache))
  found = []
  for ladder in (None, ((24, 4),), LADDER):
    copied = jax.tree.map(jnp.copy, before)
    found.append(loop.run_rounds(dataclasses.replace(frame, ladder=ladder), params, copied,
                                 jnp.int32(1)))
  is_live = ~np.asarray(before.is_done_B)
  for state in found[1:]:
    assert cases.tokens_of(state) == cases.tokens_of(found[0])
    np.testing.assert_array_equal(state.stats.accepted_BxG, found[0].stats.accepted_BxG)
    np.testing.assert_array_equal(state.is_valid_B[is_live], True)
    for b in np.flatnonzero(is_live):
      length = int(state.lens_B[b]) - 1
      for x, y in zip(jax.tree.leaves(state.cache), jax.tree.leaves(found[0].cache)):
        assert np.isfinite(x[b]).all()
        np.testing.assert_allclose(x[b, :, :length], y[b, :, :length], rtol=0, atol=TOL)


def test_a_policy_without_a_curve_says_so_and_verifies_everything():
  frame, params = cases.make_pair(G)
  adaptive = dataclasses.replace(frame, policy=EarlyStop(), ladder=LADDER)
  with pytest.warns(UserWarning, match="step curve: none given to EarlyStop"):
    state = decode(adaptive, params, max_new_tokens=6)
  fixed = decode(dataclasses.replace(frame, policy=FixedLength(G)), params, max_new_tokens=6)
  np.testing.assert_array_equal(state.stats.verified_BxG, fixed.stats.verified_BxG)
  assert cases.tokens_of(state) == cases.tokens_of(fixed)


def test_a_curve_of_another_ladder_is_refused():
  frame, params = cases.make_pair(G)
  frame = dataclasses.replace(frame, policy=EarlyStop(), ladder=LADDER)
  with pytest.raises(ValueError, match="step curve: found 1 buckets, expected the ladder's 4"):
    decode(frame, params, curve=make_curve(((24, 4),)))


def test_records_are_what_the_rounds_did():
  frame, params = cases.make_pair(G)
  frame = dataclasses.replace(frame, policy=FixedLength(G), estimator=OnlineLogistic())
  start = lambda: loop.start(frame, params, PROMPTS, max_new_tokens=20,
                             sampling=make_sampling_params(BATCH))
  state, records = record_rounds(frame, params, start(), chunk_rounds=4)
  plain = [p[:len(q) + 20] for p, q in zip(cases.plain_tokens(), PROMPTS)]
  assert cases.tokens_of(state) == plain
  assert len(records.num_accepted_N) == int(state.stats.num_rounds_B.sum())
  for k in range(G):
    assert (records.num_accepted_N > k).sum() == state.stats.accepted_BxG[:, k].sum()
    assert (records.verify_lens_N > k).sum() == state.stats.verified_BxG[:, k].sum()
  assert (np.diff(records.round_N) >= 0).all()
  for b in range(BATCH):
    assert records.num_new_N[records.request_N == b].sum() == state.stats.num_committed_B[b]
  full = records.only_full()
  assert (full.verify_lens_N == G).all() and 0 < len(full.round_N) < len(records.round_N)
  assert (records.margin_NxG >= 0).all() and np.isfinite(records.logits_NxG).all()
