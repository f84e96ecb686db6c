"""The engine: every request as if it were alone, no compilation, no waiting, no request lost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import profile
from dspark_jax.decode.state import Frame
from dspark_jax.ladder import draft_lens
from dspark_jax.scheduler.policies import ConfidenceThreshold, EarlyStop, Lagged
from dspark_jax.scheduler.step_curve import Timings
from dspark_jax.serving import slots
from dspark_jax.serving.engine import EngineOptions, QueueFull, make_buckets
from tests.decode import cases as decode_cases
from tests.serving import cases
from tests.serving.cases import make_engine
from tests.tiny import fast_compile  # noqa: F401


class Stream:
  """Keeps what a callback is told."""

  def __init__(self):
    self.calls = []

  def __call__(self, request, tokens):
    self.calls.append((list(tokens), request.is_done))

  def check(self, request):
    """The pieces joined are the answer, and exactly the last call says that it is done."""
    assert [t for tokens, _ in self.calls for t in tokens] == request.tokens
    assert [is_done for _, is_done in self.calls] == [False] * (len(self.calls) - 1) + [True]
    assert all(tokens for tokens, is_done in self.calls if not is_done)


def plain_pair():
  config, params = decode_cases.make_target()
  return Frame(config), {"target": params}


# --- a request depends on itself only ----------------------------------------------------------


@pytest.mark.smoke
def test_requests_that_join_and_leave_equal_their_runs_alone():
  """Twelve requests through three slots, arriving in three waves; greedy and sampled."""
  jobs, alone, alone_counts = cases.standard_jobs()
  engine, requests, streams = make_engine(), [], []
  for wave in (jobs[:2], jobs[2:9], jobs[9:]):
    for job in wave:
      streams.append(Stream())
      requests.append(engine.submit(**job, on_tokens=streams[-1]))
    for _ in range(4):
      engine.step()
  engine.run()
  assert [r.tokens for r in requests] == list(alone)
  assert {r.finish_reason for r in requests} == {"stop", "length"}
  for request, stream, job in zip(requests, streams, jobs):
    stream.check(request)
    is_stop = request.tokens[-1] in job.get("stop_ids", ())
    assert request.finish_reason == ("stop" if is_stop else "length")
    assert is_stop or len(request.tokens) == job["max_new_tokens"]
  # Every request took its own rounds, with its own drafts, some accepted and some not.
  assert [(r.num_rounds, r.num_verified, r.num_accepted) for r in requests] == list(alone_counts)
  counts = engine.counts
  assert counts.num_prefills == 12 and counts.num_tokens == sum(map(len, alone))
  assert (counts.num_request_rounds, counts.num_verified, counts.num_accepted) == tuple(
      map(sum, zip(*alone_counts)))
  assert 0 < counts.num_accepted < counts.num_verified
  assert counts.num_request_rounds > 1.5 * counts.num_rounds  # rounds really were shared


def test_the_order_of_arrival_does_not_matter():
  jobs, alone, _ = cases.standard_jobs()
  engine, order = make_engine(), [7, 3, 11, 0, 5, 9, 1, 10, 2, 8, 4, 6]
  requests = []
  for i in order:
    requests.append(engine.submit(**jobs[i]))
    engine.step()
  engine.run()
  assert [r.tokens for r in requests] == [alone[i] for i in order]


def test_plain_decoding():
  pair = plain_pair()
  jobs = cases.make_jobs(5, seed=3)
  engine = make_engine(pair)
  requests = [engine.submit(**job) for job in jobs]
  engine.run()
  assert [r.tokens for r in requests] == [cases.run_alone(job, pair) for job in jobs]
  assert engine.counts.num_verified == 0


@pytest.mark.parametrize("policy", [
    EarlyStop(explore_every=5, explore_share=1e9), Lagged(),
    ConfidenceThreshold(0.15)])
def test_policies_that_look_at_the_whole_batch(monkeypatch, tmp_path, policy):
  """Buckets, a curve that makes rows expensive, greedy requests: the tokens of their runs alone."""
  frame, params = decode_cases.make_pair()
  names = []

  def load_or_measure(frame, params, batch, *, name, directory, measure):
    names.append((batch, name, directory))
    return Timings(frame.ladder, tuple(10.0 + 4.0 * tokens for tokens, _ in frame.ladder),
                   tuple(3.0 + n for n in draft_lens(frame.ladder)))

  monkeypatch.setattr(profile, "load_or_measure", load_or_measure)
  jobs = [job | dict(temperature=0.0) for job in cases.make_jobs(9, seed=11)]
  engine = make_engine((dataclasses.replace(frame, policy=policy), params), step_curves=tmp_path,
                       name="tiny")
  assert engine.frame.ladder and names == ([] if isinstance(policy, ConfidenceThreshold) else
                                           [(3, "tiny", tmp_path)])
  requests = []
  for job in jobs:
    requests.append(engine.submit(**job))
    engine.step()
  engine.run()
  assert [r.tokens for r in requests] == [cases.run_alone(job) for job in jobs]
  counts, scheduler = engine.counts, engine.state.scheduler
  assert 0 < counts.num_verified < 3 * counts.num_request_rounds  # something was trimmed
  # What the scheduler counted on the device is what the engine counted behind it.
  assert int(scheduler.num_rounds) == counts.num_rounds
  assert int(scheduler.num_tokens) == counts.num_verified + counts.num_request_rounds
  assert int(scheduler.bucket_counts_N.sum()) == counts.num_rounds


# --- the device never waits --------------------------------------------------------------------


def test_results_are_read_one_round_behind():
  """Round n + 1 is dispatched before round n is read, whenever anybody may still need a round; and
  a prefill is read only after a round has been dispatched behind it."""
  jobs = cases.standard_jobs()[0]
  events = []
  engine = make_engine(on_event=lambda kind, index: events.append((kind, index)))
  for job in jobs:
    engine.submit(**job)
  engine.run()
  at = {event: i for i, event in enumerate(events)}
  assert len(at) == len(events)  # nothing is dispatched or read twice
  num_rounds = sum(kind == "round" for kind, _ in events)
  assert num_rounds > 20
  for n in range(num_rounds - 1):
    assert at["round", n] < at["round", n + 1] < at["read round", n] < at["read round", n + 1]
    # One behind, not more: a result is not kept longer than the round that hides its reading.
    if n + 2 < num_rounds:
      assert at["read round", n] < at["round", n + 2]
  for index in range(len(jobs)):
    behind = min(i for (kind, _), i in at.items() if kind == "round" and i > at["prefill", index])
    assert behind < at["read prefill", index] < at["read round", events[behind][1]]


def test_dispatching_reads_nothing(monkeypatch):
  """The only read of a step is `jax.device_get`, and it asks for nothing of the newest round."""
  engine, unread = make_engine(), []
  device_get = jax.device_get

  def spy(arrays):
    unread.append(len(engine._pending))
    return device_get(arrays)

  for job in cases.standard_jobs()[0]:
    engine.submit(**job)
  monkeypatch.setattr(jax, "device_get", spy)
  while engine.num_waiting:
    engine.step()
    assert engine._pending[-1].kind == "round"
  assert len(unread) > 5 and min(unread) >= 1
  engine.run()


def test_joining_and_leaving_compiles_nothing():
  jobs = cases.standard_jobs()[0]  # decodes them alone, the first time
  engine = make_engine()
  engine.warm_up()
  compiled = []
  listener = lambda name, seconds, **kwargs: compiled.append(name) if "compile" in name else None
  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    requests = [engine.submit(**job) for job in jobs]
    for _ in range(6):
      engine.step()
    engine.cancel(next(r for r in requests if not r.is_done))
    engine.run()
    assert not compiled
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7))  # the listener hears compilations at all
    assert compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.parametrize("policy", [EarlyStop(), Lagged()])
def test_warm_up_runs_every_shape_and_forgets_it(monkeypatch, tmp_path, policy):
  frame, params = decode_cases.make_pair()
  monkeypatch.setattr(profile, "load_or_measure", lambda frame, *args, **kwargs: Timings(
      frame.ladder, tuple(10.0 + n for n, _ in frame.ladder),
      tuple(1.0 for _ in draft_lens(frame.ladder))))
  counts, run_round = [], slots.run_round

  def spy(*args):
    state, report = run_round(*args)
    counts.append(np.asarray(state.scheduler.bucket_counts_N))
    return state, report

  monkeypatch.setattr(slots, "run_round", spy)
  run_round.clear_cache()  # another test may have compiled this very program
  engine = make_engine((dataclasses.replace(frame, policy=policy), params), step_curves=tmp_path)
  engine.warm_up()
  assert np.sum(counts, axis=0).tolist() == [1] * len(engine.frame.ladder)
  assert int(engine.state.scheduler.num_rounds) == 0 and bool(engine.state.is_done_B.all())
  engine.submit([1, 2, 3], max_new_tokens=12)
  engine.run()
  assert run_round._cache_size() == 1  # what was run is what serves


@pytest.mark.parametrize("policy", [EarlyStop(max_draft=2), Lagged(max_draft=2)])
def test_the_step_curve_is_measured_on_the_program_that_serves(monkeypatch, tmp_path, policy):
  monkeypatch.setattr(profile, "REPEATS", (1, 1))
  frame, params = decode_cases.make_pair()
  slots.run_round.clear_cache()
  engine = make_engine((dataclasses.replace(frame, policy=policy), params), step_curves=tmp_path)
  assert len(list(tmp_path.iterdir())) == slots.run_round._cache_size() == 1
  engine.warm_up()
  engine.submit([1, 2, 3], max_new_tokens=12)
  engine.run()
  assert slots.run_round._cache_size() == 1


def test_warm_up_leaves_no_trace():
  engine = make_engine()
  engine.warm_up()
  assert vars(engine.counts) == vars(type(engine.counts)()) and not engine.is_busy
  jobs, alone, _ = cases.standard_jobs()
  request = engine.submit(**jobs[0])
  with pytest.raises(ValueError, match="warm_up: found a busy engine"):
    engine.warm_up()
  engine.run()
  assert request.id == 0 and request.tokens == alone[0]


def test_a_slot_whose_request_is_bound_to_end_is_filled_at_once():
  """Plain decoding, one slot, answers of 5 tokens: the prefill's and 4 rounds. The next request
  enters before the last round of the one before it has been read."""
  events = []
  engine = make_engine(plain_pair(), options=EngineOptions(batch=1, max_len=60,
                                                           prompt_buckets=(8,)),
                       on_event=lambda *event: events.append(event))
  requests = [engine.submit([3, 1, 4], max_new_tokens=5) for _ in range(3)]
  engine.run()
  assert len({tuple(r.tokens) for r in requests}) == 1 and len(requests[0].tokens) == 5
  dispatched = [kind for kind, _ in events if not kind.startswith("read")]
  assert dispatched == (["prefill"] + ["round"] * 4) * 3


# --- ends that the device does not decide ------------------------------------------------------


def test_cancelling():
  """One waiting, one running, one from its own callback; nobody else notices."""
  jobs = [job | dict(max_new_tokens=24, stop_ids=()) for job in cases.make_jobs(6, seed=5)]
  alone = [cases.run_alone(job) for job in jobs]
  engine, streams = make_engine(), [Stream() for _ in jobs]

  def cancel_after_8(request, tokens):
    streams[1](request, tokens)
    if len(request.tokens) >= 8:
      engine.cancel(request)

  requests = [engine.submit(**job, on_tokens=cancel_after_8 if i == 1 else streams[i])
              for i, job in enumerate(jobs)]
  for _ in range(4):
    engine.step()
  assert engine.cancel(requests[0]) and engine.cancel(requests[5])
  assert not engine.cancel(requests[0])  # it is over
  engine.run()
  assert [r.finish_reason for r in requests] == ["cancelled"] * 2 + ["length"] * 3 + ["cancelled"]
  assert [r.tokens for r in requests[2:5]] == alone[2:5]
  for i in (0, 1):  # what they have is right, and not all
    n = len(requests[i].tokens)
    assert 0 < n < 24 and requests[i].tokens == alone[i][:n]
  assert requests[5].tokens == [] and requests[5].admitted_s is None
  for request, stream in zip(requests, streams):
    stream.check(request)
  assert not engine.cancel(requests[2])


def test_deadlines():
  now = [100.0]
  engine = make_engine(clock=lambda: now[0], options=EngineOptions(
      batch=1, max_len=60, prompt_buckets=(8,)))
  job = dict(prompt=[3, 1, 4], max_new_tokens=40)
  alone = cases.run_alone(job)
  running = engine.submit(**job, deadline_s=2.5)
  waiting = engine.submit(**job, deadline_s=1.5)
  patient = engine.submit(**job, deadline_s=1000, arrival_s=99.0)
  while not running.is_done:
    now[0] += 1.0
    engine.step()
  engine.run()
  assert [r.finish_reason for r in (running, waiting, patient)] == ["deadline"] * 2 + ["length"]
  assert (waiting.finished_s, running.finished_s) == (102.0, 103.0) and waiting.tokens == []
  assert 0 < len(running.tokens) < 40 and running.tokens == alone[:len(running.tokens)]
  assert patient.tokens == alone and patient.arrival_s == 99.0


def test_a_full_queue_refuses():
  options = EngineOptions(batch=2, max_len=60, prompt_buckets=(8,), max_queue=1)
  engine, job = make_engine(options=options), dict(prompt=[3, 1], max_new_tokens=9)
  requests = [engine.submit(**job) for _ in range(3)]  # two for the slots, one waits
  for _ in range(2):
    with pytest.raises(QueueFull, match="found 3 requests waiting, expected fewer than max_queue"):
      engine.submit(**job)
    assert engine.num_waiting == 3
  engine.step()
  assert engine.num_waiting == 1
  with pytest.raises(QueueFull, match="found 1 requests waiting"):
    engine.submit(**job)
  assert engine.counts.num_refused == 3
  engine.run()
  requests.append(engine.submit(**job))
  engine.run()
  assert [r.id for r in requests] == [0, 1, 2, 3]
  assert [r.tokens for r in requests] == [cases.run_alone(job)] * 4


# --- requests that fail ------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_request_without_a_law_harms_no_other():
  """Token 35 has no embedding; jobs use tokens below 34. Its slot serves the next request."""
  frame, params = decode_cases.make_pair()
  embed = params["target"]["embed_tokens"].at[35].set(jnp.nan)
  params = params | {"target": params["target"] | {"embed_tokens": embed}}
  jobs = [job | dict(stop_ids=(), temperature=0.0) for job in cases.make_jobs(8, seed=7)]
  pair = frame, params
  alone = [cases.run_alone(job, pair) for job in jobs]  # some meet 35 on their way
  for i in (1, 4):
    jobs[i]["prompt"] = [3, 35, 4]
    alone[i] = []
  engine = make_engine(pair)
  requests = [engine.submit(**job) for job in jobs]
  engine.run()
  assert [r.tokens for r in requests] == alone
  errors = [r for r in requests if r.finish_reason == "error"]
  assert requests[1] in errors and requests[4] in errors and len(errors) < 6
  assert {r.error for r in errors} == {"logits: found numbers that are not finite"}
  # All three slots were used after the first failure.
  assert engine.counts.num_prefills == 8


def test_a_slot_is_cleared_when_it_is_used_again():
  """NaN in every cache row of an idle engine, as a broken request leaves them (fault B60)."""
  jobs, alone, _ = cases.standard_jobs()
  engine = make_engine()
  engine.submit(**jobs[0])
  engine.run()
  poison = lambda tree: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tree)
  engine.state = engine.state.replace(cache=poison(engine.state.cache),
                                      drafter=poison(engine.state.drafter))
  requests = [engine.submit(**job) for job in jobs[:3]]
  engine.run()
  assert [r.tokens for r in requests] == list(alone[:3])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((engine.state.cache,
                                                            engine.state.drafter)))


def test_a_callback_that_raises_ends_its_own_request_only():
  jobs, alone, _ = cases.standard_jobs()
  engine = make_engine()

  def fail(request, tokens):
    raise KeyError("no such\nuser")

  requests = [engine.submit(**job, on_tokens=fail if i == 1 else None)
              for i, job in enumerate(jobs[:5])]
  engine.run()
  assert [r.tokens for i, r in enumerate(requests) if i != 1] == [*alone[:1], *alone[2:5]]
  assert requests[1].finish_reason == "error"
  assert requests[1].error.startswith("on_tokens: KeyError") and "\n" not in requests[1].error


@pytest.mark.parametrize("changes, message", [
    (dict(prompt=[]), "prompt: found no tokens"),
    (dict(prompt=[1] * 25), "prompt: found 25 tokens, expected at most 24"),
    (dict(prompt=[decode_cases.VOCAB]), "found token ids outside"),
    (dict(prompt=[-1]), "found token ids outside"),
    (dict(max_new_tokens=0), "max_new_tokens: found 0"),
    (dict(max_new_tokens=2.5), "max_new_tokens: found 2.5"),
    (dict(stop_ids=[1, 2, 3, 4]), "stop_ids: found 4, expected at most max_stop_ids = 3"),
    (dict(temperature=-1.0), "temperature: found -1"), (dict(top_p=0.0), "top_p: found 0"),
    (dict(seed=2**32), "seed: found"), (dict(deadline_s=0), "deadline_s: found 0")])
def test_what_cannot_be_done_is_refused_at_the_door(changes, message):
  engine = make_engine()
  with pytest.raises(ValueError, match=message):
    engine.submit(**(dict(prompt=[1], max_new_tokens=3) | changes))
  assert not engine.is_busy and engine.counts.num_refused == 0


@pytest.mark.parametrize("changes, message", [
    (dict(batch=0), "batch: found 0"), (dict(max_len=1), "max_len: found 1"),
    (dict(max_queue=-1), "max_queue: found -1"), (dict(max_stop_ids=0), "max_stop_ids: found 0"),
    (dict(prompt_buckets=(64, 16)), "prompt_buckets: found"),
    (dict(max_len=32, prompt_buckets=(64,)), "prompt_buckets: found")])
def test_sizes_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    EngineOptions(**changes)


def test_an_engine_longer_than_the_target_is_refused():
  with pytest.raises(ValueError, match="max_len: found 300, expected at most the target's 256"):
    make_engine(options=EngineOptions(max_len=300))


def test_buckets():
  assert make_buckets(512) == (64, 128, 256, 512)
  assert make_buckets(300) == (64, 128, 256, 300)
  assert make_buckets(40) == (40,)
