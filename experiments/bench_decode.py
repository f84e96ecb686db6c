"""Measures decoding speed, one request at a time, greedy, all methods interleaved in one process.

  python -m experiments.bench_decode --config=configs/bench_decode.py --config.prompts=DIRECTORY
"""

import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib

import jax

from dspark_jax import DSpark
from dspark_jax.metrics import compare
from dspark_jax.metrics.logit_gap import measure_logit_gap
from experiments import _cli, _timing


def find_differences(model: DSpark, ids, runs, reports) -> list[dict]:
  """Tells where each method first parts from plain decoding, and how near to a tie that was."""
  plain = {run.prompt: run.result.tokens for run in runs if run.method == "plain"}
  found = []
  for report in reports:
    for prompt, where in list(report.different.items())[:1]:
      best, gap = measure_logit_gap(
          model.target.config, model.target.params, ids[prompt] + plain[prompt][:where],
          dtype=model.plain_frame.dtype, vocab_limit=model.plain_frame.vocab_limit)
      found.append(dict(method=report.method, num=len(report.different), prompt=prompt,
                        token=where, top_two=best, logit_gap=gap))
      print(f"{report.method}: {len(report.different)} answers differ from plain, the first at "
            f"prompt {prompt}, token {where}, where the two best logits are {gap:.2e} apart")
  return found


def make_peers(module: str, model: DSpark, ids, **options) -> dict:
  """Returns {name: function from prompt ids to an answer}, nothing without torch."""
  if not module or not importlib.util.find_spec("torch"):
    print("no peer: " + ("torch is not installed" if module else "none asked for"))
    return {}
  name, peer = importlib.import_module(module).make_peer(
      model.target, ids, stop_ids=model.stop_ids, **options)
  return {name: peer}


def measure(config) -> dict:
  """Runs everything, prints tables, and returns what goes into the JSON file."""
  _timing.use_compilation_cache(config.compilation_cache)
  domains = _timing.choose_prompts(config.prompts, config.num_prompts, seed=config.seed)
  model = DSpark(config.target, config.draft_model, accept_rule=config.accept_rule,
                 dtype=config.dtype)
  ids = [model.encode(p["messages"]) for group in domains.values() for p in group]
  methods = _timing.make_methods(model, max_draft_lens=config.max_draft_lens,
                                 thresholds=config.thresholds, adaptive=config.adaptive)
  if config.dtype != "float32":  # plain decoding's best may be another
    methods["plain float32"] = (DSpark(config.target, None), {"is_speculative": False})
  options = dict(max_new_tokens=config.max_new_tokens)
  warm_up_s = _timing.measure_warm_up(methods, ids[0], **options)
  for name, seconds in warm_up_s.items():
    print(f"compile and warm-up of {name}: {', then '.join(f'{s:.1f} s' for s in seconds)}")
  _timing.warm_up(methods, ids, **options)
  runs = _timing.decode(methods, ids, repeats=config.repeats, **options,
                        peers=make_peers(config.peer, model, ids, **options))
  tables = compare.summarize_domains(runs, [d for d, group in domains.items() for _ in group],
                                     baseline="plain")
  for domain, reports in tables.items():
    print(f"\n{domain}: {reports[0].num_prompts} prompts, {config.repeats} repeats\n"
          + compare.format_table(reports))
  return dict(
      config=config.to_dict(), jax=jax.__version__, device=jax.devices()[0].device_kind,
      num_cpus=os.cpu_count(), warm_up_s=warm_up_s,
      reports={k: [dataclasses.asdict(r) for r in v] for k, v in tables.items()},
      differences=find_differences(model, ids, runs, tables["all"]),
      runs=[dict(method=r.method, prompt=r.prompt, repeat=r.repeat, seconds=r.result.seconds,
                 num_tokens=len(r.result.tokens)) for r in runs])


def main(config):
  out = pathlib.Path(config.out)
  _timing.prepare_directory(out.parent)
  out.write_text(json.dumps(measure(config), indent=1) + "\n")
  print(f"\n-> {out}")


if __name__ == "__main__":
  _cli.run(main, config="configs/bench_decode.py")
