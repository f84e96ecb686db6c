"""Calibrates a drafter's confidence head by sequential temperature scaling (STS).

  python -m experiments.calibrate --config=configs/calibrate.py
"""

import json
import pathlib

import numpy as np

from dspark_jax import DSpark
from dspark_jax.decode.profile import describe
from dspark_jax.decode.record import join_records
from dspark_jax.metrics import plots
from dspark_jax.metrics.reliability import make_diagram, measure_reliability
from dspark_jax.scheduler.calibration import fit_sts, save_sts
from dspark_jax.scheduler.policies import FixedLength
from experiments import _cli, _records, _timing


def compute_survival(logits_NxG, temperatures) -> np.ndarray:
  with np.errstate(over="ignore"):
    return np.cumprod(1 / (1 + np.exp(-np.float64(logits_NxG) / np.array(temperatures))), axis=1)


def compare(records, temperatures) -> list[dict]:
  """Returns figures of each draft position before and after calibration."""
  figures = []
  ones = [1.0] * len(temperatures)
  before, after = (compute_survival(records.logits_NxG, t) for t in (ones, temperatures))
  for k, temperature in enumerate(temperatures):
    outcome_N = records.num_accepted_N > k
    b, a = (measure_reliability(s[:, k], outcome_N) for s in (before, after))
    figures.append(dict(
        position=k + 1, temperature=temperature, num=b.num, accepted=b.mean_outcome,
        ece_before=b.ece, ece_after=a.ece, auroc_before=b.auroc, auroc_after=a.auroc,
        brier_before=b.brier, brier_after=a.brier))
  return figures


def format_figures(title: str, figures: list[dict]) -> str:
  show = lambda x: "-" if x is None else f"{x:.3f}"
  rows = [f"{title}: {figures[0]['num']} rounds",
          "draft  temperature  survived  ECE before  after  AUROC before  after"]
  rows += [f"{f['position']:<5}  {f['temperature']:11.3f}  {show(f['accepted']):>8}  "
           f"{show(f['ece_before']):>10}  {show(f['ece_after']):>5}  "
           f"{show(f['auroc_before']):>12}  {show(f['auroc_after']):>5}" for f in figures]
  for name in ("before", "after"):
    values = [f[f"ece_{name}"] for f in figures if f[f"ece_{name}"] is not None]
    rows.append(f"mean ECE {name}: " + (f"{100 * np.mean(values):.2f}%" if values else "-"))
  return "\n".join(rows)


def main(config):
  model = DSpark(config.target, config.draft_model, dtype=config.dtype)
  proposer = model.frame.drafter
  if proposer is None or not proposer.config.enable_confidence_head:
    raise ValueError("draft_model: found no confidence head, expected a drafter with one")
  out = _timing.prepare_directory(config.out or model.drafter_directory)
  model = model.with_policy(FixedLength(proposer.proposal_len))
  options = dict(max_new_tokens=config.max_new_tokens, batch_size=config.batch_size,
                 temperature=config.temperature, seed=config.seed)
  fit_prompts = _records.choose_mix(config.prompts, _records.read_mix(config.mix),
                                    seed=config.seed)
  test_prompts = _records.choose_mix(config.test_prompts, _records.read_mix(config.test_mix),
                                     seed=config.seed + 1, exclude=fit_prompts)
  fit_records = join_records(list(_records.record(model, fit_prompts, **options).values()))
  test_records = join_records(list(_records.record(model, test_prompts, **options).values()))

  fit = fit_sts(fit_records.logits_NxG, fit_records.num_accepted_N,
                verify_lens_N=fit_records.verify_lens_N)
  figures = {name: compare(records, fit.temperatures)
             for name, records in (("fit", fit_records), ("held out", test_records))}
  for name, rows in figures.items():
    print("\n" + format_figures(name, rows))
  for k, status in enumerate(fit.status):
    if status != "fitted":
      print(f"draft {k + 1}: temperature left at 1 ({status})")
  diagrams = {
      title: [make_diagram(survival[:, k], test_records.num_accepted_N > k)
              for k in range(proposer.proposal_len)]
      for title, survival in (
          ("held out, before", compute_survival(test_records.logits_NxG,
                                                [1.0] * proposer.proposal_len)),
          ("held out, after", compute_survival(test_records.logits_NxG, fit.temperatures)))}
  count = lambda groups: {domain: len(prompts) for domain, prompts in groups.items()}
  path = save_sts(
      out, fit.temperatures, status=list(fit.status), figures=figures,
      data=dict(prompts=config.prompts or "built-in", fit=count(fit_prompts),
                held_out=count(test_prompts), temperature=config.temperature, seed=config.seed,
                max_new_tokens=config.max_new_tokens, num_rounds=fit.num_records),
      **describe(model.frame, model.name))
  print(f"\n{path}, {plots.plot_reliability(diagrams, pathlib.Path(out) / 'reliability.png')}")
  return json.loads(path.read_text())


if __name__ == "__main__":
  _cli.run(main, config="configs/calibrate.py")
