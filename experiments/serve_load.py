"""Measures an engine under load: closed loop of users, Poisson arrivals, or a trace of them.

  python -m experiments.serve_load --config=configs/serve_load.py --config.prompts=DIRECTORY
"""

import dataclasses
import itertools
import json
import os

import jax

from dspark_jax import DSpark
from dspark_jax.metrics import load_plots
from dspark_jax.metrics.load_report import find_at_speed, format_load_table
from dspark_jax.scheduler.policies import EarlyStop
from dspark_jax.serving import load
from dspark_jax.serving.engine import Engine, EngineOptions
from dspark_jax.serving.overhead import measure_overhead, measure_scheduler
from experiments import _cli, _timing
from experiments._serving import make_engines, make_jobs, measure_closed, measure_open


def measure_arrivals(model: DSpark, config, jobs) -> list:
  """Returns reports of the open loops: one for each rate, and one for the trace."""
  loads = {rate: (load.poisson_times(rate, config.num_arrivals, seed=config.seed),
                  list(itertools.islice(itertools.cycle(jobs), config.num_arrivals)))
           for rate in config.rates}
  if config.trace:
    times_s, arrivals = load.read_trace(config.trace, [job["prompt"] for job in jobs],
                                        stop_ids=model.stop_ids)
    loads[len(times_s) / max(times_s[-1], 1e-9)] = times_s, arrivals
  engines = make_engines(model, config, batch=config.open_slots) if loads else {}
  return [report for rate, (times_s, arrivals) in loads.items() for report in measure_open(
      engines, arrivals, times_s, rate=rate, repeats=config.repeats)]


def measure_engine_overhead(model: DSpark, config, jobs) -> dict | None:
  """Compares the engine's round with the bare step, every draft of every slot verified, and tells
  the scheduler's share of it."""
  if not config.overhead_slots:
    return None
  engine = Engine(model.frame, model.params, EngineOptions(
      config.overhead_slots, config.max_len, tuple(config.prompt_buckets)))
  prompts = [job["prompt"][:config.max_len // 2] for job in jobs]
  found = measure_overhead(engine, prompts, num_rounds=config.overhead_rounds,
                           repeats=config.overhead_repeats)
  scheduler_ms = measure_scheduler(dataclasses.replace(model.frame, policy=EarlyStop()),
                                   config.overhead_slots)
  print(f"{config.overhead_slots} slots: engine {found.engine_ms:.1f} ms a round, bare step "
        f"{found.bare_ms:.1f} ms: {100 * found.share:+.1f} %; scheduler {scheduler_ms:.2f} ms, "
        f"{100 * scheduler_ms / found.bare_ms:.2f} %", flush=True)
  return dataclasses.asdict(found) | dict(scheduler_ms=scheduler_ms)


def main(config):
  out = _timing.prepare_directory(config.out)
  _timing.use_compilation_cache(config.compilation_cache)
  model = DSpark(config.target, config.draft_model, dtype=config.dtype)
  model.step_curves = config.step_curves or model.step_curves
  jobs, closed = make_jobs(model, config), []
  result = dict(config=config.to_dict(), jax=jax.__version__, num_cpus=os.cpu_count(),
                device=jax.devices()[0].device_kind)

  def keep(**more):  # after each part, so that a run cut short leaves what it has
    result.update(more)
    (out / "serve_load.json").write_text(json.dumps(result, indent=1) + "\n")

  keep(overhead=measure_engine_overhead(model, config, jobs))
  for users in config.users:
    engines = make_engines(model, config, batch=users)
    closed += measure_closed(engines, jobs, num_users=users, turn_s=config.turn_s,
                             num_measured=max(users, config.min_measured), repeats=config.repeats)
    print(format_load_table(closed[-len(engines):], baseline="plain"), flush=True)
    keep(closed=[dataclasses.asdict(r) for r in closed])
    load_plots.plot_throughput_by_speed(closed, out / "throughput_by_speed.png",
                                        speeds=config.speeds)
    load_plots.plot_by_concurrency(closed, out / "by_concurrency.png")
  print("\nclosed loop by users\n" + format_load_table(closed, baseline="plain"))
  promises = {name: {f"{s:g}": find_at_speed([r for r in closed if r.method == name], s)
                     for s in config.speeds} for name in dict.fromkeys(r.method for r in closed)}
  print("\ntokens/s while every user gets", promises)
  opened = measure_arrivals(model, config, jobs)
  if opened:
    print("\nopen loop by requests per second\n" + format_load_table(opened, baseline="plain"))
  keep(promises=promises, open=[dataclasses.asdict(r) for r in opened])
  print(f"\n-> {out}")


if __name__ == "__main__":
  _cli.run(main, config="configs/serve_load.py")
