"""Estimators: what they say of clean and of broken signals, and that they learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.metrics.reliability import measure_reliability
from dspark_jax.scheduler.estimator import (OnlineLogistic, OnlineSts, Outcome, Signals,
                                            TrainedHead, _solve)
from dspark_jax.scheduler.survival import average_survival, compute_survival

EVERY = [TrainedHead(), TrainedHead((2.0, 1.0, 0.5)), OnlineSts(), OnlineLogistic(),
         OnlineLogistic(uses_head=True), OnlineLogistic(uses_margin=False, uses_head=True),
         OnlineLogistic(uses_head=True, temperatures=(2.0, 1.0, 0.5))]


def make_signals(logits, margin=None):
  logits = jnp.asarray(logits, jnp.float32)
  return Signals(logits, jnp.abs(logits) if margin is None else jnp.asarray(margin, jnp.float32))


def test_head_with_temperatures():
  estimator = TrainedHead((2.0, 1.0))
  found = estimator.estimate(estimator.init(2), make_signals([[2.0, -1.0]]))
  np.testing.assert_allclose(found, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]], rtol=1e-6)
  with pytest.raises(ValueError, match="expected 3 numbers"):
    estimator.init(3)


@pytest.mark.parametrize("uses_margin", [True, False])
def test_refitting_starts_at_the_calibrated_head(uses_margin):
  temperatures, signals = (2.0, 1.0, 0.5), make_signals([[2.0, -1.0, 3.0]], [[9.0, 1.0, 4.0]])
  found, expected = (e.estimate(e.init(3), signals) for e in (
      OnlineLogistic(uses_margin=uses_margin, uses_head=True, temperatures=temperatures),
      TrainedHead(temperatures)))
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  with pytest.raises(ValueError, match="temperatures: found some with uses_head false"):
    OnlineLogistic(temperatures=temperatures)


@pytest.mark.parametrize("estimator", EVERY, ids=str)
def test_broken_signals_stay_where_they_are(estimator):
  """NaN or infinite signals of one request: the others' estimates and the state stay finite."""
  state = estimator.init(3)
  logits = np.array([[1.0, 2.0, -1.0], [np.nan, 1.0, 1.0], [np.inf, -np.inf, 0.0]])
  signals = make_signals(logits, np.abs(logits))
  outcome = Outcome(jnp.array([3, 3, 3]), jnp.array([1, 3, 0]), jnp.array([True, True, True]))
  for _ in range(2):
    survival = compute_survival(estimator.estimate(state, signals))
    assert np.isfinite(survival).all() and (survival >= 0).all() and (survival <= 1).all()
    state = estimator.observe(state, signals, outcome)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("estimator", EVERY[2:], ids=str)
def test_only_what_was_seen_is_learnt(estimator):
  """Drafts that were not verified, and requests that are done, change nothing; nor, for an
  estimate conditional on the drafts before, do drafts after a rejection."""
  state = estimator.init(3)
  a, b = make_signals([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]), make_signals([[1.0, 2.0, 9.0], [5.] * 3])
  outcome = Outcome(jnp.array([2, 3]), jnp.array([2, 0]), jnp.array([True, False]))
  for x, y in zip(*(jax.tree.leaves(estimator.observe(state, s, outcome)) for s in (a, b))):
    np.testing.assert_array_equal(x, y)


def learn(estimator, signals, accepted, batch):
  """Returns survivals [N, G] estimated before each round's outcome, full verification."""
  fold = lambda x: x.reshape(-1, batch, *x.shape[1:])
  lens = jnp.full(batch, signals.margin_BxG.shape[1])

  def run(state, inputs):
    signals, accepted = inputs
    survival = compute_survival(estimator.estimate(state, signals))
    return estimator.observe(state, signals, Outcome(lens, accepted, lens > 0)), survival

  signals = jax.tree.map(fold, signals)
  init = estimator.init(signals.margin_BxG.shape[-1])
  return np.concatenate(jax.jit(lambda i, x: jax.lax.scan(run, i, x)[1])(
      init, (signals, fold(accepted))))


def test_logistic_learns_a_margin_that_says_all():
  """Acceptance is a logistic of the margin, with other weights at each position; the head's logit
  is noise. After 500 records nearly as good as the truth, whose ECE over 1,500 records in 20 bins
  is 0.02 to 0.04 by chance."""
  rng = np.random.default_rng(0)
  margin = rng.exponential(3.0, (2000, 2))
  truth = 1 / (1 + np.exp(-(np.array([-2.0, -0.5]) + np.array([1.0, 0.3]) * margin)))
  accepted = np.cumprod(rng.random(margin.shape) < truth, axis=1).sum(axis=1)
  signals = make_signals(rng.normal(0, 2, margin.shape), margin)
  for estimator in (OnlineLogistic(), OnlineLogistic(uses_head=True)):
    survival = learn(estimator, signals, jnp.asarray(accepted), 8)
    for k in range(2):
      figures = measure_reliability(survival[500:, k], accepted[500:] > k)
      best = measure_reliability(np.cumprod(truth, axis=1)[500:, k], accepted[500:] > k)
      assert figures.ece < best.ece + .03 and figures.auroc > best.auroc - .02


def test_margin_is_needed_where_it_is_used():
  with pytest.raises(ValueError, match="margin: found none"):
    OnlineLogistic().estimate(OnlineLogistic().init(2), Signals(jnp.zeros((1, 2))))
  with pytest.raises(ValueError, match="uses_margin: found false"):
    OnlineLogistic(uses_margin=False)


def test_solve():
  rng = np.random.default_rng(1)
  root = rng.normal(size=(4, 3, 3))
  a, b = root @ root.transpose(0, 2, 1) + np.eye(3), rng.normal(size=(4, 3))
  found = _solve(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
  # Condition numbers are below 100, times 3 eliminations of 6e-8 each.
  np.testing.assert_allclose(found, np.linalg.solve(a, b[..., None])[..., 0], rtol=1e-4, atol=1e-5)


def test_survival():
  found = compute_survival(jnp.array([[.5, .5, 2.0], [1.0, jnp.nan, 1.0], [-1.0, 1.0, 1.0]]))
  np.testing.assert_array_equal(found, [[.5, .25, .25], [1, 0, 0], [0, 0, 0]])


def test_average_survival_by_hand():
  """Half of the old and half of the new, where there is a new; what was not drawn keeps its share
  of the last draft that was, and is never above it."""
  past, fresh = jnp.array([.5, .25, .125]), jnp.array([1.0, .75, 0.0])
  average = lambda num_drawn, past=past: average_survival(past, fresh, jnp.int32(num_drawn),
                                                          memory=.5).tolist()
  assert average(0) == [.5, .25, .125]
  assert average(1) == [.75, .375, .1875]
  assert average(2) == [.75, .5, .25]
  assert average(3) == [.75, .5, .0625]
  assert average(1, jnp.array([0.0, 0.0, 0.0])) == [.5, 0, 0]
  # With no memory the new round alone counts.
  assert average_survival(past, fresh, jnp.int32(2), memory=0.0).tolist() == [1, .75, .375]
