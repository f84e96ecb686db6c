"""The target against the public PyTorch reference (shared goldens): logits and features."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.interop.deepspec import load_drafter
from dspark_jax.interop.load import load_target
from dspark_jax.target.transformer import Transformer

FOLDERS = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash")
TOL = 1e-4  # float32, matmul precision "highest" (measured 1.3e-5)

pytestmark = pytest.mark.golden


@functools.partial(jax.jit, static_argnames=("config", "taps"))
def run(config, params, tokens, *, taps):
  model = Transformer(config)
  out = model.apply({"params": params}, tokens, tap_layer_ids=taps)
  return (model.apply({"params": params}, out.hidden_BxTxD, method="head"), out.hidden_BxTxD,
          out.features_BxTxMD)


@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_and_features(goldens, folder):
  target = load_target(str(goldens / folder / "target"))
  drafter_config = load_drafter(goldens / folder / "draft")[0]
  assert drafter_config.target_layer_ids == (0, 2, 4)
  with np.load(goldens / folder / "train_forward.npz") as file:
    golden = dict(file)
  with jax.default_matmul_precision("highest"):
    logits, hidden, features = run(target.config, target.params, jnp.asarray(golden["input_ids"]),
                                   taps=drafter_config.target_layer_ids)
  for name, found in (("target_logits", logits), ("target_last_hidden", hidden),
                      ("target_features", features)):
    assert found.shape == golden[name].shape
    worst = np.abs(np.asarray(found) - golden[name]).max()
    print(f"{folder} {name}: max |difference| {worst:.1e} of {np.abs(golden[name]).max():.1f}")
    np.testing.assert_allclose(found, golden[name], rtol=0, atol=TOL, err_msg=name)
