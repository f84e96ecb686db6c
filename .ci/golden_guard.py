"""A pytest plugin for CI: golden tests must run wherever the golden data is.

A test is golden if it is marked so or uses the `goldens` fixture. Where the data is there, the run
fails if one of them skipped, or if none ran: a skip is how a parity test dies unnoticed. The same
holds of the test that needs llama.cpp as its witness.
"""

import os
import pathlib
import re

import pytest

_PROPERTY = "golden"
_REASON = re.compile(r"golden|evaluation sets|llama\.cpp is not compiled", re.IGNORECASE)


def _data() -> pathlib.Path:
  return pathlib.Path(os.environ.get("DSPARK_GOLDENS", "../shared/goldens")).resolve()


class GoldenGuard:
  """Counts outcomes of golden tests from reports, which also arrive from parallel workers."""

  def __init__(self):
    self.executed, self.skipped = set(), {}

  @pytest.hookimpl(trylast=True)
  def pytest_collection_modifyitems(self, items):
    for item in items:
      if "goldens" in getattr(item, "fixturenames", ()) or item.get_closest_marker("golden"):
        item.user_properties.append((_PROPERTY, True))

  def pytest_collectreport(self, report):  # a whole module that skips itself
    self._count_skip(report, is_golden=False)

  def pytest_runtest_logreport(self, report):
    is_golden = (_PROPERTY, True) in [tuple(p) for p in report.user_properties]
    self._count_skip(report, is_golden=is_golden)
    if is_golden and report.when == "call" and not report.skipped:
      self.executed.add(report.nodeid)

  def _count_skip(self, report, *, is_golden):
    if report.skipped:
      reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
      if is_golden or _REASON.search(reason):
        self.skipped[report.nodeid] = reason

  def faults(self) -> list[str]:
    if not _data().is_dir():
      return []
    faults = [f"golden test skipped: {name} ({why})" for name, why in self.skipped.items()]
    return faults + ([] if self.executed else [f"no golden test ran, though {_data()} exists"])

  @pytest.hookimpl(trylast=True)
  def pytest_sessionfinish(self, session, exitstatus):
    if not hasattr(session.config, "workerinput") and exitstatus == 0 and self.faults():
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  def pytest_terminal_summary(self, terminalreporter):
    found = "present" if _data().is_dir() else "absent"
    terminalreporter.write_line(f"golden data {found}: {len(self.executed)} golden tests ran, "
                                f"{len(self.skipped)} skipped")
    for fault in self.faults():
      terminalreporter.write_line(f"FAILED {fault}", red=True)


def pytest_configure(config):
  config.pluginmanager.register(GoldenGuard(), "golden_guard_counts")
