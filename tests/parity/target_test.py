"""Targets against transformers on tiny random models, written by it and read by `load_target`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers
from dspark_jax.interop.load import load_target
from dspark_jax.target.transformer import Transformer

torch = pytest.importorskip("torch", reason="the parity tests need the [parity] extra")
transformers = pytest.importorskip("transformers")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

# Two float32 implementations of the same sums over at most 64 terms, logits of up to about 10.
TOL = 1e-4

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SCALINGS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": YARN,
    "yarn32": YARN | {"factor": 32.0, "attention_factor": 1.0},
    "yarn mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 16.0},
    "yarn untruncated": YARN | {"truncate": False},
}
SHAPE = dict(vocab_size=41, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             bos_token_id=1, eos_token_id=2)
TOKENS = np.random.default_rng(0).integers(0, 41, (2, 24))


def make_model(family: str, **fields):
  """A random model in which no norm weight and no bias keeps its trivial start (fault B48)."""
  config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[family]
  causal = {"llama": transformers.LlamaForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}[family]
  torch.manual_seed(0)
  model = causal(config(**(SHAPE | fields))).eval()
  with torch.no_grad():
    for name, p in model.named_parameters():
      center = 1.0 if "norm" in name else 0.0
      p.copy_(center + torch.randn_like(p) * 0.3)
  return model


def run_torch(model, tokens):
  with torch.no_grad():
    out = model(torch.tensor(tokens), output_hidden_states=True)
  return out.logits.numpy(), [h.numpy() for h in out.hidden_states]


@pytest.mark.parametrize("family, fields", [
    *[("llama", dict(rope_parameters={"rope_theta": 100.0, "rope_type": "default"} | s))
      for s in SCALINGS.values()],
    ("llama", dict(head_dim=12, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3)),
    ("llama", dict(tie_word_embeddings=True, num_key_value_heads=4)),
    ("qwen3", dict(head_dim=16)),
    ("qwen3", dict(head_dim=16, attention_bias=True, num_key_value_heads=1,
                   rope_parameters={"rope_theta": 1e6} | YARN)),
    ("qwen3", dict(head_dim=8, tie_word_embeddings=True)),
])
def test_logits_and_hidden_states(tmp_path, family, fields):
  model = make_model(family, **fields)
  model.save_pretrained(tmp_path)
  logits, hidden = run_torch(model, TOKENS)
  target = load_target(str(tmp_path))
  network = Transformer(target.config)

  @jax.jit
  def run(params, tokens):
    out = network.apply({"params": params}, tokens, tap_layer_ids=(-1, 0))
    return (network.apply({"params": params}, out.hidden_BxTxD, method="head"), out.hidden_BxTxD,
            out.features_BxTxMD)

  with jax.default_matmul_precision("highest"):
    found, last, taps = run(target.params, jnp.asarray(TOKENS))
  worst = np.abs(found - logits).max()
  print(f"{family} {fields}: max |difference| {worst:.1e} of logits up to "
        f"{np.abs(logits).max():.1f}")
  np.testing.assert_allclose(found, logits, rtol=0, atol=TOL)
  np.testing.assert_allclose(last, hidden[-1], rtol=0, atol=TOL)
  np.testing.assert_allclose(taps, np.concatenate(hidden[:2], axis=-1), rtol=0, atol=TOL)


@pytest.mark.parametrize("head_dim, theta", [(64, 500000.0), (128, 1e6), (8, 100.0)])
@pytest.mark.parametrize("name", [n for n in SCALINGS if n != "default"])
def test_rope_frequencies(name, head_dim, theta):
  """Also at published shapes: Llama 3 (8192 tokens before scaling) and Qwen3 (32768)."""
  for context in (8192, 32768):
    scaling = {"rope_theta": theta} | SCALINGS[name]
    if "original_max_position_embeddings" in scaling:
      scaling["original_max_position_embeddings"] = context
    config = transformers.LlamaConfig(head_dim=head_dim, max_position_embeddings=131072,
                                      rope_parameters=dict(scaling))
    inv, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    rope = layers.rope_config_from_hf({"rope_parameters": scaling})
    found, found_scale = layers.rope_frequencies(rope, head_dim)
    # Theirs is computed in float32, ours in float64 and rounded: a few float32 ulps.
    np.testing.assert_allclose(found, inv.numpy(), rtol=2e-6)
    assert found_scale == pytest.approx(scale, rel=1e-12)
