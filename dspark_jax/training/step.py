"""One optimiser step, all of it in one jit.

Target forward (frozen, features tapped online, no feature cache), anchors drawn on the device,
drafter forward, loss, gradients, AdamW. Micro-batches are added up as sums and divided once.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dspark_jax.drafter import copy_head
from dspark_jax.drafter import dspark
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.medusa import MedusaConfig
from dspark_jax.drafter.recurrent import RecurrentConfig
from dspark_jax.target.config import TransformerConfig
from dspark_jax.target.transformer import Transformer
from dspark_jax.training import anchors
from dspark_jax.training import losses
from dspark_jax.training import medusa_loss
from dspark_jax.training import recurrent_loss
from pallas_kernels import distillation_loss


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW, linear warm-up from 0 and cosine down to final_fraction of the peak.

  Attributes:
    learning_rate: peak.
    warmup_fraction: of max_steps.
    max_steps: optimiser steps; the schedule is a function of the step alone, never of time.
    clip_norm: global norm of the gradient; 0 = no clipping.
  """
  learning_rate: float = 6e-4
  warmup_fraction: float = 0.04
  final_fraction: float = 0.0
  max_steps: int = 1000
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  b1: float = 0.9
  b2: float = 0.999


@flax.struct.dataclass
class Frozen:
  """What training reads and never changes.

  Attributes:
    target_params: of the target's Transformer.
    draft_ids_Vd: sorted int32 target ids of a reduced draft vocabulary, or None.
  """
  target_params: Any
  draft_ids_Vd: jax.Array | None = None

  @property
  def head_VxD(self) -> jax.Array:
    """The target's LM head."""
    params = self.target_params
    return params["lm_head"] if "lm_head" in params else params["embed_tokens"]

  @property
  def head_VdxD(self) -> jax.Array:
    """Its rows of the draft vocabulary."""
    return self.head_VxD if self.draft_ids_Vd is None else self.head_VxD[self.draft_ids_Vd]


  def cast_layers(self, dtype: Any) -> "Frozen":
    """Returns the same with the weights of the target's layers in the dtype that it computes in.

    Its layers would cast them anyway, but every step.
    """
    def cast(path, leaf):
      is_weight = leaf.ndim == 2 and path[-1].key == "weight"
      return leaf.astype(dtype) if is_weight else leaf
    return self.replace(target_params=jax.tree_util.tree_map_with_path(cast, self.target_params))


@flax.struct.dataclass
class TrainState:
  """What a checkpoint holds (beside the data iterator's position).

  Attributes:
    step: int32, optimiser steps done.
    params: the drafter's; embedding and LM head are the target's and not among them.
    opt_state: of `make_optimizer`.
    key: typed key; randomness of a step is folded from it, the step and the micro-batch.
  """
  step: jax.Array
  params: Any
  opt_state: Any
  key: jax.Array


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
  """Returns step -> learning rate; step w of w warm-up steps has the peak."""
  warmup_steps = round(config.warmup_fraction * config.max_steps)
  return optax.warmup_cosine_decay_schedule(
      0.0 if warmup_steps else config.learning_rate, config.learning_rate, warmup_steps,
      max(config.max_steps, warmup_steps + 1), config.learning_rate * config.final_fraction)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Returns clip + AdamW."""
  clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
  return optax.chain(clip, optax.adamw(learning_rate_schedule(config), b1=config.b1, b2=config.b2,
                                       weight_decay=config.weight_decay))


def init_state(params: Any, key: jax.Array, *, optimizer: OptimizerConfig) -> TrainState:
  """Returns the state before step 0."""
  return TrainState(step=jnp.int32(0), params=params,
                    opt_state=make_optimizer(optimizer).init(params), key=key)


@dataclasses.dataclass(frozen=True)
class Objective:
  """Everything static about the loss of a batch.

  Attributes:
    num_anchors: blocks drawn from each sequence.
    dtype: of the drafter's matmuls; parameters and laws stay float32.
    target_dtype: of the target's.
  """
  target_config: TransformerConfig
  drafter_config: DrafterConfig | RecurrentConfig | MedusaConfig
  loss: losses.LossConfig = losses.LossConfig()
  num_anchors: int = 128
  dtype: Any = jnp.float32
  target_dtype: Any = jnp.float32


def run_target(frozen: Frozen, input_ids_BxT: jax.Array, *, objective: Objective):
  """Returns (final-normed hidden [B, T, D], features [B, T, M*D], log-normaliser [B, T] or None).

  The log-normaliser is over the whole vocabulary, once a position (not once a draft), and only
  where the draft vocabulary is reduced.
  """
  out = Transformer(objective.target_config, objective.target_dtype).apply(
      {"params": frozen.target_params}, input_ids_BxT,
      tap_layer_ids=objective.drafter_config.target_layer_ids)
  lse_BxT = None
  if frozen.draft_ids_Vd is not None:
    flat_NxD = out.hidden_BxTxD.reshape(-1, out.hidden_BxTxD.shape[-1])
    lse_BxT = distillation_loss.target_lse(flat_NxD, frozen.head_VxD).reshape(input_ids_BxT.shape)
  return jax.lax.stop_gradient((out.hidden_BxTxD, out.features_BxTxMD, lse_BxT))


def sum_block_losses(params: Any, frozen: Frozen, target_out, blocks: anchors.Blocks, *,
                     objective: Objective, input_ids_BxT: jax.Array | None = None
                     ) -> tuple[jax.Array, losses.LossSums]:
  """Drafter forward and loss of the given blocks: (loss sum, LossSums).

  A drafter with a copy head needs `input_ids_BxT`, the text that it copies from.
  """
  hidden_BxTxD, features_BxTxMD, lse_BxT = target_out
  config = objective.drafter_config
  drafter = dspark.DSparkDrafter(config, objective.dtype)
  apply = functools.partial(drafter.apply, {"params": params})
  block_BxAxJxD = dspark.embed_block(config, frozen.target_params["embed_tokens"],
                                     blocks.anchors_BxA)
  draft_BxAxGxD = apply(features_BxTxMD, blocks.anchor_positions_BxA, block_BxAxJxD,
                        method="train_hidden")
  confidence = None
  if config.enable_confidence_head:
    confidence = apply(draft_BxAxGxD, blocks.prev_tokens_BxAxG, method="confidence_logits")
  copy = {}
  if config.copy_ngram:
    copies = copy_head.find_copies(input_ids_BxT, config.copy_ngram)
    # Label k stands one after the position whose law predicts it.
    label_positions_BxAxG = jnp.minimum(blocks.law_positions_BxAxG + 1,
                                        input_ids_BxT.shape[1] - 1)
    token, level = jax.vmap(lambda rows, at: jax.tree.map(lambda row: row[at], rows))(
        (copies.token, copies.level), label_positions_BxAxG)
    bias_BxAxG, more_BxAxG = apply(draft_BxAxGxD, level, method="copy_bias")
    copy = dict(copy_token_BxAxG=jnp.where(level > 0, token, -1), copy_bias_BxAxG=bias_BxAxG)
    confidence = None if confidence is None else confidence + more_BxAxG
  return losses.sum_losses(
      draft_BxAxGxD, apply(draft_BxAxGxD, blocks.prev_tokens_BxAxG, method="head_inputs"),
      apply(method="bias_weight"), confidence, target_hidden_BxTxD=hidden_BxTxD,
      lm_head_VdxD=jax.lax.stop_gradient(frozen.head_VdxD), blocks=blocks, config=objective.loss,
      draft_ids_Vd=frozen.draft_ids_Vd, target_lse_BxT=lse_BxT, **copy)


def sum_batch_losses(params: Any, frozen: Frozen, batch, key: jax.Array, *, objective: Objective
                     ) -> tuple[jax.Array, losses.LossSums]:
  """Loss sums of one micro-batch {input_ids [B, T], loss_mask [B, T]} with anchors from `key`."""
  target_out = run_target(frozen, batch["input_ids"], objective=objective)
  if isinstance(objective.drafter_config, RecurrentConfig):  # trains on all positions
    return recurrent_loss.sum_losses(params, frozen, target_out, batch["input_ids"],
                                     batch["loss_mask"], objective=objective)
  positions_BxA, keep_BxA = anchors.sample_anchors(key, batch["loss_mask"],
                                                   num_anchors=objective.num_anchors)
  blocks = anchors.gather_blocks(batch["input_ids"], batch["loss_mask"], positions_BxA, keep_BxA,
                                 proposal_len=objective.drafter_config.proposal_len)
  if isinstance(objective.drafter_config, MedusaConfig):
    return medusa_loss.sum_losses(params, frozen, target_out, blocks, objective=objective)
  return sum_block_losses(params, frozen, target_out, blocks, objective=objective,
                          input_ids_BxT=batch["input_ids"])


def accumulate(params: Any, frozen: Frozen, batches, key: jax.Array, *, objective: Objective):
  """Returns (loss sum, LossSums, gradient of the global mean) over micro-batches [K, B, T].

  The gradient is that of the joined batch: sums first, one division by the global weight. Without
  a single draft it is 0.
  """
  value_and_grad = jax.value_and_grad(sum_batch_losses, has_aux=True)

  def one(carry, item):
    index, batch = item
    (loss, sums), grads = value_and_grad(params, frozen, batch, jax.random.fold_in(key, index),
                                         objective=objective)
    return jax.tree.map(jnp.add, carry, (loss, sums, grads)), None

  num_micro = batches["input_ids"].shape[0]
  first = jax.tree.map(lambda a: a[0], batches)
  if num_micro == 1:
    (loss, sums), grads = value_and_grad(params, frozen, first, jax.random.fold_in(key, 0),
                                         objective=objective)
  else:
    shapes = jax.eval_shape(lambda: value_and_grad(params, frozen, first, key,
                                                   objective=objective))
    (loss_shape, sums_shape), grads_shape = shapes
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype),
                         (loss_shape, sums_shape, grads_shape))
    (loss, sums, grads), _ = jax.lax.scan(one, zeros, (jnp.arange(num_micro), batches))
  scale = 1.0 / (sums.weight + losses.WEIGHT_FLOOR)
  return loss, sums, jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def train_step(state: TrainState, frozen: Frozen, batches, *, objective: Objective,
               optimizer: OptimizerConfig) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimiser step over micro-batches {input_ids, loss_mask}, each [K, B, T].

  Jit with `objective` and `optimizer` static and `state` donated. A step without a single valid
  anchor has loss 0 and gradient 0.
  """
  key = jax.random.fold_in(state.key, state.step)
  loss, sums, grads = accumulate(state.params, frozen, batches, key, objective=objective)
  updates, opt_state = make_optimizer(optimizer).update(grads, state.opt_state, state.params)
  metrics = losses.summarize(loss, sums)
  metrics["grad_norm"] = optax.tree.norm(grads)
  metrics["learning_rate"] = learning_rate_schedule(optimizer)(state.step)
  return TrainState(step=state.step + 1, params=optax.apply_updates(state.params, updates),
                    opt_state=opt_state, key=state.key), metrics


jit_train_step = jax.jit(train_step, static_argnames=("objective", "optimizer"),
                         donate_argnums=(0,))
