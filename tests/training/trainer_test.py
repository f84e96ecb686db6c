import json
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

from dspark_jax.checkpoints import Checkpointer
from dspark_jax.data.pipeline import Batches, PipelineConfig
from dspark_jax.training import step as step_lib
from dspark_jax.training import trainer
from dspark_jax.training.config import TrainConfig, train_config_from_dict
from tests.tiny import fast_compile  # noqa: F401
from tests.training import cases

ROOT = pathlib.Path(__file__).resolve().parents[2]


def make_config(max_steps=6, **fields):
  return TrainConfig(**{**dict(
      batch_size=2, accumulation=2, num_anchors=4, log_every=1, checkpoint_every=1,
      optimizer=step_lib.OptimizerConfig(learning_rate=1e-2, max_steps=max_steps)), **fields})


def make_batches(num_rows=11, num_epochs=None):
  batch = cases.make_batch(num_rows)
  rows = [{"input_ids": np.asarray(i), "loss_mask": np.asarray(m)}
          for i, m in zip(batch["input_ids"], batch["loss_mask"])]
  return Batches(rows, config=PipelineConfig(batch_size=2, max_len=14, num_epochs=num_epochs))


def run(workdir, *, config=None, on_step=None, **more):
  config = make_config() if config is None else config
  objective = cases.make_objective(num_anchors=config.num_anchors)
  saver = Checkpointer(pathlib.Path(workdir) / "checkpoints", config=config.fingerprint())
  return trainer.train(
      config, target_config=cases.TARGET, drafter_config=objective.drafter_config,
      frozen=cases.make_frozen(), params=cases.make_params(objective),
      batches=more.pop("batches", None) or make_batches(), checkpointer=saver, workdir=workdir,
      on_step=on_step, **more)


class Stop(Exception):
  pass


def stop_after(step):
  def on_step(num_done):
    if num_done == step:
      raise Stop
  return on_step


def read_state(workdir, config):
  """Everything in the last checkpoint, as arrays, and the data position."""
  template = step_lib.init_state(
      cases.make_params(cases.make_objective()), jax.random.key(9), optimizer=config.optimizer)
  saver = Checkpointer(pathlib.Path(workdir) / "checkpoints", config=config.fingerprint())
  state, data_state = saver.restore(template)
  state = state.replace(key=jax.random.key_data(state.key))
  return jax.tree.map(np.asarray, state), data_state


def assert_same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a[0], b[0])
  assert a[1] == b[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Directory and result of a run that nothing stopped."""
  directory = tmp_path_factory.mktemp("whole")
  return directory, run(directory)


def test_stop_and_resume_is_bit_identical(whole, tmp_path):  # B61
  config = make_config()
  with pytest.raises(Stop):
    run(tmp_path / "parts", on_step=stop_after(2))
  parts = run(tmp_path / "parts")
  assert whole[1].num_steps == parts.num_steps == 6 and parts.is_finished
  assert_same(read_state(whole[0], config), read_state(tmp_path / "parts", config))
  losses = {}
  for name, directory in (("whole", whole[0]), ("parts", tmp_path / "parts")):
    lines = [json.loads(x) for x in (directory / trainer.METRICS_FILE).open()]
    losses[name] = [(x["step"], x["loss"]) for x in lines]
  assert losses["whole"] == losses["parts"] and len(losses["whole"]) == 6
  assert (tmp_path / "parts" / "curves.png").stat().st_size > 1000
  assert list((tmp_path / "parts" / "tensorboard").glob("events*"))


def test_a_lost_step_is_repeated_not_skipped(whole, tmp_path):
  # Checkpoints at 2 and 4, stop after 3: step 3 is done again from the state and data of 2.
  config = make_config(checkpoint_every=2)
  with pytest.raises(Stop):
    run(tmp_path / "parts", config=config, on_step=stop_after(3))
  run(tmp_path / "parts", config=config)
  assert_same(read_state(whole[0], config), read_state(tmp_path / "parts", config))
  steps = [json.loads(x)["step"] for x in (tmp_path / "parts" / trainer.METRICS_FILE).open()]
  assert steps == [1, 2, 3, 4, 5, 6]


def test_kill_9_and_resume_is_bit_identical(tmp_path):
  """A process killed in the middle of its saves, twice, ends where an unbroken run does."""
  config = make_config()

  def start(name):
    # Every run is a process of its own: what other tests did to this one (flags, thread pools)
    # may change the last bit of a float.
    script = textwrap.dedent(f"""
        import jax
        jax.config.update("jax_disable_most_optimizations", True)
        from tests.training import trainer_test as t
        t.run({str(tmp_path / name)!r}, on_step=lambda step: print(step, flush=True))
        """)
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

  for delay in (0.0, 0.03):
    process = start("killed")
    process.stdout.readline()
    time.sleep(delay)  # somewhere in the next step or in its save
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
  saver = Checkpointer(tmp_path / "killed" / "checkpoints", config=config.fingerprint())
  assert 2 <= saver.latest_step()  # it got on between the kills
  for name in ("killed", "whole"):
    process = start(name)
    process.communicate()
    assert process.returncode == 0
  assert_same(read_state(tmp_path / "whole", config), read_state(tmp_path / "killed", config))


def test_trailing_window_is_a_full_step(tmp_path):
  # B41: 5 micro-batches, accumulation 2: 3 steps, and the last counts by its own tokens.
  result = run(tmp_path, batches=make_batches(10, num_epochs=1))
  assert result.num_steps == 3 and not result.is_finished
  group = trainer.next_group(iter([cases.make_batch(2)]), 2)
  assert group["input_ids"].shape == (2, 2, 14) and not group["loss_mask"][1].any()
  objective, frozen = cases.make_objective(), cases.make_frozen()
  params = cases.make_params(objective)
  alone = jax.tree.map(lambda a: a[:1], group)
  accumulate = jax.jit(step_lib.accumulate, static_argnames="objective")
  padded, single = (accumulate(params, frozen, g, jax.random.key(0), objective=objective)
                    for g in (group, alone))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), padded, single)


def test_time_limit_stops_early_and_can_go_on(tmp_path):
  config = make_config(max_minutes=1e-9)
  assert run(tmp_path, config=config).num_steps == 0
  assert run(tmp_path, config=make_config()).is_finished  # max_minutes is free to change


def test_refuses_a_checkpoint_of_another_config(tmp_path):
  with pytest.raises(Stop):
    run(tmp_path, on_step=stop_after(1))
  with pytest.raises(ValueError, match="num_anchors: found 4, expected 5"):
    run(tmp_path, config=make_config(num_anchors=5))


def test_held_out_figures_do_not_depend_on_training_randomness(tmp_path):
  batch = {k: np.asarray(v) for k, v in cases.make_batch(2, seed=5).items()}
  result = run(tmp_path, eval_batches=[batch], config=make_config(eval_every=3))
  lines = [json.loads(x) for x in (tmp_path / trainer.METRICS_FILE).open()]
  evals = [x for x in lines if x["split"] == "eval"]
  assert [x["step"] for x in evals] == [3, 6, 6]
  assert evals[1] == evals[2]
  assert result.metrics["eval_tau_prob"] == evals[2]["tau_prob"] > 1


@pytest.mark.parametrize("fields, message", [
    ({"num_anchor": 3}, "num_anchor: found an unknown field"),
    ({"loss": {"gama": 3}}, "loss.gama"), ({"optimizer": {"lr": 3}}, "optimizer.lr"),
    ({"dtype": "float16"}, "dtype"), ({"batch_size": 0}, "batch_size")])
def test_config_errors_name_the_field(fields, message):
  with pytest.raises(ValueError, match=message):
    train_config_from_dict(fields)
  assert train_config_from_dict({"loss": {"ce_weight": 1.0}}).loss.ce_weight == 1.0
