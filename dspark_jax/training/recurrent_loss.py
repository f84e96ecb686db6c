"""Training of recurrent drafters (EAGLE-3, MTP): all positions of a sequence, G steps deep.

Step s of position t predicts token t + 2 + s. In the terms of `anchors.Blocks` position t is the
block of anchor t + 1, so laws, labels and figures are those of the other drafters.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.training import losses
from dspark_jax.training.anchors import Blocks


def shift_left(x_BxT: jax.Array, by: int) -> jax.Array:
  """x[t + by] at t, 0 past the end."""
  T = x_BxT.shape[1]
  by = min(by, T)
  return jnp.pad(x_BxT[:, by:], ((0, 0), (0, by)))


def shift_embeddings(embed_VxD: jax.Array, input_ids_BxT: jax.Array, *,
                     num_steps: int) -> list[jax.Array]:
  """Embeddings of tokens t + 1 + s for each step s; of id 0 past the end, where nothing counts."""
  return [embed_VxD[shift_left(input_ids_BxT, 1 + s)] for s in range(num_steps)]


def make_blocks(input_ids_BxT: jax.Array, loss_mask_BxT: jax.Array, *, num_steps: int,
                exists_BxT: jax.Array | None = None) -> Blocks:
  """Returns the block of every position; its draft s is step s.

  Step s of position t counts iff loss_mask[t + s] and position t + s + 1, whose law it is to
  match, exists (the reference's rule, verified on its goldens). Positions are not chained: a step
  counts whether or not the one before it did.

  Args:
    exists_BxT: bool, what is not padding; None = the loss mask, so that law and token fed both
      belong to what the target wrote.
  """
  B, T = input_ids_BxT.shape
  mask_BxT = loss_mask_BxT.astype(bool)
  exists_BxT = mask_BxT if exists_BxT is None else exists_BxT.astype(bool)
  stack = lambda x_BxT, first: jnp.stack(
      [shift_left(x_BxT, first + s) for s in range(num_steps)], axis=2)
  counts_BxTxG = stack(mask_BxT, 0) & stack(exists_BxT, 1)
  positions_BxT = jnp.broadcast_to(jnp.arange(1, T + 1)[None, :], (B, T))
  return Blocks(
      anchor_positions_BxA=positions_BxT, keep_BxA=counts_BxTxG[..., 0],
      anchors_BxA=shift_left(input_ids_BxT, 1), labels_BxAxG=stack(input_ids_BxT, 2),
      prev_tokens_BxAxG=stack(input_ids_BxT, 1), eval_mask_BxAxG=counts_BxTxG,
      law_positions_BxAxG=jnp.minimum(
          positions_BxT[..., None] + jnp.arange(num_steps)[None, None, :], T - 1))


def sum_losses(params: Any, frozen, target_out, input_ids_BxT: jax.Array,
               loss_mask_BxT: jax.Array, *, objective,
               exists_BxT: jax.Array | None = None) -> tuple[jax.Array, losses.LossSums]:
  """Returns (loss sum, LossSums) of a micro-batch; arguments as `step.sum_batch_losses`.

  The weight of step s is exp(-s / loss_decay); the reference's 0.8^s is a loss_decay of 4.481, its
  soft cross-entropy is `kl_weight` (the same gradient). Like it, every step is divided by all
  positions of the batch, whether they count or not, hence `LossSums.weight`.
  """
  hidden_BxTxD, features_BxTxMD, lse_BxT = target_out
  config = objective.drafter_config
  embeds = shift_embeddings(frozen.target_params["embed_tokens"], input_ids_BxT,
                            num_steps=config.proposal_len)
  draft_BxTxGxD = config.make_network(objective.dtype).apply(
      {"params": params}, features_BxTxMD, embeds, method="train_hidden")
  blocks = make_blocks(input_ids_BxT, loss_mask_BxT, num_steps=config.proposal_len,
                       exists_BxT=exists_BxT)
  loss, sums = losses.sum_losses(
      draft_BxTxGxD, jnp.zeros((*draft_BxTxGxD.shape[:3], 0), draft_BxTxGxD.dtype),
      jnp.zeros((config.draft_vocab, 0), draft_BxTxGxD.dtype), None,
      target_hidden_BxTxD=hidden_BxTxD, lm_head_VdxD=jax.lax.stop_gradient(frozen.head_VdxD),
      blocks=blocks, config=objective.loss, draft_ids_Vd=frozen.draft_ids_Vd,
      target_lse_BxT=lse_BxT)
  # A micro-batch of loss mask 0 is a filler and has no positions (`trainer.next_group`).
  num_rows = loss_mask_BxT.astype(bool).any(axis=1).sum()
  return loss, sums.replace(weight=(num_rows * input_ids_BxT.shape[1]).astype(jnp.float32))
