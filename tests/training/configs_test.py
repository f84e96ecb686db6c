"""The shipped training configs build, for targets of the shape they are written for."""

import dataclasses
import importlib.util
import pathlib

import numpy as np
import pytest

from dspark_jax.drafter.kinds import kind_of
from dspark_jax.training.losses import LossConfig
from dspark_jax.training.run import run_config_from_dict
from tests.training import cases

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
SMOLLM2 = dataclasses.replace(cases.TARGET, vocab_size=49152, hidden_size=576,
                              intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
                              head_dim=64)
QWEN3_4B = dataclasses.replace(cases.TARGET, vocab_size=151936, hidden_size=2560,
                               intermediate_size=9728, num_layers=36, num_heads=32,
                               num_kv_heads=8, head_dim=128, qk_norm=True)


def build(name, args, target):
  spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  fields = module.get_config(*args).to_dict()
  for key in ("target", "data", "workdir", "export_dtype"):
    fields.pop(key)
  # --config.train.loss.FIELD works for every field that a file lists, and for no other.
  assert set(fields["train"]["loss"]) == {
      f.name for f in dataclasses.fields(LossConfig)} - {"chunk"}
  return run_config_from_dict(fields, target)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa"])
def test_baselines_build(kind):
  config = build("smollm2_baselines", (kind,), SMOLLM2)
  assert kind_of(config.drafter) == kind
  # exp(-1 / loss_decay) is the 0.8 of the papers, and EAGLE-3's soft cross-entropy is the KL term.
  assert abs(np.exp(-1 / config.train.loss.loss_decay) - 0.8) < 1e-4
  assert config.train.loss.kl_weight == (kind == "eagle3")


@pytest.mark.parametrize("name, args, target", [
    ("smollm2_dspark", (), SMOLLM2), ("qwen3_4b_reference", (), QWEN3_4B),
    ("qwen3_4b_reference", ("dflash",), QWEN3_4B)])
def test_builds(name, args, target):
  config = build(name, args, target)
  assert config.drafter.num_anchors == config.train.num_anchors
  assert bool(config.drafter.markov_rank) == (args != ("dflash",))
