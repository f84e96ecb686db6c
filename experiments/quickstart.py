"""The main job: a language model decoded with and without a drafter, then a small drafter trained.

  python -m experiments.quickstart
"""

import json
import pathlib

from dspark_jax import DSpark
from dspark_jax.checkpoints import Checkpointer
from dspark_jax.data.jsonl import read_rows
from dspark_jax.data.prompts import generate_prompts
from dspark_jax.interop.deepspec import save_drafter
from dspark_jax.metrics import compare, plots
from dspark_jax.serving.regenerate import RegenerateOptions, regenerate
from dspark_jax.training.run import run, run_config_from_dict
from dspark_jax.training.trainer import METRICS_FILE
from experiments import _cli, _timing


def decode(config, model: DSpark, workdir: pathlib.Path) -> None:
  """Decodes held-out prompts by three methods in turn; prints the table and saves the plots."""
  domains = _timing.choose_prompts("", 4 * config.num_prompts, seed=config.seed)
  ids, labels = [], []
  for domain, prompts in domains.items():
    encoded = [model.encode(p["messages"]) for p in prompts]
    encoded = [i for i in encoded if len(i) <= config.max_prompt_tokens][:config.num_prompts]
    ids, labels = ids + encoded, labels + [domain] * len(encoded)
  if not ids:
    raise ValueError(f"max_prompt_tokens: found {config.max_prompt_tokens}, expected more, for "
                     "all built-in prompts are longer")
  methods = _timing.make_methods(
      model, max_draft_lens=[config.max_draft_len], thresholds=[config.confidence_threshold])
  _timing.warm_up(methods, ids, max_new_tokens=config.max_new_tokens)
  runs = _timing.decode(methods, ids, repeats=config.repeats, max_new_tokens=config.max_new_tokens)
  tables = compare.summarize_domains(runs, labels, baseline="plain")
  print(f"\nprompt: {model.tokenizer.decode(ids[0], skip_special_tokens=True)}\n"
        f"answer: {runs[0].result.text}\n\n{compare.format_table(tables['all'])}\n")
  for report in tables["all"][1:]:
    same = report.num_prompts - len(report.different)
    print(f"{report.method}: greedy tokens identical to plain for {same} of {report.num_prompts}")
  print(f"plots: {plots.plot_accept_rate(tables['all'][1:], workdir / 'accept_rate.png')}, "
        f"{plots.plot_speed(tables, workdir / 'speed.png')}")


def train(config, model: DSpark, workdir: pathlib.Path) -> None:
  """The target answers prompts, and a small drafter learns to foresee its answers."""
  target = model.target
  run_config = run_config_from_dict(config.training.to_dict(), target.config)
  regenerate(target, model.tokenizer, generate_prompts(config.num_train_prompts, seed=config.seed),
             workdir / "rows.jsonl", options=RegenerateOptions(**config.answers))
  result = run(
      run_config, target_config=target.config, target_params=target.params,
      stop_token_ids=model.stop_ids, rows=read_rows(workdir / "rows.jsonl"), workdir=workdir,
      checkpointer=Checkpointer(workdir / "checkpoints", config=run_config.fingerprint()))
  save_drafter(workdir / "drafter", run_config.drafter, result.params, draft_ids=result.draft_ids)
  log = [json.loads(line) for line in (workdir / METRICS_FILE).read_text().splitlines()]
  taus = {r["step"]: r["tau_prob"] for r in log if r["split"] == "eval"}
  print("tau_prob on held-out rows: "
        + ", ".join(f"step {step}: {tau:.2f}" for step, tau in taus.items()))
  print(f"curves: {workdir / 'curves.png'}, drafter: {workdir / 'drafter'}"
        + ("" if result.train.is_finished else "; time is up, start again to train on"))


def main(config):
  workdir = _timing.prepare_directory(config.workdir)
  _timing.use_compilation_cache(config.compilation_cache)
  model = DSpark(config.target, config.draft_model)
  decode(config, model, workdir)
  if config.is_training:
    train(config, model, workdir / "training")


if __name__ == "__main__":
  _cli.run(main, config="configs/quickstart.py")
