"""JSONL files of prompts and of regenerated answers; every fault is named by file and line."""

import json
import os
import pathlib

import numpy as np

from dspark_jax.data.chat import check_messages


def read_prompts(path):
  """Reads prompts from a JSONL file, or from all `*.jsonl` of a directory in order of name.

  A line is {"turns": [text, ...]}, where the first turn is the prompt and a second one a follow-up
  question, or {"messages": [{"role", "content"}, ...]}, where an answer at the end is left out: the
  target gives its own. Later turns than these are not used. Blank lines are skipped.
  Returns a list of {"messages", "domain", "id"} and, where there is one, "follow_up"; "domain" is
  the line's or the file's name, "id" the line's or "name:line".
  Raises FileNotFoundError, or ValueError naming file, line and what was wrong.
  """
  prompts = []
  for file in _jsonl_files(path):
    prompts += [_prompt_from(record, file=file, line=line) for line, record in _read_lines(file)]
  if not prompts:
    raise ValueError(f"{path}: found no prompts, expected one JSON object a line")
  return prompts


def read_rows(path, *, vocab_size=None):
  """Reads regenerated rows from a JSONL file, or from all `*.jsonl` of a directory.

  Returns a list of {"input_ids": int32 [T], "loss_mask": bool [T], "domain": str, "id": str}.
  Raises FileNotFoundError, or ValueError naming file, line and field: ids and mask of unequal
  length, an id outside 0..vocab_size-1, a mask that is not of 0 and 1.
  """
  rows = []
  for file in _jsonl_files(path):
    for line, record in _read_lines(file):
      rows.append(_row_from(record, vocab_size=vocab_size, origin=f"{file}:{line}"))
  if not rows:
    raise ValueError(f"{path}: found no rows, expected one JSON object a line")
  return rows


def append_rows(path, rows, *, vocab_size=None):
  """Appends rows to a JSONL file and waits until they are on the disk.

  All rows are checked as in `read_rows` before the first byte is written.
  """
  lines = []
  for index, row in enumerate(rows):
    row = _row_from({name: _plain(value) for name, value in row.items()},
                    vocab_size=vocab_size, origin=f"row {index} for {path}")
    lines.append(json.dumps({
      "input_ids": row["input_ids"].tolist(), "loss_mask": row["loss_mask"].astype(int).tolist(),
      "domain": row["domain"], "id": row["id"]}, separators=(",", ":")) + "\n")
  with open(path, "ab") as stream:
    stream.write("".join(lines).encode("utf-8"))
    stream.flush()
    os.fsync(stream.fileno())


def drop_partial_line(path):
  """Cuts off a last line without its newline, as a killed writer leaves it; returns bytes cut.

  A missing file counts as nothing to cut, so that a resuming writer may call it at any start.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return 0
  data = path.read_bytes()
  keep = data.rfind(b"\n") + 1
  if keep < len(data):
    os.truncate(path, keep)
  return len(data) - keep


def _jsonl_files(path):
  path = pathlib.Path(path)
  if path.is_dir():
    files = sorted(path.glob("*.jsonl"))
    if not files:
      raise FileNotFoundError(f"{path}: found no *.jsonl in this directory")
    return files
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file or directory")
  return [path]


def _read_lines(file):
  for line, raw in enumerate(file.read_bytes().split(b"\n"), start=1):
    if not raw.strip():
      continue
    try:
      record = json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8"))
    except UnicodeDecodeError as error:
      raise ValueError(f"{file}:{line}: not UTF-8 at byte {error.start + 1} of the line") from None
    except json.JSONDecodeError as error:
      raise ValueError(f"{file}:{line}: broken JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
      raise ValueError(f"{file}:{line}: broken JSON: nested too deeply") from None
    if not isinstance(record, dict):
      raise ValueError(f"{file}:{line}: found a {type(record).__name__}, expected a JSON object")
    yield line, record


def _prompt_from(record, *, file, line):
  origin = f"{file}:{line}"
  if ("turns" in record) == ("messages" in record):
    found = "both" if "turns" in record else f"only {sorted(record)}"
    raise ValueError(f"{origin}: found {found}, expected either 'turns' or 'messages'")
  follow_up = record.get("follow_up")
  if "turns" in record:
    turns = record["turns"]
    _check_turns(turns, origin=origin)
    messages = [{"role": "user", "content": turns[0]}]
    follow_up = turns[1] if len(turns) > 1 else follow_up
  else:
    check_messages(record["messages"], origin=f"{origin}: messages")
    messages = [{"role": m["role"], "content": m["content"]} for m in record["messages"]]
    while messages and messages[-1]["role"] == "assistant":
      messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
      raise ValueError(f"{origin}: messages: found no user turn to answer")
  if follow_up is not None and (not isinstance(follow_up, str) or not follow_up.strip()):
    raise ValueError(f"{origin}: follow_up: found {follow_up!r}, expected text")
  prompt = {"messages": messages, "domain": _label(record, "domain", file.stem, origin),
            "id": _label(record, "id", f"{file.stem}:{line}", origin)}
  return prompt | ({"follow_up": follow_up} if follow_up is not None else {})


def _check_turns(turns, *, origin):
  if not isinstance(turns, list) or not turns:
    raise ValueError(f"{origin}: turns: found {str(turns)[:60]}, expected a non-empty list of text")
  for index, turn in enumerate(turns):
    if not isinstance(turn, str) or not turn.strip():
      raise ValueError(f"{origin}: turns[{index}]: found {str(turn)[:60]!r}, expected text")


def _label(record, name, default, origin):
  """A string field; numbers are taken as text, since ids often are numbers."""
  value = record.get(name, default)
  if isinstance(value, bool) or not isinstance(value, (str, int)):
    raise ValueError(f"{origin}: {name}: found {value!r}, expected text")
  return str(value)


def _row_from(record, *, vocab_size, origin):
  ids = _int_array(record, "input_ids", origin)
  mask = _int_array(record, "loss_mask", origin)
  if not len(ids):
    raise ValueError(f"{origin}: input_ids: found no tokens")
  if len(mask) != len(ids):
    raise ValueError(
      f"{origin}: loss_mask: found {len(mask)} entries, expected {len(ids)}, one an id")
  limit = 2 ** 31 if vocab_size is None else vocab_size
  _refuse_outside(ids, limit, f"{origin}: input_ids",
                  "an id >= 0" if vocab_size is None else f"0..{vocab_size - 1}")
  _refuse_outside(mask, 2, f"{origin}: loss_mask", "0 or 1")
  return {"input_ids": ids.astype(np.int32), "loss_mask": mask.astype(bool),
          "domain": _label(record, "domain", "", origin), "id": _label(record, "id", "", origin)}


def _refuse_outside(values, limit, field, expected):
  bad = np.flatnonzero((values < 0) | (values >= limit))
  if len(bad):
    raise ValueError(f"{field}[{bad[0]}]: found {values[bad[0]]}, expected {expected}")


def _int_array(record, name, origin):
  if name not in record:
    raise ValueError(f"{origin}: {name}: missing, found only {sorted(record)}")
  values = record[name]
  if not isinstance(values, list):
    raise ValueError(f"{origin}: {name}: found {str(values)[:60]}, expected a list of integers")
  for index, value in enumerate(values):
    if not isinstance(value, int) or (name == "input_ids" and isinstance(value, bool)):
      raise ValueError(f"{origin}: {name}[{index}]: found {str(value)[:60]!r}, expected an integer")
  try:
    return np.asarray(values, dtype=np.int64)
  except OverflowError:
    raise ValueError(f"{origin}: {name}: found an integer beyond 64 bits") from None


def _plain(value):
  return value.tolist() if isinstance(value, np.ndarray) else value
