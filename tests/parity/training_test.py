"""bench_training's two sides compute the same loss and the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training import anchors, losses
from dspark_jax.training import step as step_lib
from experiments import _training_case as case
from experiments import _training_ours

torch = pytest.importorskip("torch", reason="the parity tests need the [parity] extra")
from tests.parity import training_peer  # noqa: E402

SHAPE = case.Shape(vocab_size=61, hidden_size=16, intermediate_size=24, num_layers=4, num_heads=4,
                   num_kv_heads=2, head_dim=6, target_layer_ids=(0, 2), draft_layers=2,
                   markov_rank=5, proposal_len=4, mask_token_id=60, batch_size=3, seq_len=18,
                   num_anchors=5, num_prompt=4, rope_theta=100.0)


def test_both_sides_compute_the_same_loss_and_gradients():
  objective, arrays = _training_ours.make_objective(SHAPE), case.make_arrays(SHAPE, seed=0)
  frozen = step_lib.Frozen(jax.tree.map(jnp.array, arrays["target"]))
  batch = {name: jnp.array(arrays[name]) for name in ("input_ids", "loss_mask")}
  make_key = lambda: jax.random.key(0)  # the same anchors on both sides

  def mean_loss(params):
    loss, sums = step_lib.sum_batch_losses(params, frozen, batch, make_key(), objective=objective)
    return loss / (sums.weight + losses.WEIGHT_FLOOR)

  with jax.default_matmul_precision("highest"):
    expected, gradients = jax.jit(jax.value_and_grad(mean_loss))(
        jax.tree.map(jnp.array, arrays["drafter"]))
  positions, keep = anchors.sample_anchors(make_key(), batch["loss_mask"],
                                           num_anchors=SHAPE.num_anchors)
  assert keep.all()
  # Some block goes past the end of its sequence, so that the eval mask counts.
  assert int(positions.max()) + SHAPE.proposal_len >= SHAPE.seq_len
  drafter = training_peer.to_torch(arrays["drafter"], requires_grad=True)
  loss = training_peer.compute_loss(
      SHAPE, training_peer.to_torch(arrays["target"]), drafter,
      torch.tensor(arrays["input_ids"]).long(), torch.tensor(arrays["loss_mask"]).long(),
      torch.tensor(np.asarray(positions)).long())
  loss.backward()
  # Two float32 implementations of the same sums over at most 61 terms, six layers deep.
  np.testing.assert_allclose(loss.item(), expected, rtol=1e-5)
  found = jax.tree.map(lambda x: x.grad.numpy(), drafter)
  for path, value in jax.tree_util.tree_leaves_with_path(gradients):
    other = found
    for entry in path:
      other = other[entry.key]
    np.testing.assert_allclose(other, value, atol=1e-4 * float(np.abs(value).max()) + 1e-7,
                               err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_learns(dtype):
  step = training_peer.make_step(SHAPE, case.make_arrays(SHAPE, seed=0), dtype=dtype)
  first, *_, last = [step() for _ in range(30)]
  assert last < first
