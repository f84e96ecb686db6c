"""Early stop and the lagged budget against brute force, and what neither may look at.

Survivals and curves of the exact tests are dyadic, so that float32 sums are exact and ties are
ties; rates are products and quotients of those and differ by far more than a rounding error.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.ladder import draft_lens
from dspark_jax.scheduler import policies
from dspark_jax.scheduler.policies import EarlyStop, Lagged, Plan
from dspark_jax.scheduler.step_curve import StepCurve, Timings, make_step_curve
from tests.scheduler import oracle

RTOL = 3e-6  # float32 sums of up to 16 survivals and one division: 18 roundings of 6e-8, doubled


def make_curve(ladder, verify_ms, draft_ms=0.0, *, steps=None) -> StepCurve:
  """`draft_ms` is one number for all draft lengths, or one each; `steps` replaces the smoothing."""
  draft_ms = np.broadcast_to(np.float64(draft_ms), len(draft_lens(ladder))).tolist()
  curve = make_step_curve(Timings(ladder, tuple(map(float, verify_ms)), tuple(draft_ms)))
  return curve if steps is None else with_steps(curve, steps)


def with_steps(curve: StepCurve, steps) -> StepCurve:
  """The curve with these rounds per millisecond, whatever is drafted."""
  steps = jnp.asarray(steps, jnp.float32)
  return curve.replace(steps_per_ms_DxC=jnp.broadcast_to(
      steps, (curve.draft_ms_D.shape[0], *steps.shape)))


def one_by_one(most):
  return tuple((n, n) for n in range(1, most + 1))


@functools.partial(jax.jit, static_argnames=("policy", "ladder"))
def run_policy(policy, past, fresh, is_live, curve, ladder, max_lens, round_index):
  plan = policies.make_plan(policy, past, is_live, curve=curve, ladder=ladder,
                            max_lens_B=max_lens, round_index=round_index)
  lens = policies.choose_adaptive(policy, plan, fresh, is_live, curve=curve, ladder=ladder)
  return plan, lens


def run(policy, survival, curve, ladder, *, fresh=None, is_live=None, max_lens=None,
        round_index=0):
  """Returns (Plan, lengths); the past is the present unless `fresh` differs."""
  past = jnp.asarray(survival, jnp.float32)
  fresh = past if fresh is None else jnp.asarray(fresh, jnp.float32)
  batch, num_drafts = past.shape
  is_live = jnp.ones(batch, bool) if is_live is None else jnp.asarray(is_live)
  max_lens = jnp.full(batch, num_drafts) if max_lens is None else jnp.asarray(max_lens)
  plan, lens = run_policy(policy, past, fresh, is_live, curve, ladder, max_lens,
                          jnp.int32(round_index))
  return plan, np.asarray(lens).tolist()


def random_survival(rng, batch, num_drafts):
  return np.cumprod(rng.choice([0, 1 / 4, 1 / 2, 3 / 4, 1, 1], (batch, num_drafts)), axis=1)


always = functools.partial(dataclasses.replace, may_skip_draft=False, explore_every=0, memory=0.0)
EARLY, LAGGED = always(EarlyStop(fills_bucket=False)), always(Lagged())


# --- worked by hand ------------------------------------------------------------------------------


def test_b54_staircase():
  """R = 1, survivals .9, .8, .7, steps 1, .5, .5, .5. By hand: Theta 1, .95, 1.35, 1.7 on the
  stairs: exact early stop admits nothing, the search takes all 3. On the chord of the times from 1
  to 2, 1, 4/3, 5/3, 2: Theta 1, 1.425, 1.62, 1.7, so 3."""
  survival, ladder = [[.9, .8, .7]], one_by_one(4)
  curve = make_curve(ladder, [1, 2, 2, 2])
  stairs = with_steps(curve, [9, 1, .5, .5, .5])
  assert run(EARLY, survival, stairs, ladder)[1] == [0]
  assert run(EARLY, survival, curve, ladder)[1] == [3]
  assert run(LAGGED, survival, curve, ladder)[1] == [3]


def test_b54_two_requests():
  """Conditional (.9, .5), (.6, .6): Theta 2, 2.61, 2.625, 2.5675: one draft each."""
  survival = [[.9, .45], [.6, .36]]
  curve = make_curve(((6, 6),), [1], steps=[9, 9, 1, .9, .75, .65, .5])
  assert run(EARLY, survival, curve, ((6, 6),))[1] == [1, 1]


def test_b56_curve_shorter_than_the_batch():
  """Steps of 1..4 tokens only, 3 requests: Theta 2.4 -> 2.45, then nothing that was not measured.
  A clamped look-up would give (3, 3, 3)."""
  survival = np.cumprod(np.full((3, 3), .5), axis=1)
  curve = make_curve(((12, 4),), [1], steps=[9, 1, .9, .8, .7])
  assert run(EARLY, survival, curve, ((12, 4),))[1] == [1, 0, 0]
  # The search knows no bucket beyond 4 tokens either: 3 / 1 against 3.5 / 1.1.
  ladder = ((3, 1), (4, 4))
  assert run(LAGGED, survival, make_curve(ladder, [1, 1.1]), ladder)[1] == [1, 0, 0]


def test_a_32_token_stair_does_not_stop_every_draft():
  """Buckets of 32, 64, 96 tokens cost 10, 14, 18: the first extra token pays 4 ms for itself, but a
  full bucket pays. 32 requests, survival .5, .25, ..: with 32 drafts 48 / 14 > 32 / 10. Smoothed, a
  token costs 1/8 ms: a draft of .5 pays (10 ms bring 32), one of .25 does not."""
  survival = np.cumprod(np.full((32, 2), .5), axis=1)
  ladder = ((32, 1), (64, 3), (96, 3))
  curve = make_curve(ladder, [10, 14, 18])
  stairs = with_steps(curve, [9] + [1 / 10] * 32 + [1 / 14] * 32 + [1 / 18] * 32)
  assert run(EARLY, survival, stairs, ladder)[1] == [0] * 32  # what the smoothing is for
  for policy in (EARLY, LAGGED):
    assert run(policy, survival, curve, ladder)[1] == [1] * 32


def test_flat_curve_verifies_everything_that_may_survive():
  ladder = one_by_one(8)
  with pytest.warns(UserWarning, match="does not grow"):
    curve = make_curve(ladder, [1] * 8)
  survival = [[.5, .25, .125], [.5, .5, 0]]
  assert run(EARLY, survival, curve, ladder)[1] == [3, 2]  # a survival of 0 raises nothing
  assert run(LAGGED, survival, curve, ladder)[1] == [3, 2]


@pytest.mark.parametrize("policy", [EARLY, LAGGED])
def test_survival_all_0_or_1(policy):
  ladder = one_by_one(8)
  curve = make_curve(ladder, 2 + np.arange(8) / 4)  # a token costs an eighth of the first
  assert run(policy, np.zeros((2, 3)), curve, ladder)[1] == [0, 0]
  assert run(policy, np.ones((2, 3)), curve, ladder)[1] == [3, 3]
  steep = make_curve(ladder, 2.0 ** np.arange(8))
  assert run(policy, np.ones((2, 3)), steep, ladder)[1] == [0, 0]


def test_ties_go_by_position_then_by_request():
  """Room for 3 drafts among equal survivals: position 0 of all first, then position 1 of the
  first request; the same by early stop, where the curve falls to nothing after 5 tokens."""
  survival = np.ones((2, 3))
  ladder = ((5, 4), (8, 4))
  assert run(LAGGED, survival, make_curve(ladder, [1, 100]), ladder)[1] == [2, 1]
  curve = make_curve(ladder, [1, 100], steps=[9, 1, 1, 1, 1, 1, 0, 0, 0])
  assert run(EARLY, survival, curve, ladder)[1] == [2, 1]
  # Equal rates: the smaller bucket. 2 requests: 2 / 1 = 4 / 2.
  ladder = ((2, 1), (4, 2))
  assert run(LAGGED, survival, make_curve(ladder, [1, 2]), ladder)[1] == [0, 0]


# --- against brute force -------------------------------------------------------------------------


SIZES = [(1, 3), (2, 3), (3, 2)]  # R, G; few, because every one is compiled


@pytest.mark.parametrize("batch, num_drafts", SIZES)
def test_early_stop_is_the_optimum_on_the_smoothed_curve(batch, num_drafts):
  """Theta of its choice = the best over all prefix-closed sets, jagged random times, once all
  drafts are drawn."""
  rng = np.random.default_rng(batch)
  most = batch * (num_drafts + 1)
  ladder = tuple((n, min(n, num_drafts + 1)) for n in range(1, most + 1))
  low, high = jnp.zeros(batch, jnp.int32), jnp.full(batch, num_drafts)
  plan = Plan(jnp.int32(num_drafts), jnp.int32(0), low, high)

  @jax.jit
  def choose(survival, curve):
    return policies.choose_adaptive(EARLY, plan, survival, jnp.ones(batch, bool), curve=curve,
                                    ladder=ladder)

  for _ in range(30):
    curve = make_curve(ladder, rng.uniform(2, 8, most), rng.uniform(0, 2))
    steps = np.asarray(curve.steps_per_ms_DxC[-1], np.float64)
    survival = random_survival(rng, batch, num_drafts)
    lens = np.asarray(choose(jnp.asarray(survival, jnp.float32), curve)).tolist()
    best = oracle.find_best_rate(survival, lambda n, steps=steps: 1 / steps[batch + sum(n)])
    found = oracle.expected_tokens(survival, lens) * steps[batch + sum(lens)]
    np.testing.assert_allclose(found, best, rtol=RTOL)
    assert lens == oracle.run_algorithm_1(survival, steps)


@pytest.mark.parametrize("batch, num_drafts", SIZES)
def test_search_finds_the_optimum_of_the_staircase(batch, num_drafts):
  """Buckets limited in tokens and in rows, random times that may even fall, drafting that costs by
  the rows: the rate that the search promises is the best of all prefix-closed sets, and filling by
  the same survivals keeps it."""
  rng = np.random.default_rng(100 + batch)
  most = batch * (num_drafts + 1)
  ladder = ((batch, 1), (batch + 1, num_drafts), (batch + 2, 2), (most - 1, num_drafts + 1),
            (most, num_drafts + 1))

  @jax.jit
  def search_and_fill(survival, curve, low, high):
    is_live = jnp.ones(batch, bool)
    bucket, rate = policies.search_buckets(
        survival, curve=curve, ladder=ladder, is_live_B=is_live, min_lens_B=low, max_lens_B=high)
    tokens, rows = jnp.asarray(ladder)[bucket]
    plan = Plan(jnp.int32(0), tokens - batch, low, jnp.minimum(high, rows - 1))
    return rate, bucket, policies.choose_adaptive(LAGGED, plan, survival, is_live, curve=curve,
                                                  ladder=ladder)

  for _ in range(30):
    verify_ms = rng.uniform(1, 4, len(ladder))
    draft_ms = np.sort(rng.uniform(0, 2, len(draft_lens(ladder))))
    cost_ms = oracle.run_staircase(ladder, verify_ms, dict(zip(draft_lens(ladder), draft_ms)))
    survival = random_survival(rng, batch, num_drafts)
    low = rng.choice([0, 0, 0, 1], batch)
    high = rng.integers(low, num_drafts + 1)
    rate, bucket, lens = search_and_fill(jnp.asarray(survival, jnp.float32),
                                 make_curve(ladder, verify_ms, draft_ms), jnp.asarray(low),
                                 jnp.asarray(high))
    lens, bucket = np.asarray(lens), int(bucket)
    best = oracle.find_best_rate(survival, cost_ms, min_lens=low, max_lens=high)
    np.testing.assert_allclose(rate, best, rtol=RTOL)
    assert (low <= lens).all() and (lens <= high).all()
    paid_ms = verify_ms[bucket] + ({0: 0.0} | dict(zip(draft_lens(ladder), draft_ms)))[
        ladder[bucket][1] - 1]
    np.testing.assert_allclose(oracle.expected_tokens(survival, lens) / paid_ms, best, rtol=RTOL)


# --- bounds, skipping, exploring -----------------------------------------------------------------

LADDER = ((2, 1), (4, 4), (6, 4), (8, 4))
CURVE = make_curve(LADDER, [4, 5, 6, 7], 1)


@pytest.mark.parametrize("kind", [EarlyStop, Lagged])
def test_bounds(kind):
  policy = always(kind(min_draft=1, max_draft=2))
  assert run(policy, np.zeros((2, 3)), CURVE, LADDER)[1] == [1, 1]
  assert run(policy, np.ones((2, 3)), CURVE, LADDER)[1] == [2, 2]
  assert run(policy, np.ones((2, 3)), CURVE, LADDER, max_lens=[0, 3])[1] == [0, 2]
  assert run(policy, np.ones((2, 3)), CURVE, LADDER, is_live=[True, False])[1] == [2, 0]
  assert policies.max_verify_len(policy, 3) == 2
  assert run(always(kind(max_draft=0)), np.ones((2, 3)), CURVE, LADDER)[1] == [0, 0]


def test_early_stop_fills_the_bucket_that_is_paid():
  """By the curve it stops at 5 tokens of a bucket of 6; the sixth is the next in the order, the
  second draft of request 1 before the third of request 0."""
  survival = [[1, .5, .25], [1, .25, .125]]
  curve = make_curve(LADDER, [4, 5, 6, 7], steps=[9, 1, 1, 1, 1, 1, .01, 0, 0])
  assert run(EARLY, survival, curve, LADDER)[1] == [2, 1]
  filling = dataclasses.replace(EARLY, fills_bucket=True)
  assert run(filling, survival, curve, LADDER)[1] == [2, 2]


@pytest.mark.parametrize("kind", [EarlyStop, Lagged])
def test_drafting_is_skipped_where_plain_decoding_is_faster(kind):
  """Plain: 2 tokens in 4 ms. Drafting costs 1 ms more before anything: without survivors the
  plan is plain decoding, with them it is not. It rests on the past alone."""
  policy = kind(explore_every=0)
  plan, lens = run(policy, np.zeros((2, 3)), CURVE, LADDER, fresh=np.ones((2, 3)))
  assert plan.draft_choice == 0 and lens == [0, 0]
  plan, lens = run(policy, np.ones((2, 3)), CURVE, LADDER)
  assert plan.draft_choice == 1 and lens == [3, 3]
  plan, _ = run(dataclasses.replace(policy, min_draft=1), np.zeros((2, 3)), CURVE, LADDER)
  assert plan.draft_choice == 1


@pytest.mark.parametrize("kind", [EarlyStop, Lagged])
def test_as_much_is_drafted_as_earlier_rounds_say(kind):
  """2 requests, buckets of 2, 4, 8 tokens with 1, 2, 4 rows: 4, 5, 8 ms, drafting 1 or 3 drafts
  costs 1 or 2 ms. Survivals 1, 0, 0: 2 / 4 < 4 / 6 > 4 / 10, one draft each. Survivals 1, 1, 1:
  4 / 6 < 8 / 10, all three. What is not drawn is not verified, however sure this round is."""
  ladder = ((2, 1), (4, 2), (8, 4))
  curve = make_curve(ladder, [4, 5, 8], [1, 2])
  policy = kind(explore_every=0)
  plan, lens = run(policy, [[1, 0, 0]] * 2, curve, ladder, fresh=np.ones((2, 3)))
  assert plan.draft_choice == 1 and lens == [1, 1]
  plan, lens = run(policy, np.ones((2, 3)), curve, ladder)
  assert plan.draft_choice == 2 and lens == [3, 3]


@pytest.mark.parametrize("kind", [EarlyStop, Lagged])
def test_exploring_takes_the_requests_in_turn(kind):
  policy = kind(explore_every=4, explore_share=1e9)
  for round_index, chosen in ((2, None), (3, 0), (7, 1), (11, 0)):
    plan, lens = run(policy, np.zeros((2, 3)), CURVE, LADDER, round_index=round_index)
    assert bool(plan.draft_choice > 0) == (chosen is not None)
    # The other may get the slot that is left in a bucket of 6.
    assert lens == [0, 0] if chosen is None else (lens[chosen] == 3 and lens[1 - chosen] <= 1)


@pytest.mark.parametrize("does_learn, period", [(True, 75), (False, 25)])
def test_exploring_costs_no_more_than_its_share(does_learn, period):
  """Plain decoding takes 4 ms. A round that explores drafts for 1 ms, and to learn it verifies in
  the bucket of 6 for 2 ms more: 3 of 4 ms, one hundredth of that every 75 rounds."""
  plan = jax.jit(functools.partial(
      policies.make_plan, EarlyStop(explore_every=4), jnp.zeros((2, 3)), jnp.ones(2, bool),
      curve=CURVE, ladder=LADDER, max_lens_B=jnp.full(2, 3), does_learn=does_learn))
  drafting = [n for n in range(160) if plan(round_index=jnp.int32(n)).draft_choice]
  assert drafting == list(range(period - 1, 160, period))


# --- what a decision may not look at -------------------------------------------------------------


def test_this_rounds_confidences_do_not_move_the_lagged_budget():
  """The sum of lengths is the same for every permutation of this round's survivals."""
  rng = np.random.default_rng(5)
  past = np.cumprod(rng.uniform(.5, 1, (4, 3)), axis=1)
  fresh = np.cumprod(rng.uniform(.1, 1, (4, 3)), axis=1)
  ladder = ((4, 1), (8, 4), (11, 4), (16, 4))
  curve = make_curve(ladder, [4, 5, 5.5, 9])
  seen = set()
  for _ in range(8):
    plan, lens = run(LAGGED, past, curve, ladder, fresh=fresh)
    assert int(plan.budget) == sum(lens) == 7
    seen.add(tuple(lens))
    fresh = fresh[rng.permutation(4)]
  assert len(seen) > 1  # they do decide who gets it


@pytest.mark.parametrize("policy", [EARLY, dataclasses.replace(EARLY, fills_bucket=True), LAGGED])
def test_b53_a_draft_is_admitted_without_a_look_behind_it(policy):
  """Whether draft k of a request is verified depends on its survivals up to k alone."""
  rng = np.random.default_rng(6)
  ladder = ((2, 1), (4, 4), (6, 4), (8, 4))
  curve = make_curve(ladder, [4, 5, 6.5, 8], .5)
  past = np.cumprod(rng.uniform(.5, 1, (2, 3)), axis=1)
  num_changed = 0
  for _ in range(60):
    confidence = rng.choice([.2, .5, .8, 1], (2, 3))
    k = rng.integers(0, 3)
    changed = confidence.copy()
    changed[0, k + 1:] = rng.choice([0, .3, .9, 1], 2 - k)
    lens = [run(policy, past, curve, ladder, fresh=np.cumprod(c, axis=1))[1]
            for c in (confidence, changed)]
    num_changed += lens[0] != lens[1]
    assert (lens[0][0] > k) == (lens[1][0] > k)
  assert num_changed > 3


@pytest.mark.parametrize("make, name", [
    (lambda: EarlyStop(min_draft=-1), "min_draft: found -1"),
    (lambda: Lagged(max_draft=1.5), "max_draft: found 1.5"),
    (lambda: Lagged(min_draft=3, max_draft=2), "max_draft: found 2, expected at least"),
    (lambda: EarlyStop(explore_every=-1), "explore_every: found -1"),
    (lambda: EarlyStop(explore_share=0.0), "explore_share: found 0.0"),
    (lambda: Lagged(memory=1.0), "memory: found 1.0")])
def test_bad_field_is_named(make, name):
  with pytest.raises(ValueError, match=name):
    make()
