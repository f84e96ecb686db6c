"""Compares estimators of draft survival on one recorded stream of rounds, by replay.

  python -m experiments.study_estimators --config=configs/study_estimators.py
"""

import dataclasses
import functools
import json
import pathlib

import numpy as np

from dspark_jax.decode.profile import load_or_measure
from dspark_jax.decode.record import join_records
from dspark_jax.decode.replay import Oracle, replay
from dspark_jax.ladder import make_ladder
from dspark_jax.metrics.reliability import measure_reliability
from dspark_jax.scheduler.calibration import fit_sts
from dspark_jax.scheduler.estimator import OnlineLogistic, OnlineSts, TrainedHead
from dspark_jax.scheduler.policies import EarlyStop
from dspark_jax.scheduler.step_curve import make_step_curve
from experiments import _cli, _records, _timing


def make_estimators(temperatures, half_life: float) -> dict:
  online = functools.partial(OnlineLogistic, half_life=half_life)
  return {
      "trained head": TrainedHead(), "head + STS": TrainedHead(temperatures),
      "head + online STS": OnlineSts(temperatures, half_life=half_life),
      "margin, online": online(),
      "margin + head, online": online(uses_head=True),
      "margin + STS, online": online(uses_head=True, temperatures=temperatures),
      "oracle": Oracle()}


def measure(replayed, records, parts: dict[str, slice]) -> dict:
  """Returns mean AUROC and ECE over positions, of the whole stream and of each part of it."""
  survival_NxG = replayed.survival_TxRxG.reshape(-1, replayed.survival_TxRxG.shape[-1])
  accepted_N = records.num_accepted_N[:len(survival_NxG)]
  found = {}
  for name, part in ({"all": slice(None)} | parts).items():
    figures = [measure_reliability(survival_NxG[part, k], accepted_N[part] > k)
               for k in range(survival_NxG.shape[1])]
    for figure in ("auroc", "ece"):
      by_draft = [getattr(f, figure) for f in figures]
      known = [x for x in by_draft if x is not None]
      found.setdefault(name, {}).update({
          figure: float(np.mean(known)) if known else None, f"{figure}_by_draft": by_draft})
  return found | dict(tokens_per_s=replayed.tokens_per_s,
                      verify_len=float(replayed.verify_lens_TxR.mean()))


def main(config):
  model = _records.load_model(config)
  out = pathlib.Path(config.out)
  _timing.prepare_directory(out.parent)
  fit_prompts = _records.choose_mix(config.prompts, _records.read_mix(config.fit_mix),
                                    seed=config.seed)
  stream_prompts = _records.choose_mix(config.prompts, _records.read_mix(config.stream_mix),
                                       seed=config.seed + 1, exclude=fit_prompts)
  fit_records = join_records(list(_records.record(config, model, fit_prompts).values()))
  stream = _records.record(config, model, stream_prompts)
  fit = fit_sts(fit_records.logits_NxG, fit_records.num_accepted_N)
  print(f"STS on {fit.num_records} rounds of {config.fit_mix}: "
        + ", ".join(f"{t:.2f}" for t in fit.temperatures))

  records = join_records(list(stream.values()))
  # The workload changes where one domain ends and the next begins.
  ends = np.cumsum([0] + [len(group.num_accepted_N) for group in stream.values()]).tolist()
  parts = {domain: slice(*pair) for domain, pair in zip(stream, zip(ends, ends[1:]))}
  policy = EarlyStop(may_skip_draft=False)
  results = {}
  for num_requests in config.num_requests:
    ladder = make_ladder(num_requests, model.frame.proposal_len)
    frame = dataclasses.replace(model.frame, policy=policy, ladder=ladder)
    curve = make_step_curve(load_or_measure(frame, model.params, num_requests, name=model.name,
                                            directory=model.step_curves))
    run = functools.partial(replay, records, policy=policy, curve=curve, ladder=ladder,
                            num_requests=num_requests)
    rows = {name: measure(run(estimator), records, parts)
            for name, estimator in make_estimators(fit.temperatures, config.half_life).items()}
    best = rows["oracle"]["tokens_per_s"]
    print(f"\n{num_requests} requests, {len(records.num_accepted_N)} rounds of "
          f"{', then '.join(parts)}\n" + "estimator".ljust(24) + "lost  tok/s  drafts"
          + "".join(f"  AUROC {p}  ECE {p}" for p in ("all", *parts)))
    for name, row in rows.items():
      row["lost"] = 1 - row["tokens_per_s"] / best
      show = lambda x, width: ("-" if x is None else f"{x:.3f}").rjust(width)
      print(name.ljust(24) + f"{100 * row['lost']:3.0f}%  {row['tokens_per_s']:5.0f}  "
            f"{row['verify_len']:6.2f}" + "".join(
                f"  {show(row[p]['auroc'], 6 + len(p))}  {show(row[p]['ece'], 4 + len(p))}"
                for p in ("all", *parts)))
    results[num_requests] = rows
  out.write_text(json.dumps(dict(config=config.to_dict(), temperatures=fit.temperatures,
                                 results=results), indent=1) + "\n")
  print(f"\n-> {out}")


if __name__ == "__main__":
  _cli.run(main, config="configs/study_estimators.py")
