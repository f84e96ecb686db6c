"""Prompt look-up: drafts what followed the same words before (no training, no parameters).

Draft k is the token after the most recent longest earlier match of the tokens before it, the
drafts before it included. It is certain of itself, so its law is a point mass, which rejection
sampling keeps exact at any temperature. Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al.
2023, arXiv 2304.04487.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.drafter.copy_head import find_copy
from dspark_jax.types import Proposal


@dataclasses.dataclass(frozen=True)
class PromptLookupConfig:
  """What is looked up.

  Attributes:
    vocab_size: the target's V.
    proposal_len: G.
    max_ngram: matches are compared over at most this many tokens.
    min_ngram: shorter matches count as none.
  """
  vocab_size: int
  proposal_len: int = 7
  max_ngram: int = 4
  min_ngram: int = 2

  def __post_init__(self):
    for name in ("vocab_size", "proposal_len", "min_ngram"):
      if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
        raise ValueError(f"{name}: found {getattr(self, name)!r}, expected a positive integer")
    if self.max_ngram < self.min_ngram:
      raise ValueError(f"max_ngram: found {self.max_ngram}, expected at least min_ngram = "
                       f"{self.min_ngram}")


@dataclasses.dataclass(frozen=True)
class PromptLookupProposer:
  """The drafter as decoding sees it (`interface.Drafter`); its state is nothing.

  Confidence is 1 for drafts that have a match and 0 from the first one without: a threshold above
  0 then verifies just the matches. It is known before the draft is, so it may decide lengths. There
  are no logits to have a margin; the length of the match is reported in its place, as the signal
  that an online estimator can learn from.
  """
  config: PromptLookupConfig

  target_layer_ids = ()
  has_confidence = True

  @property
  def proposal_len(self) -> int:
    return self.config.proposal_len

  def with_len(self, num_drafts: int) -> "PromptLookupProposer":
    config = dataclasses.replace(self.config, proposal_len=max(num_drafts, 1))
    return dataclasses.replace(self, config=config)

  def init_state(self, batch: int, num_slots: int) -> tuple:
    return ()

  def prefill(self, params, state, features_BxTxMD, lens_B, **unused) -> tuple:
    return state

  def observe(self, params, state, features_BxWxMD, starts_B, **unused) -> tuple:
    return state

  def propose(self, params: Any, state: tuple, anchor_B: jax.Array,
              anchor_positions_B: jax.Array, sampling_params, *,
              tokens_BxS: jax.Array) -> Proposal:
    """Copies G tokens; needs room for them in `tokens_BxS`."""
    c = self.config
    drafts, has_match_B = [], jnp.ones(anchor_B.shape, bool)
    for k in range(c.proposal_len):
      positions_B = anchor_positions_B + k + 1
      copies = jax.vmap(lambda t, p: find_copy(t, p, c.max_ngram))(tokens_BxS, positions_B)
      has_match_B &= copies.level >= c.min_ngram
      tokens_BxS = jax.vmap(lambda t, p, x: t.at[p].set(x))(tokens_BxS, positions_B, copies.token)
      drafts.append((copies.token, has_match_B, jnp.where(has_match_B, copies.level, 0)))
    tokens_BxG, has_match_BxG, level_BxG = (jnp.stack(x, axis=1) for x in zip(*drafts))
    is_token_BxGxV = tokens_BxG[..., None] == jnp.arange(c.vocab_size)[None, None]
    return Proposal(
        tokens_BxG=tokens_BxG, draft_logits_BxGxV=jnp.where(is_token_BxGxV, 0.0, -jnp.inf),
        confidence_BxG=has_match_BxG.astype(jnp.float32),
        confidence_logits_BxG=jnp.where(has_match_BxG, jnp.inf, -jnp.inf),
        margin_BxG=level_BxG.astype(jnp.float32))
