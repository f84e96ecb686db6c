"""The DSpark drafter: backbone, sequential and confidence head, and its three decode functions.

`DSparkDrafter` is the network (Linen, parameters without embedding and LM head, which are the
target's and come as arguments). `DSparkProposer` is what decoding sees of it
(`interface.Drafter`): pure functions `prefill`, `propose`, `observe` over a state of its own.
"""

import dataclasses
from typing import Any, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax import layers
from dspark_jax import sampling
from dspark_jax.drafter import drafting
from dspark_jax.drafter import pruning
from dspark_jax.drafter.backbone import Backbone
from dspark_jax.drafter.confidence_head import ConfidenceHead
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.copy_head import CopyHead, find_column, find_copy
from dspark_jax.drafter.sequential_head import SequentialHead, split_cell
from dspark_jax.types import Proposal
from pallas_kernels import counter_rng, markov_sampling
from pallas_kernels.dispatch import dispatch


class DSparkDrafter(nn.Module):
  """The drafter's network. Call as `module.apply({"params": p}, ..., method="draft_hidden")`.

  Draft g, 0-based, stands for position anchor + g + 1 under either slot convention, and its
  previous token is the anchor for g = 0, else draft g - 1 (in training: label g - 1).
  Parameters: backbone/{fc, hidden_norm, layers_{i}, norm}, markov_head (rank > 0),
  confidence_head (when enabled), copy_head (copy_ngram > 0).
  """
  config: DrafterConfig
  dtype: Any = jnp.float32

  def setup(self):
    c = self.config
    self.backbone = Backbone(c, self.dtype)
    if c.markov_rank:
      self.markov_head = SequentialHead(c, self.dtype)
    if c.enable_confidence_head:
      self.confidence_head = ConfidenceHead(c.confidence_stop_gradient)
    if c.copy_ngram:
      self.copy_head = CopyHead(c.copy_ngram)

  def __call__(self, features_BxTxMD, anchor_positions_BxA, block_embeds_BxAxJxD,
               prev_tokens_BxAxG):
    """Training pass: (hidden [B, A, G, D], bias_in [B, A, G, r], confidence logits [B, A, G])."""
    hidden_BxAxGxD = self.train_hidden(features_BxTxMD, anchor_positions_BxA, block_embeds_BxAxJxD)
    if self.config.copy_ngram:
      self.copy_bias(hidden_BxAxGxD, jnp.zeros_like(prev_tokens_BxAxG))
    return (hidden_BxAxGxD, self.head_inputs(hidden_BxAxGxD, prev_tokens_BxAxG),
            self.confidence_logits(hidden_BxAxGxD, prev_tokens_BxAxG))

  def encode_context(self, features_BxTxMD: jax.Array) -> jax.Array:
    """RMSNorm(fc(features)): [B, T, M*D] -> [B, T, D]."""
    return self.backbone.encode_context(features_BxTxMD)

  def context_rows(self, context_BxTxD: jax.Array, positions_BxT: jax.Array) -> kv_cache.KVCache:
    """Keys (normed, rotated) and values of context for each draft layer, each [B, K, T, H]."""
    return self.backbone.context_rows(context_BxTxD, positions_BxT)

  def draft_hidden(self, block_embeds_BxJxD: jax.Array, positions_BxJ: jax.Array,
                   cache: kv_cache.KVCache, cache_lens_B: jax.Array,
                   num_drafts: int | None = None) -> jax.Array:
    """Serving form: one block a request over its context cache.

    Args:
      block_embeds_BxJxD: of `embed_block`, J = config.num_slots.
      positions_BxJ: anchor position + slot.
      cache: context rows; those at and beyond cache_lens_B are never seen.
      cache_lens_B: int32; equals the anchor's position.
      num_drafts: only the first so many are wanted, the same as of all; None = all.
    Returns:
      Final-normed hidden states of the G drafts, [B, G, D].
    """
    return self.backbone.draft_hidden(block_embeds_BxJxD, positions_BxJ, cache, cache_lens_B,
                                      num_drafts)

  def train_hidden(self, features_BxTxMD: jax.Array, anchor_positions_BxA: jax.Array,
                   block_embeds_BxAxJxD: jax.Array) -> jax.Array:
    """Training form: all anchors of a sequence at once; equals `draft_hidden` of each.

    Args:
      features_BxTxMD: of a whole sequence; an anchor's block sees rows j < anchor only.
      anchor_positions_BxA: int32; any order, repeats allowed.
      block_embeds_BxAxJxD: of `embed_block`.
    Returns:
      Final-normed hidden states of the drafts, [B, A, G, D].
    """
    return self.backbone.train_hidden(features_BxTxMD, anchor_positions_BxA, block_embeds_BxAxJxD)

  def head_inputs(self, hidden_xGxD: jax.Array, prev_tokens_xG: jax.Array) -> jax.Array:
    """Teacher-forced input of W2: [..., G, D] and target ids [..., G] -> [..., G, r].

    Draft logits are hidden @ lm_head.T + head_inputs @ bias_weight.T. Zero-width at rank 0.
    """
    if not self.config.markov_rank:
      return jnp.zeros((*prev_tokens_xG.shape, 0), self.dtype)
    return self.markov_head.forced(hidden_xGxD, self.markov_head.embed_previous(prev_tokens_xG))

  def bias_weight(self) -> jax.Array:
    """W2 [Vd, r]; zero-width at rank 0."""
    if not self.config.markov_rank:
      return jnp.zeros((self.config.draft_vocab, 0), self.dtype)
    return self.markov_head.markov_w2.astype(self.dtype)

  def confidence_logits(self, hidden_xGxD: jax.Array, prev_tokens_xG: jax.Array) -> jax.Array:
    """Raw confidence, float32 [..., G]; +inf without a confidence head."""
    if not self.config.enable_confidence_head:
      return jnp.full(prev_tokens_xG.shape, jnp.inf, jnp.float32)
    embed = None
    if self.config.confidence_head_with_markov:
      embed = self.markov_head.embed_previous(prev_tokens_xG)
    return self.confidence_head(hidden_xGxD, embed)

  def copy_bias(self, hidden_xGxD: jax.Array, level_xG: jax.Array):
    """(bias of the copied token's logit, addition to the confidence logit), float32 [..., G]."""
    return self.copy_head(hidden_xGxD, level_xG)

  def init_carry(self, batch: int) -> jax.Array:
    """State of the sequential head before the first draft, [B, r] (width 0 unless rnn)."""
    if not self.config.markov_rank:
      return jnp.zeros((batch, 0), self.dtype)
    return self.markov_head.init_carry(batch)

  def head_step(self, carry: jax.Array, hidden_k_BxD: jax.Array, prev_token_B: jax.Array):
    """One draft in serving: (next carry, bias_in [B, r], confidence logit [B])."""
    confidence_logit_B = self.confidence_logits(hidden_k_BxD, prev_token_B)
    if not self.config.markov_rank:
      return carry, jnp.zeros((prev_token_B.shape[0], 0), self.dtype), confidence_logit_B
    embed_BxR = self.markov_head.embed_previous(prev_token_B)
    carry, bias_in_BxR = self.markov_head.step(carry, hidden_k_BxD, embed_BxR)
    return carry, bias_in_BxR, confidence_logit_B


def embed_block(config: DrafterConfig, embed_VxD: jax.Array, anchors_x: jax.Array) -> jax.Array:
  """Input of blocks: the anchor's embedding, then the mask token's: [...] -> [..., J, D]."""
  is_anchor_J = jnp.arange(config.num_slots) == 0
  is_anchor = is_anchor_J.reshape((1,) * anchors_x.ndim + (-1, 1))
  mask_D = embed_VxD[config.mask_token_id].reshape((1,) * (anchors_x.ndim + 1) + (-1,))
  return jnp.where(is_anchor, layers.embed(embed_VxD, anchors_x)[..., None, :], mask_D)


def borrow(config: DrafterConfig, embed_VxD: jax.Array, lm_head_VxD: jax.Array, *,
           draft_ids: jax.Array | None = None) -> dict[str, jax.Array]:
  """Returns the keyword arguments of `DSparkProposer.propose` from the target's parameters.

  A reduced vocabulary's head rows are gathered here, once, not every round.
  """
  if (draft_ids is None) != (config.draft_vocab_size is None):
    raise ValueError(f"draft_ids: found {'none' if draft_ids is None else 'some'} with "
                     f"draft_vocab_size {config.draft_vocab_size}, expected both or neither")
  if draft_ids is None:
    return dict(embed_VxD=embed_VxD, lm_head_VdxD=lm_head_VxD)
  return dict(embed_VxD=embed_VxD, lm_head_VdxD=lm_head_VxD[draft_ids], draft_ids=draft_ids)


def init_params(config: DrafterConfig, key: jax.Array) -> Mapping[str, Any]:
  """Returns fresh float32 parameters of DSparkDrafter."""
  def init(key):
    block = jnp.zeros((1, 1, config.num_slots, config.hidden_size))
    return DSparkDrafter(config).init(
        key, jnp.zeros((1, 1, config.num_features)), jnp.zeros((1, 1), jnp.int32), block,
        jnp.zeros((1, 1, config.proposal_len), jnp.int32))["params"]
  return jax.jit(init)(key)


@dataclasses.dataclass(frozen=True)
class DSparkProposer:
  """The drafter as decoding sees it: three pure functions over a cache of context rows.

  A block sees the context rows before its anchor's position, so `propose` needs no length, and
  rows past the accepted ones are dead until `observe` overwrites them.

  Attributes:
    vocab_limit: ids at and beyond it (padded rows of the LM head) are never drafted.
    implementation: of the sequential walk, see `pallas_kernels.dispatch`.
    num_drafts: drafts of the block that are drawn, None = all. The block has all its slots in any
      case, since they see each other; heads, walk and draws end with the last draft.
  """
  config: DrafterConfig
  dtype: Any = jnp.float32
  vocab_limit: int | None = None
  implementation: str = "auto"
  num_drafts: int | None = None

  @property
  def proposal_len(self) -> int:
    return self.config.proposal_len if self.num_drafts is None else self.num_drafts

  @property
  def target_layer_ids(self) -> tuple[int, ...]:
    return self.config.target_layer_ids

  def init_state(self, batch: int, num_slots: int) -> kv_cache.KVCache:
    """Returns an empty context; allow W slots past the longest sequence."""
    c = self.config
    return kv_cache.init_cache(batch, num_slots, num_layers=c.num_layers,
                               num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=self.dtype)

  @property
  def has_confidence(self) -> bool:
    return self.config.enable_confidence_head

  def with_len(self, num_drafts: int) -> "DSparkProposer":
    is_short = num_drafts < self.config.proposal_len
    return dataclasses.replace(self, num_drafts=num_drafts if is_short else None)

  def prefill(self, params, state: kv_cache.KVCache, features_BxTxMD: jax.Array,
              lens_B: jax.Array, **unused) -> kv_cache.KVCache:
    """Writes the prompt's context; features at and beyond lens_B are padding, their rows dead."""
    return self.observe(params, state, features_BxTxMD, jnp.zeros_like(lens_B))

  def observe(self, params, state: kv_cache.KVCache, features_BxWxMD: jax.Array,
              starts_B: jax.Array, **unused) -> kv_cache.KVCache:
    """Writes context rows of positions starts_B + (0..W-1).

    The caller guarantees that every position from 0 to the next anchor's, exclusive, has been
    written by a row that was accepted, and starts_B + W <= num_slots.
    """
    W, found = features_BxWxMD.shape[1:]
    if found != self.config.num_features:
      raise ValueError(f"features: found width {found}, expected {self.config.num_features} = "
                       f"{len(self.config.target_layer_ids)} taps of "
                       f"{self.config.target_hidden_size}")
    if W > state.num_slots:
      raise ValueError(f"features: found {W} rows, expected at most the cache's {state.num_slots}")
    positions_BxW = starts_B[:, None] + jnp.arange(W)[None, :]
    return self.write_rows(state, self.encode_rows(params, features_BxWxMD, positions_BxW),
                           starts_B)

  def encode_rows(self, params, features_BxWxMD: jax.Array,
                  positions_BxW: jax.Array) -> kv_cache.KVCache:
    """The costly half of `observe`, row by row: context rows, each [B, K, W, H]."""
    context_BxWxD = self._apply(params, "encode_context", features_BxWxMD)
    return self._apply(params, "context_rows", context_BxWxD, positions_BxW)

  def write_rows(self, state: kv_cache.KVCache, rows: kv_cache.KVCache,
                 starts_B: jax.Array) -> kv_cache.KVCache:
    """The other half of `observe`."""
    return kv_cache.write_rows(state, rows, starts_B)

  def propose(self, params, state: kv_cache.KVCache, anchor_B: jax.Array,
              anchor_positions_B: jax.Array, sampling_params: sampling.SamplingParams, *,
              embed_VxD: jax.Array, lm_head_VdxD: jax.Array,
              draft_ids: jax.Array | None = None,
              tokens_BxS: jax.Array | None = None) -> Proposal:
    """Drafts one block a request.

    Args:
      params: of DSparkDrafter; give them in `dtype`, or they are cast each round.
      state: context of at least the rows before each anchor.
      anchor_B: int32 target ids, the last committed tokens.
      anchor_positions_B: int32 positions of the anchors = number of tokens before them.
      sampling_params: of the requests; the draft law is theirs.
      embed_VxD: the target's embedding.
      lm_head_VdxD: the target's LM head, or its rows `draft_ids`; hidden states are cast to its
        dtype.
      draft_ids: int32 [Vd], target ids of a reduced draft vocabulary; None = the whole.
      tokens_BxS: int32, all tokens of the requests, anchors included, with room for G more;
        needed by the copy head alone.
    """
    c = self.config
    self._check_vocabulary(embed_VxD, lm_head_VdxD, draft_ids)
    if c.copy_ngram and tokens_BxS is None:
      raise ValueError(f"tokens_BxS: found none with copy_ngram {c.copy_ngram}, expected the text "
                       "to copy from")
    block_BxJxD = embed_block(c, embed_VxD, anchor_B)
    positions_BxJ = anchor_positions_B[:, None] + jnp.arange(c.num_slots)[None, :]
    hidden_BxGxD = self._apply(params, "draft_hidden", block_BxJxD, positions_BxJ, state,
                               anchor_positions_B, self.num_drafts)
    # Position first, as the walk reads them.
    hidden_GxBxD = jnp.swapaxes(hidden_BxGxD, 0, 1)
    base_logits_GxBxV = layers.linear(hidden_GxBxD.astype(lm_head_VdxD.dtype),
                                      lm_head_VdxD, dtype=jnp.float32)
    words_GxBx2 = counter_rng.noise_words(
        sampling_params.seed[None], counter_rng.DRAFT, anchor_positions_B[None],
        jnp.arange(self.proposal_len)[:, None])
    args = (params, hidden_GxBxD, base_logits_GxBxV, words_GxBx2, anchor_B, sampling_params,
            draft_ids)
    if c.copy_ngram or c.markov_candidates:
      found = self._walk(*args, anchor_positions_B, tokens_BxS)
    else:
      kernels = {"tpu": self._walk_tempered} if c.markov_rank else None
      found = dispatch(self.implementation, *args, reference=self._walk, kernels=kernels)
    tokens_BxG, draft_logits_BxGxV, confidence_logits_BxG, margin_BxG = (
        jnp.swapaxes(a, 0, 1) for a in found)
    return Proposal(tokens_BxG=tokens_BxG, draft_logits_BxGxV=draft_logits_BxGxV,
                    confidence_BxG=nn.sigmoid(confidence_logits_BxG),
                    confidence_logits_BxG=confidence_logits_BxG, margin_BxG=margin_BxG)

  def _walk(self, params, hidden_GxBxD, base_logits_GxBxV, words_GxBx2, anchor_B, sampling_params,
            draft_ids, anchor_positions_B=None, tokens_BxS=None):
    """Drafts by any law, slot by slot: tokens [G, B], law [G, B, V], confidence logits, margins."""
    c = self.config
    w2_VdxR = self._apply(params, "bias_weight")
    candidates = None
    if c.markov_candidates:
      base_logits_GxBxV = self._limit(base_logits_GxBxV, draft_ids)
      candidates = pruning.find_candidates(base_logits_GxBxV, w2_VdxR, c.markov_candidates)

    def step(carry, slot, previous_B, base_BxV, words_Bx2):
      head_carry, text_BxS = carry
      hidden_BxD = hidden_GxBxD[slot]
      head_carry, bias_in_BxR, confidence_logit_B = self._apply(
          params, "head_step", head_carry, hidden_BxD, previous_B)
      copy = None
      if c.copy_ngram:
        positions_B = anchor_positions_B + slot
        text_BxS = jax.vmap(lambda t, p, x: t.at[p].set(x))(text_BxS, positions_B, previous_B)
        copies = jax.vmap(lambda t, p: find_copy(t, p, c.copy_ngram))(text_BxS, positions_B + 1)
        bias_B, more_B = self._apply(params, "copy_bias", hidden_BxD, copies.level)
        confidence_logit_B = confidence_logit_B + more_B
        copy = find_column(copies, draft_ids), bias_B
      if candidates is None:
        token_B, law = self._draw(base_BxV, bias_in_BxR, w2_VdxR, copy, words_Bx2, sampling_params,
                                  draft_ids)
      else:
        token_B, law = pruning.draw(candidates, slot, base_BxV, bias_in_BxR, w2_VdxR, copy,
                                    words_Bx2, sampling_params, draft_ids)
      return (head_carry, text_BxS), token_B, (law, confidence_logit_B)

    carry = (self._apply(params, "init_carry", anchor_B.shape[0]), tokens_BxS)
    tokens_GxB, (law, confidence_logits_GxB) = markov_sampling.walk(
        base_logits_GxBxV, words_GxBx2, anchor_B, carry, step)
    if candidates is not None:
      law_GxBxC, margin_GxB, columns_GxBxC = law
      law = pruning.widen(law_GxBxC, columns_GxBxC, c.draft_vocab), margin_GxB
    return tokens_GxB, law[0], confidence_logits_GxB, law[1]

  def _draw(self, logits_BxV, bias_in_BxR, w2_VdxR, copy, words_Bx2, sampling_params, draft_ids):
    """One slot by the whole law: (tokens [B], (law [B, V], margins [B]))."""
    if self.config.markov_rank:
      logits_BxV = logits_BxV + layers.linear(bias_in_BxR, w2_VdxR, dtype=jnp.float32)
    if copy is not None:
      column_B, bias_B = copy
      logits_BxV = logits_BxV.at[jnp.arange(column_B.shape[0]), jnp.maximum(column_B, 0)].add(
          jnp.where(column_B >= 0, bias_B, 0.0))
    margin_B = drafting.top_margin(self._limit(logits_BxV, draft_ids))
    law_BxV = sampling.law_logits(logits_BxV, sampling_params, vocab_limit=self.vocab_limit,
                                  ids=draft_ids)
    return sampling.sample(law_BxV, words_Bx2, ids=draft_ids), (law_BxV, margin_B)

  def _walk_tempered(self, params, hidden_GxBxD, base_logits_GxBxV, words_GxBx2, anchor_B,
                     sampling_params, draft_ids, *, implementation="pallas"):
    """`_walk` by the kernel, which knows no filters; with any of them in the batch, `_walk`."""
    def by_kernel():
      head = params["markov_head"]
      pre_GxBxE, cell_ExI = split_cell(self.config, head, hidden_GxBxD, self.dtype)
      draws = markov_sampling.markov_sampling(
          self._limit(base_logits_GxBxV, draft_ids), head["markov_w1"].astype(self.dtype),
          self._apply(params, "bias_weight"), anchor_B, words_GxBx2, sampling_params.temperature,
          kind=self.config.markov_head_type, pre_GxBxE=pre_GxBxE, cell_ExI=cell_ExI,
          ids_V=draft_ids, with_logits=True, implementation=implementation)
      previous_GxB = jnp.concatenate([anchor_B[None], draws.tokens_GxB[:-1]])
      law_BxGxV = sampling.law_logits(jnp.swapaxes(draws.logits_GxBxV, 0, 1), sampling_params)
      return (draws.tokens_GxB, jnp.swapaxes(law_BxGxV, 0, 1),
              self._apply(params, "confidence_logits", hidden_GxBxD, previous_GxB),
              drafting.top_margin(draws.logits_GxBxV))

    p = sampling_params
    is_filtered = jnp.any((p.temperature > 0) & ((p.top_k > 0) | (p.top_p < 1) | (p.min_p > 0)))
    return jax.lax.cond(
        is_filtered, lambda: self._walk(params, hidden_GxBxD, base_logits_GxBxV, words_GxBx2,
                                        anchor_B, sampling_params, draft_ids), by_kernel)

  def _limit(self, logits_xV: jax.Array, draft_ids: jax.Array | None) -> jax.Array:
    """Takes ids at and beyond `vocab_limit` out."""
    if self.vocab_limit is None:
      return logits_xV
    ids_V = jnp.arange(logits_xV.shape[-1]) if draft_ids is None else draft_ids
    is_in = (ids_V < self.vocab_limit).reshape((1,) * (logits_xV.ndim - 1) + (-1,))
    return jnp.where(is_in, logits_xV, -jnp.inf)

  def _apply(self, params, method: str, *args):
    return DSparkDrafter(self.config, self.dtype).apply({"params": params}, *args, method=method)

  def _check_vocabulary(self, embed_VxD, lm_head_VdxD, draft_ids) -> None:
    c = self.config
    width = c.hidden_size
    for name, found, expected in (
        ("embed_VxD", embed_VxD.shape, (c.vocab_size, width)),
        ("lm_head_VdxD", lm_head_VdxD.shape, (c.draft_vocab, width)),
        ("draft_ids", None if draft_ids is None else draft_ids.shape,
         None if c.draft_vocab_size is None else (c.draft_vocab,))):
      if found != expected:
        raise ValueError(f"{name}: found shape {found}, expected {expected}")
