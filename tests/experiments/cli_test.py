"""The scripts as programs: flags, and errors as one line."""

import os
import pathlib
import subprocess
import sys

import pytest

from experiments import _cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ("bench_decode", "bench_schedule", "bench_training", "calibrate", "compare_drafters",
           "evaluate", "profile_step_curve", "quickstart", "regenerate", "serve_load", "soak",
           "study_estimators")
# A script of its own, for the real ones import for seconds.
SCRIPT = '''"""What it does."""
from experiments import _cli

def main(config):
  if config.number < 0:
    raise ValueError(f"number: found {config.number}")
  print("ran with", config.number)

if __name__ == "__main__":
  _cli.run(main, config="%s")
'''
CONFIG = '''import ml_collections
def get_config():
  return ml_collections.ConfigDict({"number": 1})
'''


@pytest.fixture
def run(tmp_path):
  (tmp_path / "config.py").write_text(CONFIG)
  (tmp_path / "script.py").write_text(SCRIPT % (tmp_path / "config.py"))

  def call(*argv):
    return subprocess.run([sys.executable, str(tmp_path / "script.py"), *argv], text=True,
                          capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
  return call


def test_runs_with_its_default_and_with_changes(run):
  assert run().stdout == "ran with 1\n"
  result = run("--config.number=7")
  assert result.stdout == "ran with 7\n" and result.returncode == 0


def test_help_shows_the_flag(run):
  assert "--config" in run("--help").stdout


@pytest.mark.parametrize("argv, message", [
    (("--config.numbr=3",), 'Did you mean "number" instead of "numbr"'),
    (("--config.number=-1",), "number: found -1"), (("--config=nowhere.py",), "nowhere.py"),
    (("word",), "unknown arguments: word")])
def test_bad_input_is_one_line(run, argv, message):
  result = run(*argv)
  assert result.returncode == 1 and result.stdout == ""
  assert result.stderr.startswith("error: ") and message in result.stderr
  assert result.stderr.count("\n") == 1, result.stderr


def test_what_is_a_fault_of_ours_keeps_its_traceback():
  with pytest.raises(KeyError):
    _cli.guard(lambda config: {}["x"], None)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_goes_through_it(name):
  text = (ROOT / "experiments" / f"{name}.py").read_text()
  assert f'_cli.run(main, config="configs/{name}.py")' in text
  assert (ROOT / "configs" / f"{name}.py").is_file()
  assert len(text.splitlines()) <= 100


@pytest.mark.parametrize("script, found, meant", [
    ("regenerate", "max_new_tokns", "max_new_tokens"), ("train_drafter", "max_lenn", "max_len"),
    ("compare_drafters", "figure", "figures")])
def test_misspelt_field_of_a_real_script(script, found, meant):
  result = subprocess.run(
      [sys.executable, "-m", f"experiments.{script}", f"--config.{found}=3"], cwd=ROOT,
      env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
  assert result.returncode == 1
  assert result.stderr.splitlines()[-1] == (
      f'error: --config: {found} Did you mean "{meant}" instead of "{found}"?')
