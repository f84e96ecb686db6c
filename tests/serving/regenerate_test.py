"""Bulk answers: rows, follow-ups, what is skipped, and resuming to the same bytes."""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.api import DSpark
from dspark_jax.data import chat, jsonl
from dspark_jax.interop.load import load_target
from dspark_jax.serving.regenerate import RegenerateOptions, prompt_id, regenerate
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401

# One shape for all: short prompts, batches of two, at most 64 tokens.
OPTIONS = RegenerateOptions(batch_size=2, max_new_tokens=4, max_len=64, min_new_tokens=8,
                            temperature=0.8, top_p=0.9, seed=3)


def ask(text, **more):
  return {"messages": [{"role": "user", "content": text}], "domain": "d"} | more


PROMPTS = [ask("a?"), ask("b?", follow_up="c?"), ask("x" * 60, follow_up="why?"),
           ask("e?", id="my"), ask("f?", follow_up="g?"), ask("h?")]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return load_target(str(tiny.save_target(tmp_path_factory.mktemp("tiny") / "target")))


@pytest.fixture(scope="module")
def tokenizer(target):
  return chat.load_tokenizer(target.path)


@pytest.fixture(scope="module")
def whole(target, tokenizer, tmp_path_factory):
  """Path and counts of an uninterrupted run."""
  path = tmp_path_factory.mktemp("whole") / "deep" / "rows.jsonl"
  return path, regenerate(target, tokenizer, PROMPTS, path, options=OPTIONS)


def read_lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_counts(whole, tokenizer):
  path, counts = whole
  rows = read_lines(path)
  # The long prompt is skipped, and so is its follow-up.
  assert counts == dict(written=7, skipped=1, failed=0, found=0,
                        tokens=sum(sum(r["loss_mask"]) for r in rows))
  assert [r["id"] for r in rows[:5]] == [prompt_id(p["messages"]) if "id" not in p else p["id"]
                                         for p in PROMPTS if len(p["messages"][0]["content"]) < 9]
  assert {r["domain"] for r in rows} == {"d"}
  for row, prompt in zip(rows, [PROMPTS[0], PROMPTS[1], PROMPTS[3]]):
    ids = chat.render_prompt(tokenizer, prompt["messages"])
    assert row["input_ids"][:len(ids)] == ids
    num_answer = len(row["input_ids"]) - len(ids)
    assert 1 <= num_answer <= 4 and row["loss_mask"] == [0] * len(ids) + [1] * num_answer
  assert len(jsonl.read_rows(path, vocab_size=tiny.NUM_IDS)) == 7


def test_a_follow_up_builds_on_the_answer(whole, tokenizer):
  rows = {r["id"]: r for r in read_lines(whole[0])}
  first = rows[prompt_id(PROMPTS[1]["messages"])]
  answer = tokenizer.decode([t for t, m in zip(first["input_ids"], first["loss_mask"]) if m],
                            skip_special_tokens=True)
  messages = PROMPTS[1]["messages"] + [{"role": "assistant", "content": answer},
                                       {"role": "user", "content": "c?"}]
  ids = chat.render_prompt(tokenizer, messages)
  assert rows[prompt_id(messages)]["input_ids"][:len(ids)] == ids


@pytest.mark.parametrize("num_kept, num_bytes", [(0, 7), (1, 0), (2, 30), (6, 1), (7, 0)])
def test_resumed_run_gives_the_same_bytes(target, tokenizer, whole, tmp_path, num_kept, num_bytes):
  """A run killed after `num_kept` rows and `num_bytes` of the next one."""
  expected, path = whole[0].read_bytes(), tmp_path / "rows.jsonl"
  lines = [line + b"\n" for line in expected.split(b"\n")[:-1]]
  path.write_bytes(b"".join(lines[:num_kept]) + b"".join(lines[num_kept:])[:num_bytes])
  counts = regenerate(target, tokenizer, PROMPTS, path, options=OPTIONS)
  assert path.read_bytes() == expected
  assert (counts["found"], counts["written"]) == (num_kept, 7 - num_kept)


def test_stopped_run_goes_on(target, tokenizer, whole, tmp_path):
  path, asked = tmp_path / "rows.jsonl", []
  first = regenerate(target, tokenizer, PROMPTS, path, options=OPTIONS,
                     should_stop=lambda: len(asked) == 1 or asked.append(0))
  assert first["written"] == 2
  regenerate(target, tokenizer, PROMPTS, path, options=OPTIONS)
  assert path.read_bytes() == whole[0].read_bytes()


def test_answers_do_not_depend_on_company(target, tokenizer, whole, tmp_path):
  path = tmp_path / "rows.jsonl"
  regenerate(target, tokenizer, [PROMPTS[5], PROMPTS[0]], path, options=OPTIONS)
  rows = {r["id"]: r for r in read_lines(whole[0])}
  assert [rows[r["id"]] for r in read_lines(path)] == read_lines(path)
  other = tmp_path / "other.jsonl"
  regenerate(target, tokenizer, PROMPTS, other, options=dataclasses.replace(OPTIONS, seed=4))
  assert read_lines(other) != read_lines(whole[0])


def test_greedy_answers_are_the_models(target, tokenizer, tmp_path):
  path, model = tmp_path / "rows.jsonl", DSpark(target, None)
  stop = model.generate("h?", max_new_tokens=4).tokens[1]
  options = dataclasses.replace(OPTIONS, temperature=0.0, top_p=1.0)
  stopping = dataclasses.replace(target, stop_token_ids=(stop,))
  regenerate(stopping, tokenizer, [ask("h?"), ask("a?")], path, options=options)
  for row, text in zip(read_lines(path), ("h?", "a?")):
    expected = model.generate(text, max_new_tokens=4, stop_ids=[stop, tiny.STOP_ID]).tokens
    assert [t for t, m in zip(row["input_ids"], row["loss_mask"]) if m] == expected
  assert read_lines(path)[0]["input_ids"][-1] == stop


def test_padded_rows_of_the_head_are_never_emitted(target, tokenizer, tmp_path):
  head = target.params["lm_head"].at[tiny.NUM_IDS:].multiply(50)  # the likeliest, were they tokens
  loud = dataclasses.replace(target, params=target.params | {"lm_head": head})
  regenerate(loud, tokenizer, PROMPTS[:2], tmp_path / "rows.jsonl", options=OPTIONS)
  assert max(t for r in read_lines(tmp_path / "rows.jsonl") for t in r["input_ids"]) < tiny.NUM_IDS


def test_broken_weights_write_nothing(target, tokenizer, tmp_path):
  params = jax.tree.map(lambda x: x * jnp.nan, target.params)
  path = tmp_path / "rows.jsonl"
  counts = regenerate(dataclasses.replace(target, params=params), tokenizer, PROMPTS, path,
                      options=OPTIONS)
  assert counts["failed"] == 5 and counts["written"] == 0 and path.read_bytes() == b""


def test_other_options_do_not_go_on_in_the_same_file(target, tokenizer, whole):
  before = whole[0].read_bytes()
  with pytest.raises(ValueError, match="temperature: found 0.5, expected 0.8 as in the rows of"):
    regenerate(target, tokenizer, PROMPTS, whole[0],
               options=dataclasses.replace(OPTIONS, temperature=0.5))
  assert whole[0].read_bytes() == before
  bigger = dataclasses.replace(OPTIONS, batch_size=3)  # changes no answer
  assert regenerate(target, tokenizer, PROMPTS, whole[0], options=bigger)["found"] == 7


def test_bad_input(target, tokenizer, whole, tmp_path):
  path = tmp_path / "rows.jsonl"
  with pytest.raises(ValueError, match="max_len: found 121, expected at most the target's 120"):
    regenerate(target, tokenizer, PROMPTS, path, options=dataclasses.replace(OPTIONS, max_len=121))
  with pytest.raises(ValueError, match=r"prompt 1: id: found 'my' again"):
    regenerate(target, tokenizer, [PROMPTS[3], ask("other", id="my")], path, options=OPTIONS)
  with pytest.raises(ValueError, match="prompt 0: messages"):
    regenerate(target, tokenizer, [{"messages": []}], path, options=OPTIONS)
  assert not list(tmp_path.iterdir()), "refused, but something was written"
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match="file"):
    regenerate(target, tokenizer, PROMPTS, tmp_path / "file" / "rows.jsonl", options=OPTIONS)
  lines = whole[0].read_text().splitlines(keepends=True)
  path.write_text(lines[0] + "{broken\n" + lines[1])
  with pytest.raises(ValueError, match=r"rows.jsonl:2: broken JSON"):
    regenerate(target, tokenizer, PROMPTS, path, options=OPTIONS)
  assert path.read_text() == lines[0] + "{broken\n" + lines[1]


def test_the_same_prompt_twice_is_asked_once(target, tokenizer, tmp_path):
  counts = regenerate(target, tokenizer, [PROMPTS[0], PROMPTS[0]], tmp_path / "rows.jsonl",
                      options=OPTIONS)
  assert counts["written"] == 1


def test_thinking_is_switched_in_prompts(target, tokenizer, tmp_path):
  switched, path = copy.copy(tokenizer), tmp_path / "rows.jsonl"
  switched.chat_template += "{% if enable_thinking|default(true) is false %}a{% endif %}"
  options = dataclasses.replace(OPTIONS, enable_thinking=False)
  regenerate(target, switched, [ask("a?")], path, options=options)
  prompt_ids = chat.render_prompt(tokenizer, ask("a?")["messages"])
  found = read_lines(path)[0]["input_ids"]
  assert found[:len(prompt_ids) + 1] == prompt_ids + tokenizer("a").input_ids
  with pytest.raises(ValueError, match="enable_thinking: found False, expected None"):
    regenerate(target, tokenizer, [ask("a?")], tmp_path / "other.jsonl", options=options)
  assert not (tmp_path / "other.jsonl").exists()


@pytest.mark.parametrize("change, message", [
    (dict(batch_size=0), "batch_size: found 0"), (dict(temperature=-1.0), "temperature: found -1"),
    (dict(top_p=0.0), "top_p: found 0"), (dict(dtype="int8"), "dtype: found 'int8'"),
    (dict(max_new_tokens=0), "max_new_tokens: found 0")])
def test_bad_options(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(OPTIONS, **change)
