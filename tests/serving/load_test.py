"""Arrival processes on a virtual clock, worked by hand; traces; and the real engine in a loop."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from dspark_jax.metrics.load_report import summarize_load
from dspark_jax.serving import load
from dspark_jax.serving.engine import Counts, QueueFull
from dspark_jax.serving.request import Request
from tests.serving import cases
from tests.tiny import fast_compile  # noqa: F401


class VirtualEngine:
  """A step lasts one second of a clock of its own and gives each of `batch` requests one token."""

  def __init__(self, batch: int, max_queue: int = 99):
    self.now, self.batch, self.max_queue, self.counts = 0.0, batch, max_queue, Counts()
    self.queue, self.running, self.all = [], [], []

  def clock(self):
    return self.now

  def sleep(self, seconds):
    assert seconds > 0
    self.now += seconds

  def check(self, prompt, max_new_tokens):
    if max_new_tokens < 1:
      raise ValueError(f"max_new_tokens: found {max_new_tokens}")

  def submit(self, prompt, max_new_tokens, arrival_s=None):
    if len(self.queue) >= self.max_queue:
      self.counts.num_refused += 1
      raise QueueFull
    request = Request(len(self.all), tuple(prompt), max_new_tokens, None, (),
                      self.now if arrival_s is None else arrival_s)
    self.queue.append(request)
    self.all.append(request)
    return request

  def cancel(self, request):
    request.finish_reason = "cancelled"
    self.queue = [r for r in self.queue if r is not request]
    self.running = [r for r in self.running if r is not request]

  @property
  def is_busy(self):
    return bool(self.queue or self.running)

  def run(self):
    assert not self.is_busy

  def step(self):
    while self.queue and len(self.running) < self.batch:
      self.running.append(self.queue.pop(0))
      self.counts.num_prefills += 1
    self.now += 1.0
    self.counts.num_rounds += bool(self.running)
    for request in list(self.running):
      request.tokens.append(0)
      self.counts.num_tokens += 1
      self.counts.num_request_rounds += 1
      request.first_token_s = request.first_token_s or self.now
      if len(request.tokens) == request.max_new_tokens:
        request.finish_reason, request.finished_s = "length", self.now
        self.running.remove(request)


def jobs_of(*lengths):
  return [dict(prompt=[i], max_new_tokens=n) for i, n in enumerate(lengths)]


# --- closed loop -------------------------------------------------------------------------------


def test_closed_loop_by_hand():
  """Two users, answers of 2, 4, 3, 2, 5 seconds, two measured.

  t = 2: job 0 done, the window opens, job 2 starts. t = 4: job 1 done, job 3 starts. t = 5: job 2
  done, job 4 keeps the load up. t = 6: job 3 done, the window closes: 4 seconds, 2 tokens in each.
  """
  engine = VirtualEngine(batch=2)
  run = load.run_closed(engine, jobs_of(2, 4, 3, 2, 5), num_users=2, num_measured=2)
  assert (run.start_s, run.end_s) == (2.0, 6.0)
  assert [r.id for r in run.requests] == [2, 3] and [r.arrival_s for r in run.requests] == [2, 4]
  assert run.totals.num_tokens == 8 and run.totals.num_rounds == 4 and run.totals.num_prefills == 3
  assert [r.finish_reason for r in engine.all] == ["length"] * 4 + ["cancelled"]
  report = summarize_load("m", 2, run.requests, run.totals, seconds=run.seconds)
  assert report.tokens_per_s == 2.0 and report.batch == 2.0
  assert report.first_token_ms[50] == report.token_ms[50] == 1000.0


class SharedEngine(VirtualEngine):
  """One of several on one machine, whose steps take a second of everybody's time."""
  state = None

  def __init__(self, batch: int, machine: dict):
    self.machine, self.clock = machine, load.StopWatch(lambda: machine["now"])
    super().__init__(batch)

  @property
  def now(self):
    return self.clock()

  @now.setter
  def now(self, value):
    if value > self.now:
      self.machine["now"] += value - self.now
      self.machine["steps"].append(self)


def test_engines_that_take_turns_measure_what_they_measure_alone():
  machine = dict(now=100.0, steps=[])
  jobs = {"a": jobs_of(2, 4, 3, 2, 5), "b": jobs_of(1, 2, 1)}
  engines = {name: SharedEngine(2, machine) for name in jobs}
  found = load.run_in_turns(engines, {
      name: load.closed_loop(engines[name], jobs[name], num_users=2 if name == "a" else 1,
                             num_measured=2) for name in jobs}, turn_s=2.0)
  a, b = found["a"], found["b"]
  assert (a.start_s, a.end_s, a.totals.num_tokens) == (2.0, 6.0, 8)
  assert (b.start_s, b.end_s, b.totals.num_tokens) == (1.0, 4.0, 3)
  assert "".join("ab"[s is engines["b"]] for s in machine["steps"]) == "aabbaabbaa"
  assert machine["now"] == 110.0


def test_more_users_than_slots_wait():
  """Three users on two slots, answers of 2: the third always waits, first tokens come late."""
  engine = VirtualEngine(batch=2)
  run = load.run_closed(engine, itertools.cycle(jobs_of(2)), num_users=3, num_measured=4)
  assert max(r.first_token_s - r.arrival_s for r in run.requests) == 3.0
  assert run.totals.num_tokens == 2 * run.seconds  # both slots are always busy


@pytest.mark.parametrize("field", ["num_users", "num_measured"])
def test_closed_loop_refuses_nobody(field):
  with pytest.raises(ValueError, match=f"{field}: found 0"):
    load.run_closed(VirtualEngine(1), jobs_of(1), **(dict(num_users=1, num_measured=1)
                                                     | {field: 0}))


# --- open loop ---------------------------------------------------------------------------------


def test_open_loop_by_hand():
  """One slot, answers of 2 seconds, arrivals at 0, 0.5, 0.5 and 7.25.

  Job 1 gets its first token at 3, job 2 at 5: 2.5 and 4.5 seconds after they were due, although the
  driver submitted them at 1. From 6 on nothing is to be done until 7.25.
  """
  engine = VirtualEngine(batch=1)
  run = load.run_open(engine, jobs_of(2, 2, 2, 2), [0, 0.5, 0.5, 7.25], sleep=engine.sleep)
  assert [r.first_token_s - r.arrival_s for r in run.requests] == [1.0, 2.5, 4.5, 1.0]
  assert [r.finished_s for r in run.requests] == [2.0, 4.0, 6.0, 9.25] and run.seconds == 9.25
  assert run.totals.num_tokens == 8


def test_open_loop_goes_on_when_the_queue_refuses():
  """One slot, no room for more than one to wait: of four at once, two are served."""
  engine = VirtualEngine(batch=1, max_queue=1)
  run = load.run_open(engine, jobs_of(3, 3, 3, 3), [0, 1, 1, 1], sleep=engine.sleep)
  assert [r.id for r in run.requests] == [0, 1] and run.totals.num_refused == 2
  assert all(r.is_done for r in run.requests)


def test_open_loop_checks_all_jobs_before_the_first():
  engine = VirtualEngine(batch=1)
  with pytest.raises(ValueError, match="max_new_tokens: found 0"):
    load.run_open(engine, jobs_of(3, 0), [0, 1], sleep=engine.sleep)
  assert engine.all == [] and engine.now == 0


def test_poisson():
  times = load.poisson_times(4.0, 4000, seed=3)
  assert times == load.poisson_times(4.0, 4000, seed=3) != load.poisson_times(4.0, 4000, seed=4)
  gaps = np.diff([0.0, *times])
  # Exponential with mean 1/4: 4000 gaps, 5 standard errors each.
  assert abs(gaps.mean() - 0.25) < 5 * 0.25 / 4000**0.5
  assert abs((gaps > 0.25).mean() - np.exp(-1)) < 5 * (0.37 * 0.63 / 4000)**0.5
  for rate in (0, -1, float("nan"), float("inf")):
    with pytest.raises(ValueError, match="rate_per_s: found"):
      load.poisson_times(rate, 3, seed=0)


@pytest.mark.parametrize("times, message", [
    ([0, 1], "found 2 times, expected one for each of 3 jobs"), ([0, 2, 1], "found 1 after 2"),
    ([-1, 0, 1], "found -1 after 0"), ([0, 1, float("nan")], "found nan after 1")])
def test_bad_times(times, message):
  with pytest.raises(ValueError, match=message):
    load.run_open(VirtualEngine(1), jobs_of(1, 1, 1), times)


# --- traces ------------------------------------------------------------------------------------


def test_trace_is_replayed(tmp_path):
  times = load.poisson_times(2.0, 5, seed=0)
  jobs = [dict(prompt=[i, 7], max_new_tokens=i + 1, temperature=0.5, seed=i, stop_ids=[3],
               on_tokens=print) for i in range(5)]
  load.write_trace(tmp_path / "t.jsonl", times, jobs)
  found_times, found = load.read_trace(tmp_path / "t.jsonl", [], stop_ids=[3])
  assert found_times == times  # JSON keeps every bit of a float
  assert found == [{k: v for k, v in job.items() if k != "on_tokens"} for job in jobs]


def test_trace_names_prompts_by_index(tmp_path):
  path = tmp_path / "t.jsonl"
  path.write_text('{"time_s": 0, "prompt": 1}\n\n{"time_s": 0.5, "prompt": 0, "seed": 4}\n')
  assert load.read_trace(path, [[1, 2], [3]], seed=9, max_new_tokens=8) == (
      [0.0, 0.5], [dict(prompt=[3], seed=9, max_new_tokens=8),
                   dict(prompt=[1, 2], seed=4, max_new_tokens=8)])


@pytest.mark.parametrize("line, message", [
    ("{", "broken JSON"), ("[1]", "found a list"), ('{"time": 1}', "time: unknown field"),
    ('{"prompt": 0}', "time_s: found None"), ('{"time_s": "1", "prompt": 0}', "time_s: found '1'"),
    ('{"time_s": 0.5, "prompt": 0}', "time_s: found 0.5 after 1.0"),
    ('{"time_s": 2, "prompt": 2}', "prompt: found 2, expected an index below 1"),
    ('{"time_s": 2, "prompt": "hi"}', "prompt: found 'hi'"),
    ('{"time_s": 2, "prompt": [1, true]}', "prompt: found")])
def test_trace_faults_are_named(tmp_path, line, message):
  path = tmp_path / "t.jsonl"
  path.write_text(json.dumps(dict(time_s=1.0, prompt=[5])) + "\n" + line + "\n")
  with pytest.raises(ValueError, match="t.jsonl:2: ") as error:
    load.read_trace(path, [[1]])
  assert message in str(error.value)
  path.write_text("\n")
  with pytest.raises(ValueError, match="found no arrivals"):
    load.read_trace(path, [[1]])
  with pytest.raises(FileNotFoundError):
    load.read_trace(tmp_path / "nowhere.jsonl", [])


# --- the real engine ---------------------------------------------------------------------------


def test_real_engine_in_both_loops():
  jobs, alone, _ = cases.standard_jobs()
  engine = cases.make_engine()
  run = load.run_closed(engine, itertools.cycle(jobs), num_users=3, num_measured=6)
  assert [r.tokens for r in run.requests] == list(alone[3:9]) and not engine.is_busy
  assert 0 < run.totals.num_tokens < engine.counts.num_tokens
  again = load.run_open(engine, jobs, [0.0] * 12, sleep=lambda seconds: None)
  assert [r.tokens for r in again.requests] == list(alone)
  assert dataclasses.asdict(again.totals)["num_tokens"] == sum(map(len, alone))
