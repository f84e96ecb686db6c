"""The step curve's file: round trip, edits, and what is refused."""

import pytest

from dspark_jax.scheduler.step_curve import Timings
from dspark_jax.scheduler.step_table import StepTable, choose_timings, read_table, write_table

LADDER = ((2, 1), (4, 2), (6, 3))
ABOUT = dict(device="cpu (2 cores)", model="m: with a colon 1f", dtype="float32",
             versions="jax 0.10.2, jaxlib 0.10.2")
TABLE = StepTable(ABOUT | {"note": "quiet machine"}, {
    2: Timings(LADDER, (10.5, 12.25, 14.0), (1.125, 2.0)), 1: Timings(((1, 1),), (7.0,), ())})


def test_round_trip(tmp_path):
  path = write_table(tmp_path / "new" / "curve.txt", TABLE)
  assert read_table(path) == TABLE
  assert [p.name for p in path.parent.iterdir()] == ["curve.txt"]
  lines = path.read_text().splitlines()
  assert lines[0] == "# dspark_jax step curve 3"
  assert lines[6].split() == ["batch", "step", "tokens", "rows", "ms"]
  assert lines[-1].split() == ["2", "verify", "6", "3", "14.0000"]


def test_people_may_edit_it(tmp_path):
  path = write_table(tmp_path / "curve.txt", TABLE)
  path.write_text(path.read_text().replace("12.2500", "13   # by hand") + "\n\n")
  assert read_table(path).timings[2].verify_ms == (10.5, 13.0, 14.0)


@pytest.mark.parametrize("old, new, name", [
    ("curve 3", "curve 2", "line 1"), ("10.5000", "fast", "line 11: found '2      verify"),
    ("10.5000", "-1", r"batch 2: verify_ms of bucket \(2, 1\): found -1"),
    ("10.5000", "nan", "found nan"),
    ("draft   -       2     1.1250", "", "line 9"),
    ("2      draft ", "3      draft ", r"batch 2: found draft lines of \[\] rows, expected of "),
    ("-       3 ", "-       2 ", "one draft line for each number of rows"),
    ("verify", "accept", "line 8")])
def test_bad_lines_are_named(tmp_path, old, new, name):
  path = write_table(tmp_path / "curve.txt", TABLE)
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new))
  with pytest.raises(ValueError, match=name):
    read_table(path)


def test_missing_file(tmp_path):
  with pytest.raises(FileNotFoundError, match="profile_step_curve"):
    read_table(tmp_path / "curve.txt")


@pytest.mark.parametrize("change, name", [
    (dict(device="cpu (4 cores)"), r"device: found 'cpu \(2 cores\)'"),
    (dict(model="other"), "model: found"), (dict(dtype="bfloat16"), "dtype: found"),
    (dict(versions="jax 0.12.0"), "versions: found")])
def test_a_curve_of_something_else_is_refused(change, name):
  with pytest.raises(ValueError, match=name):
    choose_timings(TABLE, about=ABOUT | change, batch=2, ladder=LADDER)


def test_batch_and_ladder_must_be_there():
  assert choose_timings(TABLE, about=ABOUT, batch=2, ladder=LADDER).draft_ms == (1.125, 2.0)
  with pytest.raises(ValueError, match=r"batch: found \[1, 2\], expected 3"):
    choose_timings(TABLE, about=ABOUT, batch=3, ladder=LADDER)
  with pytest.raises(ValueError, match="ladder of batch 2"):
    choose_timings(TABLE, about=ABOUT, batch=2, ladder=((2, 1), (4, 3)))
