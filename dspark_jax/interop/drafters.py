"""Any drafter by one name: what `DSpark(draft_model=...)` and `--draft-model` open.

| `draft_model` | drafter |
|---|---|
| a directory whose config.json names a drafter's architecture | that (DSpark, EAGLE-3, ...) |
| a directory, .gguf file or packaged name of a language model | that model drafts itself |
| `prompt-lookup` | n-gram look-up in the text so far |
"""

import dataclasses
import os
import pathlib
from typing import Any, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data import chat
from dspark_jax.drafter import dspark
from dspark_jax.drafter import small_model
from dspark_jax.drafter.config import DrafterConfig, check_fits
from dspark_jax.drafter.medusa import MedusaConfig, MedusaProposer
from dspark_jax.drafter.prompt_lookup import PromptLookupConfig, PromptLookupProposer
from dspark_jax.drafter.recurrent import RecurrentProposer
from dspark_jax.interop import deepspec
from dspark_jax.interop import flat
from dspark_jax.interop import hf
from dspark_jax.interop.load import PACKAGED, Target, load_target
from dspark_jax.target.config import FAMILIES, TransformerConfig
from dspark_jax.target.transformer import Transformer

PROMPT_LOOKUP = "prompt-lookup"
SMALL_MODEL_DRAFTS = 4  # a round, where the caller does not say
DEEPSPEC = (deepspec.REFERENCE_NAME, deepspec.OWN_NAME)


@dataclasses.dataclass(frozen=True)
class Opened:
  """A drafter ready for `decode.state.Frame` and its `params`.

  Attributes:
    proposer: a `drafter.interface.Drafter`.
    params: its parameters.
    borrowed: keyword arguments of `propose` made of the target's parameters.
  """
  proposer: Any
  params: Any
  borrowed: Mapping[str, jax.Array]


def needs_no_directory(name: str) -> bool:
  """Whether `open_drafter` takes a name as it is: built in, packaged, or a .gguf file."""
  path = pathlib.Path(name)
  return (name == PROMPT_LOOKUP or name.lower() in PACKAGED
          or (path.suffix == ".gguf" and path.is_file()))


def open_drafter(name: str | os.PathLike, target: Target, *, dtype: str = "float32",
                 vocab_limit: int | None = None) -> Opened:
  """Opens a drafter of any kind for a target; everything is checked first.

  Args:
    name: a directory, or a name for which `needs_no_directory`.
    dtype: of weights and activations.
    vocab_limit: ids from here on are never drafted.
  Raises:
    FileNotFoundError, ValueError: one line naming the file or field, found and expected.
  """
  name = str(name)
  if name == PROMPT_LOOKUP:
    return Opened(PromptLookupProposer(PromptLookupConfig(target.config.vocab_size)), {}, {})
  if needs_no_directory(name) or _is_language_model(pathlib.Path(name)):
    return _open_small_model(name, target, dtype, vocab_limit)
  config, params, stored = load_drafter(name, dtype=jnp.dtype(dtype))
  return Opened(make_proposer(config, target.config, dtype=dtype, vocab_limit=vocab_limit), params,
                _borrow(config, target.params, stored))


def make_proposer(config, target_config: TransformerConfig, *, dtype: str = "float32",
                  vocab_limit: int | None = None):
  """Returns the proposer of a config, which must fit the target."""
  if isinstance(config, DrafterConfig):
    check_fits(config, target_config)
    return dspark.DSparkProposer(config, dtype=dtype, vocab_limit=vocab_limit)
  for name, expected in (("vocab_size", target_config.vocab_size),
                         ("hidden_size", target_config.hidden_size),
                         ("num_target_layers", target_config.num_layers)):
    if getattr(config, name) != expected:
      raise ValueError(f"{name}: found {getattr(config, name)}, expected the target's {expected}")
  kind = MedusaProposer if isinstance(config, MedusaConfig) else RecurrentProposer
  return kind(config, dtype=dtype, vocab_limit=vocab_limit)


def load_drafter(path: str | os.PathLike, *, dtype=None):
  """Loads a directory of any trained drafter; see `deepspec.load_drafter`."""
  raw = hf.read_json(pathlib.Path(path) / "config.json")
  architecture = (raw.get("architectures") or [None])[0]
  if architecture in flat.KINDS:
    return flat.load_drafter(path, dtype=dtype)
  if architecture not in DEEPSPEC:
    raise ValueError(f"{pathlib.Path(path) / 'config.json'}: architectures: found "
                     f"{raw.get('architectures')!r}, expected one of "
                     f"{sorted((*DEEPSPEC, *flat.KINDS))}, or a language model's")
  return deepspec.load_drafter(path, dtype=dtype)


def save_drafter(path: str | os.PathLike, config, params, **kwargs) -> None:
  """Writes a directory of any trained drafter; arguments as `deepspec.save_drafter`."""
  save = deepspec.save_drafter if isinstance(config, DrafterConfig) else flat.save_drafter
  save(path, config, params, **kwargs)


def _is_language_model(directory: pathlib.Path) -> bool:
  if not (directory / "config.json").is_file():
    return False
  raw = hf.read_json(directory / "config.json")
  architecture = (raw.get("architectures") or [None])[0]
  return raw.get("model_type") in FAMILIES and (
      architecture is None or architecture.endswith("ForCausalLM"))


def _open_small_model(name: str, target: Target, dtype: str,
                      vocab_limit: int | None) -> Opened:
  model = load_target(name, dtype=jnp.dtype(dtype))
  _check_tokenizer(model, target)
  proposer = small_model.SmallModelProposer(
      Transformer(model.config, dtype), SMALL_MODEL_DRAFTS, vocab_size=target.config.vocab_size,
      vocab_limit=vocab_limit)
  return Opened(proposer, model.params,
                small_model.borrow(model.config.vocab_size, target.config.vocab_size))


def _check_tokenizer(model: Target, target: Target) -> None:
  """Ids of another tokenizer would be legal, and all wrong."""
  found, expected = (chat.load_tokenizer(t.path).get_vocab() for t in (model, target))
  if found != expected:
    odd = next(iter(sorted(set(found.items()) ^ set(expected.items()))))
    raise ValueError(f"draft_model: {model.path}: found another tokenizer than the target's (of "
                     f"{len(found)} and {len(expected)} tokens, the first difference is {odd}), "
                     "expected the same")


def _borrow(config, target_params, stored: dict[str, jax.Array] | None) -> dict[str, jax.Array]:
  """Returns embedding and LM head for the drafter: its own where stored, else the target's."""
  stored = stored or {}
  embed_VxD = target_params["embed_tokens"]
  borrowed = dspark.borrow(config, embed_VxD, target_params.get("lm_head", embed_VxD),
                           draft_ids=stored.get("draft_ids"))
  for name in ("embed_VxD", "lm_head_VdxD"):
    # Mostly a copy of the target's: then one array serves both.
    if name in stored and not np.array_equal(stored[name], borrowed[name]):
      borrowed[name] = stored[name]
  return borrowed
