import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dspark_jax.interop import hf
from dspark_jax.target.config import config_from_hf
from tests.target import cases

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def raw():
  return cases.make_raw("llama", attention_bias=True)


@pytest.fixture
def tensors(raw):
  return cases.make_tensors(raw)


def load(path, raw):
  return hf.target_params(hf.read_tensors(path), config_from_hf(raw), origin=str(path))


def flatten(params):
  return {".".join(k.key for k in path): np.asarray(x)
          for path, x in jax.tree_util.tree_leaves_with_path(params)}


def test_names_of_a_checkpoint():
  names = hf.target_tensor_shapes(config_from_hf(cases.make_raw("qwen3", num_hidden_layers=1)))
  layer = "model.layers.0."
  assert names == {
      "model.embed_tokens.weight": (41, 32), "model.norm.weight": (32,), "lm_head.weight": (41, 32),
      layer + "input_layernorm.weight": (32,), layer + "post_attention_layernorm.weight": (32,),
      layer + "self_attn.q_proj.weight": (48, 32), layer + "self_attn.k_proj.weight": (24, 32),
      layer + "self_attn.v_proj.weight": (24, 32), layer + "self_attn.o_proj.weight": (32, 48),
      layer + "self_attn.q_norm.weight": (12,), layer + "self_attn.k_norm.weight": (12,),
      layer + "mlp.gate_proj.weight": (48, 32), layer + "mlp.up_proj.weight": (48, 32),
      layer + "mlp.down_proj.weight": (32, 48)}


def test_b48_shapes_of_qwen3_0_6b():
  """Width 1024, 16 heads of 128: q_proj is [2048, 1024] and the norms are per head."""
  shapes = hf.target_tensor_shapes(config_from_hf(cases.make_raw(
      "qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128)))
  at = "model.layers.1.self_attn."
  assert shapes[at + "q_proj.weight"] == (2048, 1024)
  assert shapes[at + "k_proj.weight"] == (1024, 1024)
  assert shapes[at + "o_proj.weight"] == (1024, 2048) and shapes[at + "q_norm.weight"] == (128,)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.float64])
def test_every_tensor_arrives(tmp_path, raw, tensors, dtype, num_shards):
  stored = {n: t.astype(dtype) for n, t in tensors.items()}
  cases.write_target(tmp_path, raw, stored, num_shards=num_shards)
  assert len(hf.tensor_files(tmp_path)) == num_shards
  found = flatten(load(tmp_path, raw))
  assert len(found) == len(tensors)
  for name, expected in stored.items():
    key = name.removeprefix("model.").replace("layers.", "layers_")
    key = key.removesuffix(".weight") if key.startswith(("embed", "lm_head")) else key
    assert found[key].dtype == np.float32
    np.testing.assert_array_equal(found[key], expected.astype(np.float32), err_msg=name)


def test_parameters_may_be_kept_in_bfloat16(raw, tensors):
  params = hf.target_params(tensors, config_from_hf(raw), origin="toy", dtype=jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_b45_bfloat16_bytes(tmp_path):
  """Bytes 80 3f 20 c0 49 40 are 1.0, -2.5, 3.140625."""
  header = json.dumps({"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
  content = bytes.fromhex("803f20c04940")
  (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
  a = hf.read_tensors(tmp_path)["a"]
  assert a.dtype == BF16
  np.testing.assert_array_equal(jax.device_put(a).astype(jnp.float32), [1.0, -2.5, 3.140625])


def test_a_dtype_without_numpy_is_refused(tmp_path):
  header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
  (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
  with pytest.raises(ValueError, match="model.safetensors: found a broken safetensors file or dt"):
    hf.read_tensors(tmp_path)


# --- fault B43: the head -----------------------------------------------------------------------


def test_b43_tied_head(raw, tensors):
  """(a) No head, tied: fine. (c) A head and tied: fine as a copy, refused if it differs."""
  config = config_from_hf(raw | {"tie_word_embeddings": True})
  head = tensors.pop("lm_head.weight")
  assert "lm_head" not in hf.target_params(tensors, config, origin="toy")
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
  assert "lm_head" not in hf.target_params(tensors, config, origin="toy")
  tensors["lm_head.weight"] = head
  with pytest.raises(ValueError, match="lm_head.weight: found a head that differs"):
    hf.target_params(tensors, config, origin="toy")
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:6]  # (e)
  with pytest.raises(ValueError, match="lm_head.weight: found a head that differs"):
    hf.target_params(tensors, config, origin="toy")


def test_b43_untied_without_a_head(raw, tensors):
  """(b) Never random, never borrowed silently."""
  del tensors["lm_head.weight"]
  with pytest.raises(ValueError, match="toy: tensor lm_head.weight is missing"):
    hf.target_params(tensors, config_from_hf(raw), origin="toy")


def test_old_rope_buffers_are_ignored(raw, tensors):
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
  hf.target_params(tensors, config_from_hf(raw), origin="toy")
  assert "model.layers.0.self_attn.rotary_emb.inv_freq" in tensors  # the caller's is untouched


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "1.mlp.up_proj.weight is missing"),
    (lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"), "0.self_attn.q_proj.bias is missing"),
    (lambda t: t.update({"model.nrom.weight": t.pop("model.norm.weight")}),
     "model.norm.weight is missing"),
    (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones((2, 2), np.float32)}),
     r"model.layers.2.mlp.up_proj.weight is unexpected, found shape \(2, 2\)"),
    (lambda t: t.update({"model.embed_tokens.weight": np.ones((40, 32), np.float32)}),
     r"model.embed_tokens.weight has shape \(40, 32\), expected \(41, 32\)"),
    (lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.ones((32, 48), np.float32)}),
     r"up_proj.weight has shape \(32, 48\), expected \(48, 32\)"),
    (lambda t: t.update({"model.norm.weight": np.ones(32, np.int8)}),
     "model.norm.weight has dtype int8, expected a float"),
])
def test_bad_tensor_is_named(tmp_path, raw, tensors, change, message):
  """(d) among others; checked before any parameter is made."""
  change(tensors)
  cases.write_target(tmp_path, raw, tensors)
  with pytest.raises(ValueError, match=message) as error:
    load(tmp_path, raw)
  assert "\n" not in str(error.value)


# --- fault B44: index and shards ---------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path, raw, tensors):
  return cases.write_target(tmp_path / "sharded", raw, tensors, num_shards=2)


def edit_index(path, change):
  index = path / "model.safetensors.index.json"
  content = json.loads(index.read_text())
  change(content["weight_map"])
  index.write_text(json.dumps(content))


def test_missing_shard(sharded):
  (sharded / "model-00002-of-00002.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors: shard named by"):
    hf.read_tensors(sharded)


def test_index_of_another_run(sharded):
  edit_index(sharded, lambda m: m.update({"model.norm.weight": "model-00007-of-00030.safetensors"}))
  with pytest.raises(FileNotFoundError, match="model-00007-of-00030.safetensors"):
    hf.read_tensors(sharded)


def test_stale_index(sharded):
  """A tensor that the index lacks, one that no shard has, one that lies in another shard."""
  edit_index(sharded, lambda m: m.pop("model.norm.weight"))
  with pytest.raises(ValueError, match="model.norm.weight is found here, but the index lacks it"):
    hf.read_tensors(sharded)


def test_index_names_a_tensor_that_is_nowhere(sharded):
  edit_index(sharded, lambda m: m.update(ghost="model-00001-of-00002.safetensors"))
  with pytest.raises(ValueError, match="00001-of-00002.safetensors: tensor ghost is missing"):
    hf.read_tensors(sharded)


def test_a_second_copy_in_another_shard_does_not_win(sharded, tensors):
  """An older shard that also holds a tensor must not decide its value."""
  name = "model.norm.weight"
  other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors",
           "model-00002-of-00002.safetensors": "model-00001-of-00002.safetensors"}
  path = sharded / other[hf.read_weight_map(sharded)[name]]
  content = safetensors.numpy.load_file(path)
  safetensors.numpy.save_file(content | {name: tensors[name] * 2}, path)
  with pytest.raises(ValueError, match=f"{path.name}: tensor {name} is found here, but the index "
                                       "places it in model-0000"):
    hf.read_tensors(sharded)


def test_shards_may_lie_in_a_folder(sharded, raw, tensors):
  (sharded / "part").mkdir()
  for path in sharded.glob("*.safetensors"):
    path.rename(sharded / "part" / path.name)
  edit_index(sharded, lambda m: m.update({k: "part/" + v for k, v in m.items()}))
  assert len(flatten(load(sharded, raw))) == len(tensors)


def test_empty_folder_and_broken_files(tmp_path, sharded):
  with pytest.raises(FileNotFoundError, match="found no model.safetensors and no usable"):
    hf.read_tensors(tmp_path)
  (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
  with pytest.raises(ValueError, match="model.safetensors: found a broken safetensors file"):
    hf.read_tensors(tmp_path)
  (sharded / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
  with pytest.raises(ValueError, match="weight_map: expected an object"):
    hf.read_tensors(sharded)
  (sharded / "model.safetensors.index.json").write_text("{")
  with pytest.raises(ValueError, match="index.json: found broken JSON"):
    hf.read_tensors(sharded)


def test_read_json(tmp_path):
  with pytest.raises(FileNotFoundError, match="a.json: no such file"):
    hf.read_json(tmp_path / "a.json")
  (tmp_path / "a.json").write_text("[1]")
  with pytest.raises(ValueError, match="a.json: found a list, expected a JSON object"):
    hf.read_json(tmp_path / "a.json")


@pytest.mark.parametrize("configs, ids", [
    ([{"eos_token_id": [1, 106]}, {"eos_token_id": 1}], (1, 106)),  # fault B17
    ([{"eos_token_id": 5}, {}], (5,)),
    ([{}, {"eos_token_id": 0}], (0,)),
    ([{"eos_token_id": None}, {}], ()),
])
def test_b17_stop_ids(configs, ids):
  assert hf.stop_ids_from(configs) == ids
