"""Prompt and row files: what is read, and which line is named when it cannot be."""

import json
import re

import numpy as np
import pytest

from dspark_jax.data.jsonl import append_rows, drop_partial_line, read_prompts, read_rows
from dspark_jax.data.prompts import generate_prompts


def _write(path, *lines):
  path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
                  + "\n")
  return path


def test_reads_turns_and_messages(tmp_path):
  path = _write(
    tmp_path / "mixed.jsonl", {"turns": ["one", "two", "three"], "id": 7}, "",
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                  {"role": "assistant", "content": "old answer"}], "domain": "chat"})
  assert read_prompts(path) == [
    {"messages": [{"role": "user", "content": "one"}], "domain": "mixed", "id": "7",
     "follow_up": "two"},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
     "domain": "chat", "id": "mixed:3"}]


def test_reads_a_directory_in_order_of_name(tmp_path):
  _write(tmp_path / "b.jsonl", {"turns": ["from b"]})
  _write(tmp_path / "a.jsonl", {"turns": ["from a"]})
  (tmp_path / "README.md").write_text("not data")
  assert [p["messages"][0]["content"] for p in read_prompts(tmp_path)] == ["from a", "from b"]


def test_built_in_prompts_survive_the_trip(tmp_path):
  prompts = generate_prompts(50, seed=1)
  back = read_prompts(_write(tmp_path / "p.jsonl", *prompts))
  assert [{k: v for k, v in p.items() if k != "id"} for p in back] == prompts


@pytest.mark.parametrize("bad,message", [
  ('{"turns": ["a"', "broken JSON: .* at column"),
  ("[1]", "found a list, expected a JSON object"),
  ({"prompt": "x"}, r"found only \['prompt'\], expected either 'turns' or 'messages'"),
  ({"turns": ["x"], "messages": []}, "found both"),
  ({"turns": []}, r"turns: found \[\], expected a non-empty list"),
  ({"turns": "x"}, "turns: found x, expected a non-empty list"),
  ({"turns": ["x", 3]}, r"turns\[1\]: found '3', expected text"),
  ({"turns": ["  "]}, r"turns\[0\]: found '  ', expected text"),
  ({"messages": []}, r"messages: found \[\], expected a non-empty list"),
  ({"messages": [{"role": "human", "content": "x"}]}, r"messages\[0\].role: found 'human', "),
  ({"messages": [{"role": "user"}]}, r"messages\[0\].content: found None, expected text"),
  ({"messages": ["x"]}, r"messages\[0\]: found 'x'"),
  ({"messages": [{"role": "assistant", "content": "x"}]}, "messages: found no user turn"),
  ({"turns": ["x"], "domain": [1]}, r"domain: found \[1\], expected text"),
  ({"turns": ["x"], "follow_up": ""}, "follow_up: found '', expected text"),
])
def test_names_file_and_line_of_a_bad_prompt(tmp_path, bad, message):
  path = _write(tmp_path / "p.jsonl", {"turns": ["fine"]}, "", bad)
  with pytest.raises(ValueError, match=re.escape(f"{path}:3: ") + message) as error:
    read_prompts(path)
  assert "\n" not in str(error.value)


def test_names_the_line_that_is_not_utf8(tmp_path):
  (tmp_path / "p.jsonl").write_bytes(b'{"turns": ["a"]}\n{"turns": ["\xff"]}\n')
  with pytest.raises(ValueError, match=r"p.jsonl:2: not UTF-8 at byte 13"):
    read_prompts(tmp_path / "p.jsonl")


def test_missing_and_empty_sources(tmp_path):
  with pytest.raises(FileNotFoundError, match="nothing.jsonl: no such file"):
    read_prompts(tmp_path / "nothing.jsonl")
  with pytest.raises(FileNotFoundError, match=r"found no \*.jsonl"):
    read_prompts(tmp_path)
  (tmp_path / "p.jsonl").write_text("\n\n")
  with pytest.raises(ValueError, match="found no prompts"):
    read_prompts(tmp_path / "p.jsonl")


def _row(ids, mask, **labels):
  return {"input_ids": ids, "loss_mask": mask, **labels}


def test_rows_come_back_as_written(tmp_path):
  path = tmp_path / "rows.jsonl"
  append_rows(path, [_row([1, 2, 3], [0, 1, 1], domain="code", id="a")], vocab_size=4)
  append_rows(path, [_row(np.array([3, 0], np.int32), np.array([True, False]), id=5)])
  first, second = read_rows(path, vocab_size=4)
  assert first["input_ids"].tolist() == [1, 2, 3] and first["input_ids"].dtype == np.int32
  assert first["loss_mask"].tolist() == [False, True, True] and first["loss_mask"].dtype == bool
  assert (first["domain"], first["id"], second["domain"], second["id"]) == ("code", "a", "", "5")
  assert second["input_ids"].tolist() == [3, 0] and second["loss_mask"].tolist() == [True, False]


BAD_ROWS = [
  (_row([1, 2, 3], [0, 1]), "loss_mask: found 2 entries, expected 3, one an id"),
  (_row([1, 9], [0, 1]), r"input_ids\[1\]: found 9, expected 0..8"),
  (_row([-1, 1], [0, 1]), r"input_ids\[0\]: found -1, expected 0..8"),
  (_row([1, 1], [0, 2]), r"loss_mask\[1\]: found 2, expected 0 or 1"),
  (_row([1, 1.5], [0, 1]), r"input_ids\[1\]: found '1.5', expected an integer"),
  (_row([1, True], [0, 1]), r"input_ids\[1\]: found 'True', expected an integer"),
  (_row([1, 10 ** 30], [0, 1]), "input_ids: found an integer beyond 64 bits"),
  (_row([], []), "input_ids: found no tokens"),
  (_row("12", [0, 1]), "input_ids: found 12, expected a list"),
  ({"input_ids": [1]}, r"loss_mask: missing, found only \['input_ids'\]"),
  (_row([1], [1], id=[2]), r"id: found \[2\], expected text"),
]


@pytest.mark.parametrize("bad,message", BAD_ROWS)
def test_names_file_line_and_field_of_a_bad_row(tmp_path, bad, message):
  path = _write(tmp_path / "rows.jsonl", _row([1], [1]), bad)
  with pytest.raises(ValueError, match=re.escape(f"{path}:2: ") + message):
    read_rows(path, vocab_size=9)


@pytest.mark.parametrize("bad,message", BAD_ROWS)
def test_writes_nothing_if_one_row_is_bad(tmp_path, bad, message):
  path = tmp_path / "rows.jsonl"
  with pytest.raises(ValueError, match="row 1 for .*" + message):
    append_rows(path, [_row([1], [1]), bad], vocab_size=9)
  assert not path.exists()


def test_negative_id_is_refused_without_a_vocabulary_too(tmp_path):
  with pytest.raises(ValueError, match=r"input_ids\[0\]: found -1, expected an id >= 0"):
    read_rows(_write(tmp_path / "rows.jsonl", _row([-1], [1])))


def test_a_killed_writer_leaves_whole_lines(tmp_path):
  path = tmp_path / "rows.jsonl"
  assert drop_partial_line(path) == 0
  append_rows(path, [_row([1, 2], [1, 1], id="whole")])
  whole = path.read_bytes()
  assert drop_partial_line(path) == 0
  path.write_bytes(whole + b'{"input_ids":[1,2')
  with pytest.raises(ValueError, match="rows.jsonl:2: broken JSON"):
    read_rows(path)
  assert drop_partial_line(path) == 17
  assert path.read_bytes() == whole
  append_rows(path, [_row([3], [1], id="next")])
  assert [row["id"] for row in read_rows(path)] == ["whole", "next"]
