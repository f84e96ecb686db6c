"""What decoding asks of a drafter: three pure functions over a state of its own.

`decode/step.py` does not know which drafter runs. A new one is a file here with a frozen dataclass
that has these members, and a reader in `interop/drafters.py`. One that can make what it keeps of a
row from that row alone may split `observe` into `encode_rows` and `write_rows` (`dspark.py`);
ragged rounds then encode the packed rows only.
"""

from typing import Any, Protocol

import jax

from dspark_jax.sampling import SamplingParams
from dspark_jax.types import Proposal


class Drafter(Protocol):
  """Static and hashable; parameters and state are trees of arrays that decoding carries.

  Attributes:
    proposal_len: G, drafts of a round.
    target_layer_ids: layers of the target whose outputs the drafter reads; () = none.
    has_confidence: whether `Proposal.confidence_BxG` says anything, so that a threshold on it
      makes sense.
  """
  proposal_len: int
  target_layer_ids: tuple[int, ...]
  has_confidence: bool

  def with_len(self, num_drafts: int) -> "Drafter":
    """Returns a drafter of the first `num_drafts` drafts (>= 1): the same ones, for less work, and
    over the same state. One that has no more, or cannot stop early, is returned as it is."""

  def init_state(self, batch: int, num_slots: int) -> Any:
    """Returns the state before the prompt; sequences end before num_slots - G."""

  def prefill(self, params, state, features_BxTxMD: jax.Array | None, lens_B: jax.Array, *,
              tokens_BxW1: jax.Array, **borrowed) -> Any:
    """Reads the prompt: `observe` of rows 0..T-1, of which the first lens_B count."""

  def propose(self, params, state, anchor_B: jax.Array, anchor_positions_B: jax.Array,
              sampling_params: SamplingParams, *, tokens_BxS: jax.Array, **borrowed) -> Proposal:
    """Drafts G tokens after each anchor, drawn from the very law that it reports.

    Must not change the state: what is drafted may be rejected, or not be used at all. Draft k's
    law and confidence may depend on the drafts before it, never on later ones.

    Args:
      tokens_BxS: all tokens of the requests, anchors included, PAD beyond.
      borrowed: what the drafter was given of the target (`params["borrowed"]`).
    """

  def observe(self, params, state, features_BxWxMD: jax.Array | None, starts_B: jax.Array, *,
              tokens_BxW1: jax.Array, num_new_B: jax.Array, **borrowed) -> Any:
    """Takes in what the target has read: rows at positions starts_B + (0..W-1).

    The first num_new_B rows of a request are committed (0 of one that is done), the others belong
    to rejected drafts: whatever is kept of them is overwritten later and not read before.

    Args:
      features_BxWxMD: the target's features of the rows; None without target_layer_ids.
      tokens_BxW1: W + 1 committed tokens from starts_B on: row w read token w, and token w + 1
        follows it. 0 where there is none.
    """
