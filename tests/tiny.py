"""A tiny target with a tokenizer, and a drafter for it, as directories in Hugging Face layout.

The target nearly is a bigram model (its layers say little), and the drafter's sequential head holds
that bigram up to noise, so some drafts are accepted and some are not.
"""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from dspark_jax.data.quiet import import_transformers
from dspark_jax.drafter import dspark
from dspark_jax.drafter.config import config_for_target
from dspark_jax.interop import deepspec
from dspark_jax.target.config import TransformerConfig
from dspark_jax.target.transformer import Transformer
from tests import hf_layout

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|mask|>")
NUM_IDS = 256 + len(SPECIAL)
STOP_ID, MASK_ID = NUM_IDS - 2, NUM_IDS - 1
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CONFIG = TransformerConfig(
    model_type="llama", vocab_size=NUM_IDS + 5, hidden_size=16, intermediate_size=24, num_layers=3,
    num_heads=4, num_kv_heads=2, head_dim=4, max_position_embeddings=120)


@pytest.fixture(scope="module", autouse=True)
def fast_compile():
  """For modules that import it: compilation is their cost, and what they test is not speed."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


def make_tokenizer():
  """One token a byte, ChatML template; fewer ids than the target has rows, as is common."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(
      vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  inner.add_special_tokens(list(SPECIAL))
  return import_transformers().PreTrainedTokenizerFast(
      tokenizer_object=inner, eos_token="<|im_end|>", chat_template=TEMPLATE,
      clean_up_tokenization_spaces=False)


@functools.lru_cache
def make_target_params():
  """Random weights with decided laws, in which attention and MLP only disturb a bigram."""
  init = lambda: Transformer(CONFIG).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
  shapes = jax.eval_shape(init)["params"]
  rng = np.random.default_rng(0)

  def fill(path, leaf):
    names = [key.key for key in path]
    if len(leaf.shape) == 1:
      return np.ones(leaf.shape, np.float32)
    scale = 1.0 if names[0] in ("embed_tokens", "lm_head") else leaf.shape[1] ** -0.5
    if names[-2:-1] and names[-2] in ("o_proj", "down_proj"):
      scale *= 0.1
    return (scale * rng.normal(size=leaf.shape)).astype(np.float32)

  return jax.tree_util.tree_map_with_path(fill, shapes)


def save_target(directory: pathlib.Path, **changes) -> pathlib.Path:
  """Writes config (with changes), generation config, weights and tokenizer.

  The generation config recommends temperature 0.7 and top_p 0.9.
  """
  directory.mkdir(parents=True)
  make_tokenizer().save_pretrained(directory)
  config = hf_layout.make_config(CONFIG, eos_token_id=STOP_ID) | changes
  (directory / "config.json").write_text(json.dumps(config))
  (directory / "generation_config.json").write_text(json.dumps(
      {"eos_token_id": [STOP_ID], "do_sample": True, "temperature": 0.7, "top_p": 0.9}))
  safetensors.numpy.save_file(hf_layout.make_tensors(CONFIG, make_target_params()),
                              directory / "model.safetensors")
  return directory


def edit_config(directory: pathlib.Path, path: pathlib.Path, **changes) -> pathlib.Path:
  """Copies a directory to `path` with changes to its config.json; None removes a field."""
  shutil.copytree(directory, path)
  config = json.loads((path / "config.json").read_text()) | changes
  (path / "config.json").write_text(json.dumps(
      {name: value for name, value in config.items() if value is not None}))
  return path


def save_drafter(directory: pathlib.Path, *, noise: float = 0.1, **overrides) -> pathlib.Path:
  """Writes a drafter whose Markov head is the target's bigram, with `noise` on its embedding."""
  fields = dict(num_layers=1, proposal_len=4, markov_rank=CONFIG.hidden_size,
                mask_token_id=MASK_ID, target_layer_ids=(0, 1))
  config = config_for_target(CONFIG, **(fields | overrides))
  params = dspark.init_params(config, jax.random.key(1))
  target = make_target_params()
  embed = target["embed_tokens"]
  bigram = embed / np.sqrt((embed**2).mean(axis=-1, keepdims=True))
  bigram += noise * np.random.default_rng(1).normal(size=embed.shape)
  rows = slice(None) if config.draft_vocab_size is None else slice(config.draft_vocab_size)
  params["markov_head"] |= {"markov_w1": jnp.asarray(bigram, jnp.float32),
                            "markov_w2": jnp.asarray(target["lm_head"][rows])}
  params["backbone"]["norm"]["weight"] *= 0.1  # base logits only disturb the bigram
  draft_ids = None if config.draft_vocab_size is None else np.arange(config.draft_vocab_size)
  deepspec.save_drafter(directory, config, params, draft_ids=draft_ids)
  return directory
