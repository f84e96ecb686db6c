"""Soaks the engine: many requests of all kinds, cancellations, refusals; nothing lost or mixed.

  python -m experiments.soak --config=configs/soak.py
"""

import dataclasses
import json
import pathlib
import time

import tqdm

from dspark_jax import DSpark
from dspark_jax.serving.engine import EngineOptions
from dspark_jax.serving.soak import SoakOptions, run_soak
from experiments import _cli, _timing


def main(config):
  out = pathlib.Path(config.out)
  _timing.prepare_directory(out.parent)
  _timing.use_compilation_cache(config.compilation_cache)
  model = DSpark(config.target, config.draft_model, max_draft_len=config.max_draft_len,
                 dtype=config.dtype)
  domains = _timing.choose_prompts("", config.num_prompts, seed=config.seed)
  prompts = [model.encode(p["messages"]) for group in domains.values() for p in group]
  start_s = time.perf_counter()
  with tqdm.tqdm(total=config.num_requests, desc="soak", unit="request") as bar:
    report = run_soak(
        model.frame, model.params, prompts,
        engine_options=EngineOptions(config.slots, config.max_len, max_queue=config.max_queue),
        options=SoakOptions(config.num_requests, config.max_new_tokens, config.num_checked,
                            seed=config.seed),
        on_step=lambda n: bar.update(n - bar.n))
  result = dataclasses.asdict(report) | {"seconds": time.perf_counter() - start_s}
  out.write_text(json.dumps({"config": config.to_dict()} | result, indent=1) + "\n")
  print(json.dumps(result, indent=1) + f"\n-> {out}")
  problems = report.find_problems()
  if problems:
    raise ValueError("soak: " + "; ".join(problems))
  print("none lost, none mixed, memory flat")


if __name__ == "__main__":
  _cli.run(main, config="configs/soak.py")
