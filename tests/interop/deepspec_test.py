import json
import os
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dspark_jax.drafter import dspark
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.interop import deepspec
from dspark_jax.layers import RopeConfig

DRAFT_IDS = np.array([0, 3, 7, 8, 30])


def make_config(**overrides):
  fields = dict(
      vocab_size=37, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=4,
      num_kv_heads=2, head_dim=6, target_layer_ids=(-1, 2, 4), num_target_layers=6,
      proposal_len=4, mask_token_id=36, sample_from_anchor=True, markov_rank=5, rms_norm_eps=1e-5,
      rope=RopeConfig(rope_theta=1e4), num_anchors=9, max_position_embeddings=64)
  return DrafterConfig(**(fields | overrides))


def make_params(config, dtype=np.float32):
  rng = np.random.default_rng(0)
  tree = jax.eval_shape(lambda: dspark.init_params(config, jax.random.key(0)))
  return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(dtype), tree)


def make_matrix(rows, dtype=np.float32):
  return np.random.default_rng(rows).standard_normal((rows, 12)).astype(dtype)


def assert_same_bits(got, want):
  got_leaves, got_tree = jax.tree.flatten(got)
  want_leaves, want_tree = jax.tree.flatten(want)
  assert got_tree == want_tree
  for g, w in zip(got_leaves, want_leaves):
    assert g.dtype == w.dtype and g.shape == w.shape
    assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


def edit_config(path, **changes):
  """Changes fields of config.json; None removes."""
  raw = json.loads((path / "config.json").read_text()) | changes
  (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def edit_tensors(path, change):
  tensors = safetensors.numpy.load_file(path / "model.safetensors")
  change(tensors)
  safetensors.numpy.save_file(tensors, path / "model.safetensors")


@pytest.fixture
def saved(tmp_path):
  deepspec.save_drafter(tmp_path / "drafter", make_config(), make_params(make_config()))
  return tmp_path / "drafter"


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("overrides, is_reference", [
    ({}, True),
    (dict(markov_head_type="gated", confidence_stop_gradient=True), True),
    (dict(markov_candidates=8), True),  # the same weights; who does not know it walks over all
    (dict(markov_head_type="rnn", rope=RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192)), True),
    (dict(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False,
          rope=RopeConfig("yarn", 1e4, 4.0, original_max_position_embeddings=32)), True),
    (dict(confidence_head_with_markov=False, sample_from_anchor=False), False),
    (dict(qk_norm=False, rope=RopeConfig("linear", 1e4, 2.0)), False),
    (dict(copy_ngram=2), False),
])
def test_round_trip_is_bit_exact(tmp_path, dtype, overrides, is_reference):
  config = make_config(**overrides)
  params, head = make_params(config, dtype), make_matrix(37, dtype)
  deepspec.save_drafter(tmp_path, config, params, lm_head_VdxD=head)
  got_config, got_params, stored = deepspec.load_drafter(tmp_path)
  assert got_config == config
  assert_same_bits(got_params, params)
  assert_same_bits(stored, {"lm_head_VdxD": head})
  raw = json.loads((tmp_path / "config.json").read_text())
  assert (raw["architectures"] == ["Qwen3DSparkModel"]) == is_reference
  assert raw["block_size"] == config.num_slots
  assert raw["sample_from_anchor"] is config.sample_from_anchor
  assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_dtype_on_saving_and_loading(tmp_path):
  config, params = make_config(), make_params(make_config())
  deepspec.save_drafter(tmp_path, config, params, dtype=jnp.bfloat16)
  rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), params)
  assert_same_bits(deepspec.load_drafter(tmp_path)[1], rounded)
  assert_same_bits(deepspec.load_drafter(tmp_path, dtype=jnp.float32)[1],
                   jax.tree.map(lambda x: x.astype(np.float32), rounded))
  params["backbone"]["norm"]["weight"][3] = 1e6
  with pytest.raises(ValueError, match="norm.weight overflows"):
    deepspec.save_drafter(tmp_path / "f16", config, params, dtype=jnp.float16)
  assert not (tmp_path / "f16").exists()


def test_bfloat16_bytes(saved):
  """Fault B45: bytes 80 3f 20 c0 49 40 are 1.0, -2.5, 3.140625."""
  bits = np.array([0x3F80, 0xC020, 0x4049] * 4, np.uint16).view(ml_dtypes.bfloat16)
  edit_tensors(saved, lambda t: t.update({"norm.weight": bits}))
  weight = deepspec.load_drafter(saved)[1]["backbone"]["norm"]["weight"]
  assert weight.dtype == jnp.bfloat16
  np.testing.assert_array_equal(weight[:3].astype(jnp.float32), [1.0, -2.5, 3.140625])


def test_reduced_vocabulary_is_stored_as_offsets(tmp_path):
  """Ids 0, 3, 7, 8, 30 are offsets 0, 2, 5, 5, 26."""
  config = make_config(draft_vocab_size=5)
  deepspec.save_drafter(tmp_path, config, make_params(config), draft_ids=DRAFT_IDS)
  tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  np.testing.assert_array_equal(tensors["d2t"], [0, 2, 5, 5, 26])
  assert tensors["d2t"].dtype == np.int64
  np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), DRAFT_IDS)
  _, params, stored = deepspec.load_drafter(tmp_path, dtype=jnp.bfloat16)
  assert params["markov_head"]["markov_w2"].shape == (5, 5)
  assert set(stored) == {"draft_ids"} and stored["draft_ids"].dtype == jnp.int32
  np.testing.assert_array_equal(stored["draft_ids"], DRAFT_IDS)

  edit_tensors(tmp_path, lambda t: t["t2d"].__setitem__(1, True))
  with pytest.raises(ValueError, match="tensors d2t, t2d: found different sets"):
    deepspec.load_drafter(tmp_path)
  edit_tensors(tmp_path, lambda t: t.update(d2t=np.zeros(5, np.int64) + 33))
  with pytest.raises(ValueError, match="tensor d2t: found ids"):
    deepspec.load_drafter(tmp_path)
  edit_tensors(tmp_path, lambda t: t.pop("d2t"))
  with pytest.raises(ValueError, match="tensor d2t is missing"):
    deepspec.load_drafter(tmp_path)
  for ids in (None, DRAFT_IDS[:4], DRAFT_IDS[::-1], DRAFT_IDS + 7):
    with pytest.raises(ValueError, match="^draft_ids: found"):
      deepspec.save_drafter(tmp_path / "bad", config, make_params(config), draft_ids=ids)


def test_absent_embedding_and_head_are_for_the_caller_to_borrow(saved):
  assert deepspec.load_drafter(saved)[2] is None  # fault B43 b: never random


def test_tied_head_is_the_embedding(saved):
  """Fault B43 a, c, e."""
  embed = make_matrix(37)
  edit_tensors(saved, lambda t: t.update({"embed_tokens.weight": embed}))
  assert set(deepspec.load_drafter(saved)[2]) == {"embed_VxD"}
  edit_config(saved, tie_word_embeddings=True)
  assert_same_bits(deepspec.load_drafter(saved)[2], {"embed_VxD": embed, "lm_head_VdxD": embed})
  edit_tensors(saved, lambda t: t.update({"lm_head.weight": embed + 1}))
  with pytest.raises(ValueError, match="lm_head.weight differs from the embedding"):
    deepspec.load_drafter(saved)
  edit_tensors(saved, lambda t: t.update({"lm_head.weight": embed[:6]}))
  with pytest.raises(ValueError, match=r"lm_head.weight has shape \(6, 12\), expected \(37, 12\)"):
    deepspec.load_drafter(saved)


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
    (lambda t: t.update({"layers.2.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}),
     "layers.2.mlp.up_proj.weight is unexpected"),
    (lambda t: t.update({"markov_head.markov_w1.weihgt": t.pop("markov_head.markov_w1.weight")}),
     "markov_head.markov_w1.weight is missing"),
    (lambda t: t.update({"fc.weight": np.zeros((12, 24), np.float32)}),
     r"fc.weight has shape \(12, 24\), expected \(12, 36\)"),
    (lambda t: t.update({"norm.weight": np.zeros(12, np.int32)}), "norm.weight has dtype int32"),
    (lambda t: t.update({"norm.weight": np.zeros(12)}), "norm.weight has dtype float64"),
])
def test_bad_tensor_is_named(saved, change, message):
  edit_tensors(saved, change)
  with pytest.raises(ValueError, match=message):
    deepspec.load_drafter(saved)


@pytest.mark.parametrize("changes, name", [
    (dict(architectures=["Gemma4DSparkModel"]), "architectures"),
    (dict(architectures=["LlamaForCausalLM"]), "architectures"),
    (dict(architectures=None), "architectures"),
    (dict(markov_rank=None, markov_rnak=5), "markov_rnak"),
    (dict(sample_from_anchr=False), "sample_from_anchr"),
    (dict(dflash_config={}), "dflash_config"),  # another dialect
    (dict(sliding_window_non_causal=True), "sliding_window_non_causal"),
    (dict(markov_rank=None), "markov_rank"), (dict(block_size=None), "block_size"),
    (dict(markov_head_type=None), "markov_head_type"),
    (dict(confidence_head_with_markov=None), "confidence_head_with_markov"),
    (dict(mask_token_id=None), "mask_token_id"), (dict(mask_token_id=37), "mask_token_id"),
    (dict(eos_token_id=36), "mask_token_id"), (dict(eos_token_id=[1, 36]), "mask_token_id"),
    (dict(target_layer_ids=[0, 5]), "target_layer_ids"),
    (dict(use_sliding_window=True), "use_sliding_window"),  # fault B31
    (dict(layer_types=["sliding_attention", "full_attention"]), "layer_types"),
    (dict(layer_types=["full_attention"]), "layer_types"),
    (dict(attention_bias=True), "attention_bias"), (dict(hidden_act="gelu"), "hidden_act"),
    (dict(rope_parameters={"rope_type": "dynamic"}), "rope_type"),
    (dict(sample_from_anchor="yes"), "sample_from_anchor"),
])
def test_bad_config_field_is_named(saved, changes, name):
  edit_config(saved, **changes)
  with pytest.raises(ValueError, match=f"config.json: {name}: ") as error:
    deepspec.load_drafter(saved)
  assert "\n" not in str(error.value)


def test_unknown_field_can_be_declared_harmless(saved):
  edit_config(saved, note="mine")
  with pytest.raises(ValueError, match="config.json: note: found an unknown field"):
    deepspec.load_drafter(saved)
  deepspec.load_drafter(saved, ignore_fields=("note",))


def test_slot_convention_is_stated_or_given_by_the_layout(saved):
  """Fault B28: the reference's layout predicts from slot 0; any other name must say."""
  edit_config(saved, sample_from_anchor=None)
  assert deepspec.load_drafter(saved)[0].sample_from_anchor
  edit_config(saved, sample_from_anchor=False)
  config, _, _ = deepspec.load_drafter(saved)
  assert (config.sample_from_anchor, config.num_slots, config.proposal_len) == (False, 4, 3)
  edit_config(saved, sample_from_anchor=None, architectures=["DSparkJaxModel"])
  with pytest.raises(ValueError, match="sample_from_anchor: missing"):
    deepspec.load_drafter(saved)


def test_sharded_files(saved):
  """Fault B44: an index is obeyed; a shard that is not there is named."""
  want = deepspec.load_drafter(saved)[1]
  tensors = safetensors.numpy.load_file(saved / "model.safetensors")
  names = sorted(tensors)
  parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
  for file, part in parts.items():
    safetensors.numpy.save_file({n: tensors[n] for n in part}, saved / file)
  (saved / "model.safetensors").unlink()
  index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
  (saved / "model.safetensors.index.json").write_text(json.dumps(index))
  assert_same_bits(deepspec.load_drafter(saved)[1], want)
  with pytest.raises(ValueError, match="found a sharded checkpoint"):
    deepspec.save_drafter(saved, make_config(), make_params(make_config()))
  (saved / "b.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="b.safetensors: shard"):
    deepspec.load_drafter(saved)


def test_missing_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="config.json: no such file"):
    deepspec.load_drafter(tmp_path)
  deepspec.save_drafter(tmp_path, make_config(), make_params(make_config()))
  (tmp_path / "model.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="no model.safetensors"):
    deepspec.load_drafter(tmp_path)


def test_wrong_params_are_refused_before_anything_is_written(saved):
  before = (saved / "model.safetensors").read_bytes()
  params = make_params(make_config())
  del params["markov_head"]["markov_w2"]
  with pytest.raises(ValueError, match="markov_head.markov_w2.weight is missing"):
    deepspec.save_drafter(saved, make_config(), params)
  with pytest.raises(ValueError, match="embed_tokens.weight has shape"):
    deepspec.save_drafter(saved, make_config(), make_params(make_config()),
                          embed_VxD=make_matrix(36))
  assert (saved / "model.safetensors").read_bytes() == before
  deepspec.load_drafter(saved)


@pytest.mark.parametrize("dies_at", ["write", "first move", "second move"])
def test_death_while_saving_never_leaves_a_mixture(saved, monkeypatch, dies_at):
  (saved / "README.md").write_text("kept")
  old = deepspec.load_drafter(saved)[1]
  new_params = jax.tree.map(lambda x: x + 1, make_params(make_config()))
  moves = []

  def die(*args, **kwargs):
    raise OSError("killed")

  def move(source, to):
    moves.append(to)
    if len(moves) == (1 if dies_at == "first move" else 2):
      die()
    pathlib.Path(source).rename(to)

  if dies_at == "write":
    monkeypatch.setattr(safetensors.numpy, "save_file", die)
  else:
    monkeypatch.setattr(os, "replace", move)
  with pytest.raises(OSError, match="killed"):
    deepspec.save_drafter(saved, make_config(mask_token_id=35), new_params)
  monkeypatch.undo()
  if dies_at == "write":
    assert_same_bits(deepspec.load_drafter(saved)[1], old)
  else:
    with pytest.raises(FileNotFoundError, match="config.json: no such file"):
      deepspec.load_drafter(saved)
  deepspec.save_drafter(saved, make_config(mask_token_id=35), new_params)
  config, params, _ = deepspec.load_drafter(saved)
  assert config.mask_token_id == 35
  assert_same_bits(params, new_params)
  assert (saved / "README.md").read_text() == "kept"


def test_fields_of_the_target_are_carried_over(tmp_path):
  deepspec.save_drafter(tmp_path, make_config(), make_params(make_config()),
                        extra={"eos_token_id": 2, "vocab_size": 99, "architectures": ["Other"]})
  raw = json.loads((tmp_path / "config.json").read_text())
  assert (raw["eos_token_id"], raw["vocab_size"]) == (2, 37)
  assert deepspec.load_drafter(tmp_path)[0] == make_config()
