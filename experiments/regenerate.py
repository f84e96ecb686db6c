"""The target answers prompts in bulk, as training text for a drafter.

  python -m experiments.regenerate --config=configs/regenerate.py --config.out=runs/rows.jsonl

Prompts come from the built-in generator, from JSONL (`--config.prompts=FILE`), or from the target
itself (`--config.prompts=self`: it writes users' turns, kept in OUT.prompts.jsonl). Started again
with the same flags, it goes on where it was stopped.
"""

import jax.numpy as jnp

from dspark_jax.data import chat
from dspark_jax.data.jsonl import read_prompts
from dspark_jax.data.prompts import generate_prompts
from dspark_jax.interop.load import load_target
from dspark_jax.serving.regenerate import RegenerateOptions, regenerate
from dspark_jax.serving.self_prompts import write_prompts
from experiments import _cli

LAW = ("temperature", "top_k", "top_p", "min_p")


def read_any_prompts(config) -> list[dict] | None:
  """Returns prompts of a file or directory, or of the built-in generator; None for "self"."""
  if config.prompts == "self":
    return None
  if config.prompts == "builtin":
    return generate_prompts(config.num_prompts, seed=config.seed)
  return read_prompts(config.prompts)[:config.num_prompts or None]


def let_target_ask(config, target, tokenizer) -> list[dict]:
  """Returns prompts that the target writes, at temperature 1."""
  return write_prompts(target, tokenizer, config.num_prompts, f"{config.out}.prompts.jsonl",
                       options=RegenerateOptions(
                           batch_size=config.batch_size, max_new_tokens=config.max_prompt_tokens,
                           temperature=1.0, seed=config.seed, dtype=config.dtype))


def make_options(config, sampling: dict[str, float]) -> RegenerateOptions:
  """Returns options with the recommended sampling law, where the config leaves it open."""
  # Makers who recommend sampling without a temperature mean 1, as transformers takes it.
  law = {"temperature": 1.0, **sampling} if sampling else {}
  law |= {name: config[name] for name in LAW if config[name] is not None}
  return RegenerateOptions(
      batch_size=config.batch_size, max_new_tokens=config.max_new_tokens, max_len=config.max_len,
      min_new_tokens=config.min_new_tokens, seed=config.seed, dtype=config.dtype,
      enable_thinking=config.enable_thinking, **law)


def main(config):
  prompts = read_any_prompts(config)
  make_options(config, {})  # a bad field is told before the target is loaded
  target = load_target(config.target, dtype=jnp.dtype(config.dtype))
  options = make_options(config, target.sampling)
  tokenizer = chat.load_tokenizer(target.path)
  if prompts is None:
    prompts = let_target_ask(config, target, tokenizer)
  print(f"{len(prompts)} prompts, {options}")
  counts = regenerate(target, tokenizer, prompts, config.out, options=options)
  print(", ".join(f"{name} {count}" for name, count in counts.items()), f"-> {config.out}")


if __name__ == "__main__":
  _cli.run(main, config="configs/regenerate.py")
