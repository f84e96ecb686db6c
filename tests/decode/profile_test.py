"""Measuring the step curve on a tiny model, and its cache."""

import dataclasses

import pytest

from dspark_jax.decode import profile
from dspark_jax.ladder import make_ladder
from dspark_jax.scheduler.policies import ConfidenceThreshold, EarlyStop, FixedLength
from dspark_jax.scheduler.step_curve import Timings
from tests.decode import cases
from tests.tiny import fast_compile  # noqa: F401

LADDER = ((2, 1), (4, 2), (8, 4))


def make_frame(ladder=LADDER, policy=EarlyStop()):
  frame, params = cases.make_pair(3)
  return dataclasses.replace(frame, policy=policy, ladder=ladder), params


def test_every_bucket_is_measured():
  frame, params = make_frame()
  timings = profile.measure_timings(frame, params, 2, context_tokens=8, repeats=2)
  assert timings.ladder == LADDER and len(timings.verify_ms) == 3
  assert all(0 < ms < 1000 for ms in (*timings.verify_ms, *timings.draft_ms))
  assert len(timings.draft_ms) == 2  # of 1 and of 3 drafts


def test_rounds_of_several_drafters_take_turns(monkeypatch):
  """Milliseconds that grow by one a run: turns a, b, a, b have medians one apart; the first turn
  compiles and is dropped. Drafting and verifying alternate, so a's drafts are runs 4 and 8."""
  clock = iter(range(100))

  def count(run, *args):
    return next(clock) / 1e3, run(*args)

  monkeypatch.setattr(profile, "_time", count)
  monkeypatch.setattr(profile, "_make_state", lambda *args: None)
  monkeypatch.setattr(profile, "_compile_parts", lambda frame: (
      lambda *args: None, lambda params, state, *rest: state))
  pair = make_frame(policy=None, ladder=None)
  found = profile.compare_rounds({"a": pair, "b": pair}, 2, context_tokens=8, repeats=2)
  assert found["a"] == profile.RoundTime(pytest.approx(6), pytest.approx(7))
  assert found["b"] == profile.RoundTime(pytest.approx(8), pytest.approx(9))


def test_a_bucket_that_is_never_used_is_refused():
  frame, params = make_frame(((8, 4), (9, 4)))  # 2 requests of 4 rows are 8 tokens at most
  with pytest.raises(ValueError, match=r"bucket \(9, 4\) can never be used"):
    profile.measure_timings(frame, params, 2, context_tokens=8, repeats=1)


def test_measured_once_and_refused_when_it_was_moved(tmp_path):
  frame, params = make_frame()
  calls = []

  def measure(frame, params, batch):
    calls.append(batch)
    return Timings(frame.ladder, (1.0, 2.0, 3.0), (.5, .6))

  load = lambda frame, **kw: profile.load_or_measure(
      frame, params, 2, **(dict(name="tiny", directory=tmp_path, measure=measure) | kw))
  assert load(frame) == load(frame) == Timings(LADDER, (1.0, 2.0, 3.0), (.5, .6))
  assert calls == [2]
  load(dataclasses.replace(frame, ladder=((2, 1), (4, 3), (8, 4))))  # another file
  assert calls == [2, 2] and len(list(tmp_path.iterdir())) == 2
  # Policy and estimator are no part of what was measured.
  load(dataclasses.replace(frame, policy=FixedLength(3)))
  assert calls == [2, 2]
  for path in tmp_path.iterdir():
    path.write_text(path.read_text().replace("# model: tiny", "# model: huge"))
  with pytest.raises(ValueError, match="model: found 'huge"):
    load(frame)


def test_prepare_batch(tmp_path):
  """Policies get what they need, and no more."""
  frame, params = make_frame(ladder=None, policy=FixedLength(2))
  prepare = lambda frame: profile.prepare_batch(frame, params, 2, name="x", directory=tmp_path)
  assert prepare(frame) == (frame, None)
  ragged, curve = prepare(dataclasses.replace(frame, policy=ConfidenceThreshold(.5, 2)))
  assert ragged.ladder == make_ladder(2, 2) and curve is None
  assert list(tmp_path.iterdir()) == []
