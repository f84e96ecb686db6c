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
from dspark_jax.serving import load
from dspark_jax.serving.engine import Engine, EngineOptions
from dspark_jax.serving.overhead import measure_overhead
from experiments import _cli, _timing
from experiments._serving import make_engines, make_jobs, run_turns


def measure_open(model: DSpark, config, jobs) -> list:
  """Returns reports of the open loops: one for each rate, and one for the trace."""
  loads = {rate: (load.poisson_times(rate, config.num_arrivals, seed=config.seed),
                  list(itertools.islice(itertools.cycle(jobs), config.num_arrivals)))
           for rate in config.rates}
  if config.trace:
    times_s, arrivals = load.read_trace(config.trace, [job["prompt"] for job in jobs],
                                        stop_ids=model.stop_ids)
    loads[len(times_s) / max(times_s[-1], 1e-9)] = times_s, arrivals
  engines = make_engines(model, config, batch=config.open_slots) if loads else {}
  return [report for rate, (times_s, arrivals) in loads.items() for report in run_turns(
      engines, lambda e, t=times_s, a=arrivals: load.run_open(e, a, t), load_value=rate,
      repeats=config.repeats)]


def measure(config) -> dict:
  """Runs everything, prints tables, draws figures, and returns what goes into the JSON file."""
  out = _timing.prepare_directory(config.out)
  _timing.use_compilation_cache(config.compilation_cache)
  model = DSpark(config.target, config.draft_model, dtype=config.dtype)
  jobs, closed = make_jobs(model, config), []
  for users in config.users:
    engines = make_engines(model, config, batch=users)
    closed += run_turns(engines, lambda e, n=users: load.run_closed(
        e, itertools.cycle(jobs), num_users=n, num_measured=max(n, config.min_measured)),
        load_value=users, repeats=config.repeats)
    print(format_load_table(closed[-len(engines):], baseline="plain"), flush=True)
  print("\nclosed loop by users\n" + format_load_table(closed, baseline="plain"))
  opened = measure_open(model, config, jobs)
  if opened:
    print("\nopen loop by requests per second\n" + format_load_table(opened, baseline="plain"))
  load_plots.plot_throughput_by_speed(closed, out / "throughput_by_speed.png",
                                      speeds=config.speeds)
  load_plots.plot_by_concurrency(closed, out / "by_concurrency.png")
  by_method = {name: [r for r in closed if r.method == name]
               for name in dict.fromkeys(r.method for r in closed)}
  promises = {name: {f"{s:g}": find_at_speed(group, s) for s in config.speeds}
              for name, group in by_method.items()}
  print("\ntokens/s while every user gets", promises)
  overhead = None
  if config.overhead_slots:
    engine = Engine(model.frame, model.params, EngineOptions(config.overhead_slots, config.max_len))
    overhead = measure_overhead(engine, [job["prompt"] for job in jobs], repeats=3,
                                num_rounds=config.overhead_rounds)
    print(f"engine {overhead.engine_ms:.1f} ms a round, bare step {overhead.bare_ms:.1f} ms: "
          f"{100 * overhead.share:+.1f} %")
  return dict(config=config.to_dict(), jax=jax.__version__, num_cpus=os.cpu_count(),
              device=jax.devices()[0].device_kind, promises=promises,
              closed=[dataclasses.asdict(r) for r in closed],
              open=[dataclasses.asdict(r) for r in opened],
              overhead=overhead and dataclasses.asdict(overhead))


def main(config):
  result = measure(config)
  path = os.path.join(config.out, "serve_load.json")
  with open(path, "w", encoding="utf-8") as file:
    file.write(json.dumps(result, indent=1) + "\n")
  print(f"\n-> {config.out}")


if __name__ == "__main__":
  _cli.run(main, config="configs/serve_load.py")
