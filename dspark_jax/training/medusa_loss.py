"""Training of Medusa heads, on the same blocks as DSpark's."""

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.drafter.medusa import MedusaDrafter
from dspark_jax.training import losses
from dspark_jax.training.anchors import Blocks


def sum_losses(params: Any, frozen, target_out, blocks: Blocks, *,
               objective) -> tuple[jax.Array, losses.LossSums]:
  """Returns (loss sum, LossSums); arguments as `step.sum_block_losses`.

  The heads of an anchor read the position before it, so the first position anchors no block.
  """
  hidden_BxTxD, features_BxTxD, lse_BxT = target_out
  config = objective.drafter_config
  is_readable_BxA = blocks.anchor_positions_BxA > 0
  blocks = blocks.replace(keep_BxA=blocks.keep_BxA & is_readable_BxA,
                          eval_mask_BxAxG=blocks.eval_mask_BxAxG & is_readable_BxA[..., None])
  before_BxA = jnp.maximum(blocks.anchor_positions_BxA - 1, 0)
  read_BxAxD = jnp.take_along_axis(features_BxTxD, before_BxA[..., None], axis=1)
  draft_BxAxGxD = MedusaDrafter(config, objective.dtype).apply({"params": params}, read_BxAxD)
  return losses.sum_losses(
      draft_BxAxGxD, jnp.zeros((*draft_BxAxGxD.shape[:3], 0), draft_BxAxGxD.dtype),
      jnp.zeros((config.draft_vocab, 0), draft_BxAxGxD.dtype), None,
      target_hidden_BxTxD=hidden_BxTxD, lm_head_VdxD=jax.lax.stop_gradient(frozen.head_VdxD),
      blocks=blocks, config=objective.loss, draft_ids_Vd=frozen.draft_ids_Vd,
      target_lse_BxT=lse_BxT)
