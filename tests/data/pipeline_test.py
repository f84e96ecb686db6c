"""Batches: shape, order, exact resume, and rows that cannot train anything."""

import itertools
import json

import numpy as np
import pytest

from dspark_jax.data.jsonl import append_rows, read_rows
from dspark_jax.data.pipeline import Batches, PipelineConfig, has_anchor


def _rows(num, *, seed=0):
  rng = np.random.default_rng(seed)
  rows = []
  for index in range(num):
    length = int(rng.integers(4, 13))
    ids = rng.integers(1, 100, length)
    ids[0] = index  # recognises the row
    rows.append({"input_ids": ids, "loss_mask": np.arange(length) >= 2, "id": str(index)})
  return rows


def _take(batches, num):
  return list(itertools.islice(batches, num))


def _equal(left, right):
  return len(left) == len(right) and all(
    a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
    for a, b in zip(left, right))


@pytest.mark.parametrize("mask,is_candidate", [
  ([0, 0, 0], False), ([0, 0, 1], False), ([0, 0, 0, 0, 1, 1], True), ([1, 0, 1, 0, 1], False),
  ([1], False), ([], False), ([1, 1], True), ([0, 0, 1, 1, 1, 0], True)])
def test_anchor_candidates(mask, is_candidate):  # faults B35 (a) to (e), B36
  assert has_anchor(mask) is is_candidate


def test_batches_are_padded_on_the_right():
  rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
          {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1, 1, 1, 1, 1]}]
  config = PipelineConfig(batch_size=2, max_len=4, pad_id=9, is_shuffled=False, num_epochs=1)
  batches = Batches(rows, config=config)
  batch, = list(batches)
  assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [1, 2, 3, 4]]
  assert batch["loss_mask"].tolist() == [[False, True, True, False], [True] * 4]
  assert batch["lengths"].tolist() == [3, 4]
  assert [batch[k].dtype for k in ("input_ids", "loss_mask", "lengths")] == [
    np.int32, bool, np.int32]
  assert (batches.num_rows, batches.num_skipped, batches.num_truncated) == (2, 0, 1)


def test_rows_without_a_candidate_are_skipped_and_counted():
  rows = _rows(4) + [
    {"input_ids": [1, 2], "loss_mask": [0, 0]}, {"input_ids": [1, 2], "loss_mask": [0, 1]},
    {"input_ids": [1], "loss_mask": [1]},
    # The answer begins behind max_len: a conversation cut in its first assistant turn (B37).
    {"input_ids": list(range(20)), "loss_mask": [0] * 14 + [1] * 6}]
  batches = Batches(rows, config=PipelineConfig(batch_size=2, max_len=13, num_epochs=1))
  assert (batches.num_rows, batches.num_skipped, batches.num_truncated) == (4, 4, 0)
  seen = np.concatenate([b["input_ids"][:, 0] for b in batches])
  assert sorted(seen.tolist()) == [0, 1, 2, 3]


def test_no_usable_row_is_refused():
  with pytest.raises(ValueError, match="rows: none of 1 has an anchor candidate"):
    Batches([{"input_ids": [1, 2], "loss_mask": [0, 1]}],
            config=PipelineConfig(batch_size=1, max_len=4))


def test_every_epoch_has_every_row_once_in_another_order():
  config = PipelineConfig(batch_size=5, max_len=12, num_epochs=3, seed=4)
  batches = Batches(_rows(20), config=config)
  assert batches.num_batches == 12
  ids = np.concatenate([b["input_ids"][:, 0] for b in batches]).reshape(3, 20)
  assert all(sorted(epoch) == list(range(20)) for epoch in ids.tolist())
  assert len({tuple(epoch) for epoch in ids.tolist()}) == 3


def test_seed_decides_the_order():
  def first(seed):
    batches = Batches(_rows(50), config=PipelineConfig(batch_size=8, max_len=12, seed=seed))
    return _take(batches, 3)
  assert _equal(first(1), first(1))
  assert not _equal(first(1), first(2))


@pytest.mark.parametrize("place", [0, 3, 19])  # 7 rows, batches of 3: within, across epochs
def test_resume_is_bit_identical(place):
  config = PipelineConfig(batch_size=3, max_len=12, seed=11)
  whole = _take(Batches(_rows(7), config=config), 24)
  first = Batches(_rows(7), config=config)
  assert _equal(_take(first, place), whole[:place])
  state = json.loads(json.dumps(first.get_state()))  # as a checkpoint keeps it
  second = Batches(_rows(7), config=config)
  _take(second, 2)  # a used iterator goes back as well
  second.set_state(state)
  assert _equal(_take(second, 24 - place), whole[place:])
  assert second.get_state()["place"] != state["place"]


def test_place_is_that_of_the_batches_handed_out():
  """No read-ahead: the state counts batches seen by the trainer, not batches prepared."""
  batches = Batches(_rows(30), config=PipelineConfig(batch_size=2, max_len=12))
  states = [batches.get_state()["place"] for _ in itertools.islice(batches, 4)]
  fresh = Batches(_rows(30), config=PipelineConfig(batch_size=2, max_len=12))
  for state in states:
    next(fresh)
    assert fresh.get_state()["place"] == state


@pytest.mark.parametrize("name,value", [
  ("batch_size", 4), ("max_len", 11), ("seed", 1), ("pad_id", 1), ("num_epochs", 2),
  ("is_shuffled", False)])
def test_state_of_other_settings_is_refused(name, value):
  base = dict(batch_size=3, max_len=12, seed=0)
  state = Batches(_rows(9), config=PipelineConfig(**base)).get_state()
  other = Batches(_rows(9), config=PipelineConfig(**base | {name: value}))
  with pytest.raises(ValueError, match=f"pipeline state: {name}: found"):
    other.set_state(state)


def test_state_of_other_rows_is_refused():
  config = PipelineConfig(batch_size=3, max_len=12)
  state = Batches(_rows(9), config=config).get_state()
  rows = _rows(9)
  rows[4]["loss_mask"] = np.roll(rows[4]["loss_mask"], 1)
  with pytest.raises(ValueError, match="pipeline state: rows: found data .* have changed"):
    Batches(rows, config=config).set_state(state)
  with pytest.raises(ValueError, match="pipeline state: found no"):
    Batches(rows, config=config).set_state({"place": {}})


@pytest.mark.parametrize("name,value", [
  ("batch_size", 0), ("batch_size", 2.0), ("max_len", 1), ("seed", -1), ("seed", 2 ** 32),
  ("pad_id", -1), ("num_epochs", 0)])
def test_bad_settings_are_refused(name, value):
  with pytest.raises(ValueError, match=f"{name}: found {value}"):
    PipelineConfig(**dict(batch_size=1, max_len=4) | {name: value})


def test_batch_larger_than_all_epochs_is_refused():
  with pytest.raises(ValueError, match="batch_size: found 9, expected at most 8"):
    Batches(_rows(4), config=PipelineConfig(batch_size=9, max_len=12, num_epochs=2))


def test_mask_of_another_length_is_refused():
  with pytest.raises(ValueError, match="row 'r1': loss_mask: found shape .2,., expected"):
    Batches([{"input_ids": [1, 2, 3], "loss_mask": [1, 1], "id": "r1"}],
            config=PipelineConfig(batch_size=1, max_len=4))


def test_from_file_to_batch(tmp_path):
  append_rows(tmp_path / "rows.jsonl", _rows(6), vocab_size=100)
  config = PipelineConfig(batch_size=2, max_len=12, num_epochs=2)
  assert _equal(list(Batches(read_rows(tmp_path), config=config)),
                list(Batches(_rows(6), config=config)))
