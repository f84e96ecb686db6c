"""What every drafter owes: exact decoding at any temperature, alone and in any batch."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import loop
from dspark_jax.decode import step
from dspark_jax.drafter.small_model import SmallModelProposer
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler.policies import ConfidenceThreshold, FixedLength
from dspark_jax.target.transformer import Transformer
from tests import oracles
from tests.decode import cases
from tests.decode.cases import ALL_ROUNDS, PROMPTS
from tests.drafter import every
from tests.tiny import fast_compile  # noqa: F401

MIN_P_VALUE = 1e-4
MAX_P_VALUE_OF_A_FAULT = 1e-9


# --- in a mixed batch --------------------------------------------------------------------------

MIXED = dict(
    temperature=[0.0, 1.0, 0.7, 1.3, 0.0, 1.0], top_k=[0, 0, 5, 0, 0, 0],
    top_p=[1.0, 1.0, 1.0, 0.8, 1.0, 1.0], min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.1],
    seed=[0, 7, 7, 123, 1, 5])
STOPS = [[], [7], [2, 24], [], [], [16]]
COUNTS = [20, 20, 13, 20, 9, 7]


def start(kind, prompts, rows=slice(None), **more):
  frame, params = every.make_pair(kind)
  arguments = dict(max_new_tokens=COUNTS[rows], stop_ids=STOPS[rows],
                   sampling=make_sampling_params(
                       len(prompts), **{k: v[rows] for k, v in MIXED.items()})) | more
  return loop.start(frame, params, prompts, **arguments)


@functools.lru_cache
def mixed_state(kind):
  """The six different requests in one batch, decoded to the end."""
  return loop.run_rounds(*every.make_pair(kind), start(kind, PROMPTS), ALL_ROUNDS)


@pytest.mark.parametrize("kind", every.KINDS)
def test_a_mixed_batch(kind):
  """Greedy rows are plain greedy decoding, each request is itself alone, and what the drafter keeps
  of the text is what it would keep of a prompt (faults B15, B14, B20, B21, B23)."""
  frame, params = every.make_pair(kind)
  state = mixed_state(kind)
  tokens = cases.tokens_of(state)
  assert bool(state.is_valid_B.all())
  for i in (0, 4):
    assert tokens[i] == cases.plain_tokens()[i][:len(PROMPTS[i]) + COUNTS[i]]
  accepted = int(state.stats.accepted_BxG.sum())
  assert accepted < int(state.stats.verified_BxG.sum())
  assert accepted >= (20 if kind == "small-model" else 0)
  alone = loop.run_rounds(frame, params, start(kind, PROMPTS[1:2], slice(1, 2)), ALL_ROUNDS)
  assert cases.tokens_of(alone) == tokens[1:2]
  np.testing.assert_array_equal(alone.stats.accepted_BxG, state.stats.accepted_BxG[1:2])
  fresh = start(kind, tokens, max_new_tokens=1)
  check_same_rows(state.drafter, fresh.drafter, np.asarray(state.lens_B))


def check_same_rows(found, expected, lens_B):
  """Caches of a drafter, [B, K, S, H]: rows before each anchor."""
  found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
  assert len(found) == len(expected)
  for f, e in zip(found, expected):
    for b, n in enumerate(lens_B if f.ndim == 4 else []):
      np.testing.assert_allclose(f[b, :, :n - 1], e[b, :, :n - 1], rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", every.KINDS)
def test_a_short_block_is_the_start_of_a_long_one(kind):
  """The same drafts by the same laws with the same confidence; who cannot stop drafts them all."""
  frame, params = every.make_pair(kind)
  state = start(kind, PROMPTS)
  whole, short = (jax.jit(functools.partial(step.draft, frame, num_drafts=n))(params, state)
                  for n in (None, 2))
  assert short.tokens_BxG.shape[1] == (frame.proposal_len if kind == "medusa" else 2)
  np.testing.assert_array_equal(short.tokens_BxG[:, :2], whole.tokens_BxG[:, :2])
  np.testing.assert_allclose(jax.nn.softmax(short.draft_logits_BxGxV[:, :2]),
                             jax.nn.softmax(whole.draft_logits_BxGxV[:, :2]), atol=5e-5)
  np.testing.assert_allclose(short.confidence_BxG[:, :2], whole.confidence_BxG[:, :2], atol=5e-5)
  assert frame.drafter.with_len(1).proposal_len == short.tokens_BxG.shape[1] - (kind != "medusa")


@pytest.mark.parametrize("kind", ["small-model", "eagle3"])
def test_fewer_rows_are_verified_than_drafted(kind):
  """A policy of one draft a round, and block verification: greedy rows stay plain decoding."""
  frame, params = every.make_pair(kind)
  frame = dataclasses.replace(frame, policy=FixedLength(1), accept_rule="block")
  state = loop.run_rounds(frame, params, start(kind, PROMPTS), ALL_ROUNDS)
  tokens = cases.tokens_of(state)
  for i in (0, 4):
    assert tokens[i] == cases.plain_tokens()[i][:len(PROMPTS[i]) + COUNTS[i]]
  assert not state.stats.verified_BxG[:, 1:].any() and state.stats.verified_BxG[:, 0].any()


# --- the law -----------------------------------------------------------------------------------

VOCAB, NUM_DRAWS, NUM_TOKENS = 5, 2**13, 3
PROMPT = [3, 1, 3]


@functools.lru_cache
def target_logits():
  """Logits [V, V, V] of the target after PROMPT and the first 0, 1, 2 tokens, as {prefix: row}."""
  config, params = every.make_target(VOCAB)
  model = Transformer(config)
  pairs = list(itertools.product(range(VOCAB), repeat=2))

  @jax.jit
  def run(tokens):
    out = model.apply({"params": params}, tokens)
    return model.apply({"params": params}, out.hidden_BxTxD, method="head")

  rows = np.asarray(run(jnp.asarray([PROMPT + list(pair) for pair in pairs])))[:, len(PROMPT) - 1:]
  found = {}
  for pair, row in zip(pairs, rows):
    for n in range(3):
      found[pair[:n]] = row[n]
  return found


def compute_law(**fields):
  laws = {prefix: oracles.compute_law(row, **fields) for prefix, row in target_logits().items()}
  return oracles.compute_sequence_law(lambda prefix: laws[prefix], NUM_TOKENS, VOCAB)


def compute_p_value(frame, params, **fields):
  """Decodes three tokens for every seed and compares their joint counts with the target's law."""
  prompts_BxT = jnp.broadcast_to(jnp.asarray(PROMPT), (NUM_DRAWS, len(PROMPT)))
  lens_B = jnp.full(NUM_DRAWS, len(PROMPT))
  state = loop.prefill(
      frame, params, prompts_BxT, lens_B, limits_B=lens_B + NUM_TOKENS,
      sampling=make_sampling_params(NUM_DRAWS, seed=np.arange(NUM_DRAWS), **fields),
      stop_ids_BxE=jnp.full((NUM_DRAWS, 4), -1), num_slots=16)
  state = loop.run_rounds(frame, params, state, ALL_ROUNDS)
  tokens = np.asarray(state.tokens_BxS[:, len(PROMPT):len(PROMPT) + NUM_TOKENS])
  counts = np.bincount(np.ravel_multi_index(tokens.T, (VOCAB,) * NUM_TOKENS),
                       minlength=VOCAB**NUM_TOKENS)
  law = compute_law(**fields)
  assert (law * NUM_DRAWS >= 5).sum() >= 20, "a law with hardly any choice tests nothing"
  return oracles.compute_p_value(counts, law)


@pytest.mark.parametrize("kind, rule", [(kind, "token") for kind in every.KINDS] + [
    ("small-model", "block")])
def test_tokens_follow_the_target(kind, rule):
  frame, params = every.make_pair(kind, VOCAB)
  policy = ConfidenceThreshold(0.5) if kind == "prompt-lookup" else None
  frame = dataclasses.replace(frame, accept_rule=rule, policy=policy)
  assert compute_p_value(frame, params, temperature=1.5) > MIN_P_VALUE


def test_tokens_follow_the_target_with_a_small_model_of_fewer_tokens():
  frame, params = every.make_pair("small-model", VOCAB, small_vocab=4)
  assert compute_p_value(frame, params, temperature=1.5) > MIN_P_VALUE


@dataclasses.dataclass(frozen=True)
class Liar(SmallModelProposer):
  """Reports a much flatter law than the one it drew from."""

  def propose(self, *args, **kwargs):
    honest = super().propose(*args, **kwargs)
    return honest.replace(draft_logits_BxGxV=0.1 * honest.draft_logits_BxGxV)


def test_a_wrong_law_is_caught():
  frame, params = every.make_pair("small-model", VOCAB)
  liar = Liar(**{f.name: getattr(frame.drafter, f.name)
                 for f in dataclasses.fields(SmallModelProposer)})
  p_value = compute_p_value(dataclasses.replace(frame, drafter=liar), params, temperature=1.5)
  assert p_value < MAX_P_VALUE_OF_A_FAULT
