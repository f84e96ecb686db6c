import json

import jax
import numpy as np
import pytest

from dspark_jax.checkpoints import Checkpointer
from dspark_jax.interop.deepspec import load_drafter, save_drafter
from dspark_jax.training import run as run_lib
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
