"""Calibrates a drafter's confidence head by sequential temperature scaling (STS).

  python -m experiments.calibrate --config=configs/calibrate.py
"""

import json
import pathlib

from dspark_jax.decode.profile import describe
from dspark_jax.decode.record import join_records
from dspark_jax.metrics import plots
from dspark_jax.metrics.reliability import (compare_calibration, compute_survival,
                                            format_calibration, make_diagram)
from dspark_jax.scheduler.calibration import fit_sts, save_sts
from experiments import _cli, _records, _timing


def main(config):
  model = _records.load_model(config)
  out = _timing.prepare_directory(config.out or model.drafter_directory)
  fit_prompts = _records.choose_mix(config.prompts, _records.read_mix(config.mix),
                                    seed=config.seed)
  test_prompts = _records.choose_mix(config.test_prompts, _records.read_mix(config.test_mix),
                                     seed=config.seed + 1, exclude=fit_prompts)
  fit_records = join_records(list(_records.record(config, model, fit_prompts).values()))
  test_records = join_records(list(_records.record(config, model, test_prompts).values()))

  fit = fit_sts(fit_records.logits_NxG, fit_records.num_accepted_N,
                verify_lens_N=fit_records.verify_lens_N)
  figures = {name: compare_calibration(records.logits_NxG, records.num_accepted_N,
                                         fit.temperatures)
             for name, records in (("fit", fit_records), ("held out", test_records))}
  for name, rows in figures.items():
    print("\n" + format_calibration(name, rows))
  for k, status in enumerate(fit.status):
    if status != "fitted":
      print(f"draft {k + 1}: temperature left at 1 ({status})")
  diagrams = {
      title: [make_diagram(survival[:, k], test_records.num_accepted_N > k)
              for k in range(model.frame.proposal_len)]
      for title, survival in (
          ("held out, before", compute_survival(test_records.logits_NxG,
                                                [1.0] * model.frame.proposal_len)),
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
