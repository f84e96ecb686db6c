"""What XLA makes of the generation loop: no copy of the cache in every layer and round.

The cache is the state's largest part by far, and a copy of it a round is memory traffic that plain
decoding does not have. Writing must be known to come after all reading (`decode.step.commit`), and
which form of update avoids the rest was found by trying (`kv_cache.write_rows`).
"""

import re

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.decode import loop
from dspark_jax.decode.state import Frame
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler import policies
from dspark_jax.verification import commit as commit_lib
from tests.decode import cases
from tests.target import cases as target_cases

NUM_LAYERS = 8
NUM_SLOTS = 192  # a number that nothing else in the program has

# LLVM's passes come after the ones looked at here.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def count_cache_copies(batch: int, **ragged) -> int:
  """Compiles the loop for an 8-layer toy and counts copies of a whole layer's keys or values."""
  config, target_params = target_cases.make_target("qwen3", num_hidden_layers=NUM_LAYERS)
  frame = Frame(config, cases.ScriptedProposer(2), **ragged)
  params = {"target": target_params, "drafter": cases.script([[0]] * batch), "borrowed": {}}
  state = jax.eval_shape(lambda: loop.prefill(
      frame, params, jnp.zeros((batch, 64), jnp.int32), jnp.full((batch,), 5),
      limits_B=jnp.full((batch,), 30), sampling=make_sampling_params(batch),
      stop_ids_BxE=jnp.full((batch, 4), -1), num_slots=NUM_SLOTS))
  text = loop.run_rounds.lower(frame, params, state, jnp.int32(3)).compile(
      compiler_options=QUICK).as_text()
  shape = rf"f32\[{batch},{config.num_kv_heads},{NUM_SLOTS},{config.head_dim}\]"
  updates = re.findall(rf"= {shape}\S* (?:dynamic-update-slice|fusion|scatter)\(", text)
  assert len(updates) >= 2 * NUM_LAYERS  # the pattern finds the cache at all
  return len(re.findall(rf"= {shape}\S* copy\(", text))


@pytest.mark.parametrize("batch", [1, 4])
def test_rounds_copy_no_layer_of_the_cache(batch):
  assert count_cache_copies(batch) == 0


def test_buckets_copy_no_layer_of_the_cache():
  """Each bucket is a loop of one turn or none, which writes in place."""
  ladder = ((4, 1), (8, 3), (12, 3))
  assert count_cache_copies(4, policy=policies.ConfidenceThreshold(0.5), ladder=ladder) == 0


def test_the_count_sees_copies(monkeypatch):
  """One batched update, which need not wait for the verdict, copies all 16 arrays in and out."""
  def write_rows(cache, rows, starts_B):
    write = jax.vmap(lambda old, new, s: jax.lax.dynamic_update_slice(old, new, (0, s, 0)))
    return jax.tree.map(lambda old, new: write(old, new, jnp.arange(len(starts_B))), cache, rows)

  loop.run_rounds.clear_cache()
  monkeypatch.setattr(commit_lib, "commit_rows", write_rows)
  assert count_cache_copies(4) >= 2 * NUM_LAYERS
  loop.run_rounds.clear_cache()
