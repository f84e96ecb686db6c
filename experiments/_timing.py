"""What the scripts that time decoding share: prompts, methods, and how methods are warmed up."""

import functools
import os
import pathlib
from typing import Any, Callable, Mapping, Sequence

import jax
import numpy as np
import tqdm

from dspark_jax import DSpark
from dspark_jax.data.jsonl import read_prompts
from dspark_jax.data.prompts import held_out_prompts
from dspark_jax.infer import POLICIES
from dspark_jax.metrics import compare
from dspark_jax.scheduler.estimator import OnlineLogistic

Methods = dict[str, tuple[DSpark, dict[str, Any]]]  # name -> model and options of its `generate`


def prepare_directory(path: str | pathlib.Path) -> pathlib.Path:
  """Makes a directory; raises OSError now, not after minutes, where it cannot be written."""
  path = pathlib.Path(path)
  path.mkdir(parents=True, exist_ok=True)
  if not os.access(path, os.W_OK | os.X_OK):
    raise PermissionError(f"{path}: cannot be written")
  return path


def use_compilation_cache(directory: str) -> None:
  """Keeps compiled programs in a directory for the next process; "" = JAX's own setting."""
  if directory:
    jax.config.update("jax_compilation_cache_dir", str(prepare_directory(directory)))


def choose_prompts(path: str, num: int, *, seed: int) -> dict[str, list[dict]]:
  """Returns {domain: prompts}, `num` of each (0 = all), spread evenly over what there is.

  `path` is a JSONL file or directory of {"turns"} or {"messages"}, where a file is a domain; "" are
  the built-in held-out prompts: code, arithmetic, chat.
  """
  if num < 0 or (num == 0 and not path):
    raise ValueError(f"num_prompts: found {num}, expected an integer >= {0 if path else 1}")
  domains: dict[str, list[dict]] = {}
  for prompt in read_prompts(path) if path else held_out_prompts(3 * num, seed=seed):
    domains.setdefault(prompt["domain"], []).append(prompt)
  for name, group in domains.items():
    chosen = np.linspace(0, len(group) - 1, min(num or len(group), len(group))).astype(int)
    domains[name] = [group[i] for i in chosen]
  return domains


def make_methods(model: DSpark, *, max_draft_lens: Sequence[int], thresholds: Sequence[float],
                 adaptive: Sequence[str] = ()) -> Methods:
  """Returns plain decoding, fixed lengths, thresholds, and adaptive policies by name.

  A threshold verifies at most as many drafts as the longest of the fixed lengths.
  A drafter without confidences has no thresholds, and its margins tell an adaptive policy how sure
  it is.
  """
  methods = {"plain": (model, {"is_speculative": False})}
  for length in max_draft_lens:
    methods[f"fixed {length}"] = (model.with_policy(max_draft_len=length), {})
  more = {}
  if model.proposer is not None and not model.proposer.has_confidence:
    thresholds, more = (), {"estimator": OnlineLogistic()}
  for threshold in thresholds:
    other = model.with_policy(confidence_threshold=threshold,
                              max_draft_len=max(max_draft_lens, default=None))
    methods[f"threshold {threshold:g}"] = (other, {})
  for name in adaptive:
    if name not in POLICIES:
      raise ValueError(f"adaptive: found {name!r}, expected some of {sorted(POLICIES)}")
    methods[name] = (model.with_policy(POLICIES[name](), **more), {})
  return methods


def warm_up(methods: Methods, prompts: Sequence[Any], **options) -> None:
  """Compiles every method for every prompt's shape, with progress."""
  with tqdm.tqdm(total=len(methods) * len(prompts), desc="compile", unit="run") as bar:
    for model, own in methods.values():
      for prompt in prompts:
        model.warm_up(prompt, **own, **options)
        bar.update()


def measure_warm_up(methods: Methods, prompt: Any, **options) -> dict[str, list[float]]:
  """Returns seconds of compilation and warm-up by method: [first] or [first, second].

  The second is measured only with a compilation cache: everything compiled is forgotten, as in a
  new process, and comes back from the cache. Where the cache was filled by an earlier process, the
  first is a second too.
  """
  measure = lambda: {name: model.warm_up(prompt, **own, **options)
                     for name, (model, own) in methods.items()}
  rounds = [measure()]
  if jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache:
    jax.clear_caches()
    rounds.append(measure())
  return {name: [seconds[name] for seconds in rounds] for name in methods}


def decode(methods: Methods, prompts: Sequence[Any], *, repeats: int,
           peers: Mapping[str, Callable[[Any], Any]] | None = None, **options):
  """Decodes every prompt by every method and peer in turn; returns the runs."""
  functions = {name: functools.partial(model.generate, **own, **options)
               for name, (model, own) in methods.items()}
  return compare.run_interleaved(functions | dict(peers or {}), prompts, repeats=repeats)
