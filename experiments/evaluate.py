"""Evaluates any target with any drafter on sets of prompts, by the public reference's measures.

  python -m experiments.evaluate --config=configs/evaluate.py --config.prompts=DIRECTORY
"""

import dataclasses
import json
import os
import pathlib

import jax

from dspark_jax import DSpark
from dspark_jax.decode.record import join_records
from dspark_jax.metrics import evaluation as evaluations
from experiments import _cli, _evaluation, _timing


def load_model(config) -> DSpark:
  return DSpark(config.target, None if config.draft_model == "none" else config.draft_model,
                max_draft_len=config.max_draft_len, dtype=config.dtype,
                confidence_threshold=config.confidence_threshold, accept_rule=config.accept_rule,
                enable_thinking=config.enable_thinking)


def pool(parts: list[_evaluation.Decoded]) -> _evaluation.Decoded:
  return _evaluation.Decoded(
      [c for part in parts for c in part.counts], join_records([part.rounds for part in parts]),
      seconds=sum(part.seconds for part in parts),
      num_decoded=sum(part.num_decoded for part in parts))


def measure(config) -> dict:
  """Decodes every set, prints the tables, and returns what goes into the JSON file."""
  domains = _timing.choose_prompts(config.prompts, config.num_prompts, seed=config.seed)
  model = load_model(config)
  law = {name: config[name] for name in ("temperature", "top_k", "top_p", "min_p")}
  if config.is_recommended:
    law = _evaluation.recommend_law(model)
  decoded = {
      name: _evaluation.decode(
          model, prompts, law=law, max_new_tokens=config.max_new_tokens, seed=config.seed,
          batch_size=config.batch_size, num_turns=config.num_turns, desc=name)
      for name, prompts in domains.items()}
  if len(decoded) > 1:
    decoded["all"] = pool(list(decoded.values()))
  found = {name: evaluations.evaluate_counts(d.counts, seconds=d.seconds, seed=config.seed,
                                             num_decoded=d.num_decoded)
           for name, d in decoded.items()}
  print(f"\n{model.name}, " + ", ".join(f"{k} {v:g}" for k, v in law.items()) + "\n"
        + evaluations.format_evaluations(found))
  results = {name: dict(evaluation=dataclasses.asdict(e), answers=[
      dataclasses.asdict(c) for c in decoded[name].counts]) for name, e in found.items()}
  # Behind a threshold, only drafts that the head trusts would be seen.
  if model.frame.drafter is not None and model.frame.drafter.has_confidence and (
      not config.confidence_threshold):
    for name, d in decoded.items():
      positions = evaluations.measure_positions(
          d.rounds.logits_NxG, d.rounds.verify_lens_N, d.rounds.num_accepted_N)
      print("\n" + evaluations.format_positions(f"confidence, {name}", positions))
      results[name] |= dict(confidence=[dataclasses.asdict(p) for p in positions],
                            confidence_mean=evaluations.mean_positions(positions))
  return dict(config=config.to_dict(), model=model.name, law=law, jax=jax.__version__,
              device=jax.devices()[0].device_kind, num_cpus=os.cpu_count(), results=results)


def main(config):
  out = pathlib.Path(config.out)
  _timing.prepare_directory(out.parent)
  _timing.use_compilation_cache(config.compilation_cache)
  out.write_text(json.dumps(measure(config), indent=1) + "\n")
  print(f"\n-> {out}")


if __name__ == "__main__":
  _cli.run(main, config="configs/evaluate.py")
