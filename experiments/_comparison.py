"""The cells of `compare_drafters`: each trains, evaluates or times, once, and is kept as a file."""

import dataclasses
import hashlib
import json
import pathlib
import time
from typing import Any, Callable

import jax
import jax.numpy as jnp

from dspark_jax import DSpark
from dspark_jax.data.jsonl import read_rows
from dspark_jax.decode.profile import RoundTime, compare_rounds
from dspark_jax.drafter.dspark import DSparkProposer
from dspark_jax.interop.load import load_target
from dspark_jax.metrics.drafter_report import Cell
from dspark_jax.metrics.evaluation import Counts
from dspark_jax.training.run import RunConfig, run_config_from_dict
from experiments import _evaluation, _timing, _training

PLAIN = "plain"  # decoding without a drafter, in the place of a drafter's name
HEADLESS = " without head"  # suffix of a drafter timed without its sequential head


class Comparison:
  """What all cells share, and the cells themselves.

  Attributes:
    runs: recipe's name -> its training run.
    laws: name -> sampling parameters.
    domains: name -> prompts.
    is_complete: False once something was left for the next start.
  """

  def __init__(self, config, recipes: dict[str, dict]):
    self.config, self.recipes, self.is_complete = config, recipes, True
    self.workdir = _timing.prepare_directory(config.workdir)
    _timing.prepare_directory(self.workdir / "cells")
    self._deadline = time.monotonic() + 60 * (config.max_minutes or float("inf"))
    self.domains = choose_domains(config)
    self.target = load_target(config.target)
    self.runs = {name: make_run_config(config, recipe, self.target.config)
                 for name, recipe in recipes.items()}  # refuses a bad recipe before any work
    self._rows = read_rows(config.data, vocab_size=self.target.config.vocab_size) if recipes else []
    self._rows_digest = digest([[r["input_ids"].tolist(), r["loss_mask"].tolist()]
                                for r in self._rows])
    is_float32 = config.dtype == "float32"  # as training needs the target
    self._plain = DSpark(self.target if is_float32 else config.target, None, dtype=config.dtype)
    known = {"greedy": lambda: dict(temperature=0.0),
             "recommended": lambda: _evaluation.recommend_law(self._plain)}
    for law in (*config.laws, config.study_law):
      if law not in known:
        raise ValueError(f"laws: found {law!r}, expected some of {sorted(known)}")
    self.laws = {law: known[law]() for law in dict.fromkeys((*config.laws, config.study_law))}
    self._model: tuple[str, DSpark] = (PLAIN, self._plain)

  def train(self, name: str) -> dict[str, Any] | None:
    """Trains one recipe; returns its figures, None where time is up first."""
    made_of = self.runs[name].fingerprint() | {"rows": self._rows_digest}
    return self._cell(f"train {name}", made_of, lambda: self._train(name, self.runs[name]))

  def _train(self, name: str, run: RunConfig) -> dict[str, Any] | None:
    left = (self._deadline - time.monotonic()) / 60
    train = dataclasses.replace(run.train, max_minutes=left if left < float("inf") else 0.0)
    started = time.perf_counter()
    result = _training.train(dataclasses.replace(run, train=train), self.target, self._rows,
                             self.workdir / "drafters" / name,
                             export_dtype=jnp.dtype(self.config.export_dtype))
    if not result.train.is_finished:
      return None
    steps, sequences = result.train.num_steps, run.train.batch_size * run.train.accumulation
    return dict(parameters=count_parameters(result.params), steps=steps,
                positions=steps * sequences * run.max_len, metrics=dict(result.train.metrics),
                seconds_of_last_start=time.perf_counter() - started)

  def evaluate(self, name: str, law: str, domain: str, threshold: float = 0.0) -> Cell | None:
    """Decodes a domain's prompts by one drafter; None where it is not there yet, or time is up."""
    c, prompts = self.config, self.domains[domain]
    if name in self.recipes and self.train(name) is None:
      return None
    made_of = dict(drafter=self._identify(name), law=self.laws[law], threshold=threshold,
                   prompts=digest([p["messages"] for p in prompts]), seed=c.seed, dtype=c.dtype,
                   max_new_tokens=c.max_new_tokens, batch_size=c.batch_size)

    def run():
      model = self.open(name)
      if threshold:
        model = model.with_policy(confidence_threshold=threshold)
      found = _evaluation.decode(
          model, prompts, law=self.laws[law], max_new_tokens=c.max_new_tokens,
          batch_size=c.batch_size, seed=c.seed, desc=f"{name}, {law}, {domain}")
      return dict(counts=[dataclasses.asdict(n) for n in found.counts], seconds=found.seconds,
                  num_decoded=found.num_decoded)

    suffix = f" {threshold:g}" if threshold else ""
    found = self._cell(f"evaluate {file_name(name)} {law} {domain}{suffix}", made_of, run)
    return found and Cell([Counts(**n) for n in found["counts"]], found["seconds"],
                          found["num_decoded"])

  def time(self, names: list[str]) -> dict[str, RoundTime]:
    """Times rounds of all drafters that there are, side by side: one cell, as they take turns.

    A DSpark with a sequential head is also timed without it.
    """
    c = self.config
    names = [n for n in names if n not in self.recipes or self.train(n) is not None]
    made_of = dict(drafters={n: self._identify(n) for n in names}, dtype=c.dtype,
                   batch_size=c.batch_size, **c.timing.to_dict())

    def run():
      frames = {}
      for name in names:
        model = self.open(name)
        frames[name] = (model.frame, model.params)
        proposer = model.frame.drafter
        if isinstance(proposer, DSparkProposer) and proposer.config.markov_rank:
          frames[name + HEADLESS] = (
              dataclasses.replace(model.frame, drafter=without_head(proposer)), model.params)
      return {name: dataclasses.asdict(t) for name, t in compare_rounds(
          frames, c.batch_size, **c.timing.to_dict()).items()}

    found = self._cell("time", made_of, run, may_replace=True)
    return {name: RoundTime(**t) for name, t in (found or {}).items()}

  def open(self, name: str) -> DSpark:
    """Returns the model with a drafter; the last one is kept."""
    if self._model[0] != name:
      directory = self.workdir / "drafters" / name / "drafter" if name in self.recipes else name
      model = self._plain if name == PLAIN else DSpark(
          self._plain.target, str(directory), dtype=self.config.dtype)
      self._model = (name, model)
    return self._model[1]

  def _identify(self, name: str) -> str:
    """What a drafter is, as far as its results depend on it."""
    if name not in self.recipes:
      return name
    return digest(self.runs[name].fingerprint() | {"rows": self._rows_digest})

  def _cell(self, name: str, made_of: dict, run: Callable[[], dict | None], *,
            may_replace: bool = False) -> dict | None:
    """Returns a cell's result: the one in its file, else that of `run`; None where time is up.

    Raises ValueError where the file was made of something else, unless it may be replaced.
    """
    path = self.workdir / "cells" / (name.replace(" ", "_") + ".json")
    made_of = json.loads(json.dumps(made_of | {"target": self.config.target}))
    if path.is_file():
      kept = json.loads(path.read_text())
      differing = [k for k in made_of if kept["made_of"].get(k) != made_of[k]]
      if not differing:
        return kept["result"]
      if not may_replace:
        raise ValueError(f"{path}: found {differing[0]} = {kept['made_of'].get(differing[0])}, "
                         f"expected {made_of[differing[0]]}: another comparison's; choose another "
                         "workdir, or delete the file")
    result = run() if time.monotonic() < self._deadline else None
    if result is None:
      self.is_complete = False
      return None
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(dict(made_of=made_of, result=result), indent=1) + "\n")
    aside.replace(path)  # a killed run leaves a whole cell or none
    return result


def choose_domains(config) -> dict[str, list[dict]]:
  """Returns {domain: prompts} from each domain's file or directory, or the built-in ones."""
  domains, builtin = {}, None
  for domain, path in config.prompts.items():
    if path:
      groups = _timing.choose_prompts(path, config.num_prompts, seed=config.seed)
      domains[domain] = [prompt for group in groups.values() for prompt in group]
      continue
    builtin = builtin or _timing.choose_prompts("", config.num_prompts, seed=config.seed)
    if domain not in builtin:
      raise ValueError(f"prompts.{domain}: found no path, expected one, or a built-in domain: "
                       f"{', '.join(builtin)}")
    domains[domain] = builtin[domain]
  if not domains:
    raise ValueError("prompts: found no domain, expected at least one")
  return domains


def make_run_config(config, recipe: dict, target_config) -> RunConfig:
  """Returns a recipe's run with the budget that all recipes share."""
  budget = config.budget.to_dict()
  train = dict(recipe["train"])
  train |= {name: budget[name] for name in ("seed", "batch_size", "accumulation",
                                            "checkpoint_every", "dtype")}
  train["target_dtype"] = budget["dtype"]
  train["optimizer"] = train.get("optimizer", {}) | {"max_steps": budget["max_steps"]}
  return run_config_from_dict(
      {name: recipe[name] for name in ("drafter", "warm_start") if name in recipe}
      | dict(train=train, max_len=budget["max_len"], num_eval_rows=budget["num_eval_rows"]),
      target_config)


def without_head(proposer: DSparkProposer) -> DSparkProposer:
  """Returns the proposer without its sequential head; it passes over the head's parameters.

  The confidence head reads the sequential head's embedding, so it goes too (one dot product).
  """
  return dataclasses.replace(proposer, config=dataclasses.replace(
      proposer.config, markov_rank=0, enable_confidence_head=False,
      confidence_head_with_markov=False))


def count_parameters(params: Any) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(params))


def file_name(name: str) -> str:
  return pathlib.PurePath(name).name


def digest(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
