"""The scripts about scheduling, on a tiny model: files, tables, and errors in one line."""

import json

import pytest

from configs import bench_schedule as bench_config
from configs import calibrate as calibrate_config
from configs import profile_step_curve as profile_config
from configs import study_estimators as study_config
from dspark_jax.api import DSpark
from dspark_jax.scheduler.calibration import load_sts
from dspark_jax.scheduler.estimator import OnlineLogistic
from dspark_jax.scheduler.policies import EarlyStop
from dspark_jax.scheduler.step_table import read_table
from experiments import (_cli, _records, bench_schedule, calibrate, profile_step_curve,
                         study_estimators)
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  root = tmp_path_factory.mktemp("tiny")
  return tiny.save_target(root / "target"), tiny.save_drafter(root / "drafter")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
  monkeypatch.setattr("dspark_jax.api.STEP_CURVES", tmp_path / "curves")


def write_prompts(tmp_path):
  path = tmp_path / "sets"
  path.mkdir()
  for name, texts in (("maths", "abcdef"), ("code", "ghijkl")):
    (path / f"{name}.jsonl").write_text(
        "".join(json.dumps({"turns": [t]}) + "\n" for t in texts))
  return str(path)


def fill(config, directories, **changes):
  config.update(target=str(directories[0]), draft_model=str(directories[1]), max_new_tokens=24,
                batch_size=2, **changes)
  return config


def test_calibrate_writes_what_a_model_reads(directories, tmp_path, capsys):
  sets = write_prompts(tmp_path)
  config = fill(calibrate_config.get_config(), directories, prompts=sets, test_prompts=sets,
                mix="maths=3,code=1", test_mix="code=2")
  calibrate.main(config)
  out = capsys.readouterr().out
  assert "mean ECE before" in out and "held out:" in out
  content = json.loads((directories[1] / "sts.json").read_text())
  assert content["data"]["fit"] == {"maths": 3, "code": 1} and len(content["temperatures"]) == 4
  assert [f["position"] for f in content["figures"]["held out"]] == [1, 2, 3, 4]
  assert content["model"].startswith("target + drafter") and "jax" in content["versions"]
  assert (directories[1] / "reliability.png").stat().st_size > 1000
  model = DSpark(*map(str, directories)).with_policy(EarlyStop())
  assert model.frame.estimator == OnlineLogistic(
      uses_head=True, temperatures=load_sts(directories[1], 4))


def test_step_curve_is_written(directories, tmp_path, capsys):
  config = profile_config.get_config()
  config.update(target=str(directories[0]), draft_model=str(directories[1]), batch_sizes=(2,),
                max_draft_len=2, context_tokens=8, repeats=1, out=str(tmp_path / "o" / "curve.txt"))
  profile_step_curve.main(config)
  table = read_table(tmp_path / "o" / "curve.txt")
  assert list(table.timings) == [2] and table.timings[2].ladder == (
      (2, 1), (4, 2), (4, 3), (6, 3))
  assert (tmp_path / "o" / "curve_2.png").stat().st_size > 1000
  assert "2 requests: drafting" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_of_policies(directories, tmp_path, capsys):
  config = bench_config.get_config()
  config.update(target=str(directories[0]), draft_model=str(directories[1]), max_new_tokens=16,
                prompts=write_prompts(tmp_path), num_requests=(2,), max_draft_lens=(2,),
                thresholds=(), repeats=1, out=str(tmp_path / "bench.json"))
  bench_schedule.main(config)
  rows = json.loads((tmp_path / "bench.json").read_text())["results"]["2"]
  assert list(rows) == ["plain", "fixed 2", "early_stop", "lagged"]
  assert all(row["identical"] == 2 for row in rows.values())
  assert rows["plain"]["speed_up"] == 1 and rows["fixed 2"]["verified"] > 1
  assert "padding" in capsys.readouterr().out


@pytest.mark.slow
def test_study(directories, tmp_path, capsys):
  config = fill(study_config.get_config(), directories, prompts=write_prompts(tmp_path),
                fit_mix="maths=2", stream_mix="maths=2,code=2", num_requests=(2,),
                out=str(tmp_path / "study.json"))
  study_estimators.main(config)
  rows = json.loads((tmp_path / "study.json").read_text())["results"]["2"]
  assert len(rows) == 7 and rows["oracle"]["lost"] == 0
  # Early stop on the smoothed curve is not the optimum of the stairs, not even for who knows all.
  assert all(row["lost"] > -.05 for row in rows.values())
  assert set(rows["trained head"]) >= {"all", "maths", "code", "tokens_per_s"}
  assert "margin + head, online" in capsys.readouterr().out


@pytest.mark.parametrize("changes, message", [
    (dict(mix="maths"), "mix: found 'maths'"), (dict(mix="maths=1,maths=2"), "each domain once"),
    (dict(mix="maths=0"), "at least one prompt"), (dict(mix="chat=1"), "found domain 'chat'")])
def test_bad_mix_is_one_line(directories, tmp_path, changes, message):
  config = fill(calibrate_config.get_config(), directories, prompts=write_prompts(tmp_path))
  config.update(changes)
  with pytest.raises(SystemExit) as error:
    _cli.guard(calibrate.main, config)
  assert error.value.code.startswith("error: mix: ") and message in error.value.code


def test_mixes_do_not_overlap(tmp_path):
  sets = write_prompts(tmp_path)
  first = _records.choose_mix(sets, {"maths": 3, "code": 0}, seed=0)
  second = _records.choose_mix(sets, {"maths": 3}, seed=1, exclude=first)
  texts = [str(p["messages"]) for p in first["maths"] + second["maths"]]
  assert list(first) == ["maths"] and len(set(texts)) == len(texts) == 6
