"""The built-in prompts: different, repeatable, split, and free of benchmark text."""

import ast
import collections
import json
import pathlib
import re

import pytest

from dspark_jax.data import prompt_maths, prompts
from dspark_jax.data.prompt_functions import FUNCTIONS
from dspark_jax.data.prompts import generate_prompts, held_out_prompts, prompt_key

EVAL_DATASETS = pathlib.Path(__file__).resolve().parents[3] / "shared" / "eval_datasets"


def _texts(records):
  return [record["messages"][0]["content"] for record in records]


@pytest.fixture(scope="module")
def training():
  return generate_prompts(10_000, seed=0)


def test_ten_thousand_differ_and_cover_the_domains(training):
  texts = _texts(training)
  assert len(set(texts)) == 10_000
  assert all(text.strip() and len(text.split()) <= 250 for text in texts)
  words = sorted(len(text.split()) for text in texts)
  assert words[0] <= 6 and words[-1] >= 120
  counts = collections.Counter(record["domain"] for record in training)
  assert counts["code"] == max(counts.values())
  assert min(counts.values()) >= 600 and len(counts) == 10
  assert all(len(record["messages"]) == 1 and record["messages"][0]["role"] == "user"
             for record in training)


def test_some_have_a_follow_up_and_none_an_empty_one(training):
  follow_ups = [record["follow_up"] for record in training if "follow_up" in record]
  assert 500 < len(follow_ups) < 5000
  assert all(follow_ups)


def test_the_seed_fixes_them():
  assert generate_prompts(200, seed=7) == generate_prompts(200, seed=7)
  assert generate_prompts(200, seed=7) != generate_prompts(200, seed=8)


def test_fewer_prompts_are_the_beginning_of_more():
  assert generate_prompts(50, seed=3) == generate_prompts(120, seed=3)[:50]


def test_no_slot_is_left_open(training):
  assert [t for t in _texts(training) if re.search(r"(?<!`)\{[a-z]\w*\}", t)
          and "```" not in t] == []


def test_held_out_shares_no_key_with_training_of_any_seed(training):
  held_out = set(_texts(held_out_prompts(300, seed=0)))
  assert len(held_out) == 300
  assert not held_out & set(_texts(training))
  # Keys blank the numbers: no held-out word problem appears in training with other numbers.
  problems = [r for r in held_out_prompts(300, seed=0) if r["kind"] == "reasoning"]
  others = {prompt_key(t) for t in _texts(training + generate_prompts(3000, seed=9))}
  assert problems and not {prompt_key(t) for t in _texts(problems)} & others


def test_one_function_is_never_on_both_sides(training):
  def functions(records):
    return {name for text in _texts(records)
            for name in re.findall(r"^def (\w+)\(.*->", text, re.M)}
  held_out = functions(held_out_prompts(600, seed=1))
  assert held_out and not held_out & functions(training)


def test_held_out_is_balanced():
  records = held_out_prompts(30, seed=5)
  assert collections.Counter(r["domain"] for r in records) == {
    "code": 10, "arithmetic": 10, "chat": 10}
  assert len({r["kind"] for r in records}) == 10


def test_stubs_are_python_and_their_examples_come_from_the_solution(training):
  stubs = [stub for text in _texts(training)
           for stub in re.findall(r"^def .*?\n    \"\"\"\n", text, re.M | re.S)]
  solutions = {function[0]: function[4] for function in FUNCTIONS}
  num_checked = 0
  for stub in stubs:
    tree = ast.parse(stub).body[0]
    assert ">>>" in ast.get_docstring(tree)
    if tree.name in solutions:
      for call, value in re.findall(r">>> (.*)\n    (.*)", stub):
        num_checked += 1
        assert eval(call, {tree.name: solutions[tree.name]}) == ast.literal_eval(value), call
  assert len(stubs) > 500 and num_checked > 300


@pytest.mark.parametrize("name,args,answer", [
  ("collatz_steps", (6,), 8),  # 6 3 10 5 16 8 4 2 1
  ("longest_climb", ([1, 2, 3, 1, 5],), 3), ("longest_climb", ([],), 0),
  ("run_lengths", ("aabcc",), [("a", 2), ("b", 1), ("c", 2)]),
  ("caesar_shift", ("xyz a", 3), "abc d"), ("make_change", (88,), [50, 20, 10, 5, 2, 1]),
  ("digit_root", (9875,), 2),  # 29 -> 11 -> 2
  ("is_leap_year", (1900,), False), ("turn_clockwise", ([[1, 2], [3, 4]],), [[3, 1], [4, 2]]),
  ("triangle_kind", (2, 3, 5), "none"), ("spread_evenly", (10, 4), [3, 3, 2, 2]),
  ("second_largest", ([4, 4],), 0), ("count_pairs", ([1, 2, 3, 2], 4), 2),
])
def test_solutions_by_hand(name, args, answer):
  solution = {function[0]: function[4] for function in FUNCTIONS}[name]
  assert solution(*args) == answer


@pytest.mark.parametrize("num", [-1, 2.0, True, None])
def test_refuses_bad_num(num):
  with pytest.raises(ValueError, match="num: found"):
    generate_prompts(num, seed=0)


def test_refuses_bad_seed():
  with pytest.raises(ValueError, match="seed: found 'x'"):
    generate_prompts(1, seed="x")


def test_refuses_more_than_can_be_made(monkeypatch):
  monkeypatch.setattr(prompts, "_DOMAINS", {"arithmetic": (1, lambda rng: (
    f"What is 1 + {rng.randrange(5)}?", f"k{rng.randrange(5)}", None))})
  with pytest.raises(ValueError, match="num: found 99, but domain 'arithmetic' gave no new prompt"):
    generate_prompts(99, seed=0)
  assert prompt_maths.make_arithmetic  # the real one is untouched


def test_no_ten_words_in_a_row_from_a_benchmark(training):
  if not EVAL_DATASETS.is_dir():
    pytest.skip(f"no evaluation sets in {EVAL_DATASETS}")

  def runs(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i:i + 10]) for i in range(len(words) - 9)}
  theirs = set()
  for file in EVAL_DATASETS.glob("*.jsonl"):
    for line in file.read_text().splitlines():
      for turn in json.loads(line)["turns"]:
        theirs |= runs(turn)
  assert len(theirs) > 1000
  assert not [t for t in _texts(training + held_out_prompts(300, seed=0)) if runs(t) & theirs]
