"""Plain PyTorch's side of bench_training: the same step, as one would write it down.

Written from `reference-semantics` (sections 2-5) and the paper, eager, every law of every draft at
once. PyTorch is needed here and nowhere else.
"""

import time
from typing import Callable

import torch
import torch.nn.functional as F

from experiments import _training_case as case


def to_torch(tree, *, requires_grad: bool = False):
  if isinstance(tree, dict):
    return {name: to_torch(value, requires_grad=requires_grad) for name, value in tree.items()}
  return torch.tensor(tree, requires_grad=requires_grad)


def leaves(tree) -> list[torch.Tensor]:
  return [x for v in tree.values() for x in leaves(v)] if isinstance(tree, dict) else [tree]


def rms_norm(x, p, eps):
  return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * p["weight"]


def rotate(x_BTNH, positions_BT, theta):
  """RoPE, halves rotated."""
  half = x_BTNH.shape[-1] // 2
  frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
  angle = (positions_BT[..., None].float() * frequencies)[:, :, None]
  a, b = x_BTNH[..., :half], x_BTNH[..., half:]
  cos, sin = angle.cos(), angle.sin()
  return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def project(x, p, name, s, positions=None):
  """Heads of one projection, [B, heads, T, H]; rotated where positions are given."""
  heads = F.linear(x, p[name]["weight"]).unflatten(-1, (-1, s.head_dim))
  if positions is not None:
    heads = rotate(heads, positions, s.rope_theta)
  return heads.transpose(1, 2)


def finish_layer(x, attended, p, s):
  x = x + F.linear(attended.transpose(1, 2).flatten(2), p["self_attn"]["o_proj"]["weight"])
  h, mlp = rms_norm(x, p["post_attention_layernorm"], s.rms_norm_eps), p["mlp"]
  gated = F.silu(F.linear(h, mlp["gate_proj"]["weight"])) * F.linear(h, mlp["up_proj"]["weight"])
  return x + F.linear(gated, mlp["down_proj"]["weight"])


@torch.no_grad()
def run_target(s: case.Shape, p, ids):
  """Returns (final-normed hidden states, features of the tapped layers)."""
  positions = torch.arange(ids.shape[1])[None]
  x, taps = p["embed_tokens"][ids], []
  for i in range(s.num_layers):
    layer = p[f"layers_{i}"]
    h, attention = rms_norm(x, layer["input_layernorm"], s.rms_norm_eps), layer["self_attn"]
    q, k = (project(h, attention, name, s, positions) for name in ("q_proj", "k_proj"))
    x = finish_layer(x, F.scaled_dot_product_attention(
        q, k, project(h, attention, "v_proj", s), is_causal=True, enable_gqa=True), layer, s)
    if i in s.target_layer_ids:
      taps.append(x)
  return rms_norm(x, p["norm"], s.rms_norm_eps), torch.cat(taps, dim=-1)


def draft(s: case.Shape, p, embed, features, anchors, positions_BA):
  """Returns hidden states of all drafts, [B, A * G, D]."""
  (B, T), G = features.shape[:2], s.proposal_len
  A = positions_BA.shape[1]
  context = rms_norm(F.linear(features, p["fc"]["weight"]), p["hidden_norm"], s.rms_norm_eps)
  slots = torch.arange(G)
  tokens = torch.where(slots == 0, anchors[..., None], s.mask_token_id).flatten(1)
  positions = (positions_BA[..., None] + slots).flatten(1)
  context_positions = torch.arange(T)[None]
  sees_context = (torch.arange(T) < positions_BA[..., None]).repeat_interleave(G, dim=1)
  block = torch.arange(A * G) // G
  sees_block = (block[:, None] == block).expand(B, -1, -1)
  mask = torch.cat([sees_context, sees_block], dim=-1)[:, None]
  x = embed[tokens]
  for i in range(s.draft_layers):
    layer = p[f"layers_{i}"]
    h, attention = rms_norm(x, layer["input_layernorm"], s.rms_norm_eps), layer["self_attn"]
    both = lambda name, of_context, of_block, h=h, attention=attention: torch.cat(
        [project(context, attention, name, s, of_context), project(h, attention, name, s,
                                                                   of_block)], dim=2)
    x = finish_layer(x, F.scaled_dot_product_attention(
        project(h, attention, "q_proj", s, positions), both("k_proj", context_positions, positions),
        both("v_proj", None, None), attn_mask=mask, enable_gqa=True), layer, s)
  return rms_norm(x, p["norm"], s.rms_norm_eps)


def compute_loss(s: case.Shape, target, drafter, ids, loss_mask, positions_BA):
  """Mean loss of the blocks after the given anchors, all of them valid."""
  hidden, features = run_target(s, target, ids)
  embed, G = target["embed_tokens"], s.proposal_len
  at = lambda x, index: torch.gather(x, 1, index.flatten(1))
  draft_hidden = draft(s, drafter["backbone"], embed, features, at(ids, positions_BA), positions_BA)
  label_positions = positions_BA[..., None] + torch.arange(1, G + 1)
  inside = label_positions < ids.shape[1]
  label_positions = label_positions.clamp(max=ids.shape[1] - 1)
  labels = at(ids, label_positions)
  counts = (inside & at(loss_mask, label_positions).view_as(inside).bool()).cumprod(dim=-1)
  weights = (counts * torch.exp(-torch.arange(G) / case.LOSS_DECAY)).flatten(1)
  previous = torch.cat([at(ids, positions_BA)[..., None], labels.view_as(inside)[..., :-1]], -1)
  head = drafter["markov_head"]
  embeds = head["markov_w1"][previous.flatten(1)]
  log_p = F.log_softmax(F.linear(draft_hidden, embed) + F.linear(embeds, head["markov_w2"]), -1)
  law_positions = (positions_BA[..., None] + torch.arange(G)).clamp(max=ids.shape[1] - 1).flatten(1)
  with torch.no_grad():
    read = torch.gather(hidden, 1, law_positions[..., None].expand(-1, -1, hidden.shape[-1]))
    target_p = F.softmax(F.linear(read, embed), dim=-1)
  ce = -log_p.gather(-1, labels[..., None])[..., 0]
  tv = (log_p.exp() - target_p).abs().sum(-1)
  proj = drafter["confidence_head"]["proj"]
  confidence = F.linear(torch.cat([draft_hidden, embeds], -1), proj["weight"], proj["bias"])[..., 0]
  bce = F.binary_cross_entropy_with_logits(confidence, (1 - 0.5 * tv).detach(), reduction="none")
  each = case.CE_WEIGHT * ce + case.TV_WEIGHT * tv + case.CONFIDENCE_WEIGHT * bce
  return (weights * each).sum() / (weights.sum() + 1e-6)


def make_step(shape: case.Shape, arrays: dict, *, dtype: str) -> Callable[[], float]:
  """As `experiments._training_ours.make_step`; bfloat16 by autocast, as its users have it."""
  target, drafter = to_torch(arrays["target"]), to_torch(arrays["drafter"], requires_grad=True)
  ids, loss_mask = (torch.tensor(arrays[name]).long() for name in ("input_ids", "loss_mask"))
  optimizer = torch.optim.AdamW(leaves(drafter), lr=case.LEARNING_RATE, weight_decay=0.0)
  is_candidate = loss_mask * F.pad(loss_mask[:, 1:], (0, 1))
  torch.manual_seed(0)

  def step() -> float:
    draws = torch.where(is_candidate > 0, torch.rand(ids.shape), 2.0)
    positions = draws.argsort(dim=1)[:, :shape.num_anchors].sort(dim=1).values
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
      loss = compute_loss(shape, target, drafter, ids, loss_mask, positions)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(leaves(drafter), case.CLIP_NORM)
    optimizer.step()
    return loss.item()

  return step


def measure_matmul(dtype: str) -> float:
  """As `experiments._training_ours.measure_matmul`."""
  x, y = (torch.randn(shape, dtype=getattr(torch, dtype)) for shape in ((1024, 576), (576, 8192)))
  seconds = []
  for _ in range(6):
    started = time.perf_counter()
    x @ y
    seconds.append(time.perf_counter() - started)
  return 2 * 1024 * 576 * 8192 / min(seconds[1:])
