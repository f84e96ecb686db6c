"""A small language model as the drafter (Leviathan et al. 2023; Chen et al. 2023).

Any decoder with the target's tokenizer: it drafts token by token over a cache of its own, each
draft drawn from its law under the request's sampling parameters.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.drafter import drafting
from dspark_jax.types import Proposal


@dataclasses.dataclass(frozen=True)
class SmallModelProposer:
  """A decoder as decoding sees it (`interface.Drafter`); its state is its KV cache.

  `propose` drafts on a copy of the cache, which costs one copy a round and keeps the state clean;
  `observe` then reads what was committed in one pass, as the target does. Roll-back is nothing:
  rows of rejected drafts lie past the valid length until they are overwritten.

  Attributes:
    model: Linen module called as `target.transformer.Transformer` is, with its `config`. (Handed
      in: nothing in this folder knows the target's.)
    proposal_len: G.
    vocab_size: the target's V. A model with more rows has the others cut off; one with fewer
      comes with `draft_ids` (see `borrow`).
    vocab_limit: ids at and beyond it (padded rows of the LM head) are never drafted.
  """
  model: Any
  proposal_len: int
  vocab_size: int
  vocab_limit: int | None = None

  target_layer_ids = ()
  has_confidence = False

  def __post_init__(self):
    if not isinstance(self.proposal_len, int) or self.proposal_len < 1:
      raise ValueError(f"proposal_len: found {self.proposal_len!r}, expected a positive integer")

  def with_len(self, num_drafts: int) -> "SmallModelProposer":
    return dataclasses.replace(self, proposal_len=max(num_drafts, 1))

  def init_state(self, batch: int, num_slots: int) -> kv_cache.KVCache:
    c = self.model.config
    return kv_cache.init_cache(batch, num_slots, num_layers=c.num_layers,
                               num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
                               dtype=self.model.dtype)

  def prefill(self, params, state: kv_cache.KVCache, features_BxTxMD, lens_B: jax.Array, *,
              tokens_BxW1: jax.Array, **unused) -> kv_cache.KVCache:
    out = self.model.apply({"params": params}, self._clip(tokens_BxW1[:, :-1]))
    return kv_cache.write_rows(state, out.rows, jnp.zeros_like(lens_B))

  def observe(self, params, state: kv_cache.KVCache, features_BxWxMD, starts_B: jax.Array, *,
              tokens_BxW1: jax.Array, **unused) -> kv_cache.KVCache:
    out = self.model.apply({"params": params}, self._clip(tokens_BxW1[:, :-1]), cache=state,
                           cache_lens_B=starts_B)
    return kv_cache.write_rows(state, out.rows, starts_B)

  def propose(self, params, state: kv_cache.KVCache, anchor_B: jax.Array,
              anchor_positions_B: jax.Array, sampling_params, *,
              draft_ids: jax.Array | None = None,
              tokens_BxS: jax.Array | None = None) -> Proposal:
    width = min(self.model.config.vocab_size, self.vocab_size)

    def draft(k, carry):
      token_B, cache, drafts = carry
      out = self.model.apply({"params": params}, self._clip(token_B[:, None]), cache=cache,
                             cache_lens_B=anchor_positions_B + k)
      logits_BxV = self.model.apply({"params": params}, out.hidden_BxTxD[:, 0], method="head")
      drawn = drafting.draw(
          logits_BxV[:, :width], k, sampling_params, anchor_positions_B,
          vocab_limit=self.vocab_limit, draft_ids=draft_ids)
      cache = kv_cache.write_rows(cache, out.rows, anchor_positions_B + k)
      return drawn[0], cache, tuple(x.at[:, k].set(new) for x, new in zip(drafts, drawn))

    # A loop, not unrolled: the model is the largest program of a round, and is compiled once.
    batch, G = anchor_B.shape[0], self.proposal_len
    empty = (jnp.zeros((batch, G), jnp.int32), jnp.zeros((batch, G, width), jnp.float32),
             jnp.zeros((batch, G), jnp.float32))
    _, _, drafts = jax.lax.fori_loop(0, G, draft, (anchor_B, state, empty))
    return drafting.make_proposal(*drafts)

  def _clip(self, tokens_BxT: jax.Array) -> jax.Array:
    """Ids that the model lacks become its last: a poor guess, but a finite one."""
    return jnp.minimum(tokens_BxT, self.model.config.vocab_size - 1)


def borrow(model_vocab_size: int, vocab_size: int) -> dict[str, jax.Array]:
  """Returns the keyword arguments of `SmallModelProposer.propose`."""
  if model_vocab_size >= vocab_size:
    return {}
  return {"draft_ids": jnp.arange(model_vocab_size, dtype=jnp.int32)}
