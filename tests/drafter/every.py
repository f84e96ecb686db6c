"""Every kind of drafter on one small target, for tests that no drafter may fail.

Networks are random: what they propose is poor, and exactly what a fault could turn into a wrong
token. The small model is the target with noise on its weights, so that many drafts are accepted.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.state import Frame
from dspark_jax.drafter import dspark, kinds, small_model
from dspark_jax.drafter.medusa import MedusaProposer
from dspark_jax.drafter.prompt_lookup import PromptLookupConfig, PromptLookupProposer
from dspark_jax.drafter.recurrent import RecurrentProposer
from dspark_jax.target.transformer import Transformer
from tests.target import cases as target_cases

KINDS = ("prompt-lookup", "small-model", "eagle3", "mtp", "medusa", "pruned")


@functools.lru_cache
def make_target(vocab: int = 41):
  return target_cases.make_target("qwen3", seed=4, vocab_size=vocab)


def random_params(shapes, seed: int = 0):
  """Random parameters of given shapes, norms around 1."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    value = rng.standard_normal(leaf.shape).astype(np.float32)
    is_norm = "norm" in jax.tree_util.keystr(path[-2:-1])
    return jnp.asarray(1 + 0.3 * value if is_norm else value * leaf.shape[-1] ** -0.5)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def make_network(kind: str, target_config, *, proposal_len: int = 3, **fields):
  """Returns (config, random parameters) of a trained kind."""
  fields = dict(proposal_len=proposal_len) | ({"target_layer_ids": (-1, 0)} if kind == "eagle3"
                                              else {}) | fields
  config = kinds.config_for_target(kind, target_config, **fields)
  init = kinds.KINDS[kind].init_params
  return config, random_params(jax.eval_shape(lambda: init(config, jax.random.key(0))))


@functools.lru_cache
def make_pair(kind: str, vocab: int = 41, *, proposal_len: int = 3, small_vocab: int | None = None):
  """Returns (frame, params) of a drafter; `small_vocab` = tokens that the small model knows."""
  config, target = make_target(vocab)
  if kind == "prompt-lookup":
    lookup = PromptLookupConfig(vocab, proposal_len=proposal_len, max_ngram=3, min_ngram=1)
    return Frame(config, PromptLookupProposer(lookup)), {
        "target": target, "drafter": {}, "borrowed": {}}
  if kind == "small-model":
    small_config, small = target_cases.make_target("qwen3", seed=4, vocab_size=vocab)
    rng = np.random.default_rng(1)
    small = jax.tree.map(
        lambda x: x + 0.1 * x.std() * rng.standard_normal(x.shape).astype(np.float32), small)
    known = small_vocab or vocab
    small |= {name: small[name][:known] for name in ("embed_tokens", "lm_head")}
    model = Transformer(dataclasses.replace(small_config, vocab_size=known), "float32")
    return Frame(config, small_model.SmallModelProposer(model, proposal_len, vocab)), {
        "target": target, "drafter": small, "borrowed": small_model.borrow(known, vocab)}
  fields, make = {}, RecurrentProposer
  if kind == "pruned":  # DSpark, half of the vocabulary to choose from, and the copied token
    kind, make = "dspark", dspark.DSparkProposer
    fields = dict(mask_token_id=vocab - 1, num_layers=1, markov_rank=4, copy_ngram=2,
                  target_layer_ids=(-1, 0), markov_candidates=vocab // 2)
  elif kind == "medusa":
    make = MedusaProposer
  drafter_config, drafter = make_network(kind, config, proposal_len=proposal_len, **fields)
  proposer = make(drafter_config)
  return Frame(config, proposer), {
      "target": target, "drafter": drafter,
      "borrowed": dspark.borrow(drafter_config, target["embed_tokens"], target["lm_head"])}
