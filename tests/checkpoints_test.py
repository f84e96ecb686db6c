import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoints import Checkpointer
from dspark_jax.training import step as step_lib

CONFIG = {"train": {"seed": 0, "taps": (1, 2)}, "max_len": 8}
OPTIMIZER = step_lib.OptimizerConfig()


def make_state(shape=(3, 2), names=("a", "t", "opt", "mi"), seed=7):
  # Leaf names that substring tests on "optimizer" would swallow (B61).
  params = {name: jnp.full(shape, i + 0.5) for i, name in enumerate(names)}
  return step_lib.init_state(params, jax.random.key(seed), optimizer=OPTIMIZER)


def as_bits(tree):
  to_words = lambda a: jax.random.key_data(a) if jax.dtypes.issubdtype(
      a.dtype, jax.dtypes.prng_key) else a
  return [np.asarray(to_words(a)) for a in jax.tree.leaves(tree)]


def test_round_trip_is_exact(tmp_path):
  state = make_state()
  state = state.replace(step=jnp.int32(5), params=jax.tree.map(lambda a: a * 1.1, state.params))
  saver = Checkpointer(tmp_path, config=CONFIG)
  saver.save(5, state, data_state={"place": {"next": 3}, "rows": "ab"})
  loaded, data_state = Checkpointer(tmp_path, config=CONFIG).restore(make_state(seed=8))
  assert jax.tree.structure(loaded) == jax.tree.structure(state)
  for found, expected in zip(as_bits(loaded), as_bits(state)):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
  assert data_state == {"place": {"next": 3}, "rows": "ab"}
  # The restored key is a typed key that draws the same numbers.
  assert jax.random.bits(loaded.key) == jax.random.bits(state.key)


def test_keeps_the_last_ones(tmp_path):
  saver = Checkpointer(tmp_path, config=CONFIG, keep=2)
  for step in (1, 2, 3):
    saver.save(step, make_state(), data_state={})
  assert saver.latest_step() == 3
  assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]


def test_nothing_to_restore(tmp_path):
  saver = Checkpointer(tmp_path, config=CONFIG)
  assert saver.latest_step() is None
  with pytest.raises(FileNotFoundError, match="checkpoint"):
    saver.restore(make_state())


@pytest.mark.parametrize("field, other", [
    ("train.seed", {"train": {"seed": 1, "taps": (1, 2)}, "max_len": 8}),
    ("train.taps", {"train": {"seed": 0, "taps": (1, 3)}, "max_len": 8}),
    ("max_len", {"train": {"seed": 0, "taps": (1, 2)}}),
    ("extra", {**CONFIG, "extra": 1})])
def test_refuses_another_configuration(tmp_path, field, other):
  Checkpointer(tmp_path, config=CONFIG).save(1, make_state(), data_state={})
  with pytest.raises(ValueError, match=f"configuration: {field}: found"):
    Checkpointer(tmp_path, config=other).restore(make_state())


@pytest.mark.parametrize("leaf, template", [
    ("params/z", dict(names=("a", "t", "opt", "mi", "z"))),
    ("params/mi", dict(names=("a", "t", "opt"))), ("params/a", dict(shape=(3, 3)))])
def test_refuses_another_structure(tmp_path, leaf, template):
  Checkpointer(tmp_path, config=CONFIG).save(1, make_state(), data_state={})
  # The first difference in order of name is in the moments; all of them name the leaf.
  with pytest.raises(ValueError, match=leaf.split("/")[1] + ": found"):
    Checkpointer(tmp_path, config=CONFIG).restore(make_state(**template))


def test_an_unfinished_checkpoint_is_invisible(tmp_path):
  saver = Checkpointer(tmp_path, config=CONFIG)
  saver.save(1, make_state(), data_state={})
  half = tmp_path / "2.orbax-checkpoint-tmp"  # what a kill leaves
  half.mkdir()
  (half / "state").mkdir()
  again = Checkpointer(tmp_path, config=CONFIG)
  assert again.latest_step() == 1
  again.restore(make_state())


def test_names_a_directory_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="workdir"):
    Checkpointer(tmp_path / "file", config=CONFIG)
