"""Block verification: the target's law whatever is drafted, and more drafts accepted."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.sampling import law_logits, make_sampling_params, sample
from dspark_jax.verification import block
from dspark_jax.verification.accept import accept
from pallas_kernels.counter_rng import COIN, RECOVER, noise_words, uniform
from pallas_kernels.rejection_sampling.reference import residual_law
from tests import oracles
from tests.toy_decoder import compute_p_value, make_tables
from tests.verification.accept_test import decide, make_batch

MIN_P_VALUE = 1e-4
MAX_P_VALUE_OF_A_FAULT = 1e-9

TABLES = {
  "3 tokens, 2 drafts": make_tables(3, 2, seed=1),
  "5 tokens, 3 drafts": make_tables(5, 3, seed=2),
  "6 tokens, 4 of them drafted": make_tables(6, 3, draft_ids=[0, 2, 3, 5], seed=5),
}
accept_block = functools.partial(accept, rule="block")
PLANTS = {"accept_fn": accept_block}


@pytest.mark.parametrize("name, threshold, fields", [
  ("3 tokens, 2 drafts", 0.0, {"temperature": 1.0}),
  ("3 tokens, 2 drafts", 0.4, {"temperature": 0.5}),
  ("5 tokens, 3 drafts", 0.0, {"temperature": 1.0}),
  ("5 tokens, 3 drafts", 0.4, {"temperature": 1.7, "top_k": 4, "top_p": 0.9, "min_p": 0.05}),
  ("5 tokens, 3 drafts", 0.4, {"temperature": 1.0, "top_p": 0.7}),
  ("6 tokens, 4 of them drafted", 0.0, {"temperature": 1.0}),
  ("6 tokens, 4 of them drafted", 0.4, {"temperature": 1.7, "top_k": 2}),
])  # fmt: skip
def test_tokens_follow_the_target(name, threshold, fields):
  assert compute_p_value(TABLES[name], threshold, plants=PLANTS, **fields) > MIN_P_VALUE


# Planted faults ----------------------------------------------------------------------------------


def accept_with(
  target_BxWxV, tokens_BxG, *, draft_logits_BxGxD, verify_lens_B, params, anchor_positions_B,
  draft_ids, coins_by_position=False, verify_fn=block.verify_block,
):  # fmt: skip
  """`accept` by parts, with noise of this round, or coins keyed by the token's position."""
  num_drafts = tokens_BxG.shape[1]
  slot_G = jnp.arange(1, num_drafts + 1)[None]
  ones_BxG = jnp.ones_like(tokens_BxG)
  positions_BxG, slots_BxG = anchor_positions_B[:, None] * ones_BxG, slot_G * ones_BxG
  if coins_by_position:
    positions_BxG, slots_BxG = positions_BxG + slots_BxG, 0 * slots_BxG
  positions_BxW = anchor_positions_B[:, None] + 1 + jnp.arange(num_drafts + 1)[None]
  return verify_fn(
    law_logits(target_BxWxV, params), draft_logits_BxGxD, tokens_BxG, verify_lens_B=verify_lens_B,
    coins_BxG=uniform(noise_words(params.seed, COIN, positions_BxG, slots_BxG)),
    noise_words_BxWx2=noise_words(params.seed, RECOVER, positions_BxW, 0), draft_ids=draft_ids)


def test_the_parts_without_a_fault_pass():
  p_value = compute_p_value(TABLES["5 tokens, 3 drafts"], 0.0, plants={"accept_fn": accept_with},
                            temperature=1.0)
  assert p_value > MIN_P_VALUE


def test_coins_that_a_later_round_meets_again_are_caught():
  """Keyed as the token-wise coins are: a coin that refused draft 3 of one round is known to be
  high when it judges draft 1 or 2 of the next."""
  plants = {"accept_fn": functools.partial(accept_with, coins_by_position=True)}
  p_value = compute_p_value(TABLES["5 tokens, 3 drafts"], 0.0, plants=plants, temperature=1.0)
  assert p_value < MAX_P_VALUE_OF_A_FAULT


def forget_the_weight(target, draft, tokens, **keywords):
  """The next token from max(p - q, 0), as after a token-wise rejection."""
  num_accepted_B, next_B, is_valid_B = block.verify_block(target, draft, tokens, **keywords)
  lens_B = keywords["verify_lens_B"]
  at = jnp.minimum(num_accepted_B, draft.shape[1] - 1)[:, None, None]
  row = lambda x: jnp.take_along_axis(x, at, axis=1)[:, 0]
  law_BxV = residual_law(jax.nn.softmax(row(target)), jax.nn.softmax(row(draft)))
  wrong_B = sample(jnp.log(law_BxV), row(keywords["noise_words_BxWx2"]))
  return num_accepted_B, jnp.where(num_accepted_B < lens_B, wrong_B, next_B), is_valid_B


def test_the_residual_of_the_token_wise_rule_is_caught():
  plants = {"accept_fn": functools.partial(accept_with, verify_fn=forget_the_weight)}
  p_value = compute_p_value(TABLES["5 tokens, 3 drafts"], 0.0, plants=plants, temperature=1.0)
  assert p_value < MAX_P_VALUE_OF_A_FAULT


# Accepted drafts, and the law by enumeration -----------------------------------------------------


def walk_block(target, drafter, prefix, drafts, *, num_sent):
  """Yields (accepted drafts, probability, law of the next token) of one block, from the paper."""
  laws = [(target(prefix + drafts[:k]), drafter(prefix + drafts[:k])) for k in range(num_sent)]
  weights = [1.0]
  for x, (p, q) in zip(drafts, laws):
    weights.append(min(1.0, weights[-1] * p[x] / q[x]))
  refused = 1.0
  for i in range(num_sent, -1, -1):
    h, law = weights[i], target(prefix + drafts[:i])
    if i < num_sent:
      residual = np.maximum(weights[i] * laws[i][0] - laws[i][1], 0)
      rest = residual.sum()
      h = rest / (rest + 1 - weights[i]) if rest + 1 - weights[i] > 0 else 1.0
      law = residual / rest if rest > 0 else law
    h = 1.0 if i == 0 else h
    yield i, refused * h, law
    refused *= 1 - h


def compute_block_law(target, drafter, num_sent, *, num_tokens, num_drafts, vocab):
  """As `oracles.compute_speculative_law`, with blocks: every event of decoding `num_tokens`."""

  @functools.cache
  def continue_from(prefix):
    if len(prefix) >= num_tokens:
      return {prefix[:num_tokens]: 1.0}
    found = {}
    for drafts in itertools.product(range(vocab), repeat=num_drafts):
      weight = np.prod([drafter(prefix + drafts[:k])[drafts[k]] for k in range(num_drafts)])
      length = num_sent(prefix, drafts)
      for i, chance, law in walk_block(target, drafter, prefix, drafts, num_sent=length):
        for token in np.flatnonzero(law * chance * weight):
          more = continue_from(prefix + drafts[:i] + (int(token),))
          for sequence, p in more.items():
            found[sequence] = found.get(sequence, 0.0) + weight * chance * law[token] * p
    return found

  law = np.zeros((vocab,) * num_tokens)
  for sequence, p in continue_from(()).items():
    law[sequence] = p
  return law


@pytest.mark.parametrize("num_sent", [
  lambda prefix, drafts: 3,
  # Depends on what was drafted before, as thresholds do, or where drafting ends at a stop token.
  lambda prefix, drafts: 1 + (drafts[0] == 1) * (1 + (drafts[1] != 0)),
])
def test_enumeration_agrees_that_the_rule_is_exact(num_sent):
  sizes = {"num_tokens": 3, "num_drafts": 3, "vocab": 3}
  target, drafter = random_laws(5, 3), random_laws(6, 3)
  found = compute_block_law(target, drafter, num_sent, **sizes)
  expected = oracles.compute_sequence_law(target, 3, 3)
  np.testing.assert_allclose(found, expected, atol=1e-12)


def test_enumeration_agrees_that_peeking_is_not():
  """Whether draft 2 is sent must not depend on draft 2."""
  sizes = {"num_tokens": 2, "num_drafts": 2, "vocab": 3}
  target, drafter = random_laws(5, 3), random_laws(6, 3)
  found = compute_block_law(target, drafter, lambda _, drafts: 1 + (drafts[1] == 0), **sizes)
  assert np.abs(found - oracles.compute_sequence_law(target, 2, 3)).max() > 0.01


def compute_expected_accepted(target, drafter, *, num_drafts, vocab):
  """Returns E[accepted drafts] of (token-wise, block) verification by enumeration, float64.

  `target(prefix)` and `drafter(prefix)` are laws [vocab].
  """
  token = both = 0.0
  for drafts in itertools.product(range(vocab), repeat=num_drafts):
    chance, product, products = 1.0, 1.0, []
    for k, x in enumerate(drafts):
      p, q = target(drafts[:k])[x], drafter(drafts[:k])[x]
      chance, product = chance * q, product * min(1.0, p / q)
      products.append(product)
    token += chance * sum(products)
    blocks = walk_block(target, drafter, (), drafts, num_sent=num_drafts)
    both += chance * sum(i * accepted for i, accepted, _ in blocks)
  return token, both


def random_laws(seed, vocab):
  """Laws that depend on the whole prefix."""
  @functools.cache
  def law(prefix):
    rng = np.random.default_rng([seed, *prefix])
    return oracles.compute_law(rng.normal(0, 1.5, vocab))
  return law


def test_block_never_accepts_fewer_in_expectation():
  """Enumeration for 40 random pairs of laws; more in nearly all, and by a real amount."""
  gains = []
  for seed in range(40):
    token, both = compute_expected_accepted(
      random_laws(2 * seed, 3), random_laws(2 * seed + 1, 3), num_drafts=4, vocab=3)
    assert both >= token - 1e-12
    gains.append(both / token - 1)
  assert np.median(gains) > 0.01
  same = random_laws(1, 3)
  np.testing.assert_allclose(compute_expected_accepted(same, same, num_drafts=4, vocab=3), 4)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_our_rules_accept_as_many_as_the_enumeration_says(rule):
  """2^15 rounds of 3 drafts over 4 tokens, laws that depend on the slot alone."""
  num, rng = 2**15, np.random.default_rng(3)
  target, draft = rng.normal(0, 1.2, (4, 4)), rng.normal(0, 1.2, (3, 4))
  law = lambda rows: lambda prefix: oracles.compute_law(rows[len(prefix)])
  token, both = compute_expected_accepted(law(target), law(draft), num_drafts=3, vocab=4)
  assert both > token + 0.03  # the rules can be told apart by the tolerance below
  tile = lambda rows: np.broadcast_to(rows.astype(np.float32), (num, *rows.shape))
  verdict, _ = decide(tile(target), tile(draft),
                      make_sampling_params(num, temperature=1.0, seed=np.arange(num)), rule=rule)
  found = np.asarray(verdict.num_accepted_B, np.float64)
  expected = {"token": token, "block": both}[rule]
  assert abs(found.mean() - expected) < 4 * found.std() / num**0.5 < 0.03


# Edges -------------------------------------------------------------------------------------------


def test_greedy_rows_of_a_mixed_batch_are_the_greedy_path():
  target, draft = make_batch()
  lens, anchors = np.arange(60) % 4, np.arange(60)
  found, _ = decide(target, draft, make_sampling_params(60), lens=lens, anchors=anchors)
  more = lambda a: np.concatenate([a, a[:1]])
  params = make_sampling_params(61, temperature=[0.0] * 60 + [1.0])
  mixed, _ = decide(more(target), more(draft), params, lens=more(lens), anchors=more(anchors),
                    rule="block")
  for name in ("num_accepted_B", "next_token_B", "is_valid_B"):
    np.testing.assert_array_equal(getattr(mixed, name)[:60], getattr(found, name))


def test_equal_laws_are_accepted_whole():
  target = np.random.default_rng(0).normal(size=(200, 4, 7)).astype(np.float32)
  params = make_sampling_params(200, temperature=1.0, top_p=0.9, seed=np.arange(200))
  verdict, _ = decide(target, target[:, :3], params, rule="block")
  assert (np.asarray(verdict.num_accepted_B) == 3).all()


@pytest.mark.parametrize("part", ["target", "draft"])
def test_b13_a_broken_row_ends_the_block(part):
  target = np.random.default_rng(1).normal(size=(2, 4, 8)).astype(np.float32)
  draft = target[:, :3].copy()
  {"target": target, "draft": draft}[part][0, 1, 3] = np.nan
  params = make_sampling_params(2, temperature=1.0, seed=[1, 2])
  verdict, _ = decide(target, draft, params, rule="block")
  np.testing.assert_array_equal(verdict.is_valid_B, [False, True])
  np.testing.assert_array_equal(verdict.num_accepted_B, [1, 3])
  verdict, _ = decide(target, draft, params, lens=[1, 3], rule="block")
  np.testing.assert_array_equal(verdict.is_valid_B, [part == "draft", True])


def test_an_impossible_draft_is_never_accepted():
  """p = (1, 0), token 1 drafted: with q = (0, 1), and with a faulty q = (1, 0)."""
  with np.errstate(divide="ignore"):
    p, q = np.log(np.float32([[[1, 0]] * 2] * 2)), np.log(np.float32([[[0, 1]], [[1, 0]]]))
  found = block.verify_block(
    jnp.asarray(p), jnp.asarray(q), jnp.ones((2, 1), jnp.int32),
    verify_lens_B=jnp.ones(2, jnp.int32), coins_BxG=jnp.full((2, 1), 2.0**-33),
    noise_words_BxWx2=jnp.ones((2, 2, 2), jnp.uint32))
  np.testing.assert_array_equal(found[0], [0, 0])
  np.testing.assert_array_equal(found[1], [0, 0])
  assert found[2].all()


def test_an_unknown_rule_is_named():
  with pytest.raises(ValueError, match="accept_rule: found 'best', expected one of token, block"):
    decide(*make_batch(), make_sampling_params(60), rule="best")
