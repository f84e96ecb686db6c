"""Our side of bench_training: the library's training step, as `train_drafter` runs it."""

import functools
import time
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import layers
from dspark_jax.drafter.config import config_for_target
from dspark_jax.target.config import TransformerConfig
from dspark_jax.training import losses
from dspark_jax.training import step as step_lib
from dspark_jax.training.config import DTYPES
from experiments import _training_case as case


def make_objective(shape: case.Shape, *, dtype: str = "float32") -> step_lib.Objective:
  """Returns the objective of the case: whole vocabulary, products in `dtype`."""
  s = shape
  target = TransformerConfig(
      model_type="llama", vocab_size=s.vocab_size, hidden_size=s.hidden_size,
      intermediate_size=s.intermediate_size, num_layers=s.num_layers, num_heads=s.num_heads,
      num_kv_heads=s.num_kv_heads, head_dim=s.head_dim, rms_norm_eps=s.rms_norm_eps,
      rope=layers.RopeConfig(rope_theta=s.rope_theta), tie_word_embeddings=True)
  drafter = config_for_target(
      target, num_layers=s.draft_layers, target_layer_ids=tuple(s.target_layer_ids),
      proposal_len=s.proposal_len, markov_rank=s.markov_rank, mask_token_id=s.mask_token_id,
      qk_norm=False)
  loss = losses.LossConfig(case.CE_WEIGHT, case.TV_WEIGHT, case.CONFIDENCE_WEIGHT, case.LOSS_DECAY)
  return step_lib.Objective(target, drafter, loss, num_anchors=s.num_anchors, dtype=DTYPES[dtype],
                            target_dtype=DTYPES[dtype])


def make_step(shape: case.Shape, arrays: dict, *, dtype: str) -> Callable[[], float]:
  """Loads the case; returns a function that takes one optimiser step and returns its loss."""
  objective = make_objective(shape, dtype=dtype)
  optimizer = step_lib.OptimizerConfig(learning_rate=case.LEARNING_RATE, warmup_fraction=0.0,
                                       clip_norm=case.CLIP_NORM)
  frozen = step_lib.Frozen(target_params=jax.tree.map(jnp.array, arrays["target"])).cast_layers(
      objective.target_dtype)
  state = step_lib.init_state(jax.tree.map(jnp.array, arrays["drafter"]), jax.random.key(0),
                              optimizer=optimizer)
  batches = {name: jnp.array(arrays[name])[None] for name in ("input_ids", "loss_mask")}

  def step() -> float:
    nonlocal state
    state, metrics = step_lib.jit_train_step(state, frozen, batches, objective=objective,
                                             optimizer=optimizer)
    return float(metrics["loss"])

  return step


def measure_matmul(dtype: str) -> float:
  """Returns FLOPs per second of the machine's best of 5 products of 1024 x 576 x 8192."""
  rng = np.random.default_rng(0)
  x, y = (jnp.asarray(rng.normal(size=s), DTYPES[dtype]) for s in ((1024, 576), (576, 8192)))
  multiply, seconds = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32)), []
  for _ in range(6):
    started = time.perf_counter()
    multiply(x, y).block_until_ready()
    seconds.append(time.perf_counter() - started)
  return 2 * 1024 * 576 * 8192 / min(seconds[1:])
