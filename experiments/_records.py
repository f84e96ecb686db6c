"""What calibration and the study of estimators share: rounds in which every draft is verified."""

from typing import Mapping

import numpy as np
import tqdm

from dspark_jax import DSpark
from dspark_jax.decode import loop
from dspark_jax.decode.record import Records, join_records, record_rounds
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler.policies import FixedLength
from experiments import _timing


def read_mix(text: str) -> dict[str, int]:
  """Reads "code=16,chat=4"."""
  mix = {}
  for part in filter(None, text.split(",")):
    domain, _, num = part.partition("=")
    if not num.strip().isdigit() or domain.strip() in mix:
      raise ValueError(f"mix: found {part!r} in {text!r}, expected domain=number, each domain once")
    mix[domain.strip()] = int(num)
  if not any(mix.values()):
    raise ValueError(f"mix: found {text!r}, expected at least one prompt")
  return mix


def choose_mix(path: str, mix: Mapping[str, int], *, seed: int,
               exclude: Mapping[str, list[dict]] | None = None) -> dict[str, list[dict]]:
  """Returns {domain: prompts}, so many of each domain as `mix` says, none that `exclude` has."""
  used = {str(p["messages"]) for group in (exclude or {}).values() for p in group}
  # Some more than asked for, since some may be used already.
  found = _timing.choose_prompts(path, 2 * max(mix.values()), seed=seed)
  chosen = {}
  for domain, num in mix.items():
    if num and domain not in found:
      raise ValueError(f"mix: found domain {domain!r}, expected one of {', '.join(sorted(found))}")
    rest = [p for p in found.get(domain, []) if str(p["messages"]) not in used]
    chosen[domain] = rest[:num]
  return {domain: prompts for domain, prompts in chosen.items() if prompts}


def load_model(config) -> DSpark:
  """Returns the model, every draft verified; refuses a drafter without a confidence head."""
  model = DSpark(config.target, config.draft_model, dtype=config.dtype)
  proposer = model.frame.drafter
  if proposer is None or not proposer.config.enable_confidence_head:
    raise ValueError("draft_model: found no confidence head, expected a drafter with one")
  return model.with_policy(FixedLength(proposer.proposal_len))


def record(config, model: DSpark, domains: Mapping[str, list[dict]]) -> dict[str, Records]:
  """Decodes prompts as the config says; returns {domain: full rounds}."""
  frame, records, batch_size, seed = model.frame, {}, config.batch_size, config.seed
  num = sum(len(prompts) for prompts in domains.values())
  with tqdm.tqdm(total=num, desc="decode", unit="answer") as bar:
    for domain, prompts in domains.items():
      parts = []
      for start in range(0, len(prompts), batch_size):
        ids = [model.encode(p["messages"]) for p in prompts[start:start + batch_size]]
        # A short last batch is filled up, so that no second shape is compiled.
        filled = ids + [ids[0]] * (min(batch_size, num) - len(ids))
        sampling = make_sampling_params(len(filled), temperature=config.temperature,
                                        seed=seed + start + np.arange(len(filled)))
        state = loop.start(frame, model.params, filled, sampling=sampling,
                           max_new_tokens=[config.max_new_tokens] * len(ids)
                           + [1] * (len(filled) - len(ids)),
                           stop_ids=model.stop_ids, max_slots=model.max_slots)
        parts.append(record_rounds(frame, model.params, state)[1].only_full())
        bar.update(len(ids))
      records[domain] = join_records(parts)
  return records
