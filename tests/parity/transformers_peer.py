"""transformers' greedy `generate` on a target's own weights, the peer of bench_decode.py.

PyTorch is needed here and nowhere else. float32 on the CPU, without compilation, with a dynamic or
a static cache, whichever is faster on the first prompt.
"""

import dataclasses
import time
from typing import Callable, Sequence

import torch
import transformers

from tests import hf_layout

CLASSES = {"llama": transformers.LlamaForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}


@dataclasses.dataclass(frozen=True)
class PeerDecoded:
  """One answer; nothing was drafted, and the prefill is not timed apart."""
  tokens: list[int]
  seconds: float
  prefill_seconds: float = 0.0
  num_rounds: int = 0
  num_verified: tuple = (0,)
  num_accepted: tuple = (0,)


def load_model(target) -> transformers.PreTrainedModel:
  """Returns the transformers model of a loaded target with plain RoPE."""
  if target.config.rope.rope_type != "default":
    raise ValueError(f"rope_type: found {target.config.rope.rope_type!r}, expected 'default'")
  make = CLASSES[target.config.model_type]
  model = make(make.config_class(**hf_layout.make_config(target.config)))
  tensors = {name: torch.tensor(x) for name, x in
             hf_layout.make_tensors(target.config, target.params).items()}
  if target.config.tie_word_embeddings:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  model.load_state_dict(tensors)
  return model.eval()


def make_peer(target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
              stop_ids: Sequence[int]) -> tuple[str, Callable[[Sequence[int]], PeerDecoded]]:
  """Returns (name, function from prompt ids to an answer), warmed up on the first prompt."""
  model = load_model(target)

  def make(cache: str):
    def generate(ids: Sequence[int]) -> PeerDecoded:
      start = time.perf_counter()
      out = model.generate(
          torch.tensor([list(ids)]), do_sample=False, max_new_tokens=max_new_tokens,
          cache_implementation=cache, eos_token_id=list(stop_ids), pad_token_id=stop_ids[0],
          attention_mask=torch.ones(1, len(ids), dtype=torch.long), disable_compile=True)
      return PeerDecoded(out[0, len(ids):].tolist(), time.perf_counter() - start)
    return generate

  ways = {f"transformers, {cache} cache": make(cache) for cache in ("dynamic", "static")}
  for way in ways.values():
    way(prompts[0])
  name = min(ways, key=lambda name: ways[name](prompts[0]).seconds)
  return name, ways[name]
