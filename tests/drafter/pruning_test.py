"""The pruned walk of the drafter: its law is what it says, and what it draws from."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from dspark_jax import sampling
from dspark_jax.drafter import dspark
from pallas_kernels import counter_rng
from pallas_kernels.markov_sampling.reference import pruned_markov_sampling
from tests.drafter import cases, every
from tests.drafter.every_test import MAX_P_VALUE_OF_A_FAULT, compute_p_value
from tests.tiny import fast_compile  # noqa: F401

G, B, V = 3, 4, 37
ANCHORS = np.array([3, 11, 20, 1], np.int32)
DRAFT_IDS = np.array([0, 1, 5, 6, 9, 12, 20, 21, 30, 35], np.int32)
FILTERS = dict(temperature=[0.7, 0.0, 1.5, 1.0], top_k=[3, 0, 0, 0], top_p=[1.0, 1.0, 0.8, 1.0],
               min_p=[0.0, 0.0, 0.0, 0.2])


@pytest.fixture(autouse=True)
def _full_precision():
  with jax.default_matmul_precision("highest"):
    yield


def make_inputs(width):
  rng = np.random.default_rng(3)
  words = counter_rng.noise_words(jnp.arange(B)[None], counter_rng.DRAFT, 0, jnp.arange(G)[:, None])
  # Every text ends with (7, 8, anchor), which something followed before.
  text = np.full((B, 16), -1, np.int32)
  text[:, :8] = [[7, 8, a, c, 4, 7, 8, a] for a, c in zip(ANCHORS, (5, 30, 9, 2))]
  return (jnp.asarray(rng.normal(size=(G, B, 12)), jnp.float32),
          jnp.asarray(rng.normal(size=(G, B, width)), jnp.float32), words, jnp.asarray(text))


def walk(config, *, filters, vocab_limit=None):
  """Runs the walk alone: (tokens [G, B], law [G, B, V], confidence logits, margins)."""
  params = cases.make_params(config)
  proposer = dspark.DSparkProposer(config, vocab_limit=vocab_limit)
  hidden, base, words, text = make_inputs(config.draft_vocab)
  ids = None if config.draft_vocab_size is None else jnp.asarray(DRAFT_IDS)
  return jax.jit(lambda law: proposer._walk(
      params, hidden, base, words, jnp.asarray(ANCHORS), law, ids, jnp.full(B, 7), text))(
          sampling.make_sampling_params(B, **filters))


make_config = functools.partial(cases.make_config, proposal_len=G)


@pytest.mark.parametrize("fields", [
    dict(markov_head_type="rnn"), dict(copy_ngram=2, draft_vocab_size=len(DRAFT_IDS))], ids=str)
def test_all_candidates_are_the_whole_walk(fields):
  expected = walk(make_config(**fields), filters=FILTERS, vocab_limit=33)
  found = walk(make_config(**fields, markov_candidates=99), filters=FILTERS, vocab_limit=33)
  np.testing.assert_array_equal(found[0], expected[0])
  for a, b in zip(found[1:], expected[1:]):  # one linear map of at most 22 products, two orders
    np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def compute_law(config, tokens, *, num, temperature, vocab_limit):
  """Law [G, B, Vd] from the definition, float64, for the tokens drawn and their copies."""
  params = jax.tree.map(np.float64, cases.make_params(config))
  hidden, base, _, _ = make_inputs(config.draft_vocab)
  base = np.float64(base)
  base[..., DRAFT_IDS >= vocab_limit] = -np.inf
  w1, w2 = params["markov_head"]["markov_w1"], params["markov_head"]["markov_w2"]
  law, copied = np.zeros_like(base), 0
  for b in range(B):
    text = [7, 8, ANCHORS[b], (5, 30, 9, 2)[b], 4, 7, 8, ANCHORS[b]]
    for g in range(G):
      logits = base[g, b] + w2 @ w1[text[-1]]
      is_drafted = base[g, b] >= np.sort(base[g, b])[-num]
      follower, level = find_follower(text)
      if level and follower in DRAFT_IDS:
        column = list(DRAFT_IDS).index(follower)
        head = params["copy_head"]
        logits[column] += (head["gate_weight"][level - 1] @ np.float64(hidden[g, b])
                           + head["gate_bias"][level - 1])
        copied += not is_drafted[column] and follower < vocab_limit
        is_drafted[column] = True
      law[g, b] = special.softmax(np.where(is_drafted, logits / temperature, -np.inf))
      text.append(int(tokens[g, b]))
  return law, copied


def find_follower(text):
  for n in (2, 1):
    for j in range(len(text) - 1, n - 1, -1):
      if text[j - n:j] == text[-n:]:
        return text[j], n
  return 0, 0


def test_reports_the_law_of_candidates_and_copy_and_draws_from_it():
  config = make_config(copy_ngram=2, draft_vocab_size=len(DRAFT_IDS), markov_candidates=3)
  found = walk(config, filters=dict(temperature=0.8, seed=1), vocab_limit=33)
  tokens, law = np.asarray(found[0]), np.asarray(found[1])
  expected, num_extra = compute_law(config, tokens, num=3, temperature=0.8, vocab_limit=33)
  assert num_extra > 0  # some copy was no candidate
  np.testing.assert_allclose(special.softmax(law, axis=-1), expected, atol=1e-5)
  assert set((expected > 0).sum(-1).ravel()) <= {3, 4}
  noise = counter_rng.gumbel(make_inputs(10)[2], jnp.asarray(DRAFT_IDS))
  np.testing.assert_array_equal(tokens, DRAFT_IDS[np.argmax(law + np.asarray(noise), axis=-1)])


@pytest.mark.parametrize("kind", ["vanilla"])
def test_is_the_walk_of_the_kernels(kind):
  config = make_config(markov_head_type=kind, markov_candidates=6)
  temperature = [0.7, 0.0, 1.5, 1.0]
  found = walk(config, filters=dict(temperature=temperature))
  params = cases.make_params(config)["markov_head"]
  _, base, words, _ = make_inputs(V)
  draws, columns = pruned_markov_sampling(
      base, params["markov_w1"], params["markov_w2"], jnp.asarray(ANCHORS), words,
      jnp.asarray(temperature), num_candidates=6, kind=kind)
  np.testing.assert_array_equal(found[0], draws.tokens_GxB)
  law = np.take_along_axis(np.asarray(found[1]), np.asarray(columns), axis=-1)
  logits = np.asarray(draws.logits_GxBxV) / np.where(np.equal(temperature, 0), 1, temperature)[
      None, :, None]
  is_drawn = np.array(temperature) > 0
  np.testing.assert_allclose(special.softmax(law, -1)[:, is_drawn],
                             special.softmax(logits, -1)[:, is_drawn], atol=1e-5)
  assert (np.isfinite(found[1]).sum(-1) == np.where(is_drawn, 6, 1)[None]).all()


@dataclasses.dataclass(frozen=True)
class Liar(dspark.DSparkProposer):
  """Draws from the candidates and reports them with some probability for what it left out."""

  def propose(self, *args, **kwargs):
    honest = super().propose(*args, **kwargs)
    law = honest.draft_logits_BxGxV
    return honest.replace(draft_logits_BxGxV=jnp.where(jnp.isfinite(law), law, 0.0))


def test_a_law_that_is_not_the_pruned_one_is_caught():
  """`every_test` shows that the honest one decodes the target's law, copies included."""
  frame, params = every.make_pair("pruned", 5)
  liar = Liar(frame.drafter.config)
  p_value = compute_p_value(dataclasses.replace(frame, drafter=liar), params, temperature=1.5)
  assert p_value < MAX_P_VALUE_OF_A_FAULT
