"""Load on an engine: a closed loop of users, open loops of arrivals, and traces of them.

A job is the arguments of `Engine.submit`. Latency counts from when a request was due, not from when
the driver got round to it: a slow engine must not slow its own clock down.
"""

import collections
import dataclasses
import itertools
import json
import pathlib
import time
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from dspark_jax.serving.engine import Counts, Engine, QueueFull
from dspark_jax.serving.request import Request

Job = Mapping[str, Any]
TRACE_FIELDS = ("time_s", "prompt", "max_new_tokens", "temperature", "top_k", "top_p", "min_p",
                "seed", "deadline_s")


@dataclasses.dataclass(frozen=True)
class LoadRun:
  """What a load left behind.

  Attributes:
    requests: the measured requests, in order of arrival.
    totals: Counts of the window, whoever's rounds and tokens they were.
    start_s, end_s: the window, by the engine's clock.
  """
  requests: list[Request]
  totals: Counts
  start_s: float
  end_s: float

  @property
  def seconds(self) -> float:
    return self.end_s - self.start_s


class StopWatch:
  """A clock that runs only between `start` and `stop`, for an engine that shares its device."""

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    self._clock, self._seconds, self._started = clock, 0.0, None

  def __call__(self) -> float:
    """Returns the seconds that it has run."""
    return self._seconds + (0.0 if self._started is None else self._clock() - self._started)

  def start(self) -> None:
    self._started = self._clock()

  def stop(self) -> None:
    self._seconds, self._started = self(), None


def run_in_turns(engines: Mapping[str, Engine], loops: Mapping[str, Iterator[None]], *,
                 turn_s: float) -> dict[str, LoadRun]:
  """Runs a loop on each engine, all of them by turns of `turn_s` seconds, to the end.

  So what else the machine does in the meantime favours none. Each engine's clock is a StopWatch,
  and runs in its own turns only; what is dispatched in a turn is waited for in it.

  Args:
    loops: by engine's name, as from `closed_loop`.
  """
  found, waiting = {}, collections.deque(loops)
  while waiting:
    name = waiting.popleft()
    engine, clock = engines[name], engines[name].clock
    clock.start()
    end_s = clock() + turn_s
    try:
      while clock() < end_s:
        next(loops[name])
      jax.block_until_ready(engine.state)
      waiting.append(name)
    except StopIteration as stop:
      found[name] = stop.value
    finally:
      clock.stop()
  return {name: found[name] for name in loops}


def run_closed(engine: Engine, jobs: Iterable[Job], *, num_users: int,
               num_measured: int) -> LoadRun:
  """Runs a `closed_loop` to its end."""
  loop = closed_loop(engine, jobs, num_users=num_users, num_measured=num_measured)
  while True:
    try:
      next(loop)
    except StopIteration as stop:
      return stop.value


def closed_loop(engine: Engine, jobs: Iterable[Job], *, num_users: int,
                num_measured: int) -> Iterator[None]:
  """Runs `num_users` users, each with one request at a time, the next as soon as one is done.

  A generator: it yields after every step of the engine and returns a LoadRun.

  The first `num_users` jobs fill the engine; the window opens when the first of them is done, and
  the next `num_measured` jobs are measured. Further jobs keep the load up until the last of these
  is done, where the window closes; what is still running then is cancelled. So every method
  measures the same jobs at the same concurrency.

  Args:
    jobs: endless, or at least num_users - 1 more than are counted here.
  """
  _check_positive(num_users=num_users, num_measured=num_measured)
  jobs = iter(jobs)
  live = [engine.submit(**next(jobs)) for _ in range(num_users)]
  measured: list[Request] = []
  start, start_s, end_s = Counts(), engine.clock(), None
  while end_s is None:
    engine.step()
    yield
    num_done = sum(r.is_done for r in live)
    if num_done and not measured:
      start, start_s = dataclasses.replace(engine.counts), engine.clock()
    live = [r for r in live if not r.is_done]
    if len(measured) == num_measured and all(r.is_done for r in measured):
      end_s = engine.clock()
      totals = _subtract(engine.counts, start)
      break
    for job in itertools.islice(jobs, num_users - len(live)):
      live.append(engine.submit(**job))
      if len(measured) < num_measured:
        measured.append(live[-1])
  for request in live:
    engine.cancel(request)
  engine.run()
  return LoadRun(measured, totals, start_s, end_s)


def run_open(engine: Engine, jobs: Sequence[Job], times_s: Sequence[float], *,
             sleep: Callable[[float], None] = time.sleep) -> LoadRun:
  """Submits job i at times_s[i] after the start, however busy the engine is, and runs to the end.

  A job that the queue has no room for is refused for good (`totals.num_refused`).

  Args:
    times_s: seconds, as from `poisson_times`; never falling.
    sleep: waits while there is nothing to do; replaced by tests together with the engine's clock.
  Raises:
    ValueError: a job that can never be done; before any is submitted.
  """
  check_times(times_s, len(jobs))
  for job in jobs:  # before the clock runs
    engine.check(**{k: v for k, v in job.items() if k != "on_tokens"})
  waiting = collections.deque(zip(times_s, jobs))
  requests, start, start_s = [], dataclasses.replace(engine.counts), engine.clock()
  while waiting or engine.is_busy:
    now_s = engine.clock() - start_s
    while waiting and waiting[0][0] <= now_s:
      time_s, job = waiting.popleft()
      try:
        requests.append(engine.submit(**job, arrival_s=start_s + time_s))
      except QueueFull:
        pass  # counted by the engine
    if engine.is_busy:
      engine.step()
    elif waiting:
      sleep(waiting[0][0] - now_s)
  return LoadRun(requests, _subtract(engine.counts, start), start_s, engine.clock())


def poisson_times(rate_per_s: float, num: int, *, seed: int) -> list[float]:
  """Returns `num` arrival times in seconds of a Poisson process, the same for the same seed."""
  if not (np.isfinite(rate_per_s) and rate_per_s > 0):
    raise ValueError(f"rate_per_s: found {rate_per_s}, expected a number > 0")
  _check_positive(num=num)
  return np.cumsum(np.random.default_rng(seed).exponential(1 / rate_per_s, num)).tolist()


def read_trace(path: str | pathlib.Path, prompts: Sequence[Sequence[int]],
               **defaults) -> tuple[list[float], list[dict]]:
  """Reads arrivals from JSONL; returns (times in seconds, jobs).

  A line is {"time_s": seconds since the start, "prompt": an index into `prompts` or a list of token
  ids} and, optionally, arguments of `Engine.submit` (TRACE_FIELDS), which go before `defaults`.

  Raises:
    FileNotFoundError, or ValueError naming file, line and field.
  """
  times_s, jobs = [], []
  for number, line in enumerate(pathlib.Path(path).read_text("utf-8").splitlines(), start=1):
    if not line.strip():
      continue
    try:
      time_s, job = _read_arrival(line, prompts)
      check_times(times_s[-1:] + [time_s], len(times_s[-1:]) + 1)
    except ValueError as error:
      raise ValueError(f"{path}:{number}: {error}") from None
    times_s.append(time_s)
    jobs.append(defaults | job)
  if not jobs:
    raise ValueError(f"{path}: found no arrivals, expected one JSON object a line")
  return times_s, jobs


def write_trace(path: str | pathlib.Path, times_s: Sequence[float], jobs: Sequence[Job]) -> None:
  """Writes arrivals as `read_trace` reads them, prompts as token ids."""
  check_times(times_s, len(jobs))
  lines = [json.dumps({"time_s": float(t), **{k: job[k] for k in TRACE_FIELDS if k in job}})
           for t, job in zip(times_s, jobs)]
  pathlib.Path(path).write_text("".join(line + "\n" for line in lines), "utf-8")


def check_times(times_s: Sequence[float], num: int) -> None:
  """Raises ValueError unless these are `num` arrival times, from 0 on, never falling."""
  if len(times_s) != num:
    raise ValueError(f"time_s: found {len(times_s)} times, expected one for each of {num} jobs")
  for before, after in itertools.pairwise([0.0, *times_s]):
    if not (np.isfinite(after) and after >= before):
      raise ValueError(f"time_s: found {after} after {before}, expected a number that is not less")


def _read_arrival(line: str, prompts) -> tuple[float, dict]:
  try:
    record = json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(f"broken JSON: {error.msg}") from None
  if not isinstance(record, dict):
    raise ValueError(f"found a {type(record).__name__}, expected a JSON object")
  for name in record:
    if name not in TRACE_FIELDS:
      raise ValueError(f"{name}: unknown field, expected some of {', '.join(TRACE_FIELDS)}")
  time_s, prompt = record.pop("time_s", None), record.pop("prompt", None)
  if isinstance(time_s, bool) or not isinstance(time_s, (int, float)):
    raise ValueError(f"time_s: found {time_s!r}, expected a number of seconds")
  if isinstance(prompt, int) and not isinstance(prompt, bool):
    if not 0 <= prompt < len(prompts):
      raise ValueError(f"prompt: found {prompt}, expected an index below {len(prompts)}")
    prompt = prompts[prompt]
  elif not isinstance(prompt, list) or not all(type(t) is int for t in prompt):
    raise ValueError(f"prompt: found {str(prompt)[:60]!r}, expected an index or token ids")
  return float(time_s), {"prompt": list(prompt), **record}


def _subtract(after: Counts, before: Counts) -> Counts:
  return Counts(**{name: value - getattr(before, name) for name, value in vars(after).items()})


def _check_positive(**fields: int) -> None:
  for name, value in fields.items():
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f"{name}: found {value!r}, expected an integer >= 1")
