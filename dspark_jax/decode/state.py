"""Everything that changes while decoding, in one struct on the device, and its static frame."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.sampling import SamplingParams
from dspark_jax.scheduler.schedule import SchedulerState
from dspark_jax.target.config import TransformerConfig

PAD = -1  # in token buffers: nothing committed here


@flax.struct.dataclass
class RoundStats:
  """Counts over the rounds of each request (the prefill's token belongs to no round).

  Attributes:
    num_rounds_B: rounds run.
    num_committed_B: tokens committed by them; tau = num_committed / num_rounds.
    verified_BxG, accepted_BxG: how often draft position k was verified, and accepted.
  """
  num_rounds_B: jax.Array
  num_committed_B: jax.Array
  verified_BxG: jax.Array
  accepted_BxG: jax.Array


@flax.struct.dataclass
class DecodeState:
  """State of a batch of requests between rounds.

  Invariant: the target's cache holds lens_B - 1 rows (the anchor has none yet), and the drafter
  has observed exactly the features of those rows.

  Attributes:
    tokens_BxS: int32, prompt and committed tokens, PAD beyond; with slack for one round.
    lens_B: int32, number of valid tokens; the last one is the anchor.
    limits_B: int32, length at which a request ends (prompt + max_new_tokens, or the cache's end).
    is_done_B: bool; a request that is done commits nothing any more.
    is_valid_B: bool; False once a request's logits were not finite. It is done then.
    cache: the target's keys and values.
    drafter: the drafter's own state.
    sampling: SamplingParams of the requests.
    stop_ids_BxE: int32 ids that end a request once committed, padded with PAD.
    stats: RoundStats.
    scheduler: SchedulerState; None where nothing is to be learnt from rounds (`loop.start` sets
      it for adaptive policies and learning estimators).
  """
  tokens_BxS: jax.Array
  lens_B: jax.Array
  limits_B: jax.Array
  is_done_B: jax.Array
  is_valid_B: jax.Array
  cache: kv_cache.KVCache
  drafter: Any
  sampling: SamplingParams
  stop_ids_BxE: jax.Array
  stats: RoundStats
  scheduler: SchedulerState | None = None


@dataclasses.dataclass(frozen=True)
class Frame:
  """Static part of decoding, hashable: what to compile for.

  Attributes:
    target: architecture of the target.
    drafter: a `drafter.interface.Drafter`, or None for plain decoding.
    policy: how many drafts to verify (`scheduler.policies`).
    accept_rule: "token" or "block" (`verification.accept`).
    estimator: how sure the drafts are (`scheduler.estimator`), None = the trained head as it is.
    ladder: buckets of ragged verification (`ladder`), None = one rectangle as wide as
      the policy may ever verify.
    vocab_limit: ids from here on are never emitted (padded rows of the LM head), None = all are.
    dtype: of activations and weights in matmuls, as a name.
  """
  target: TransformerConfig
  drafter: Any = None
  policy: Any = None
  accept_rule: str = "token"
  estimator: Any = None
  ladder: tuple[tuple[int, int], ...] | None = None
  vocab_limit: int | None = None
  dtype: str = "float32"

  @property
  def proposal_len(self) -> int:
    return 0 if self.drafter is None else self.drafter.proposal_len

  @property
  def tap_layer_ids(self) -> tuple[int, ...]:
    return () if self.drafter is None else self.drafter.target_layer_ids

  def for_prefill(self) -> "Frame":
    """The frame of a prefill, in which scheduler, rule and draft length play no part: methods that
    differ in those alone share its program."""
    drafter = None if self.drafter is None else self.drafter.with_len(1)
    return Frame(self.target, drafter, vocab_limit=self.vocab_limit, dtype=self.dtype)

  @property
  def slack(self) -> int:
    """Slots past the longest request, so that a round's writes never cross the buffer's end."""
    return self.proposal_len + 1


def init_stats(batch: int, proposal_len: int) -> RoundStats:
  zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
  return RoundStats(zeros(batch), zeros(batch), zeros(batch, proposal_len),
                    zeros(batch, proposal_len))
