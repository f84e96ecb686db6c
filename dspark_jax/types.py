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
  """
  tokens_BxG: jax.Array
  draft_logits_BxGxV: jax.Array
  confidence_BxG: jax.Array
  confidence_logits_BxG: jax.Array


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
