"""STS offline and online."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.metrics.reliability import measure_reliability
from dspark_jax.scheduler.calibration import FILE, fit_sts, load_sts, save_sts
from dspark_jax.scheduler.estimator import OnlineSts, Outcome, Signals


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def draw_records(rng, num, temperatures):
  """Logits, and outcomes that follow sigmoid(logit / temperature) at each position."""
  logits = rng.normal(1.5, 2.5, (num, len(temperatures)))
  is_accepted = rng.random(logits.shape) < sigmoid(logits / np.array(temperatures))
  return logits, np.cumprod(is_accepted, axis=1).sum(axis=1)


def test_b52_by_hand():
  """Position 1: all logits 2, half accepted. sigmoid(2) = .8808, off by .3808; at T = 8 by .0622.
  Position 2 is fitted on products with .5622 fixed."""
  num = 64
  logits = np.full((num, 2), 2.0)
  accepted = np.arange(num) % 2  # never 2
  fit = fit_sts(logits, accepted, grid=[.5, 1, 2, 4, 8])
  assert fit.temperatures[0] == 8.0 and fit.status == ("fitted", "one class")
  assert fit.ece_before[0] == pytest.approx(.3808, abs=1e-4)
  assert fit.ece_after[0] == pytest.approx(.0622, abs=1e-4)
  # The second position keeps T = 1: .5622 x .8808 predicted, 0 happened.
  assert fit.ece_after[1] == pytest.approx(.56218 * .88080, abs=1e-4)


def test_recovers_temperatures():
  """20,000 records: the grid steps by 4.4%, the ECE of a bin is good to 0.01."""
  truth = (2.0, 0.7, 1.0, 3.0)
  logits, accepted = draw_records(np.random.default_rng(0), 20000, truth)
  fit = fit_sts(logits, accepted)
  np.testing.assert_allclose(np.log(fit.temperatures), np.log(truth), atol=.25)
  held_out = draw_records(np.random.default_rng(1), 20000, truth)
  survival = np.cumprod(sigmoid(held_out[0] / np.array(fit.temperatures)), axis=1)
  for k in range(4):
    after = measure_reliability(survival[:, k], held_out[1] > k).ece
    assert after < .02 and after < fit.ece_before[k] + .005


def test_its_ece_is_that_of_the_metrics():
  logits, accepted = draw_records(np.random.default_rng(2), 500, (2.0, 1.0))
  fit = fit_sts(logits, accepted)
  survival = np.cumprod(sigmoid(logits / np.array(fit.temperatures)), axis=1)
  for k in range(2):
    assert fit.ece_after[k] == pytest.approx(measure_reliability(survival[:, k], accepted > k).ece)
    assert fit.ece_before[k] == pytest.approx(measure_reliability(
        np.cumprod(sigmoid(logits), axis=1)[:, k], accepted > k).ece)


def test_b51_tiny_data():
  """No records, few, or one class: temperatures stay 1, the rest is missing or finite."""
  none = fit_sts(np.zeros((0, 3)), np.zeros(0, int))
  assert none.temperatures == (1.0,) * 3 and none.status == ("no data",) * 3
  assert none.ece_before == none.ece_after == (None,) * 3
  one = fit_sts([[np.log(3 / 7)] * 3], [1])
  assert one.status == ("few data",) * 3 and one.ece_after[0] == pytest.approx(.7)
  every = fit_sts(np.ones((50, 2)), np.full(50, 2))
  assert every.status == ("one class",) * 2 and every.temperatures == (1.0, 1.0)
  first_only = fit_sts(np.ones((50, 3)), np.arange(50) % 2)  # nothing ever reaches the second
  assert first_only.status == ("fitted", "one class", "one class")


def test_b52_saturated_logits():
  logits = np.tile([np.inf, -np.inf, 40.0, -40.0], 16)[:, None]
  fit = fit_sts(logits, np.arange(64) % 2)
  assert np.isfinite(fit.temperatures[0]) and np.isfinite(fit.ece_after[0])


@pytest.mark.parametrize("change, name", [
    (dict(verify_lens_N=[2] * 39 + [1]), "verify_lens: found 1, expected 2"),
    (dict(grid=[1.0, 0.0]), "grid: found 0"), (dict(logits_NxG=np.full((40, 2), np.nan)), "NaN"),
    (dict(num_accepted_N=np.full(40, 3)), "num_accepted"),
    (dict(num_accepted_N=np.zeros(39)), "num_accepted")])
def test_bad_records_are_refused(change, name):
  """Fault B52 (c) among them: records that were cut short look better than they are."""
  arguments = dict(logits_NxG=np.zeros((40, 2)), num_accepted_N=np.arange(40) % 3) | change
  with pytest.raises(ValueError, match=name):
    fit_sts(**arguments)


def test_file(tmp_path):
  path = save_sts(tmp_path, (1.5, 0.25), figures=dict(ece=[None, .1]), data="x")
  assert path.name == FILE and json.loads(path.read_text())["data"] == "x"
  assert load_sts(tmp_path, 2) == (1.5, 0.25)
  with pytest.raises(ValueError, match="expected 3 numbers"):
    load_sts(tmp_path, 3)
  with pytest.raises(FileNotFoundError, match="calibrate"):
    load_sts(tmp_path / "nowhere", 2)
  with pytest.raises(ValueError, match="Out of range"):
    save_sts(tmp_path, (1.0,), ece=float("nan"))
  for text, name in (("[1]", "expected an object"), ("{", "no JSON"),
                     ('{"format": "dspark_jax.sts", "version": 2}', "version: found 2"),
                     ('{"temperatures": [1, 1]}', "format: found None"),
                     ('{"format": "dspark_jax.sts", "version": 1, "temperatures": [1, 0]}',
                      "found 0, expected numbers > 0")):
    path.write_text(text)
    with pytest.raises(ValueError, match=name):
      load_sts(tmp_path, 2)


# --- online --------------------------------------------------------------------------------------


def run_online(estimator, rounds, state=None):
  """Feeds rounds [T, B] of (logits, accepted, lengths); returns (state, temperatures [T, G])."""
  logits, accepted, lens = (jnp.asarray(x) for x in rounds)

  def learn(state, inputs):
    logits, accepted, lens = inputs
    outcome = Outcome(lens, jnp.minimum(lens, accepted), jnp.ones(lens.shape, bool))
    state = estimator.observe(state, Signals(logits), outcome)
    return state, state.temperatures_G

  state = estimator.init(logits.shape[-1]) if state is None else state
  return jax.jit(lambda s, x: jax.lax.scan(learn, s, x))(state, (logits, accepted, lens))


def make_rounds(seed, num_rounds, truth, batch=8):
  logits, accepted = draw_records(np.random.default_rng(seed), num_rounds * batch, truth)
  fold = lambda x: x.reshape(num_rounds, batch, *x.shape[1:])
  return (np.float32(fold(logits)), fold(accepted).astype(np.int32),
          np.full((num_rounds, batch), len(truth), np.int32))


def test_online_temperatures_follow_the_workload():
  """Two positions; the truth changes from T = (4, 1) to (1/2, 2) and the estimate goes along."""
  estimator = OnlineSts(half_life=256)
  state, temperatures = run_online(estimator, make_rounds(3, 150, (4.0, 1.0)))
  np.testing.assert_allclose(np.log2(temperatures[-1]), [2, 0], atol=1.01)
  state, temperatures = run_online(estimator, make_rounds(4, 150, (0.5, 2.0)), state)
  np.testing.assert_allclose(np.log2(temperatures[-1]), [-1, 1], atol=1.01)


def test_online_without_data_keeps_its_start():
  """Nothing verified, or nobody live: bit for bit the start, and one round moves nothing."""
  start = (1.3, 0.9)
  estimator = OnlineSts(start)
  logits, accepted, lens = make_rounds(5, 4, (3.0, 3.0))
  state, temperatures = run_online(estimator, (logits, accepted, 0 * lens))
  np.testing.assert_array_equal(temperatures, np.float32([start] * 4))
  np.testing.assert_array_equal(state.gap_GxTxN, 0)
  _, temperatures = run_online(estimator, (logits[:1, :2], accepted[:1, :2], lens[:1, :2]))
  np.testing.assert_allclose(temperatures[-1], start, rtol=1e-6)


def test_online_survives_broken_and_saturated_logits():
  logits, accepted, lens = make_rounds(6, 8, (1.0, 1.0))
  logits[::2, 0] = np.nan
  logits[1::2, 1] = np.inf
  state, temperatures = run_online(OnlineSts(), (logits, accepted, lens))
  assert np.isfinite(state.gap_GxTxN).all() and np.isfinite(temperatures).all()


def test_the_last_round_is_not_used_before_it_ends():
  """An estimate reads the state of earlier rounds: this round's outcome cannot be in it."""
  estimator = OnlineSts()
  state = estimator.init(2)
  signals = Signals(jnp.array([[1.0, -1.0]]))
  before = estimator.estimate(state, signals)
  np.testing.assert_allclose(before, sigmoid(np.array([[1.0, -1.0]])), rtol=1e-6)
  with pytest.raises(ValueError, match="half_life: found 0"):
    OnlineSts(half_life=0)
