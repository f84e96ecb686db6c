import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training import anchors
from dspark_jax.training import losses

E = jnp.eye(2)


def make_blocks(eval_mask, labels, law_positions):
  """One sequence, blocks of the given rows; teacher tokens play no part in the loss."""
  mask = jnp.array([eval_mask], bool)
  return anchors.Blocks(
      anchor_positions_BxA=jnp.zeros(mask.shape[:2], jnp.int32), keep_BxA=mask[..., 0],
      anchors_BxA=jnp.zeros(mask.shape[:2], jnp.int32), labels_BxAxG=jnp.array([labels]),
      prev_tokens_BxAxG=jnp.zeros(mask.shape, jnp.int32), eval_mask_BxAxG=mask,
      law_positions_BxAxG=jnp.array([law_positions]))


def run(hidden_AxGxD, blocks, config, *, target_hidden_TxD=E, confidence_AxG=None, head=E, **more):
  hidden = jnp.asarray(hidden_AxGxD, jnp.float32)[None]
  confidence = None if confidence_AxG is None else jnp.asarray(confidence_AxG, jnp.float32)[None]
  return losses.sum_losses(
      hidden, jnp.zeros((*hidden.shape[:3], 0)), jnp.zeros((head.shape[0], 0)), confidence,
      target_hidden_BxTxD=jnp.asarray(target_hidden_TxD, jnp.float32)[None], lm_head_VdxD=head,
      blocks=blocks, config=config, **more)


def test_dropped_blocks_do_not_count():
  # B36 companion: two blocks with CE 1 and 9, the second dropped: 1, and not their mean 5.
  # With logits (x, 0), -log p(0) = log(1 + exp(-x)), so x = -log(exp(ce) - 1).
  hidden = [[[-np.log(np.expm1(1.0)), 0.0]], [[-np.log(np.expm1(9.0)), 0.0]]]
  blocks = make_blocks([[True], [False]], [[0], [0]], [[0], [0]])
  loss, sums = run(hidden, blocks, losses.LossConfig(ce_weight=1.0, tv_weight=0.0))
  np.testing.assert_allclose(losses.summarize(loss, sums)["loss"], 1.0, rtol=1e-5)
  both = make_blocks([[True], [True]], [[0], [0]], [[0], [0]])
  loss, sums = run(hidden, both, losses.LossConfig(ce_weight=1.0, tv_weight=0.0))
  np.testing.assert_allclose(losses.summarize(loss, sums)["loss"], 5.0, rtol=1e-5)


def test_labels_accept_rate_and_tau_by_hand():
  # p_d = (.7, .2, .1) against p_t = (.5, .3, .2) at both drafts: c* = .8 (B42); block of 2.
  head, p_d, p_t = jnp.eye(3), np.log([.7, .2, .1]), np.log([.5, .3, .2])
  blocks = make_blocks([[True, True]], [[1, 0]], [[0, 1]])
  config = losses.LossConfig(loss_decay=2.0)
  loss, sums = run([[p_d, p_d]], blocks, config, target_hidden_TxD=[p_t, p_t],
                   confidence_AxG=[[0.0, 0.0]], head=head)
  w = np.exp(-0.5)
  metrics = losses.summarize(loss, sums)
  ce = (-np.log(.2) - w * np.log(.7)) / (1 + w)
  np.testing.assert_allclose(metrics["loss_ce"], ce, rtol=1e-5)
  np.testing.assert_allclose(metrics["loss_tv"], 0.4, rtol=1e-5)
  np.testing.assert_allclose(metrics["loss_confidence"], np.log(2), rtol=1e-5)
  np.testing.assert_allclose(metrics["loss"], .1 * ce + .9 * .4 + np.log(2), rtol=1e-5)
  np.testing.assert_allclose(metrics["tau_prob"], 1 + .8 + .64, rtol=1e-5)
  np.testing.assert_allclose([metrics["accept_rate_1"], metrics["accept_rate_2"]], .8, rtol=1e-5)
  # The label is c* itself: BCE is smallest at its logit, ln 4.
  bce = lambda z: run([[p_d, p_d]], blocks, config, target_hidden_TxD=[p_t, p_t],
                      confidence_AxG=[[z, z]], head=head)[1].confidence
  np.testing.assert_allclose(jax.grad(bce)(jnp.log(4.0)), 0.0, atol=1e-6)


def test_the_law_is_that_of_the_position_before_the_label():
  target = jnp.array([[5.0, 0.0], [0.0, 5.0]])
  first = run([[[5.0, 0.0]]], make_blocks([[True]], [[0]], [[0]]), losses.LossConfig(),
              target_hidden_TxD=target)[1].accept_G[0]
  second = run([[[5.0, 0.0]]], make_blocks([[True]], [[0]], [[1]]), losses.LossConfig(),
               target_hidden_TxD=target)[1].accept_G[0]
  assert first > 0.99 and second < 0.02


@pytest.mark.parametrize("logit, expected", [(1000.0, 200.0), (-1000.0, 800.0)])
def test_binary_cross_entropy_does_not_overflow(logit, expected):  # B42
  np.testing.assert_allclose(losses.binary_cross_entropy(jnp.float32(logit), jnp.float32(0.8)),
                             expected, rtol=1e-6)


def test_no_draft_at_all_is_zero():
  blocks = make_blocks([[False], [False]], [[0], [0]], [[0], [0]])
  value = lambda hidden: run(hidden, blocks, losses.LossConfig(), confidence_AxG=[[3.], [3.]])
  (loss, sums), gradient = jax.value_and_grad(value, has_aux=True)(jnp.ones((2, 1, 2)))
  assert loss == 0 and not gradient.any()
  assert all(np.isfinite(v) and v == 0 for v in losses.summarize(loss, sums).values())


def test_reduced_vocabulary():
  ids = jnp.array([1, 4, 7], jnp.int32)
  assert losses.to_draft_index(jnp.array([0, 1, 4, 5, 7, 9]), ids).tolist() == [
      -1, 0, 1, -1, 2, -1]
  blocks = make_blocks([[True], [True]], [[4], [5]], [[0], [0]])
  _, sums = run([[[0., 0.]], [[0., 0.]]], blocks, losses.LossConfig(), head=jnp.ones((3, 2)),
                draft_ids_Vd=ids, target_lse_BxT=jnp.full((1, 2), 10.0))
  assert sums.num_outside == 1
  np.testing.assert_allclose(sums.ce, np.log(3), rtol=1e-6)  # only the label inside pays
  with pytest.raises(ValueError, match="target_lse"):
    run([[[0., 0.]], [[0., 0.]]], blocks, losses.LossConfig(), draft_ids_Vd=ids)


# Objectives beside CE + TV -----------------------------------------------------------------------

P_D, P_T = np.array([.7, .2, .1]), np.array([.5, .3, .2])  # acceptance .5 + .2 + .1 = .8


def run_two(config, labels=(1, 0), mask=(True, True), **more):
  """One block of two drafts with laws P_D against P_T."""
  blocks = make_blocks([list(mask)], [list(labels)], [[0, 1]])
  return run([[np.log(P_D)] * 2], blocks, config, target_hidden_TxD=[np.log(P_T)] * 2,
             head=jnp.eye(3), **more)


@pytest.mark.parametrize("form, expected", [
    ("alpha", -np.log(.8)),
    ("lambda", np.exp(-2.4) * np.sum(P_T * np.log(P_T / P_D)) + (1 - np.exp(-2.4)) * .2)])
def test_lk_by_hand(form, expected):
  config = losses.LossConfig(0.0, 0.0, 0.0, lk_weight=1.0, lk_form=form, loss_decay=2.0)
  loss, sums = run_two(config)
  np.testing.assert_allclose(losses.summarize(loss, sums)["loss"], expected, rtol=1e-5)


def test_kl_by_hand():
  loss, sums = run_two(losses.LossConfig(0.0, 0.0, 0.0, kl_weight=2.0))
  np.testing.assert_allclose(losses.summarize(loss, sums)["loss"],
                             2 * np.sum(P_T * np.log(P_T / P_D)), rtol=1e-5)


def test_dpace_by_hand():
  # q = .2, .7 and c = .5: factors .6, .85; P = .6, .51; w = 1.11, .51, per block and not divided.
  config = losses.LossConfig(1.0, 0.0, 0.0, weighting="dpace")
  loss, sums = run_two(config)
  expected = -1.11 * np.log(.2) - .51 * np.log(.7)
  np.testing.assert_allclose([loss, losses.summarize(loss, sums)["loss"]], expected, rtol=1e-5)
  # Only the first draft counts: w = P_1 = .6.
  loss, _ = run_two(config, mask=(True, False))
  np.testing.assert_allclose(loss, -.6 * np.log(.2), rtol=1e-5)


def test_dpace_weighs_the_other_terms_and_leaves_confidence_its_decay():
  config = losses.LossConfig(0.0, 1.0, 1.0, weighting="dpace", loss_decay=2.0)
  loss, sums = run_two(config, confidence_AxG=[[0.0, 0.0]])
  np.testing.assert_allclose(sums.tv, (1.11 + .51) * .4, rtol=1e-5)
  np.testing.assert_allclose(sums.confidence, (1 + np.exp(-.5)) * np.log(2), rtol=1e-5)
  np.testing.assert_allclose(loss, sums.tv + sums.confidence, rtol=1e-6)


def test_dpace_of_a_label_outside_the_draft_vocabulary():
  # Draft 1 cannot be right: q = 0, factor .5; then P = .5, .425 and w = .925, .425.
  config = losses.LossConfig(1.0, 0.0, 0.0, weighting="dpace")
  loss, sums = run_two(config, labels=(5, 0), draft_ids_Vd=jnp.array([0, 2, 4], jnp.int32),
                       target_lse_BxT=jnp.zeros((1, 2)))
  assert sums.num_outside == 1
  np.testing.assert_allclose(loss, -.425 * np.log(.7), rtol=1e-5)


@pytest.mark.parametrize("smoothing", [.3, 1.0])
def test_dpace_weights_are_gradients_of_the_accepted_length(smoothing):
  """w_j is d sum_m P_m / d log((1 - c) q_j + c), by central differences in float64."""
  rng = np.random.default_rng(0)
  q = rng.uniform(size=(3, 5))
  mask = np.arange(5)[None] < np.array([5, 3, 0])[:, None]

  def compute_length(log_factor):
    return np.sum(np.cumprod(np.where(mask, np.exp(log_factor), 0), axis=1))

  log_factor = np.log((1 - smoothing) * q + smoothing)
  expected = np.zeros_like(q)
  for at in np.ndindex(q.shape):
    step = np.zeros_like(q)
    step[at] = 1e-6
    expected[at] = (compute_length(log_factor + step) - compute_length(log_factor - step)) / 2e-6
  found = losses.dpace_weights(jnp.asarray(q, jnp.float32), jnp.asarray(mask), smoothing)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_dpace_weights_have_no_gradient():
  """The gradient is that of CE with the weights 1.11 and .51 held fixed."""
  blocks = make_blocks([[True, True]], [[1, 0]], [[0, 1]])
  dpace = losses.LossConfig(1.0, 0.0, 0.0, weighting="dpace")
  value = lambda config: lambda hidden: run(hidden, blocks, config, head=jnp.eye(3),
                                            target_hidden_TxD=[np.log(P_T)] * 2)[0]
  hidden = jnp.asarray([[np.log(P_D)] * 2])
  expected = np.array([[P_D - np.eye(3)[1], P_D - np.eye(3)[0]]]) * [[[1.11], [.51]]]
  np.testing.assert_allclose(jax.grad(value(dpace))(hidden), expected, rtol=1e-5)


@pytest.mark.parametrize("field, value", [
    ("lk_weight", -1.0), ("lk_eta", -1.0), ("lk_form", "beta"), ("weighting", "pace"),
    ("dpace_smoothing", 0.0), ("dpace_smoothing", 1.5)])
def test_refuses_bad_options(field, value):
  with pytest.raises(ValueError, match=f"^{field}: found .*expected"):
    losses.LossConfig(**{field: value})


def test_refuses_bad_weights():
  with pytest.raises(ValueError, match="tv_weight"):
    losses.LossConfig(tv_weight=-1.0)
  with pytest.raises(ValueError, match="loss_decay"):
    losses.LossConfig(loss_decay=0.0)
