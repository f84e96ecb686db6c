from dspark_jax.metrics import compare, plots
from tests.metrics.compare_test import Answer, make_runs

PNG = b"\x89PNG\r\n\x1a\n"


def make_reports():
  answers = {("plain", 0, 0): Answer([1, 2], 1.0, 0.5, 1),
             ("fixed 2", 0, 0): Answer([1, 3], 0.5, 0.25, 1, (1, 0), (1, 0))}
  return compare.summarize(make_runs(answers), baseline="plain")


def test_plots_are_written(tmp_path):
  reports = make_reports()
  for path in (plots.plot_accept_rate(reports, tmp_path / "new" / "a.png"),
               plots.plot_speed({"all": reports, "code": reports[:1]}, tmp_path / "b.png")):
    assert path.read_bytes().startswith(PNG)


def test_plots_of_nothing_drafted(tmp_path):
  assert plots.plot_accept_rate(make_reports()[:1], tmp_path / "a.png").is_file()
