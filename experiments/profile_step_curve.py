"""Measures the step curve of this machine: milliseconds of drafting, and of every verify bucket.

  python -m experiments.profile_step_curve --config=configs/profile_step_curve.py
"""

import dataclasses
import pathlib

from dspark_jax import DSpark
from dspark_jax.decode.profile import describe, measure_timings
from dspark_jax.ladder import draft_lens, make_ladder, measure_padding
from dspark_jax.metrics import plots
from dspark_jax.scheduler.policies import EarlyStop
from dspark_jax.scheduler.step_curve import make_step_curve
from dspark_jax.scheduler.step_table import StepTable, write_table
from experiments import _cli, _timing


def main(config):
  out = pathlib.Path(config.out)
  _timing.prepare_directory(out.parent)
  _timing.use_compilation_cache(config.compilation_cache)
  model = DSpark(config.target, config.draft_model, dtype=config.dtype)
  if model.frame.drafter is None:
    raise ValueError("draft_model: found none, expected a drafter to measure a step curve with")
  max_draft = config.max_draft_len or model.frame.proposal_len
  about, timings = describe(model.frame, model.name), {}
  for batch in config.batch_sizes:
    frame = dataclasses.replace(model.frame, policy=EarlyStop(max_draft=max_draft),
                                ladder=make_ladder(batch, max_draft))
    found = timings[batch] = measure_timings(
        frame, model.params, batch, context_tokens=config.context_tokens,
        num_slots=config.num_slots or None, temperature=config.temperature, repeats=config.repeats)
    # After each, so that a run cut short leaves what it has.
    write_table(out, StepTable(about | {"context": f"{config.context_tokens} tokens, medians of "
                                        f"{config.repeats}"}, timings))
    drafting = ", ".join(f"{n} of each {ms:.1f} ms"
                         for n, ms in zip(draft_lens(found.ladder), found.draft_ms))
    print(f"\n{batch} requests: drafting {drafting}; padding of the ladder "
          f"{100 * measure_padding(found.ladder, batch):.0f}% on average")
    for (tokens, rows), ms in zip(found.ladder, found.verify_ms):
      print(f"  {tokens:4} tokens, up to {rows} a request: {ms:8.1f} ms, "
            f"{ms / tokens:6.2f} ms a token")
    draft_ms = (0.0, *found.draft_ms)[-1]  # the plot is of rounds that draft in full
    smoothed = 1 / make_step_curve(found).steps_per_ms_DxC[-1, 1:]
    plots.plot_step_curve(
        [(tokens, ms + draft_ms) for (tokens, _), ms in zip(found.ladder, found.verify_ms)],
        list(enumerate(smoothed.tolist(), start=1)),
        out.with_name(f"{out.stem}_{batch}.png"), title=f"{model.name}, {batch} requests")
  print(f"\n-> {out}")


if __name__ == "__main__":
  _cli.run(main, config="configs/profile_step_curve.py")
