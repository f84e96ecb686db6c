"""The device half: what entering a slot writes, what a round reports, what XLA makes of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import loop
from dspark_jax.decode.state import PAD, Frame
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler.policies import Lagged
from dspark_jax.serving import slots
from tests.decode import cases
from tests.target import cases as target_cases

NUM_LAYERS, BATCH = 8, 4
NUM_SLOTS = 192  # a number that nothing else in the program has
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def make_slots(frame, batch=3, max_len=60):
  return slots.init_slots(frame, batch=batch, max_len=max_len, num_stop_ids=4)


def fill(state, value):
  """Every number of a state becomes `value`, in its own dtype; not the scheduler's."""
  scheduler, state = state.scheduler, state.replace(scheduler=None)
  return jax.tree.map(lambda x: jnp.full_like(x, value), state).replace(scheduler=scheduler)


def test_entering_a_slot_touches_that_slot_alone():
  """NaN everywhere, then a request of 8 rows of 2: its slot holds them and zeros, and PAD."""
  frame, _ = cases.make_pair()
  state = fill(make_slots(frame), 7)
  nan = lambda tree: jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tree)
  state = state.replace(cache=nan(state.cache), drafter=nan(state.drafter))
  fresh = fill(make_slots(frame, batch=1), 2)
  short = lambda tree: jax.tree.map(lambda x: x[:, :, :8], tree)
  fresh = fresh.replace(cache=short(fresh.cache), drafter=short(fresh.drafter),
                        tokens_BxS=fresh.tokens_BxS[:, :8])
  before = jax.tree.map(np.array, state)
  after = slots.insert(state, fresh, 1)
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    np.testing.assert_array_equal(new[jnp.array([0, 2])], old[[0, 2]])
  for x in jax.tree.leaves((after.cache, after.drafter)):
    assert (x[1, :, :8] == 2).all() and (x[1, :, 8:] == 0).all()
  assert after.tokens_BxS[1].tolist() == [2] * 8 + [PAD] * (after.tokens_BxS.shape[1] - 8)
  for x in jax.tree.leaves((after.lens_B, after.limits_B, after.sampling, after.stats,
                            after.stop_ids_BxE)):
    assert (x[1] == 2).all()


def test_the_scheduler_forgets_the_last_occupant_only():
  frame, _ = cases.make_pair()
  frame = Frame(frame.target, frame.drafter, Lagged(), ladder=((3, 1), (12, 4)))
  with pytest.warns(UserWarning, match="step curve: none given to Lagged"):
    state = loop.attach_scheduler(frame, make_slots(frame))
  state = state.replace(scheduler=state.scheduler.replace(
      num_drawn_B=jnp.array([3, 3, 1]), past_survival_BxG=jnp.full((3, 3), .5),
      num_rounds=jnp.int32(9)))
  after = slots.insert(state, make_slots(frame, batch=1), 1).scheduler
  assert after.num_drawn_B.tolist() == [3, 0, 1] and int(after.num_rounds) == 9
  # The new request starts with what is usual.
  np.testing.assert_array_equal(after.past_survival_BxG, jnp.stack(
      [jnp.full(3, .5), after.usual_survival_G, jnp.full(3, .5)]))


def test_empty_slots_are_harmless():
  """Nobody is there: nothing is run, nothing is reported."""
  frame, params = cases.make_pair()
  before = jax.tree.map(np.array, make_slots(frame))
  after, report = slots.run_round(frame, params, make_slots(frame), np.int32(1))
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    np.testing.assert_array_equal(old, new)
  assert not report.is_live_B.any() and report.is_done_B.all() and not report.num_new_B.any()


def test_report_is_what_the_round_did():
  frame, params = cases.make_pair()
  prompts = cases.PROMPTS[:3]
  start = lambda: loop.start(frame, params, prompts, max_new_tokens=[20, 1, 20], max_slots=60,
                             sampling=make_sampling_params(3, temperature=[0.0, 1.0, 1.0]))
  state = start()
  lens = np.asarray(state.lens_B)
  expected = loop.run_rounds(frame, params, start(), jnp.int32(1))
  after, report = slots.run_round(frame, params, state, np.int32(1))
  assert report.is_live_B.tolist() == [True, False, True]
  tokens = np.asarray(expected.tokens_BxS)
  np.testing.assert_array_equal(report.num_new_B, expected.lens_B - lens)
  for b in range(3):
    n = int(report.num_new_B[b])
    assert report.tokens_BxW[b, :n].tolist() == tokens[b, lens[b]:lens[b] + n].tolist()
  np.testing.assert_array_equal(report.num_accepted_B, expected.stats.accepted_BxG.sum(axis=1))
  np.testing.assert_array_equal(report.num_verified_B, expected.stats.verified_BxG.sum(axis=1))
  # A request that is done asks for no law any more.
  assert after.sampling.temperature.tolist() == [0.0, 0.0, 1.0]


def count_cache_copies(lowered, config) -> int:
  text = lowered.compile(compiler_options=QUICK).as_text()
  shape = rf"f32\[{BATCH},{config.num_kv_heads},{NUM_SLOTS},{config.head_dim}\]"
  updates = re.findall(rf"= {shape}\S* (?:dynamic-update-slice|fusion|scatter)\(", text)
  assert len(updates) >= 2 * NUM_LAYERS  # the pattern finds the cache at all
  return len(re.findall(rf"= {shape}\S* copy\(", text))


def test_serving_copies_no_layer_of_the_cache():
  """As in `tests/decode/hlo_test.py`: on CPU up to 4 copies of one layer's arrays remain."""
  config, target_params = target_cases.make_target("qwen3", num_hidden_layers=NUM_LAYERS)
  frame = Frame(config, cases.ScriptedProposer(2))
  params = {"target": target_params, "drafter": cases.script([[0]] * BATCH), "borrowed": {}}
  big = jax.eval_shape(lambda: make_slots(frame, batch=BATCH, max_len=NUM_SLOTS - 10))
  small = jax.eval_shape(lambda: make_slots(frame, batch=1, max_len=50))
  assert big.cache.num_slots == NUM_SLOTS and small.cache.num_slots < NUM_SLOTS
  rounds = slots.run_round.lower(frame, params, big, jnp.int32(1))
  assert count_cache_copies(rounds, config) <= 4
  assert count_cache_copies(slots._insert.lower(big, small, jnp.int32(0)), config) <= 4
