"""The command line: its forms of input and output, and one clear line for bad input."""

import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from dspark_jax import infer
from dspark_jax.api import DSpark
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROMPT = "Six?"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  root = tmp_path_factory.mktemp("tiny")
  return tiny.save_target(root / "target"), tiny.save_drafter(root / "drafter")


@pytest.fixture(scope="module")
def expected(directories):
  """The answer of the library to the command line's prompt."""
  return DSpark(*map(str, directories)).generate(PROMPT, max_new_tokens=20)


@pytest.fixture
def run(directories, capsys):
  """Runs the command on the tiny model; returns (exit code, stdout, stderr)."""
  def call(*argv, model=directories[0], drafter=directories[1]):
    code = infer.main(["--model", str(model), "--draft-model", str(drafter), *map(str, argv)])
    return (code, *capsys.readouterr())
  return call


@pytest.mark.smoke
def test_prints_the_answer_alone_on_stdout(run, expected):
  code, out, err = run("--prompt", PROMPT, "--max-new-tokens", 20)
  assert code == 0 and out == expected.text + "\n"
  assert f"[{len(expected.tokens)} tokens, length, {expected.num_rounds} rounds, tau " in err


def test_stdin(run, expected, monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
  assert run("--max-new-tokens", 20)[1] == expected.text + "\n"


def test_several_prompts(run, expected):
  code, out, _ = run("--prompt", PROMPT, "--prompt", "Hi", "--max-new-tokens", 20)
  assert code == 0 and out.startswith(f"--- prompt 0\n{expected.text}\n--- prompt 1\n")


def test_json_is_one_object_a_prompt(run, expected):
  _, out, err = run("--prompt", PROMPT, "--prompt", "Hi", "--json", "--max-new-tokens", 20)
  first, second = map(json.loads, out.splitlines())
  assert first["prompt"] == PROMPT and second["prompt"] == "Hi"
  assert first["tokens"] == expected.tokens and first["text"] == expected.text
  assert first["num_accepted"] == expected.num_accepted and err == ""


def test_stream(run, expected):
  assert run("--prompt", PROMPT, "--stream", "--max-new-tokens", 20)[1] == expected.text + "\n"


def test_compare(run):
  code, _, err = run("--prompt", PROMPT, "--compare", "--max-new-tokens", 20)
  assert code == 0 and "greedy tokens identical for 1 of 1 prompts" in err
  assert "plain " in err and "x\n" in err
  _, _, err = run("--prompt", PROMPT, "--compare", "--max-new-tokens", 20, "--temperature", 1)
  assert "identical" not in err


def test_options_reach_the_model(run, directories):
  options = dict(max_length=50, temperature=0.9, top_k=30, top_p=0.9, min_p=0.01, seed=5,
                 is_raw=True)
  model = DSpark(*map(str, directories), max_draft_len=2)
  expected = model.generate(PROMPT, **options)
  _, out, _ = run("--prompt", PROMPT, "--json", "--raw", "--max-length", 50, "--temperature", 0.9,
                  "--top-k", 30, "--top-p", 0.9, "--min-p", 0.01, "--seed", 5,
                  "--max-draft-len", 2)
  assert json.loads(out)["tokens"] == expected.tokens
  assert json.loads(out)["num_verified"] == expected.num_verified


def test_without_a_drafter(run, expected):
  _, out, _ = run("--prompt", PROMPT, "--json", "--max-new-tokens", 20, drafter="none")
  assert json.loads(out)["tokens"] == expected.tokens and json.loads(out)["accepted_len"] == 1.0


BAD_ARGUMENTS = [
    (("--temperature", -1), "temperature: found -1.0, expected a finite number >= 0"),
    (("--top-p", 0), "top_p: found 0.0, expected a number in (0, 1]"),
    (("--top-p", 1.5), "top_p: found 1.5"), (("--top-k", -1), "top_k: found -1"),
    (("--min-p", 2), "min_p: found 2.0"), (("--seed", -1), "seed: found -1"),
    (("--max-new-tokens", 0), "max_new_tokens: found 0, expected an integer >= 1"),
    (("--max-length", 3), "max_length: found 3, expected more than the prompt's"),
    (("--max-length", 99, "--max-new-tokens", 3), "max_length: found together"),
    (("--max-draft-len", 9), "max_draft_len: found 9, expected within 0..proposal_len = 4"),
    (("--confidence-threshold", 2), "confidence_threshold: found 2.0"),
    (("--prompt", ""), "prompt: found no text"),
    (("--prompt", "a" * 200), "found 2"), (("--stream", "--json"), "--stream: found with"),
    (("--stream", "--prompt", "again"), "--stream: found with several prompts")]


@pytest.mark.parametrize("argv, message", BAD_ARGUMENTS)
def test_bad_arguments(run, argv, message):
  prompt = () if argv[0] == "--prompt" else ("--prompt", PROMPT)
  check_refusal(run(*prompt, *argv), message)


def check_refusal(result, message):
  """One line that names what is wrong, exit code 2, and nothing on stdout."""
  code, out, err = result
  assert code == 2 and out == ""
  assert err.startswith("error: ") and message in err and err.count("\n") == 1, err


def test_prompt_longer_than_the_cache(run):
  check_refusal(run("--prompt", "a" * 200), "tokens, expected at most 119, so that one new token")


def test_empty_stdin(run, monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO(""))
  check_refusal(run(), "prompt: found no text, expected a message")


def test_nothing_to_compare_with(run):
  check_refusal(run("--prompt", PROMPT, "--compare", drafter="none"), "--compare: found with")


def break_target(directory, path, kind):
  shutil.copytree(directory, path)
  weights = path / "model.safetensors"
  if kind == "no config":
    (path / "config.json").unlink()
  elif kind == "missing shard":
    weights.rename(path / "model-00001-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}))
  elif kind == "cut weights":
    weights.write_bytes(weights.read_bytes()[:-100])
  elif kind == "broken config":
    (path / "config.json").write_text("{")
  elif kind == "no tokenizer":
    for name in ("tokenizer.json", "tokenizer_config.json"):
      (path / name).unlink()
  return path


@pytest.mark.parametrize("kind, message", [
    ("no config", "found no config.json"),
    ("missing shard", "model-00002-of-00002.safetensors: shard named by"),
    ("cut weights", "found a broken safetensors file"), ("broken config", "found broken JSON"),
    ("no tokenizer", "tokenizer: found no")])
def test_broken_target(run, directories, tmp_path, kind, message):
  broken = break_target(directories[0], tmp_path / "target", kind)
  check_refusal(run("--prompt", PROMPT, model=broken), message)


def test_unknown_names(run, tmp_path):
  check_refusal(run("--prompt", PROMPT, model="smollm3"),
                "model: found 'smollm3', expected a directory, a .gguf file, a hub id")
  check_refusal(run("--prompt", PROMPT, model=tmp_path), "found no config.json")
  check_refusal(run("--prompt", PROMPT, drafter="nobody"), "draft_model: found 'nobody'")
  check_refusal(run("--prompt", PROMPT, drafter=tmp_path), "config.json: no such file")
  check_refusal(run("--prompt", PROMPT, drafter="auto"), "draft_model: found 'auto'")


@pytest.mark.parametrize("changes, message", [
    (dict(vocab_size=300), "shape"), (dict(hidden_size=24), "shape"),
    (dict(target_layer_ids=[0, 2]), "target_layer_ids: found"),
    (dict(num_target_layers=9), "num_target_layers: found 9, expected the target's 3"),
    (dict(mask_token_id=264), "mask_token_id: found 264, expected an id in [0, 264)"),
    (dict(architectures=["DSparkJaxModel"], sample_from_anchor=None),
     "sample_from_anchor: missing")])
def test_drafter_that_does_not_fit(run, directories, tmp_path, changes, message):
  drafter = tiny.edit_config(directories[1], tmp_path / "drafter", **changes)
  check_refusal(run("--prompt", PROMPT, drafter=drafter), message)


def test_misspelt_flag():
  with pytest.raises(SystemExit) as error:
    infer.main(["--temprature", "1"])
  assert error.value.code == 2


def test_as_a_program_whose_reader_goes_away(directories):
  # The reader has gone before the first word: no traceback, exit code 1.
  read_end, write_end = os.pipe()
  os.close(read_end)
  result = subprocess.run(
      [sys.executable, "-m", "dspark_jax.infer", "--model", str(directories[0]), "--draft-model",
       "none", "--prompt", PROMPT, "--max-new-tokens", "1"], stdout=write_end,
      stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})
  os.close(write_end)
  assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
  assert "BrokenPipe" not in result.stderr


def test_policy(run, expected, monkeypatch, tmp_path):
  monkeypatch.setattr("dspark_jax.api.STEP_CURVES", tmp_path)
  code, out, _ = run("--prompt", PROMPT, "--max-new-tokens", 20, "--policy", "lagged",
                     "--max-draft-len", 1)  # each length more is one bucket more to be measured
  assert code == 0 and out == expected.text + "\n"
  code, _, err = run("--prompt", "x", "--policy", "lagged", "--confidence-threshold", 0.5)
  assert code == 2 and "--confidence-threshold: found with --policy" in err
