"""Which positions of a sequence become anchors, and what each block of drafts is trained on."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Blocks:
  """The blocks of a batch; a block is the G drafts after an anchor.

  Attributes:
    anchor_positions_BxA: int32; kept anchors ascending, then dummies at position 0.
    keep_BxA: bool, False for dummies.
    anchors_BxA: int32 token ids at the anchors.
    labels_BxAxG: int32 token ids at anchor + k, k = 1..G (0 past the end).
    prev_tokens_BxAxG: int32, (anchor, label_1, ..., label_{G-1}): teacher forcing.
    eval_mask_BxAxG: bool, the drafts that count: a prefix of each kept block.
    law_positions_BxAxG: int32, anchor + k - 1, the target position whose law predicts label k.
  """
  anchor_positions_BxA: jax.Array
  keep_BxA: jax.Array
  anchors_BxA: jax.Array
  labels_BxAxG: jax.Array
  prev_tokens_BxAxG: jax.Array
  eval_mask_BxAxG: jax.Array
  law_positions_BxAxG: jax.Array


def find_candidates(loss_mask_BxT: jax.Array) -> jax.Array:
  """Returns bool [B, T]: a is a candidate iff loss_mask[a] and loss_mask[a + 1]."""
  mask_BxT = loss_mask_BxT.astype(bool)
  return mask_BxT & jnp.pad(mask_BxT[:, 1:], ((0, 0), (0, 1)))


def sample_anchors(key: jax.Array, loss_mask_BxT: jax.Array, *,
                   num_anchors: int) -> tuple[jax.Array, jax.Array]:
  """Draws num_anchors candidates a sequence, uniformly without replacement, then sorts them.

  Returns:
    (positions int32 [B, A] ascending, keep bool [B, A]). Where a sequence has fewer candidates
    all of them are taken, and the rest are dummies: position 0, keep False.
  """
  B, T = loss_mask_BxT.shape
  candidates_BxT = find_candidates(loss_mask_BxT)
  # A random order of the candidates: the smallest num_anchors of independent uniform draws.
  draws_BxT = jnp.where(candidates_BxT, jax.random.uniform(key, (B, T)), 2.0)
  rank_BxT = jnp.argsort(jnp.argsort(draws_BxT, axis=1), axis=1)
  chosen_BxT = candidates_BxT & (rank_BxT < num_anchors)
  positions_BxT = jnp.sort(jnp.where(chosen_BxT, jnp.arange(T)[None, :], T), axis=1)
  positions_BxA = positions_BxT[:, :num_anchors]
  positions_BxA = jnp.pad(positions_BxA, ((0, 0), (0, max(num_anchors - T, 0))),
                          constant_values=T)
  keep_BxA = positions_BxA < T
  return jnp.where(keep_BxA, positions_BxA, 0).astype(jnp.int32), keep_BxA


def gather_blocks(input_ids_BxT: jax.Array, loss_mask_BxT: jax.Array,
                  anchor_positions_BxA: jax.Array, keep_BxA: jax.Array, *,
                  proposal_len: int) -> Blocks:
  """Looks up tokens, labels and masks of the blocks after the given anchors.

  The eval mask is the running product over k of (a + k < T and loss_mask[a + k]), and keep.
  """
  T = input_ids_BxT.shape[1]
  offsets_G = jnp.arange(1, proposal_len + 1, dtype=jnp.int32)
  positions_BxAxG = anchor_positions_BxA[:, :, None].astype(jnp.int32) + offsets_G[None, None, :]
  is_inside = positions_BxAxG < T
  clipped_BxAxG = jnp.minimum(positions_BxAxG, T - 1)
  look_up = jax.vmap(lambda row, at: row[at])
  labels_BxAxG = jnp.where(is_inside, look_up(input_ids_BxT, clipped_BxAxG), 0).astype(jnp.int32)
  counts = is_inside & look_up(loss_mask_BxT.astype(bool), clipped_BxAxG)
  anchors_BxA = look_up(input_ids_BxT, anchor_positions_BxA).astype(jnp.int32)
  return Blocks(
      anchor_positions_BxA=anchor_positions_BxA.astype(jnp.int32), keep_BxA=keep_BxA,
      anchors_BxA=anchors_BxA, labels_BxAxG=labels_BxAxG,
      prev_tokens_BxAxG=jnp.concatenate([anchors_BxA[..., None], labels_BxAxG[..., :-1]], axis=-1),
      eval_mask_BxAxG=jnp.cumprod(counts, axis=-1).astype(bool) & keep_BxA[..., None],
      law_positions_BxAxG=jnp.minimum(positions_BxAxG - 1, T - 1))
