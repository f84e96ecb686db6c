"""Training of EAGLE-3, MTP and Medusa by the common step, and by a whole run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints import Checkpointer
from dspark_jax.drafter import kinds
from dspark_jax.drafter.medusa import MedusaDrafter
from dspark_jax.interop.drafters import load_drafter, save_drafter
from dspark_jax.training import losses, recurrent_loss
from dspark_jax.training import step as step_lib
from dspark_jax.training.run import run, run_config_from_dict
from tests.tiny import fast_compile  # noqa: F401
from tests.training import cases

KINDS = ("eagle3", "mtp", "medusa")


def make(kind, *, num_draft_ids=None):
  """Returns (objective, params, frozen)."""
  fields = {} if kind == "medusa" else {"qk_norm": False}
  config = kinds.config_for_target(kind, cases.TARGET, proposal_len=3,
                                   draft_vocab_size=num_draft_ids, **fields)
  loss = losses.LossConfig(ce_weight=0.5, tv_weight=0.0, confidence_weight=0.0, kl_weight=0.5,
                           chunk=16)
  objective = step_lib.Objective(target_config=cases.TARGET, drafter_config=config, loss=loss,
                                 num_anchors=6)
  params = kinds.KINDS[kind].init_params(config, jax.random.key(0))
  return objective, params, cases.make_frozen(num_draft_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_empty_rows_weigh_nothing(kind):
  objective, params, frozen = make(kind, num_draft_ids=20)
  optimizer = step_lib.OptimizerConfig(learning_rate=1e-2, max_steps=30)
  state = step_lib.init_state(params, jax.random.key(1), optimizer=optimizer)
  batch = cases.make_batch(3)
  # The second micro-batch is a filler: a loss mask of 0 everywhere.
  group = {k: jnp.stack([v, v * (k == "input_ids")]) for k, v in batch.items()}
  found = []
  for _ in range(30):
    state, metrics = step_lib.jit_train_step(state, frozen, group, objective=objective,
                                             optimizer=optimizer)
    found.append({k: float(v) for k, v in metrics.items()})
  assert all(np.isfinite(list(m.values())).all() for m in found)
  assert found[-1]["loss"] < 0.8 * found[0]["loss"]
  assert found[-1]["tau_prob"] > found[0]["tau_prob"] >= 1
  assert 0 < found[0]["outside"] < 1

  grads = jax.jit(step_lib.accumulate, static_argnames="objective")(
      state.params, frozen, {k: v[1:] for k, v in group.items()}, jax.random.key(0),
      objective=objective)[2]
  assert all((g == 0).all() for g in jax.tree.leaves(grads))


def test_blocks_of_a_recurrent_drafter_by_hand():
  """T = 6, mask 0 1 1 0 1 1: step s of position t counts iff mask[t + s] and mask[t + s + 1]."""
  ids = jnp.asarray([[10, 11, 12, 13, 14, 15]])
  blocks = recurrent_loss.make_blocks(ids, jnp.asarray([[0, 1, 1, 0, 1, 1]]), num_steps=2)
  np.testing.assert_array_equal(
      blocks.eval_mask_BxAxG[0], [[0, 1], [1, 0], [0, 0], [0, 1], [1, 0], [0, 0]])
  np.testing.assert_array_equal(
      blocks.labels_BxAxG[0], [[12, 13], [13, 14], [14, 15], [15, 0], [0, 0], [0, 0]])
  np.testing.assert_array_equal(
      blocks.law_positions_BxAxG[0], [[1, 2], [2, 3], [3, 4], [4, 5], [5, 5], [5, 5]])
  # With a mask of what exists, the last position of a span counts too, unless it is the last of
  # all: the law that it would have to match stands at position 6, which does not exist.
  more = recurrent_loss.make_blocks(ids, jnp.asarray([[0, 1, 1, 0, 1, 1]]), num_steps=2,
                                    exists_BxT=jnp.ones((1, 6)))
  np.testing.assert_array_equal(
      more.eval_mask_BxAxG[0], [[0, 1], [1, 1], [1, 0], [0, 1], [1, 0], [0, 0]])


def test_medusa_starts_as_the_target_itself():
  """Heads of 0 behind the target's norm give what the target's own head reads."""
  objective, params, frozen = make("medusa")
  norm = {"weight": jnp.asarray(frozen.target_params["norm"]["weight"])}
  batch = cases.make_batch(1)
  out = step_lib.run_target(frozen, batch["input_ids"], objective=objective)
  hidden = MedusaDrafter(objective.drafter_config).apply(
      {"params": {**params, "hidden_norm": norm}}, out[1])
  np.testing.assert_allclose(hidden, np.repeat(np.asarray(out[0])[:, :, None], 3, axis=2),
                             rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run(kind, tmp_path):
  fields = dict(
      max_len=14, num_eval_rows=2, drafter=dict(kind=kind, proposal_len=3, draft_vocab_size=20),
      train=dict(batch_size=2, num_anchors=4, log_every=1,
                 optimizer=dict(max_steps=2), loss=dict(chunk=16, confidence_weight=0.0)))
  config = run_config_from_dict(fields, cases.TARGET)
  assert kinds.kind_of(config.drafter) == kind
  batch = cases.make_batch(6)
  rows = [{"input_ids": np.asarray(i), "loss_mask": np.asarray(m)}
          for i, m in zip(batch["input_ids"], batch["loss_mask"])]
  result = run(config, target_config=cases.TARGET, target_params=cases.make_target_params(),
               stop_token_ids=[2], rows=rows, workdir=tmp_path,
               checkpointer=Checkpointer(tmp_path / "checkpoints", config=config.fingerprint()))
  assert result.train.is_finished and result.train.metrics["eval_tau_prob"] >= 1
  save_drafter(tmp_path / "drafter", config.drafter, result.params, draft_ids=result.draft_ids)
  again, params, stored = load_drafter(tmp_path / "drafter")
  assert again == config.drafter
  jax.tree.map(np.testing.assert_array_equal, params, result.params)
  np.testing.assert_array_equal(stored["draft_ids"], result.draft_ids)


def test_kinds_are_told_apart_in_a_fingerprint_and_dspark_keeps_its_own():
  fields = dict(max_len=14, num_eval_rows=2)
  prints = [run_config_from_dict(fields | dict(drafter=dict(kind=kind)), cases.TARGET).fingerprint()
            for kind in KINDS]
  assert [p["drafter"]["kind"] for p in prints] == list(KINDS)
  own = run_config_from_dict(fields | dict(drafter=dict(mask_token_id=59)), cases.TARGET)
  # A choice of serving is no part of it: an old run has no such field, and may be resumed.
  of_training = dataclasses.asdict(own.drafter)
  del of_training["markov_candidates"]
  assert own.fingerprint()["drafter"] == of_training
  served = dataclasses.replace(own, drafter=dataclasses.replace(own.drafter, markov_candidates=8))
  assert served.fingerprint() == own.fingerprint()


@pytest.mark.parametrize("drafter, message", [
    (dict(kind="eagle2"), "drafter.kind: found 'eagle2', expected one of dspark, eagle3"),
    (dict(kind="mtp", markov_rank=3), "drafter.markov_rank: found an unknown field of mtp")])
def test_errors_are_named(drafter, message):
  with pytest.raises(ValueError, match=message):
    run_config_from_dict(dict(max_len=14, num_eval_rows=2, drafter=drafter), cases.TARGET)
