"""The load and soak scripts, whole, on a tiny model."""

import json

import pytest

from configs import serve_load as configs_serve_load
from configs import soak as configs_soak
from experiments import _cli, serve_load, soak
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  root = tmp_path_factory.mktemp("tiny")
  return tiny.save_target(root / "target"), tiny.save_drafter(root / "drafter")


def make_config(module, directories, tmp_path, **changes):
  config = module.get_config().unlock()
  config.update(target=str(directories[0]), draft_model=str(directories[1]))
  config.update(changes)
  return config


def make_load_config(directories, tmp_path, **changes):
  sets = tmp_path / "sets"
  sets.mkdir()
  for name, texts in (("math", ("a?", "bc?", "d?")), ("code", ("e?",))):
    (sets / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in texts))
  (tmp_path / "trace.jsonl").write_text("".join(
      json.dumps(dict(time_s=0.01 * i, prompt=i % 4, max_new_tokens=3)) + "\n" for i in range(3)))
  defaults = dict(
      prompts=str(sets), num_prompts=2, max_new_tokens=8, max_len=64,
      prompt_buckets=(32,), users=(1, 2), min_measured=3,
      max_draft_lens=(2,), thresholds=(), adaptive=False, step_curves=str(tmp_path / "curves"),
      trace=str(tmp_path / "trace.jsonl"), open_slots=2, overhead_slots=2, overhead_rounds=3,
      out=str(tmp_path / "out"))
  return make_config(configs_serve_load, directories, tmp_path, **(defaults | changes))


def test_whole_load(directories, tmp_path, capsys):
  serve_load.main(make_load_config(directories, tmp_path))
  out = capsys.readouterr().out
  result = json.loads((tmp_path / "out" / "serve_load.json").read_text())
  assert [(r["load"], r["method"]) for r in result["closed"]] == [
      (1, "plain"), (1, "fixed 2"), (2, "plain"), (2, "fixed 2")]
  for report in result["closed"] + result["open"]:
    assert report["num_requests"] == 3 and report["num_failed"] == report["num_refused"] == 0
    assert report["tokens_per_s"] > 0 and 0 < report["first_token_ms"]["50"]
    is_plain = report["method"] == "plain"
    assert report["accepted_len"] == 1.0 if is_plain else 1.0 < report["accepted_len"] <= 3.0
    assert report["verify_len"] == 0.0 if is_plain else 0.0 < report["verify_len"] <= 2.0
  assert [r["method"] for r in result["open"]] == ["plain", "fixed 2"]
  assert [r["batch"] for r in result["closed"]][:2] == [1.0, 1.0]
  assert result["overhead"]["engine_ms"] > 0 and "bare step" in out
  assert 0 < result["overhead"]["scheduler_ms"] < 1000 and "scheduler" in out
  assert set(result["promises"]) == {"plain", "fixed 2"} and "closed loop by users" in out
  for name in ("throughput_by_speed.png", "by_concurrency.png"):
    assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("changes, message", [
    (dict(max_len=20), "max_len: found 20"), (dict(max_draft_lens=(-1,)), "length: found -1"),
    (dict(trace="nowhere.jsonl", users=()), "nowhere.jsonl")])
def test_bad_input_is_one_line(directories, tmp_path, changes, message):
  config = make_load_config(directories, tmp_path, overhead_slots=0, **changes)
  with pytest.raises(SystemExit) as error:
    _cli.guard(serve_load.main, config)
  assert error.value.code.startswith("error: ") and message in error.value.code


def test_soak_script(directories, tmp_path, capsys):
  config = make_config(configs_soak, directories, tmp_path, num_prompts=2, slots=3, max_len=100,
                       max_queue=4, num_requests=30, max_new_tokens=8, num_checked=6,
                       max_draft_len=2, out=str(tmp_path / "soak.json"))
  soak.main(config)
  assert "none lost, none mixed, memory flat" in capsys.readouterr().out
  result = json.loads((tmp_path / "soak.json").read_text())
  assert sum(result["num_by_reason"].values()) == 30 and result["num_checked"] == 6
