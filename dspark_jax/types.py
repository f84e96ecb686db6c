"""Legend of the dimension letters, and the structs that pass between the stages of a round.

Dimension letters, used as suffixes of array names (`draft_logits_BxGxV`):
  B requests                  T context tokens             S cache slots
  G draft positions           J block slots (G, or G + 1)  W verify rows (G + 1)
  P packed verify tokens      A anchors of a sequence      M tapped layers
  D width                     F MLP width                  H head dimension
  N query heads               K key-value heads            L layers
  V vocabulary                Vd draft vocabulary          R rank of the sequential head
  x any leading dimensions
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Proposal:
  """A round's drafts; every request drafts the full block, whatever is verified later.

  Attributes:
    tokens_BxG: int32 target ids.
    draft_logits_BxGxV: float32 [B, G, Vd], the law that `tokens` were drawn from, as logits after
      temperature and filters: softmax of them is the draft law, -inf = removed.
    confidence_BxG: float32 in [0, 1], sigmoid of the raw confidence logits: probability that a
      draft is accepted given that the drafts before it were. Ones without a confidence head.
    confidence_logits_BxG: float32; +inf without a confidence head.
    margin_BxG: float32 >= 0, best minus second-best draft logit before temperature and filters;
      None from a drafter that does not tell.
  """
  tokens_BxG: jax.Array
  draft_logits_BxGxV: jax.Array
  confidence_BxG: jax.Array
  confidence_logits_BxG: jax.Array
  margin_BxG: jax.Array | None = None


@flax.struct.dataclass
class Packing:
  """Where the rows of a ragged batch lie in one packed row of P tokens (`verification.pack`).

  Attributes:
    slots_BxW: int32, packed slot of row w of request b; anything in range where there is none.
    exists_BxW: bool, whether request b has a row w.
    request_P, row_P: int32, the markers: whose row, and which, a packed slot holds.
  """
  slots_BxW: jax.Array
  exists_BxW: jax.Array
  request_P: jax.Array
  row_P: jax.Array

  def unpack(self, x_1xPx: jax.Array) -> jax.Array:
    """[1, P, ...] -> [B, W, ...], zeros where there is no row."""
    x_BxWx = x_1xPx[0][self.slots_BxW]
    exists = self.exists_BxW.reshape(self.exists_BxW.shape + (1,) * (x_BxWx.ndim - 2))
    # Not another request's numbers: one that broke down may hold NaN.
    return jnp.where(exists, x_BxWx, jnp.zeros((), x_BxWx.dtype))

  def pack(self, x_BxWx: jax.Array) -> jax.Array:
    """[B, W, ...] -> [1, P, ...]; padding slots repeat some row."""
    return x_BxWx[self.request_P, self.row_P][None]


@flax.struct.dataclass
class Verdict:
  """What verification decided.

  Attributes:
    num_accepted_B: int32, drafts accepted, 0..verify length.
    next_token_B: int32, the token after them: recovered at a rejection, else the bonus.
    is_valid_B: bool, whether the request's laws were finite and its `next_token` can be used.
  """
  num_accepted_B: jax.Array
  next_token_B: jax.Array
  is_valid_B: jax.Array
