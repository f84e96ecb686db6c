"""Opening any drafter by name, and decoding with it through `DSpark` and the command line."""

import json
import shutil

import jax
import numpy as np
import pytest

from dspark_jax import infer
from dspark_jax.api import DSpark
from dspark_jax.drafter import kinds
from dspark_jax.interop import drafters
from tests import tiny
from tests.drafter import every
from tests.tiny import fast_compile  # noqa: F401

PROMPT = "Six?"
TRAINED = ("eagle3", "mtp", "medusa")
OPTIONS = dict(max_new_tokens=24, stop_ids=[])


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return tiny.save_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="module")
def plain(target):
  return DSpark(str(target), None).generate(PROMPT, **OPTIONS)


def save(directory, kind, **fields):
  config, params = every.make_network(kind, tiny.CONFIG, **({"target_layer_ids": (0, 1)} if
                                      kind == "eagle3" else {}), **fields)
  ids = None if config.draft_vocab_size is None else np.arange(config.draft_vocab_size)
  drafters.save_drafter(directory, config, params, draft_ids=ids)
  return config, params, ids


@pytest.mark.parametrize("kind", TRAINED)
def test_trained_kinds_survive_and_decode(kind, target, plain, tmp_path):
  config, params, ids = save(tmp_path / "d", kind, draft_vocab_size=200)
  again, again_params, stored = drafters.load_drafter(tmp_path / "d")
  assert again == config and type(again) is type(config)
  jax.tree.map(np.testing.assert_array_equal, again_params, params)
  np.testing.assert_array_equal(stored["draft_ids"], ids)
  model = DSpark(str(target), str(tmp_path / "d"), accept_rule="block")
  assert model.generate(PROMPT, **OPTIONS).tokens == plain.tokens
  assert model.frame.proposal_len == 3 and model.frame.accept_rule == "block"
  with pytest.raises(ValueError, match="confidence_threshold: found 0.5 with a drafter that"):
    model.with_policy(confidence_threshold=0.5)
  with pytest.raises(ValueError, match="max_draft_len: found 4, expected within 0..proposal_len"):
    model.with_policy(max_draft_len=4)


def test_the_target_drafts_for_itself(target, plain):
  """A small model that is the target: every draft is accepted. It drafts as many as are asked for,
  not more."""
  model = DSpark(str(target), str(target), max_draft_len=3)
  found = model.generate(PROMPT, **OPTIONS)
  assert found.tokens == plain.tokens and found.num_rounds == 6  # 1 + 5 * 4 + 3 tokens
  assert found.num_verified == found.num_accepted and len(found.num_verified) == 3
  longer = model.with_policy(max_draft_len=6).generate(PROMPT, **OPTIONS)
  assert longer.tokens == plain.tokens and len(longer.num_verified) == 6


def test_prompt_lookup(target, plain):
  model = DSpark(str(target), "prompt-lookup", confidence_threshold=0.5)
  found = model.generate(PROMPT, **OPTIONS)
  assert found.tokens == plain.tokens
  # A greedy target that is nearly a bigram model soon repeats itself, and look-up notices.
  repeated = model.generate(PROMPT, max_new_tokens=90, stop_ids=[])
  assert sum(repeated.num_verified) > sum(repeated.num_accepted) / 2 > 0


def test_the_command_line(target, plain, capsys):
  argv = ["--model", str(target), "--draft-model", "prompt-lookup", "--prompt", PROMPT,
          "--max-new-tokens", "24", "--accept-rule", "block"]
  assert infer.main(argv) == 0
  assert plain.text.startswith(capsys.readouterr().out.rstrip("\n"))


def test_another_tokenizer_is_refused(target, tmp_path):
  other = tmp_path / "other"
  shutil.copytree(target, other)
  path = other / "tokenizer.json"
  path.write_text(path.read_text().replace("<|mask|>", "<|musk|>"))
  path = other / "tokenizer_config.json"
  path.write_text(path.read_text().replace("<|mask|>", "<|musk|>"))
  with pytest.raises(ValueError, match="draft_model: .*found another tokenizer than the target's"):
    DSpark(str(target), str(other))


@pytest.mark.parametrize("kind, change, message", [
    ("eagle3", dict(architectures=["Eagle4"]), "architectures: found .'Eagle4'"),
    ("eagle3", dict(draft_num_hidden_layers=2), "draft_num_hidden_layers: found 2, expected 1"),
    ("eagle3", dict(ttt_lenght=3), "ttt_lenght: found an unknown field, expected 'ttt_length'"),
    ("eagle3", dict(ttt_length=None), "ttt_length: missing"),
    ("mtp", dict(qk_norm=None), "qk_norm: missing"),
    ("mtp", dict(num_target_layers=4), "num_target_layers: found 4, expected the target's 3"),
    ("medusa", dict(hidden_size=8), "tensor .* has shape|hidden_size: found 8"),
    ("medusa", dict(proposal_len=4), "tensor heads.bias has shape"),
    ("medusa", dict(sliding_windows=4), "sliding_windows: found an unknown field")])
def test_bad_configs_are_named(kind, change, message, target, tmp_path):
  save(tmp_path / "good", kind)
  bad = tiny.edit_config(tmp_path / "good", tmp_path / "bad", **change)
  with pytest.raises(ValueError, match=message) as error:
    DSpark(str(target), str(bad))
  assert "\n" not in str(error.value)


def test_eagle3_is_written_under_the_references_name_only_if_it_is_the_references(tmp_path):
  names = []
  for i, fields in enumerate((dict(), dict(qk_norm=False), dict(draft_vocab_size=100))):
    save(tmp_path / str(i), "eagle3", **fields)
    names += json.loads((tmp_path / str(i) / "config.json").read_text())["architectures"]
  assert names == ["Qwen3Eagle3Model", "Eagle3JaxModel", "Eagle3JaxModel"]


def test_kinds_are_all_readable():
  from dspark_jax.interop import flat
  written = {config for config, _ in flat.KINDS.values()}
  assert written == {kind.config for name, kind in kinds.KINDS.items() if name != "dspark"}
