import pytest

from dspark_jax.layers import RopeConfig
from dspark_jax.target.config import config_from_hf
from tests.target import cases


def test_every_field_is_read():
  config = config_from_hf(cases.make_raw(
      "qwen3", attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
  assert (config.model_type, config.vocab_size, config.hidden_size) == ("qwen3", 41, 32)
  assert (config.intermediate_size, config.num_layers) == (48, 2)
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 12)
  assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 256)
  assert config.rope == RopeConfig(rope_theta=100.0, original_max_position_embeddings=256)
  assert config.attention_bias and config.mlp_bias and config.tie_word_embeddings
  assert config.qk_norm and not config_from_hf(cases.make_raw("llama")).qk_norm
  assert hash(config) == hash(config_from_hf(cases.make_raw(
      "qwen3", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)))


def test_defaults_are_those_of_transformers():
  config = config_from_hf(cases.make_raw(
      "llama", num_key_value_heads=None, rms_norm_eps=None, tie_word_embeddings=None,
      rope_theta=None, hidden_act=None))
  assert config.num_kv_heads == 4 and config.head_dim == 8
  assert config.rms_norm_eps == 1e-6 and config.rope.rope_theta == 1e4
  assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)


def test_b48_head_width_is_its_own_field():
  """Qwen3-0.6B: width 1024, 16 heads of 128."""
  config = config_from_hf(cases.make_raw(
      "qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128))
  assert config.head_dim == 128


@pytest.mark.parametrize("fields, message", [
    (dict(model_type="gemma4_text"), "model_type: found 'gemma4_text'"),
    (dict(model_type=None), "model_type: found None"),
    *[({name: None}, f"{name}: found None") for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads")],
    (dict(vocab_size=0), "vocab_size: found 0"),
    (dict(hidden_size="32"), "hidden_size: found '32'"),
    (dict(hidden_act="gelu"), "hidden_act: found 'gelu'"),
    (dict(use_sliding_window=True), "layer_types: found sliding-window layers"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types: found sliding"),
    (dict(num_key_value_heads=3), "num_key_value_heads: found 3"),
    (dict(head_dim=7), "head_dim: found 7"),
    (dict(hidden_size=12), "head_dim: found 3"),
    (dict(rope_scaling={"type": "dynamic"}), "rope_type: found 'dynamic'"),
])
def test_bad_field_is_named(fields, message):
  with pytest.raises(ValueError, match=message) as error:
    config_from_hf(cases.make_raw("llama", **fields))
  assert "\n" not in str(error.value)
