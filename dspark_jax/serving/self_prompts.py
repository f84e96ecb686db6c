"""The target writes users' turns itself: prompts as varied as what it was tuned on.

A chat model that is given the opening of a user's turn goes on with what users ask (Magpie, arXiv
2406.08464). Nothing but the model is needed, and a drafter trained on its answers to them meets the
whole range of its text, not the range of somebody's list of prompts.
"""

import json
import os
import pathlib
from typing import Any, Sequence

import numpy as np
import tqdm

from dspark_jax.data import chat
from dspark_jax.data import jsonl
from dspark_jax.decode import loop
from dspark_jax.decode.state import Frame
from dspark_jax.sampling import make_sampling_params
from dspark_jax.serving.regenerate import RegenerateOptions

DOMAIN = "self"
MIN_CHARACTERS = 8
_PLACEHOLDER = "\u241e"
_MAX_MISSES = 2000  # turns in a row of which none can be used


def write_prompts(target, tokenizer, num: int, out_path, *,
                  options: RegenerateOptions) -> list[dict[str, Any]]:
  """Lets the target write `num` different users' turns, appending to `out_path` as it goes.

  A turn is used if the target ended it itself within `max_new_tokens`, and it is plain text of some
  length. Turn number i depends on (options.seed, i) only; started again, it goes on after the last.

  Args:
    target: a loaded target.
    tokenizer: its tokenizer, with a chat template.
    out_path: JSONL, as `jsonl.read_prompts` reads it.
    options: batch size, law (temperature 1 is the model's own range), seed, `max_new_tokens`.
  Returns:
    `num` dicts {"messages", "domain", "id"}.
  Raises:
    ValueError, OSError: greedy law, a template that cannot be cut before the user's text, a target
    that ends no turn, an output that cannot be written.
  """
  if options.temperature == 0:
    raise ValueError("temperature: found 0, expected more: greedy, all users' turns are one")
  write = _make_writer(target, tokenizer, options)
  out_path = pathlib.Path(out_path)
  out_path.parent.mkdir(parents=True, exist_ok=True)
  open(out_path, "ab").close()  # fails here, before any work, where it cannot be written
  jsonl.drop_partial_line(out_path)
  prompts = jsonl.read_prompts(out_path) if out_path.stat().st_size else []
  seen = {p["messages"][0]["content"] for p in prompts}
  index = _find_next(prompts, options.seed)
  misses = 0
  with tqdm.tqdm(total=num, initial=min(len(prompts), num), desc="write prompts") as bar:
    while len(prompts) < num:
      found = []
      for text in write(range(index, index + options.batch_size)):
        if text is None or text in seen:
          misses += 1
        else:
          misses = 0
          seen.add(text)
          found.append({"messages": [{"role": "user", "content": text}], "domain": DOMAIN,
                        "id": f"{DOMAIN}-{options.seed}-{index}"})
        index += 1
      if misses >= _MAX_MISSES:
        raise ValueError(f"target: wrote {misses} users' turns of which none can be used, expected "
                         "a chat model that ends them")
      found = found[:num - len(prompts)]
      _append(out_path, found)
      prompts += found
      bar.update(len(found))
  return prompts[:num]


def opening_ids(tokenizer) -> list[int]:
  """Token ids of a conversation up to where the user's text begins."""
  text = chat.render_text(tokenizer, [{"role": "user", "content": _PLACEHOLDER}])
  opening, mark, _ = text.partition(_PLACEHOLDER)
  if not mark or not opening:
    raise ValueError("tokenizer: its chat template shows no text before the user's, expected the "
                     "opening of a user's turn")
  return tokenizer(opening, add_special_tokens=False)["input_ids"]


def _find_next(prompts, seed: int) -> int:
  """Number of the first turn that no line comes from."""
  numbers = [-1]
  for p in prompts:
    parts = p["id"].split("-")
    if parts[:2] != [DOMAIN, str(seed)] or not parts[-1].isdigit():
      raise ValueError(f"seed: found {seed} and a prompt {p['id']!r}, expected the prompts of one "
                       "seed in a file; choose another file for another seed")
    numbers.append(int(parts[-1]))
  return max(numbers) + 1


def _make_writer(target, tokenizer, options: RegenerateOptions):
  """Returns a function from turn numbers (one batch) to texts, None where a turn is of no use."""
  num_ids = len(tokenizer)
  frame = Frame(target.config, dtype=options.dtype,
                vocab_limit=num_ids if num_ids < target.config.vocab_size else None)
  stop_ids = chat.stop_token_ids(tokenizer, generation_eos=list(target.stop_token_ids))
  opening = opening_ids(tokenizer)

  def write(numbers: Sequence[int]):
    seeds = [(options.seed * 1_000_003 + n) % 2**32 for n in numbers]
    state = loop.generate(
        frame, {"target": target.params}, [opening] * len(numbers),
        max_new_tokens=options.max_new_tokens, stop_ids=stop_ids,
        sampling=make_sampling_params(len(numbers), **options.law, seed=seeds))
    tokens, lens = np.asarray(state.tokens_BxS), np.asarray(state.lens_B)
    for row, length in zip(tokens, lens):
      yield _read_turn(tokenizer, row[len(opening):length].tolist(), stop_ids)

  return write


def _read_turn(tokenizer, ids: list[int], stop_ids) -> str | None:
  """Returns the text of a turn that ended, without its end; None if it is of no use."""
  if not ids or ids[-1] not in stop_ids or set(ids[:-1]) & set(tokenizer.all_special_ids):
    return None
  text = tokenizer.decode(ids[:-1]).strip()
  return text if len(text) >= MIN_CHARACTERS and "\ufffd" not in text else None


def _append(path: pathlib.Path, prompts) -> None:
  with open(path, "a", encoding="utf-8") as stream:
    stream.writelines(json.dumps(p) + "\n" for p in prompts)
    stream.flush()
    os.fsync(stream.fileno())
