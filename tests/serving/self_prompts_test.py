"""Users' turns that the target writes: what is kept, and resuming to the same bytes."""

import json

import pytest

from dspark_jax.data import chat
from dspark_jax.interop.load import load_target
from dspark_jax.serving import self_prompts
from dspark_jax.serving.regenerate import RegenerateOptions
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401

OPTIONS = RegenerateOptions(batch_size=4, max_new_tokens=40, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return load_target(str(tiny.save_target(tmp_path_factory.mktemp("tiny") / "target")))


@pytest.fixture(scope="module")
def tokenizer(target):
  return chat.load_tokenizer(target.path)


def test_opening_is_all_before_the_users_text(tokenizer):
  ids = self_prompts.opening_ids(tokenizer)
  whole = chat.render_prompt(tokenizer, [{"role": "user", "content": "hello"}])
  assert 0 < len(ids) < len(whole) and whole[:len(ids)] == ids
  assert "hello" not in tokenizer.decode(ids)


def test_written_resumed_and_read(target, tokenizer, tmp_path, monkeypatch):
  # A random model's turns are full of control tokens: here every turn that ended is of use.
  monkeypatch.setattr(self_prompts, "_read_turn", lambda _, ids, stop_ids: (
      f"turn {ids}" if ids and ids[-1] in stop_ids else None))
  path = tmp_path / "deep" / "prompts.jsonl"
  prompts = self_prompts.write_prompts(target, tokenizer, 5, path, options=OPTIONS)
  texts = [p["messages"][0]["content"] for p in prompts]
  assert len(set(texts)) == 5 and all(len(t) >= self_prompts.MIN_CHARACTERS for t in texts)
  assert [json.loads(line) for line in path.read_text().splitlines()] == prompts
  # Killed while writing the third line, started again for as many: the same turns are written.
  whole = path.read_bytes()
  lines = whole.splitlines(keepends=True)
  path.write_bytes(b"".join(lines[:2]) + lines[2][:9])
  again = self_prompts.write_prompts(target, tokenizer, 5, path, options=OPTIONS)
  assert again == prompts and path.read_bytes() == whole
  assert self_prompts.write_prompts(target, tokenizer, 3, path, options=OPTIONS) == prompts[:3]


@pytest.mark.parametrize("change, message", [
    (dict(temperature=0.0), "temperature: found 0"), (dict(seed=4), "seed: found 4")])
def test_refused(change, message, target, tokenizer, tmp_path):
  path = tmp_path / "prompts.jsonl"
  path.write_text(json.dumps({"messages": [{"role": "user", "content": "What is it?"}],
                              "domain": "self", "id": "self-3-7"}) + "\n")
  options = RegenerateOptions(**{**vars(OPTIONS), **change})
  with pytest.raises(ValueError, match=message):
    self_prompts.write_prompts(target, tokenizer, 3, path, options=options)


def test_turns_of_no_use(tokenizer):
  encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
  stop = (tokenizer.eos_token_id,)
  read = lambda ids: self_prompts._read_turn(tokenizer, ids, stop)
  assert read(encode("long enough") + list(stop)) == "long enough"
  assert read(encode("long enough")) is None  # cut off
  assert read(encode("short") + list(stop)) is None
  assert read(encode("long ") + list(stop) + encode("enough") + list(stop)) is None
  assert read([]) is None
