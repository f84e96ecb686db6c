"""Static configuration of a DSpark drafter, and whether it fits a target."""

import dataclasses
from typing import Any, Protocol

from dspark_jax import layers

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
MAX_TAPS = 5  # taps that `config_for_target` chooses, as in the published drafters


class TargetShape(Protocol):
  """What is read of a target's config (`target.config.TransformerConfig` has it)."""
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rms_norm_eps: float
  rope: layers.RopeConfig
  max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
  """Shape and conventions of a drafter; hashable, so it can be closed over or passed to jit.

  Attributes:
    vocab_size: the target's V; `markov W1` is indexed by target ids.
    target_layer_ids: 0-based decoder layers whose raw outputs are read (-1 = embedding output),
      strictly increasing; the target's last layer is refused.
    target_hidden_size: width of one tapped layer; None = hidden_size.
    proposal_len: G, the number of drafts of a round.
    mask_token_id: target id that fills every block slot but the first.
    sample_from_anchor: True: slot k of G predicts position anchor + k + 1. False: slot 0 only
      conditions and slot k of G + 1 predicts anchor + k. A property of the weights, never guessed.
    markov_rank: r; 0 = no sequential head (DFlash).
    markov_candidates: the sequential head's bias goes to so many best base logits of a slot, and
      only they are drafted (`pruning.py`); 0 = all. A choice of serving: training never prunes.
    copy_ngram: longest match of the copy head (`copy_head.py`), in tokens; 0 = no copy head.
    draft_vocab_size: Vd of a reduced draft vocabulary; None = the target's whole vocabulary.
    num_anchors, max_position_embeddings: carried for checkpoints; no computation reads them.
  """
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  target_layer_ids: tuple[int, ...]
  num_target_layers: int
  proposal_len: int
  mask_token_id: int
  sample_from_anchor: bool
  markov_rank: int
  markov_head_type: str = "vanilla"
  enable_confidence_head: bool = True
  confidence_head_with_markov: bool = True
  confidence_stop_gradient: bool = False
  rms_norm_eps: float = 1e-6
  rope: layers.RopeConfig = layers.RopeConfig()
  qk_norm: bool = True
  target_hidden_size: int | None = None
  draft_vocab_size: int | None = None
  copy_ngram: int = 0
  markov_candidates: int = 0
  num_anchors: int = 512
  max_position_embeddings: int = 2048

  def __post_init__(self):
    object.__setattr__(self, "target_layer_ids", tuple(int(i) for i in self.target_layer_ids))
    if self.target_hidden_size is None:
      object.__setattr__(self, "target_hidden_size", self.hidden_size)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                 "num_kv_heads", "head_dim", "num_target_layers", "proposal_len",
                 "target_hidden_size", "num_anchors", "max_position_embeddings"):
      _check(_is_int(getattr(self, name)) and getattr(self, name) >= 1, name,
             getattr(self, name), "a positive integer")
    for name in ("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov",
                 "confidence_stop_gradient", "qk_norm"):
      _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
    _check(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads,
           f"a divisor of num_heads = {self.num_heads}")
    _check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number")
    _check(self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "a positive number")
    _check_layer_ids(self.target_layer_ids, self.num_target_layers)
    _check(_is_int(self.mask_token_id) and 0 <= self.mask_token_id < self.vocab_size,
           "mask_token_id", self.mask_token_id, f"an id in [0, {self.vocab_size})")
    _check(_is_int(self.markov_rank) and self.markov_rank >= 0, "markov_rank", self.markov_rank,
           "an integer >= 0")
    for name in ("copy_ngram", "markov_candidates"):
      _check(_is_int(getattr(self, name)) and getattr(self, name) >= 0, name, getattr(self, name),
             "an integer >= 0")
    _check(self.markov_rank > 0 or not self.markov_candidates, "markov_candidates",
           self.markov_candidates, "0 with markov_rank = 0, which has no walk to prune")
    _check(self.markov_head_type in MARKOV_HEAD_TYPES, "markov_head_type", self.markov_head_type,
           f"one of {MARKOV_HEAD_TYPES}")
    _check(self.draft_vocab_size is None or (
        _is_int(self.draft_vocab_size) and 1 <= self.draft_vocab_size <= self.vocab_size),
           "draft_vocab_size", self.draft_vocab_size, f"None or within 1..{self.vocab_size}")
    if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
      raise ValueError("confidence_head_with_markov: found true with markov_rank = 0, expected "
                       "false, since there is no previous-token embedding to read")

  @property
  def num_slots(self) -> int:
    """Slots of a block: G, or G + 1 where slot 0 only conditions."""
    return self.proposal_len if self.sample_from_anchor else self.proposal_len + 1

  @property
  def num_features(self) -> int:
    """Width of the concatenated taps, M * target_hidden_size."""
    return len(self.target_layer_ids) * self.target_hidden_size

  @property
  def draft_vocab(self) -> int:
    """Vd: width of the draft logits."""
    return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size


def check_fits(config: DrafterConfig, target_config: TargetShape, *,
               sample_from_anchor: bool | None = None, max_draft_len: int | None = None) -> None:
  """Raises ValueError, naming the field, where a drafter cannot serve a target.

  Args:
    config: of the drafter.
    target_config: of the target whose features, embedding and LM head the drafter would use.
    sample_from_anchor: slot convention that the caller counts on, None = whatever the drafter's.
    max_draft_len: drafts a round that the caller wants verified, None = proposal_len.
  """
  t = target_config
  _check(config.vocab_size == t.vocab_size, "vocab_size", config.vocab_size,
         f"the target's {t.vocab_size}")
  _check(config.hidden_size == t.hidden_size, "hidden_size", config.hidden_size,
         f"the target's {t.hidden_size}, since embedding and LM head are borrowed")
  _check(config.target_hidden_size == t.hidden_size, "target_hidden_size",
         config.target_hidden_size, f"the target's hidden_size {t.hidden_size}")
  _check_layer_ids(config.target_layer_ids, t.num_layers)
  _check(config.num_target_layers == t.num_layers, "num_target_layers", config.num_target_layers,
         f"the target's {t.num_layers}")
  _check(0 <= config.mask_token_id < t.vocab_size, "mask_token_id", config.mask_token_id,
         f"an id of the target in [0, {t.vocab_size})")
  if sample_from_anchor is not None:
    _check(config.sample_from_anchor == sample_from_anchor, "sample_from_anchor",
           config.sample_from_anchor,
           f"{sample_from_anchor}; the weights hold the convention, so it cannot be converted")
  if max_draft_len is not None:
    _check(0 <= max_draft_len <= config.proposal_len, "max_draft_len", max_draft_len,
           f"within 0..proposal_len = {config.proposal_len}")


def config_for_target(target_config: TargetShape, **overrides: Any) -> DrafterConfig:
  """Returns a drafter of the target's block shape: 2 layers, 7 drafts, rank 256, spread taps.

  Args:
    target_config: shape is taken from it.
    **overrides: any field of DrafterConfig; `mask_token_id` is required, because only the caller
      knows an id that no text uses.
  """
  t = target_config
  known = {f.name for f in dataclasses.fields(DrafterConfig)}
  for name in overrides:
    _check(name in known, name, overrides[name], f"a field of DrafterConfig: {sorted(known)}")
  if "mask_token_id" not in overrides:
    raise ValueError("mask_token_id: missing, expected an id of the target that no text uses")
  fields = dict(
      vocab_size=t.vocab_size, hidden_size=t.hidden_size, intermediate_size=t.intermediate_size,
      num_layers=2, num_heads=t.num_heads, num_kv_heads=t.num_kv_heads, head_dim=t.head_dim,
      target_layer_ids=spread_layer_ids(t.num_layers), num_target_layers=t.num_layers,
      proposal_len=7, sample_from_anchor=True, markov_rank=256, rms_norm_eps=t.rms_norm_eps,
      rope=t.rope, max_position_embeddings=t.max_position_embeddings)
  fields.update(overrides)
  if not fields["markov_rank"] and "confidence_head_with_markov" not in overrides:
    fields["confidence_head_with_markov"] = False
  config = DrafterConfig(**fields)
  check_fits(config, t)
  return config


def spread_layer_ids(num_target_layers: int, num_taps: int = MAX_TAPS) -> tuple[int, ...]:
  """Returns evenly spread taps from layer 1 to L - 3: 36 layers -> (1, 9, 17, 25, 33)."""
  first, last = min(1, max(num_target_layers - 2, -1)), max(num_target_layers - 3, 0)
  last = min(max(last, first), num_target_layers - 2)
  num_taps = min(num_taps, last - first + 1)
  if num_taps == 1:
    return (last,)
  step = (last - first) / (num_taps - 1)
  return tuple(int(first + i * step + 0.5) for i in range(num_taps))


def _check_layer_ids(ids: tuple[int, ...], num_target_layers: int) -> None:
  _check(len(ids) > 0, "target_layer_ids", ids, "at least one layer")
  _check(all(a < b for a, b in zip(ids, ids[1:])), "target_layer_ids", ids,
         "strictly increasing ids")
  _check(all(-1 <= i <= num_target_layers - 2 for i in ids), "target_layer_ids", ids,
         f"ids within -1..{num_target_layers - 2}; the last of {num_target_layers} layers is "
         "refused, since its output is what the head already reads")


def _is_int(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _check(is_valid: bool, name: str, found: Any, expected: str) -> None:
  if not is_valid:
    raise ValueError(f"{name}: found {found!r}, expected {expected}")
