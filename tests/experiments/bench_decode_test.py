import json

import pytest

from dspark_jax.api import DSpark
from dspark_jax.metrics import compare
from configs import bench_decode as configs_bench_decode
from experiments import _cli, bench_decode
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  root = tmp_path_factory.mktemp("tiny")
  return tiny.save_target(root / "target"), tiny.save_drafter(root / "drafter")


def make_config(directories, tmp_path, **changes):
  config = configs_bench_decode.get_config().unlock()
  (tmp_path / "sets").mkdir()
  for name, texts in (("math", ("a?", "b?", "c?")), ("code", ("d?",))):
    (tmp_path / "sets" / f"{name}.jsonl").write_text(
        "".join(json.dumps({"turns": [t]}) + "\n" for t in texts))
  config.update(target=str(directories[0]), draft_model=str(directories[1]),
                prompts=str(tmp_path / "sets"), num_prompts=2, max_new_tokens=10, repeats=2,
                max_draft_lens=(2,), thresholds=(0.4,), adaptive=(), peer="",
                out=str(tmp_path / "o" / "b.json"))
  config.update(changes)
  return config


def test_whole_benchmark(directories, tmp_path, capsys):
  config = make_config(directories, tmp_path)
  bench_decode.main(config)
  out = capsys.readouterr().out
  result = json.loads((tmp_path / "o" / "b.json").read_text())
  assert list(result["warm_up_s"]) == ["plain", "fixed 2", "threshold 0.4"]
  assert all(len(s) == 1 and s[0] > 0 for s in result["warm_up_s"].values())
  assert list(result["reports"]) == ["all", "code", "math"]
  assert [r["num_prompts"] for r in result["reports"]["all"]] == [3, 3, 3]
  plain, fixed, _ = result["reports"]["all"]
  assert plain["speed_up"] == 1.0 and plain["acceptance"]["accepted_len"] == 1.0
  assert 1.0 < fixed["acceptance"]["accepted_len"] <= 3.0
  # A float32 target of this size has no ties within rounding.
  assert result["differences"] == [] and fixed["different"] == {}
  assert len(result["runs"]) == 3 * 3 * 2 and {r["num_tokens"] for r in result["runs"]} == {10}
  assert "code: 1 prompts, 2 repeats" in out and "no peer: none asked for" in out


def test_bfloat16_has_plain_float32_beside_it(directories, tmp_path, capsys):
  bench_decode.main(make_config(directories, tmp_path, dtype="bfloat16", num_prompts=1, repeats=1,
                                thresholds=()))
  result = json.loads((tmp_path / "o" / "b.json").read_text())
  assert [r["method"] for r in result["reports"]["all"]] == ["plain", "fixed 2", "plain float32"]


def test_differences_are_reported_with_their_gap(directories, tmp_path, capsys):
  model = DSpark(*map(str, directories))
  ids = [model.encode("a?")]
  plain = model.generate(ids[0], max_new_tokens=10, stop_ids=[])
  wrong = type(plain)(**{**vars(plain), "tokens": plain.tokens[:4] + [3] + plain.tokens[5:]})
  runs = [compare.Run("plain", 0, 0, plain), compare.Run("odd", 0, 0, wrong)]
  reports = compare.summarize(runs, baseline="plain")
  [found] = bench_decode.find_differences(model, ids, runs, reports)
  assert (found["method"], found["prompt"], found["token"], found["num"]) == ("odd", 0, 4, 1)
  # The likeliest token there is the one that plain decoding took.
  assert found["top_two"][0] == plain.tokens[4] and found["logit_gap"] > 0
  assert "odd: 1 answers differ from plain, the first at prompt 0, token 4" in (
      capsys.readouterr().out)


@pytest.mark.parametrize("changes, message", [
    (dict(draft_model="auto"), "draft_model: found 'auto'"), (dict(prompts="nowhere"), "nowhere"),
    (dict(num_prompts=-1), "num_prompts: found -1"), (dict(out="FILE/b.json"), "FILE"),
    (dict(max_draft_lens=(9,)), "max_draft_len: found 9")])
def test_bad_input_is_one_line(directories, tmp_path, changes, message):
  (tmp_path / "FILE").write_text("")
  if "out" in changes:
    changes = {"out": str(tmp_path / changes["out"])}
  config = make_config(directories, tmp_path, **changes)
  with pytest.raises(SystemExit) as error:
    _cli.guard(bench_decode.main, config)
  text = error.value.code
  assert text.startswith("error: ") and message in text and "\n" not in text
