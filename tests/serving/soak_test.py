"""The soak run, short, and that it sees what it is there to see."""

import dataclasses

import pytest

from dspark_jax.host_memory import count_used_bytes
from dspark_jax.serving import soak
from dspark_jax.serving.engine import Engine, EngineOptions
from dspark_jax.serving.soak import SoakOptions, run_soak
from tests.decode import cases as decode_cases
from tests.serving.cases import make_jobs
from tests.tiny import fast_compile  # noqa: F401

ENGINE = EngineOptions(batch=4, max_len=60, prompt_buckets=(24,), max_queue=3, max_stop_ids=3)
OPTIONS = SoakOptions(num_requests=80, max_new_tokens=16, num_checked=20, seed=1)
PROMPTS = [job["prompt"] for job in make_jobs(10, seed=9)]


def test_short_soak():
  report = run_soak(*decode_cases.make_pair(), PROMPTS, engine_options=ENGINE, options=OPTIONS)
  assert report.find_problems() == [] and report.num_checked == 20
  assert sum(report.num_by_reason.values()) == 80
  # All kinds of things happened.
  assert set(report.num_by_reason) == {"stop", "length", "cancelled", "deadline"}
  assert report.num_by_reason["cancelled"] >= 4 and report.num_by_reason["stop"] >= 4
  assert report.num_refused > 0 and report.num_impossible > 0
  assert report.num_tokens > 300 and report.num_rounds > 30


class MixedUp(Engine):
  """Hands every fifth round's tokens out in the wrong order."""

  def _read(self, pending):
    if pending.kind == "round" and pending.index % 5 == 4:
      report = pending.arrays
      pending.arrays = report.replace(tokens_BxW=report.tokens_BxW[::-1])
    super()._read(pending)


class Forgetful(Engine):
  """Tells the end of every tenth request twice."""

  def _finish(self, request, *args, **kwargs):
    is_first = super()._finish(request, *args, **kwargs)
    if is_first and request.id % 10 == 3:
      self._tell(request, [])
    return is_first


class Hoarder(Engine):
  """Keeps a megabyte of every round for itself."""
  hoard: list[bytes] = []

  def _dispatch_round(self):
    super()._dispatch_round()
    self.hoard.append(b"x" * 2**20)


@pytest.mark.parametrize("fault, problem", [(MixedUp, "mixed"), (Forgetful, "lost")])
def test_the_soak_sees_a_planted_fault(monkeypatch, fault, problem):
  monkeypatch.setattr(soak, "Engine", fault)
  report = run_soak(*decode_cases.make_pair(), PROMPTS, engine_options=ENGINE,
                    options=dataclasses.replace(OPTIONS, num_requests=40))
  assert getattr(report, problem) and problem in " ".join(report.find_problems())


def test_the_soak_sees_a_leak(monkeypatch):
  if count_used_bytes() is None:
    pytest.skip("a system that does not tell")
  monkeypatch.setattr(soak, "Engine", Hoarder)
  report = run_soak(*decode_cases.make_pair(), PROMPTS, engine_options=ENGINE, options=OPTIONS)
  Hoarder.hoard.clear()
  assert [p.split()[0] for p in report.find_problems()] == ["host"]


def test_growth_is_a_problem():
  report = soak.SoakReport({"stop": 10}, 0, 0, [], [], 5, (1000, 1000), (10**8, 10**8), 9, 99)
  assert report.find_problems() == []
  grown = dataclasses.replace(report, device_bytes=(1000, 10**6), host_bytes=(10**8, 2 * 10**8))
  assert [p.split()[0] for p in grown.find_problems()] == ["device", "host"]
