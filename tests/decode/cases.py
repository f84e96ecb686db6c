"""Small targets and drafters for decoding, and helpers that run them.

`ScriptedProposer` is the smallest drafter there is: it proposes given continuations with an error
wherever the test wants one, so that every number of accepted drafts can be forced. `make_pair` is a
real DSpark drafter that knows its target's bigrams and therefore gets a fair share accepted.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode import loop
from dspark_jax.decode.state import Frame
from dspark_jax.decode.step import speculate_step
from dspark_jax.drafter import dspark
from dspark_jax.drafter.config import config_for_target
from dspark_jax.sampling import make_sampling_params
from dspark_jax.target.transformer import Transformer
from dspark_jax.types import Proposal
from tests.target import cases as target_cases

VOCAB = 41
BATCH = 6  # one batch size for nearly every test, so that few programs are compiled
ALL_ROUNDS = jnp.int32(100)  # more than any test needs; a fault fails here and does not hang

run_step = jax.jit(speculate_step, static_argnums=0)

PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5], [35, 8, 9, 7, 9], [3], [23, 8, 4, 6, 26, 4, 33],
           [38, 3, 27, 9])


@functools.lru_cache
def make_target():
  """Returns (config, params) of a qwen3 whose next token depends on the whole context."""
  return target_cases.make_target("qwen3", seed=4)  # chosen: its greedy answers vary


@dataclasses.dataclass(frozen=True)
class ScriptedProposer:
  """Proposes params["script_BxS"] at the positions after the anchor.

  Draft `right_BxS[b, anchor position]` is wrong on purpose (>= G: none is). Confidence is 1 for
  the first `sure_BxS[b, anchor position]` drafts, then 0. The state is the starts of the last
  `observe`.
  """
  proposal_len: int
  target_layer_ids: tuple[int, ...] = ()

  def with_len(self, num_drafts):
    return dataclasses.replace(self, proposal_len=min(num_drafts, self.proposal_len))

  def init_state(self, batch, num_slots):
    return jnp.full((batch,), -1, jnp.int32)

  def prefill(self, params, state, features, lens_B, **unused):
    return jnp.zeros_like(lens_B)

  def observe(self, params, state, features, starts_B, **unused):
    return starts_B

  def propose(self, params, state, anchor_B, anchor_positions_B, sampling_params, **unused):
    slots_G = jnp.arange(self.proposal_len)[None]
    at = lambda table, i: jnp.take_along_axis(params[table], i, axis=1)
    tokens_BxG = at("script_BxS", anchor_positions_B[:, None] + 1 + slots_G)
    is_wrong_BxG = slots_G == at("right_BxS", anchor_positions_B[:, None])
    tokens_BxG = jnp.where(is_wrong_BxG, (tokens_BxG + 1) % VOCAB, tokens_BxG)
    is_token_BxGxV = tokens_BxG[..., None] == jnp.arange(VOCAB)[None, None]
    confidence_BxG = (slots_G < at("sure_BxS", anchor_positions_B[:, None])).astype(jnp.float32)
    return Proposal(tokens_BxG, jnp.where(is_token_BxGxV, 0.0, -jnp.inf), confidence_BxG,
                    jnp.where(confidence_BxG > 0, jnp.inf, -jnp.inf))


def script(sequences, *, right=99, sure=99, slots: int = 256):
  """Parameters of a ScriptedProposer; `right` and `sure` are one value, one a request, or all."""
  script_BxS = np.zeros((len(sequences), slots), np.int32)
  for row, sequence in zip(script_BxS, sequences):
    row[:len(sequence)] = sequence
  table = lambda x: np.broadcast_to(
      np.asarray(x, np.int32).reshape((-1, 1) if np.ndim(x) == 1 else np.shape(x)),
      script_BxS.shape)
  return {k: jnp.asarray(v) for k, v in
          dict(script_BxS=script_BxS, right_BxS=table(right), sure_BxS=table(sure)).items()}


def scripted_params(sequences, **kwargs):
  return {"target": make_target()[1], "drafter": script(sequences, **kwargs), "borrowed": {}}


def decode(frame, params, prompts=PROMPTS, *, max_new_tokens=20, stop_ids=(), max_slots=None,
           **sampling):
  """Runs `loop.generate` and returns (lists of tokens, prompts included, state)."""
  state = loop.generate(frame, params, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids,
                        max_slots=max_slots,
                        sampling=make_sampling_params(len(prompts), **sampling))
  return tokens_of(state), state


def tokens_of(state):
  tokens, lens = np.asarray(state.tokens_BxS), np.asarray(state.lens_B)
  for row, n in zip(tokens, lens):
    assert (row[:n] >= 0).all() and (row[n:] == -1).all()
  return [row[:n].tolist() for row, n in zip(tokens, lens)]


@functools.lru_cache
def plain_tokens():
  """Plain greedy decoding of PROMPTS, 40 new tokens: long enough for every script."""
  config, params = make_target()
  return decode(Frame(config), {"target": params}, max_new_tokens=40)[0]


@functools.lru_cache
def make_pair(proposal_len: int = 3):
  """Returns (frame, params) of a DSpark drafter whose Markov head is the target's bigram table.

  Rank V: W1 is the identity, W2 the target's logits after each single token. The backbone adds a
  little that depends on the context, so that a wrong context row shows.
  """
  config, params = make_target()
  drafter_config = config_for_target(config, target_layer_ids=(-1, 0), num_layers=1,
                                     markov_rank=VOCAB, proposal_len=proposal_len, copy_ngram=2,
                                     mask_token_id=VOCAB - 1)
  drafter_params = jax.tree.map(jnp.asarray, random_drafter(drafter_config))
  model = Transformer(config)

  @jax.jit
  def bigrams(params):
    out = model.apply({"params": params}, jnp.arange(VOCAB)[:, None])
    return model.apply({"params": params}, out.hidden_BxTxD[:, 0], method="head")

  drafter_params["markov_head"] |= {"markov_w1": jnp.eye(VOCAB), "markov_w2": bigrams(params).T}
  drafter_params["backbone"]["norm"]["weight"] *= 0.1
  borrowed = dspark.borrow(drafter_config, params["embed_tokens"], params["lm_head"])
  return (Frame(config, dspark.DSparkProposer(drafter_config)),
          {"target": params, "drafter": drafter_params, "borrowed": borrowed})


def random_drafter(config, seed: int = 0):
  """Random drafter parameters without compiling an initialiser."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda: dspark.init_params(config, jax.random.key(0)))

  def draw(path, leaf):
    value = rng.standard_normal(leaf.shape).astype(np.float32)
    if "norm" in jax.tree_util.keystr(path):
      return 1 + 0.3 * value
    return value * leaf.shape[-1] ** -0.5

  return jax.tree_util.tree_map_with_path(draw, shapes)
