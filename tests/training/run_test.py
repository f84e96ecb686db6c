import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints import Checkpointer
from dspark_jax.interop.deepspec import load_drafter, save_drafter
from dspark_jax.training import run as run_lib
from dspark_jax.training import step as step_lib
from dspark_jax.training import warm_start
from tests.tiny import fast_compile  # noqa: F401
from tests.training import cases

FIELDS = {
    "max_len": 14, "num_eval_rows": 2,
    "drafter": {"num_layers": 1, "proposal_len": 3, "markov_rank": 2, "mask_token_id": 59,
                "target_layer_ids": [0, 1], "draft_vocab_size": 30, "qk_norm": False},
    "warm_start": {"layer_ids": [2]},
    "train": {"batch_size": 2, "num_anchors": 4, "log_every": 1,
              "optimizer": {"max_steps": 3}}}


def make_rows(num_rows=8):
  batch = cases.make_batch(num_rows)
  return [{"input_ids": np.asarray(i), "loss_mask": np.asarray(m)}
          for i, m in zip(batch["input_ids"], batch["loss_mask"])]


def run(workdir, rows, fields=FIELDS, **kwargs):
  config = run_lib.run_config_from_dict(fields, cases.TARGET)
  saver = Checkpointer(workdir / "checkpoints", config=config.fingerprint())
  return run_lib.run(config, target_config=cases.TARGET, target_params=cases.make_target_params(),
                     stop_token_ids=(1,), rows=rows, checkpointer=saver, workdir=workdir,
                     **kwargs)


def test_whole_run(tmp_path):
  result = run(tmp_path, make_rows())
  assert result.train.num_steps == 3 and result.train.is_finished
  assert len(result.draft_ids) == 30 and 1 in result.draft_ids
  assert result.params["markov_head"]["markov_w2"].shape == (30, 2)
  line = json.loads((tmp_path / "provenance.jsonl").read_text())
  assert line["config"]["drafter"]["proposal_len"] == 3 and line["versions"]["jax"]
  # Started again, it finds itself finished and leaves the same drafter.
  again = run(tmp_path, make_rows())
  np.testing.assert_array_equal(again.params["markov_head"]["markov_w1"],
                                result.params["markov_head"]["markov_w1"])


def test_starts_from_a_drafter(tmp_path):
  first = run(tmp_path / "first", make_rows())
  drafter = run_lib.run_config_from_dict(FIELDS, cases.TARGET).drafter
  save_drafter(tmp_path / "drafter", drafter, first.params, draft_ids=first.draft_ids)
  start = load_drafter(tmp_path / "drafter")
  # Other rows would give another draft vocabulary; a rate of 0 leaves the parameters alone.
  still = {**FIELDS, "train": {**FIELDS["train"], "optimizer": {
      "max_steps": 1, "learning_rate": 0.0}}}
  second = run(tmp_path / "second", make_rows(9)[4:], still, start=start)
  np.testing.assert_array_equal(second.draft_ids, first.draft_ids)
  jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
  other = {**FIELDS, "drafter": {**FIELDS["drafter"], "proposal_len": 2}}
  with pytest.raises(ValueError, match="start_drafter: found proposal_len = 3, expected 2"):
    run(tmp_path / "third", make_rows(), other, start=start)


DFLASH = {**FIELDS, "warm_start": {}, "drafter": {
    **FIELDS["drafter"], "markov_rank": 0, "enable_confidence_head": False}}


@pytest.fixture(scope="module")
def dflash(tmp_path_factory):
  """(result, directory) of a DFlash that was trained and saved."""
  workdir = tmp_path_factory.mktemp("dflash")
  result = run(workdir, make_rows(), DFLASH)
  config = run_lib.run_config_from_dict(DFLASH, cases.TARGET).drafter
  save_drafter(workdir / "drafter", config, result.params, draft_ids=result.draft_ids)
  return result, workdir / "drafter"


def test_a_dspark_starts_with_the_law_of_its_dflash(dflash):
  first = dflash[0]
  configs = [run_lib.run_config_from_dict(f, cases.TARGET).drafter for f in (DFLASH, FIELDS)]
  params = warm_start.add_heads(configs[1], first.params, jax.random.key(0))
  assert set(params) == {"backbone", "markov_head", "confidence_head"}
  assert params["markov_head"]["markov_w1"].any()  # or W2 could not learn
  frozen = step_lib.Frozen(cases.make_target_params(), jnp.asarray(first.draft_ids))
  compute = jax.jit(step_lib.sum_batch_losses, static_argnames="objective")
  (_, before), (_, after) = (
      compute(p, frozen, cases.make_batch(), jax.random.key(0),
              objective=step_lib.Objective(cases.TARGET, config, num_anchors=4))
      for config, p in zip(configs, (first.params, params)))
  # Adding a bias of exact zeros changes no bit of a law.
  for name in ("ce", "tv", "accept_G", "tau", "weight"):
    np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_every_kind_of_head_starts_without_a_bias(kind):
  config = dataclasses.replace(run_lib.run_config_from_dict(FIELDS, cases.TARGET).drafter,
                               markov_head_type=kind)
  head = warm_start.add_heads(config, {}, jax.random.key(0))["markov_head"]
  assert not head["markov_w2"].any() and head["markov_w1"].any()


def test_heads_that_were_added_learn(dflash, tmp_path):
  first, directory = dflash
  fields = {**FIELDS, "train": {**FIELDS["train"], "optimizer": {
      "max_steps": 2, "learning_rate": 1e-2, "warmup_fraction": 0.0}}}
  second = run(tmp_path, make_rows(), fields, start=load_drafter(directory))
  np.testing.assert_array_equal(second.draft_ids, first.draft_ids)
  start = warm_start.add_heads(run_lib.run_config_from_dict(FIELDS, cases.TARGET).drafter,
                               first.params, jax.random.key(0))
  moved = jax.tree.map(lambda a, b: bool((a != b).any()), second.params, dict(start))
  assert all(jax.tree.leaves(moved))
  # One rate of 1e-2 a step moved what was copied, and did not replace it.
  gap = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), second.params["backbone"],
                     first.params["backbone"])
  assert max(jax.tree.leaves(gap)) < 0.021


@pytest.mark.parametrize("change, message", [
    (dict(markov_rank=2, num_layers=2), "found num_layers = 1, expected 2"),
    (dict(markov_rank=2, copy_ngram=2), "found copy_ngram = 0, expected 2"),
    (dict(markov_rank=2, qk_norm=True), "found qk_norm = False, expected True")])
def test_what_else_differs_from_the_dflash_is_named(change, message):
  found, expected = (dataclasses.replace(run_lib.run_config_from_dict(
      DFLASH, cases.TARGET).drafter, **c) for c in ({}, change))
  with pytest.raises(ValueError, match=f"^start_drafter: {message} as in config.drafter"):
    run_lib._check_start(found, expected)


def test_heads_are_not_taken_away_or_changed():
  dflash = run_lib.run_config_from_dict(DFLASH, cases.TARGET).drafter
  dspark = run_lib.run_config_from_dict(FIELDS, cases.TARGET).drafter
  run_lib._check_start(dflash, dspark)
  with pytest.raises(ValueError, match="start_drafter: found markov_rank = 2, expected 0"):
    run_lib._check_start(dspark, dflash)
  with pytest.raises(ValueError, match="found markov_head_type = vanilla, expected rnn"):
    run_lib._check_start(dspark, dataclasses.replace(dspark, markov_head_type="rnn"))
  bare = dataclasses.replace(dflash, enable_confidence_head=True)
  with pytest.raises(ValueError, match="confidence_head_with_markov = False, expected True"):
    run_lib._check_start(bare, dspark)


def test_options_that_came_later_are_in_the_fingerprint_only_when_used():
  found = run_lib.run_config_from_dict(FIELDS, cases.TARGET).fingerprint()
  assert set(found["train"]["loss"]) == {
      "ce_weight", "tv_weight", "confidence_weight", "loss_decay", "chunk", "kl_weight"}
  assert set(found) == {"max_len", "num_eval_rows", "drafter", "train", "warm_start",
                        "start_drafter"}
  # The fields of the shipped drafter's run: one more, and its checkpoints could not be resumed.
  assert set(found["drafter"]) == {
      "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
      "head_dim", "target_layer_ids", "num_target_layers", "proposal_len", "mask_token_id",
      "sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head",
      "confidence_head_with_markov", "confidence_stop_gradient", "rms_norm_eps", "rope", "qk_norm",
      "target_hidden_size", "draft_vocab_size", "copy_ngram", "num_anchors",
      "max_position_embeddings"}
  used = {**FIELDS, "train": {"loss": {"lk_weight": 1.0}}}
  assert run_lib.run_config_from_dict(used, cases.TARGET).fingerprint()["train"]["loss"][
      "lk_weight"] == 1.0


def test_other_rows_are_refused_on_resume(tmp_path):
  run(tmp_path, make_rows())
  with pytest.raises(ValueError, match="rows"):
    run(tmp_path, make_rows(9))


def test_split_is_even_and_complete():
  train, held_out = run_lib.split_rows(list(range(10)), 3)
  assert held_out == [0, 4, 9] and sorted(train + held_out) == list(range(10))
  assert run_lib.split_rows([1, 2], 0) == ([1, 2], [])
  with pytest.raises(ValueError, match="num_eval_rows"):
    run_lib.split_rows([1, 2], 2)


@pytest.mark.parametrize("change, message", [
    ({"max_lenn": 3}, "max_lenn"), ({"warm_start": {"layers": 3}}, "warm_start.layers"),
    ({"drafter": {"mask_token_id": 59, "blocksize": 3}}, "blocksize"),
    ({"train": {"steps": 3}}, "steps")])
def test_unknown_fields_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    run_lib.run_config_from_dict({**FIELDS, **change}, cases.TARGET)
