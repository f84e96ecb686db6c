import dataclasses
import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.target.transformer import Transformer
from dspark_jax.training import anchors
from dspark_jax.training import losses
from dspark_jax.training import step as step_lib
from tests.tiny import fast_compile  # noqa: F401
from tests.training import cases

OPTIMIZER = step_lib.OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.0, max_steps=10,
                                     weight_decay=0.1)


@pytest.fixture(autouse=True)
def _full_precision():
  with jax.default_matmul_precision("highest"):
    yield


@functools.partial(jax.jit, static_argnames=("objective",))
def accumulate(params, frozen, batches, key, *, objective):
  return step_lib.accumulate(params, frozen, batches, key, objective=objective)


def stack(*batches):
  return jax.tree.map(lambda *a: jnp.stack(a), *batches)


def test_gradient_is_that_of_the_mean_loss():
  objective = cases.make_objective()
  params, frozen, batch = cases.make_params(objective), cases.make_frozen(), cases.make_batch()
  key = jax.random.key(3)
  loss, sums, gradient = accumulate(params, frozen, stack(batch), key, objective=objective)

  def mean(params):
    loss, sums = step_lib.sum_batch_losses(params, frozen, batch, jax.random.fold_in(key, 0),
                                           objective=objective)
    return loss / (sums.weight + losses.WEIGHT_FLOOR)

  value, expected = jax.jit(jax.value_and_grad(mean))(params)
  np.testing.assert_allclose(loss / (sums.weight + losses.WEIGHT_FLOOR), value, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, expected)


def test_blocks_see_only_the_context_before_their_anchor():
  # Fault B33: S = 12, K = 4, anchors 2 and 4.
  objective = cases.make_objective()
  params = cases.make_params(objective)
  features = jax.random.normal(jax.random.key(0), (1, 12, 32))
  ids = jnp.arange(12)[None]
  blocks = anchors.gather_blocks(ids, jnp.ones((1, 12)), jnp.array([[2, 4]]),
                                 jnp.ones((1, 2), bool), proposal_len=4)

  def loss_of(block, features):
    only = blocks.replace(eval_mask_BxAxG=blocks.eval_mask_BxAxG
                          & (jnp.arange(2) == block)[None, :, None])
    hidden = jax.random.normal(jax.random.key(1), (1, 12, 16))
    return step_lib.sum_block_losses(params, cases.make_frozen(), (hidden, features, None), only,
                                     objective=objective)[0]

  for block, anchor in enumerate((2, 4)):
    gradient = jax.jit(jax.grad(functools.partial(loss_of, block)))(features)
    moved = jnp.abs(gradient[0]).sum(-1) > 0
    assert moved.tolist() == [True] * anchor + [False] * (12 - anchor)


@pytest.mark.parametrize("mask", [
    [0] * 6, [0, 0, 0, 0, 0, 1], [1, 0, 1, 0, 1, 0]])
@pytest.mark.parametrize("num_draft_ids", [None, 20])
def test_no_valid_anchor_is_zero_and_finite(mask, num_draft_ids):  # B35
  overrides = {} if num_draft_ids is None else dict(draft_vocab_size=num_draft_ids)
  objective = cases.make_objective(num_anchors=4, **overrides)
  batch = {"input_ids": jnp.arange(6)[None] + 3, "loss_mask": jnp.array([mask])}
  loss, sums, gradient = accumulate(
      cases.make_params(objective), cases.make_frozen(num_draft_ids), stack(batch),
      jax.random.key(0), objective=objective)
  assert loss == 0 and sums.weight == 0
  assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


def test_accumulation_equals_the_joined_batch():
  # B41: micro-batches with very different numbers of drafts; anchors = all candidates, so that
  # the draw does not matter.
  objective = cases.make_objective(num_anchors=13)
  params, frozen = cases.make_params(objective), cases.make_frozen()
  few, many = cases.make_batch(2, num_prompt=11), cases.make_batch(2, num_prompt=2, seed=1)
  joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), few, many)
  key = jax.random.key(0)
  apart = accumulate(params, frozen, stack(few, many), key, objective=objective)
  whole = accumulate(params, frozen, stack(joined), key, objective=objective)
  np.testing.assert_allclose(apart[0], whole[0], rtol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), apart[1], whole[1])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), apart[2], whole[2])
  # The wrong way, a mean of the two means, is far from it.
  mean = lambda batch: accumulate(params, frozen, stack(batch), key, objective=objective)[2]
  wrong = jax.tree.map(lambda a, b: (a + b) / 2, mean(few), mean(many))
  gap = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(wrong),
                                                         jax.tree.leaves(whole[2])))
  assert gap > 1e-3


def test_two_devices_give_the_gradient_of_the_whole_batch():
  """B41 on a CPU mesh; a process of its own, since the device count is fixed at start."""
  script = textwrap.dedent("""
      import jax, jax.numpy as jnp, numpy as np
      jax.config.update("jax_num_cpu_devices", 2)
      jax.config.update("jax_default_matmul_precision", "highest")
      from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
      from dspark_jax.training import step
      from tests.training import cases
      objective = cases.make_objective(num_anchors=13)
      params, frozen = cases.make_params(objective), cases.make_frozen()
      few, many = cases.make_batch(1, num_prompt=11), cases.make_batch(1, num_prompt=2, seed=1)
      batch = jax.tree.map(lambda a, b: jnp.concatenate([a, b])[None], few, many)
      f = jax.jit(step.accumulate, static_argnames="objective")
      one = f(params, frozen, batch, jax.random.key(0), objective=objective)
      mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
      place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
      split = place(batch, P(None, "data"))
      assert len(split["input_ids"].sharding.device_set) == 2
      two = f(place(params, P()), place(frozen, P()), split, place(jax.random.key(0), P()),
              objective=objective)
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), one, two)
      print("equal")
      """)
  out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
  assert out.stdout.strip().endswith("equal"), out.stderr[-2000:]


def test_frozen_weights_do_not_move_and_have_no_moments():  # B40
  objective = cases.make_objective()
  params, frozen = cases.make_params(objective), cases.make_frozen()
  before = jax.tree.map(np.array, frozen)
  state = step_lib.init_state(params, jax.random.key(0), optimizer=OPTIMIZER)
  start = jax.tree.map(np.array, params)
  state, _ = step_lib.jit_train_step(state, frozen, stack(cases.make_batch()),
                                     objective=objective, optimizer=OPTIMIZER)
  jax.tree.map(np.testing.assert_array_equal, before, frozen)
  shapes = {a.shape for a in jax.tree.leaves((state.params, state.opt_state))}
  assert not any(cases.TARGET.vocab_size == s[0] and 16 in s for s in shapes if s)
  moved = jax.tree.map(lambda a, b: bool((a != b).any()), start, state.params)
  assert all(jax.tree.leaves(moved))
  # Teacher and head are detached: the loss has no gradient to any frozen weight.
  loss = lambda frozen: step_lib.sum_batch_losses(state.params, frozen, cases.make_batch(),
                                                  jax.random.key(1), objective=objective)[0]
  gradient = jax.jit(jax.grad(loss))(frozen).target_params
  gradient = dict(gradient)
  embed = gradient.pop("embed_tokens")
  assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))
  # The embedding feeds the draft blocks, so it has one mathematically; only anchor rows and mask.
  assert not embed[58].any()


@pytest.mark.parametrize("is_detached", [True, False])
def test_confidence_alone_pulls_on_the_backbone_only_when_asked(is_detached):  # B42
  loss = losses.LossConfig(0.0, 0.0, 1.0, chunk=16)
  gradients = {}
  for flag in (True, False):
    objective = cases.make_objective(loss=loss, confidence_stop_gradient=flag)
    gradients[flag] = accumulate(
        cases.make_params(objective), cases.make_frozen(), stack(cases.make_batch()),
        jax.random.key(0), objective=objective)[2]
  found = gradients[is_detached]
  pulled = [found["backbone"]["layers_0"]["mlp"]["up_proj"]["weight"],
            found["markov_head"]["markov_w1"]]
  assert all(bool(g.any()) != is_detached for g in pulled)
  assert not found["markov_head"]["markov_w2"].any()  # only reachable through the detached label
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
               gradients[True]["confidence_head"], gradients[False]["confidence_head"])


def test_confidence_alone_has_the_labels_of_the_full_loss():
  sums = [accumulate(cases.make_params(objective), cases.make_frozen(),
                     stack(cases.make_batch()), jax.random.key(0), objective=objective)[1]
          for objective in (cases.make_objective(), cases.make_objective(
              loss=losses.LossConfig(0.0, 0.0, 1.0, chunk=16)))]
  np.testing.assert_allclose(sums[0].confidence, sums[1].confidence, rtol=1e-6)
  np.testing.assert_allclose(sums[0].tau, sums[1].tau, rtol=1e-6)


def test_target_law_comes_from_the_normed_state_and_taps_do_not():
  # B38: h = (3, 4), norm weight (2, 1), head = I: law (0.638, 0.362); un-normed (0.269, 0.731).
  normed = np.array([3.0, 4.0]) / np.sqrt(12.5) * np.array([2.0, 1.0])
  np.testing.assert_allclose(np.exp(normed) / np.exp(normed).sum(), [0.638, 0.362], atol=5e-4)
  objective = cases.make_objective()
  ids = cases.make_batch()["input_ids"]
  hidden, features, lse = step_lib.run_target(cases.make_frozen(), ids, objective=objective)
  model = Transformer(cases.TARGET)
  out = model.apply({"params": cases.make_target_params()}, ids, tap_layer_ids=(0, 1, 2))
  last_raw = out.features_BxTxMD[..., 32:]
  weight = cases.make_target_params()["norm"]["weight"]
  rms = jnp.sqrt(jnp.mean(last_raw**2, -1, keepdims=True) + cases.TARGET.rms_norm_eps)
  np.testing.assert_allclose(hidden, last_raw / rms * weight[None, None], rtol=1e-5)
  np.testing.assert_allclose(features, out.features_BxTxMD[..., :32], rtol=1e-6)
  assert lse is None


def test_reduced_vocabulary_equals_the_whole_when_it_is_the_whole():
  whole, reduced = cases.make_objective(), cases.make_objective(draft_vocab_size=60)
  params, batch = cases.make_params(whole), stack(cases.make_batch())
  frozen = cases.make_frozen()
  key = jax.random.key(0)
  one = accumulate(params, frozen, batch, key, objective=whole)
  all_ids = frozen.replace(draft_ids_Vd=jnp.arange(60, dtype=jnp.int32))
  two = accumulate(params, all_ids, batch, key, objective=reduced)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, two)


def test_schedule():
  # B61: warm-up of 10 steps to 1e-3: step 7 has 7e-4; then a cosine to 0 at the last step.
  schedule = step_lib.learning_rate_schedule(step_lib.OptimizerConfig(
      learning_rate=1e-3, warmup_fraction=0.1, max_steps=100))
  np.testing.assert_allclose([schedule(0), schedule(7), schedule(10), schedule(55), schedule(100)],
                             [0, 7e-4, 1e-3, 5e-4, 0], atol=1e-9)


def test_training_learns():
  objective = cases.make_objective(num_anchors=9)
  optimizer = step_lib.OptimizerConfig(learning_rate=1e-2, max_steps=60)
  frozen, batch = cases.make_frozen(), stack(cases.make_batch())
  state = step_lib.init_state(cases.make_params(objective), jax.random.key(0),
                              optimizer=optimizer)
  taus = []
  for _ in range(60):
    state, metrics = step_lib.jit_train_step(state, frozen, batch, objective=objective,
                                             optimizer=optimizer)
    taus.append(float(metrics["tau_prob"]))
  assert taus[-1] > taus[0] + 0.5


def test_bfloat16_option_runs_with_float32_parameters():
  objective = cases.make_objective()
  half = dataclasses.replace(objective, dtype=jnp.bfloat16, target_dtype=jnp.bfloat16)
  params, batch = cases.make_params(objective), stack(cases.make_batch())
  exact = accumulate(params, cases.make_frozen(), batch, jax.random.key(0), objective=objective)
  rough = accumulate(params, cases.make_frozen(), batch, jax.random.key(0), objective=half)
  np.testing.assert_allclose(rough[0], exact[0], rtol=0.05)  # bf16 has 8 bits
  assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(rough[2]))


def test_target_layers_cast_beforehand_change_nothing():
  half = dataclasses.replace(cases.make_objective(), target_dtype=jnp.bfloat16)
  params, batch, frozen = cases.make_params(half), stack(cases.make_batch()), cases.make_frozen()
  cast = frozen.cast_layers(jnp.bfloat16)
  assert cast.target_params["layers_0"]["mlp"]["up_proj"]["weight"].dtype == jnp.bfloat16
  assert cast.head_VxD.dtype == jnp.float32  # the drafter reads it, and may compute in float32
  run = lambda frozen: accumulate(params, frozen, batch, jax.random.key(0), objective=half)
  jax.tree.map(np.testing.assert_array_equal, run(cast), run(frozen))
