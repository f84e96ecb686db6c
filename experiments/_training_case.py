"""One training step as both sides of bench_training see it: shapes, weights, a batch, its FLOPs.

NumPy alone: neither side's memory holds the other's library.
"""

import ctypes
import dataclasses
import resource
import sys

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
  """A Llama target with tied embeddings, and a DSpark drafter of its block shape (vanilla head).

  Attributes:
    num_prompt: tokens at the start of each sequence that are in no loss.
    draft_layers, markov_rank, proposal_len: of the drafter, which has a confidence head.
  """
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  target_layer_ids: tuple[int, ...]
  draft_layers: int
  markov_rank: int
  proposal_len: int
  mask_token_id: int
  batch_size: int
  seq_len: int
  num_anchors: int
  num_prompt: int = 0
  rope_theta: float = 10000.0
  rms_norm_eps: float = 1e-5


# The loss and optimiser of the public reference.
CE_WEIGHT, TV_WEIGHT, CONFIDENCE_WEIGHT, LOSS_DECAY = 0.1, 0.9, 1.0, 4.0
LEARNING_RATE, CLIP_NORM = 6e-4, 1.0


def make_arrays(shape: Shape, *, seed: int) -> dict:
  """Returns {target, drafter: trees of float32 weights [out, in]; input_ids, loss_mask [B, T]}."""
  s, rng = shape, np.random.default_rng(seed)
  linear = lambda out, width: {"weight": _normal(rng, out, width)}
  norm = lambda: {"weight": np.ones(s.hidden_size, np.float32)}
  D, F = s.hidden_size, s.intermediate_size
  N, K = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim

  def layer():
    return {"input_layernorm": norm(), "post_attention_layernorm": norm(),
            "self_attn": {"q_proj": linear(N, D), "k_proj": linear(K, D), "v_proj": linear(K, D),
                          "o_proj": linear(D, N)},
            "mlp": {"gate_proj": linear(F, D), "up_proj": linear(F, D), "down_proj": linear(D, F)}}

  layers = lambda num: {f"layers_{i}": layer() for i in range(num)}
  target = {"embed_tokens": _normal(rng, s.vocab_size, D), "norm": norm(), **layers(s.num_layers)}
  drafter = {
      "backbone": {"fc": linear(D, len(s.target_layer_ids) * D), "hidden_norm": norm(),
                   "norm": norm(), **layers(s.draft_layers)},
      "markov_head": {f"markov_w{i}": _normal(rng, s.vocab_size, s.markov_rank) for i in (1, 2)},
      "confidence_head": {"proj": linear(1, D + s.markov_rank) | {"bias": np.zeros(1, np.float32)}}}
  mask = np.ones((s.batch_size, s.seq_len), np.int32)
  mask[:, :s.num_prompt] = 0
  ids = rng.integers(0, s.vocab_size, mask.shape).astype(np.int32)
  return dict(target=target, drafter=drafter, input_ids=ids, loss_mask=mask)


def _normal(rng, rows: int, width: int) -> np.ndarray:
  return rng.standard_normal((rows, width), dtype=np.float32) * np.float32(width**-0.5)


def count_flops(shape: Shape) -> dict[str, int]:
  """Returns multiplications and additions that no implementation of the step can leave out.

  Matrix products alone. The frozen target runs forward only, its law once a position; the drafter's
  products count three times (forward, gradient of the input, of the weight), but for the frozen LM
  head, whose weight has no gradient, and `fc`, whose input has none. A block sees half of the
  context on average.
  """
  s = shape
  D, V, R = s.hidden_size, s.vocab_size, s.markov_rank
  N, K = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
  layer = 2 * D * N + 2 * D * K + 3 * D * s.intermediate_size
  B, T = s.batch_size, s.seq_len
  tokens, drafts = B * T, B * s.num_anchors * s.proposal_len
  block_attention = 4 * N * drafts * (T // 2 + s.proposal_len)
  return {
      "target": s.num_layers * (2 * tokens * layer + 4 * N * B * T * (T + 1) // 2),
      "target law": 2 * min(drafts, tokens) * V * D,
      "context": 2 * 2 * tokens * len(s.target_layer_ids) * D * D
                 + 3 * s.draft_layers * 2 * tokens * 2 * D * K,
      "draft layers": 3 * s.draft_layers * (2 * drafts * layer + block_attention),
      "draft law": 2 * 2 * drafts * V * D + 3 * 2 * drafts * V * R}


def current_bytes() -> int:
  """Returns what this process has in memory now; without /proc, the most that it ever had."""
  try:
    with open("/proc/self/statm", encoding="ascii") as f:
      return int(f.read().split()[1]) * resource.getpagesize()
  except OSError:
    return peak_bytes()


def peak_bytes() -> int:
  """Returns the most that this process had in memory, since `reset_peak` where that works."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024


def give_back_freed() -> None:
  """Returns to the system what was allocated and freed, by a compiler or in loading."""
  try:
    ctypes.CDLL(None).malloc_trim(0)
  except (AttributeError, OSError, TypeError):  # not glibc
    pass


def reset_peak() -> bool:
  """Starts `peak_bytes` anew from what is in use now; says whether this system (Linux) can."""
  give_back_freed()
  try:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as f:
      f.write("5")
  except OSError:
    return False
  return True
