import json

import pytest

from dspark_jax.data import jsonl
from configs import regenerate as configs_regenerate
from experiments import _cli, regenerate
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  return tiny.save_target(tmp_path_factory.mktemp("tiny") / "target")


def make_config(directory, tmp_path, **changes):
  config = configs_regenerate.get_config().unlock()
  config.update(target=str(directory), prompts=str(tmp_path / "prompts.jsonl"), batch_size=2,
                max_new_tokens=4, max_len=64, min_new_tokens=8, out=str(tmp_path / "rows.jsonl"))
  config.update(changes)
  return config


def write_prompts(tmp_path, *lines):
  (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


LINES = ({"turns": ["a?", "b?"]}, {"messages": [{"role": "user", "content": "c?"}], "domain": "x"},
         {"turns": ["e?"]})


def test_answers_a_file_with_the_recommended_law(directory, tmp_path, capsys):
  write_prompts(tmp_path, *LINES)
  config = make_config(directory, tmp_path, num_prompts=2)
  regenerate.main(config)
  out = capsys.readouterr().out
  # generation_config.json of the tiny target: temperature 0.7, top_p 0.9.
  assert "temperature=0.7" in out and "top_p=0.9" in out and "top_k=0" in out
  assert "written 3, skipped 0" in out
  rows = jsonl.read_rows(tmp_path / "rows.jsonl", vocab_size=tiny.CONFIG.vocab_size)
  assert [r["domain"] for r in rows] == ["prompts", "x", "prompts"]
  before = (tmp_path / "rows.jsonl").read_bytes()
  regenerate.main(config)
  assert "written 0, skipped 0, failed 0, found 3" in capsys.readouterr().out
  assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_law_is_overridden_by_the_config(directory, tmp_path):
  config = make_config(directory, tmp_path, temperature=0.0, top_k=5)
  options = regenerate.make_options(config, dict(temperature=0.7, top_p=0.9))
  assert (options.temperature, options.top_k, options.top_p) == (0.0, 5, 0.9)
  assert regenerate.make_options(config, {}).top_p == 1.0
  config.temperature = None
  assert regenerate.make_options(config, {}).temperature == 0.0
  assert regenerate.make_options(config, dict(top_p=0.9)).temperature == 1.0


def test_builtin_prompts(directory, tmp_path):
  config = make_config(directory, tmp_path, prompts="builtin", num_prompts=7, seed=3)
  prompts = regenerate.read_any_prompts(config)
  assert len(prompts) == 7 and all(p["messages"] for p in prompts)


@pytest.mark.parametrize("changes, line, message", [
    (dict(prompts="nowhere.jsonl"), "{}", "nowhere.jsonl: no such file"),
    ({}, "{broken", "prompts.jsonl:1: broken JSON"), (dict(target="smollm3"), None, "smollm3"),
    (dict(temperature=-1.0), None, "temperature: found -1"),
    (dict(max_new_tokens=0), None, "max_new_tokens: found 0"),
    (dict(dtype="int7"), None, "dtype: found 'int7'"),
    (dict(out="FILE/rows.jsonl"), None, "FILE")])
def test_bad_input_is_one_line(directory, tmp_path, changes, line, message):
  write_prompts(tmp_path, *LINES)
  if line is not None:
    (tmp_path / "prompts.jsonl").write_text(line + "\n")
  (tmp_path / "FILE").write_text("a file where a directory is wanted")
  if "out" in changes:
    changes = {"out": str(tmp_path / changes["out"])}
  before = sorted(tmp_path.rglob("*"))
  config = make_config(directory, tmp_path, **changes)
  with pytest.raises(SystemExit) as error:
    _cli.guard(regenerate.main, config)
  text = error.value.code  # printed to stderr, with exit status 1
  assert text.startswith("error: ") and message in text and "\n" not in text
  assert sorted(tmp_path.rglob("*")) == before
