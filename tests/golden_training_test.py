"""Losses and gradient norms of the PyTorch reference, with its anchors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.interop.deepspec import load_drafter
from dspark_jax.interop.load import load_target
from dspark_jax.training import anchors
from dspark_jax.training import losses
from dspark_jax.training import step as step_lib
from tests.tiny import fast_compile  # noqa: F401

FOLDERS = ["qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash"]


@pytest.fixture(autouse=True)
def _full_precision():
  with jax.default_matmul_precision("highest"):
    yield


@functools.lru_cache
def load(folder):
  target = load_target(str(folder / "target"))
  config, params = load_drafter(str(folder / "draft"))[:2]
  return target, config, params, dict(np.load(folder / "train_forward.npz"))


def make_blocks(golden, proposal_len):
  return anchors.gather_blocks(
      jnp.asarray(golden["input_ids"], jnp.int32), jnp.asarray(golden["loss_mask"]),
      jnp.asarray(golden["anchor_positions"], jnp.int32), jnp.asarray(golden["block_keep_mask"]),
      proposal_len=proposal_len)


def run(folder, weights, *, with_gradient=False):
  """Returns (mean loss, gradient) with the given (CE, TV, CONF) weights."""
  target, config, params, golden = load(folder)
  ce, tv, confidence = weights
  objective = step_lib.Objective(
      target_config=target.config, drafter_config=config,
      loss=losses.LossConfig(ce, tv, confidence, loss_decay=4.0, chunk=64))
  frozen = step_lib.Frozen(target_params=target.params)

  @jax.jit
  def loss(params):
    out = step_lib.run_target(frozen, jnp.asarray(golden["input_ids"], jnp.int32),
                              objective=objective)
    blocks = make_blocks(golden, config.proposal_len)
    total, sums = step_lib.sum_block_losses(params, frozen, out, blocks, objective=objective)
    return total / (sums.weight + losses.WEIGHT_FLOOR)

  if not with_gradient:
    return loss(params), None
  return jax.value_and_grad(loss)(params)


@pytest.mark.golden
@pytest.mark.parametrize("name", FOLDERS)
def test_labels_and_eval_mask(goldens, name):
  _, config, _, golden = load(goldens / name)
  blocks = make_blocks(golden, config.proposal_len)
  np.testing.assert_array_equal(blocks.eval_mask_BxAxG, golden["eval_mask"])
  mask = golden["eval_mask"]
  np.testing.assert_array_equal(np.asarray(blocks.labels_BxAxG)[mask], golden["target_ids"][mask])


def tensor_path(name):
  """HF tensor name -> path of keys in our parameter tree, written here from the README's list."""
  parts = name.split(".")
  if parts[0] == "layers":
    parts = [f"layers_{parts[1]}", *parts[2:]]
  if parts[0] in ("markov_head", "confidence_head"):
    return parts[:2] if parts[1].startswith("markov_w") else parts
  return ["backbone", *parts]


@pytest.mark.golden
@pytest.mark.parametrize("name", FOLDERS)
def test_losses_and_gradient_norms(goldens, name):
  folder = goldens / name
  golden = load(folder)[3]
  full = (1.0, 0.0, 0.0) if name == "qwen3_dflash" else (0.1, 0.9, 1.0)
  value, gradient = run(folder, full, with_gradient=True)
  np.testing.assert_allclose(value, golden["loss"], rtol=1e-5)
  for key, weights in (("loss_ce", (1., 0., 0.)), ("loss_l1", (0., 1., 0.)),
                       ("loss_conf", (0., 0., 1.))):
    if key in golden:
      np.testing.assert_allclose(run(folder, weights)[0], golden[key], rtol=1e-5, err_msg=key)
  names = [key.removeprefix("grad_norm/") for key in golden if key.startswith("grad_norm/")]
  for tensor in names:
    found = functools.reduce(lambda tree, key: tree[key], tensor_path(tensor), gradient)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(found, np.float64)),
                               golden[f"grad_norm/{tensor}"], rtol=1e-3, err_msg=tensor)
  assert len(names) == len(jax.tree.leaves(gradient))  # every parameter was compared
