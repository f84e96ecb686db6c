"""The pruned walk: the sequential head's bias over the best few base logits of each slot alone.

The candidates are chosen before any token is drawn, so W2's rows of all slots are gathered at once
and no step of the walk touches anything as wide as the vocabulary. What is outside has draft
probability 0 in the reported law, which keeps acceptance exact: what the bias would have lifted
from outside is merely never drafted. `pallas_kernels.markov_sampling` has the same walk for laws
without filters and copies; this is the part that the drafter's own walk shares with it.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax import sampling
from dspark_jax.drafter import drafting
from pallas_kernels.counter_rng import gumbel
from pallas_kernels.rows import first_argmax


@flax.struct.dataclass
class Candidates:
  """The drafts that are possible, slot by slot.

  Attributes:
    columns_GxBxC: int32 columns of the draft vocabulary, ascending, so that ties go to the lowest.
    logits_GxBxC: their base logits.
    rows_GxBxCxR: their rows of W2.
  """
  columns_GxBxC: jax.Array
  logits_GxBxC: jax.Array
  rows_GxBxCxR: jax.Array

  def biased(self, slot: jax.Array, bias_in_BxR: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (logits with the head's bias, their columns) of one slot, both [B, C]."""
    bias_BxC = jnp.einsum("bcr,br->bc", self.rows_GxBxCxR[slot], bias_in_BxR,
                          preferred_element_type=jnp.float32)
    return self.logits_GxBxC[slot] + bias_BxC, self.columns_GxBxC[slot]


def find_candidates(base_logits_GxBxV: jax.Array, w2_VxR: jax.Array, num: int) -> Candidates:
  """Returns the `num` best columns of each slot, or all where there are not so many."""
  best_GxBxC = lax.top_k(base_logits_GxBxV, min(num, base_logits_GxBxV.shape[-1]))[1]
  columns_GxBxC = jnp.sort(best_GxBxC, axis=-1).astype(jnp.int32)
  return Candidates(columns_GxBxC, jnp.take_along_axis(base_logits_GxBxV, columns_GxBxC, axis=-1),
                    w2_VxR[columns_GxBxC])


def draw(candidates: Candidates, slot: jax.Array, base_BxV: jax.Array, bias_in_BxR: jax.Array,
         w2_VxR: jax.Array, copy: tuple[jax.Array, jax.Array] | None, words_Bx2: jax.Array,
         sampling_params: sampling.SamplingParams, draft_ids: jax.Array | None):
  """Draws one slot from the law of its candidates and, where there is one, of the copied token.

  Args:
    base_BxV: the slot's base logits; -inf removes a token.
    copy: (column of the copied token, -1 = none; what the copy adds to its logit).
    words_Bx2: noise of the draw, by target id, as in `sampling.sample`.
  Returns:
    (target ids [B], (law as logits [B, C], margins [B], columns [B, C])).
  """
  logits_BxC, columns_BxC = candidates.biased(slot, bias_in_BxR)
  if copy is not None:
    column_B, bias_B = copy
    at_B = jnp.maximum(column_B, 0)
    logit_B = base_BxV[jnp.arange(at_B.shape[0]), at_B] + jnp.einsum(
        "br,br->b", w2_VxR[at_B], bias_in_BxR, preferred_element_type=jnp.float32)
    logits_BxC, columns_BxC = _add_copy(logits_BxC, columns_BxC, column_B, logit_B, bias_B)
  law_BxC = sampling.law_logits(logits_BxC, sampling_params)
  ids_BxC = columns_BxC if draft_ids is None else draft_ids[columns_BxC]
  drawn_B = first_argmax(law_BxC + gumbel(words_Bx2, ids_BxC))
  token_B = jnp.take_along_axis(ids_BxC, drawn_B[:, None], axis=-1)[:, 0].astype(jnp.int32)
  return token_B, (law_BxC, drafting.top_margin(logits_BxC), columns_BxC)


def _add_copy(logits_BxC: jax.Array, columns_BxC: jax.Array, column_B: jax.Array,
             logit_B: jax.Array, copy_bias_B: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Gives a copied token its bias, as one more candidate where it is none: [B, C + 1] both.

  Args:
    column_B: of the copied token, -1 = none; then the extra candidate is impossible.
    logit_B: its logit without the copy, bias of the sequential head included.
    copy_bias_B: what the copy adds.
  """
  is_copy_BxC = columns_BxC == column_B[:, None]
  is_new_B = (column_B >= 0) & ~is_copy_BxC.any(axis=-1)
  logits_BxC = logits_BxC + jnp.where(is_copy_BxC, copy_bias_B[:, None], 0.0)
  extra_B = jnp.where(is_new_B, logit_B + copy_bias_B, -jnp.inf)
  return (jnp.concatenate([logits_BxC, extra_B[:, None]], axis=-1),
          jnp.concatenate([columns_BxC, jnp.maximum(column_B, 0)[:, None]], axis=-1))


def widen(law_GxBxC: jax.Array, columns_GxBxC: jax.Array, vocab: int) -> jax.Array:
  """Returns laws as logits over the draft vocabulary, -inf outside the candidates: [G, B, V]."""
  G, B, _ = law_GxBxC.shape
  wide_GxBxV = jnp.full((G, B, vocab), -jnp.inf)
  at = (jnp.arange(G)[:, None, None], jnp.arange(B)[None, :, None], columns_GxBxC)
  return wide_GxBxV.at[at].max(law_GxBxC)  # an impossible extra candidate repeats a column
