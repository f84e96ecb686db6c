"""The first three tokens of speculative decoding follow the target's law, and the test can tell.

A toy decoder is put together from our own functions: `law_logits` and `sample` draw the drafts,
a static confidence threshold cuts them, `accept` decides. Target, drafter and confidence are
arbitrary tables over the last two tokens. 131,072 seeds decode three tokens in three rounds; a
chi-square compares the joint counts with the target's exact law. Every fault this could hide is
then planted in the toy decoder, and the same chi-square has to fail.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.sampling import law_logits, make_sampling_params, sample
from dspark_jax.verification.accept import accept
from pallas_kernels.counter_rng import COIN, DRAFT, RECOVER, noise_words, uniform, uniform_at
from pallas_kernels.rejection_sampling import reference, rejection_sampling
from tests import oracles

NUM_DRAWS = 2**17
NUM_TOKENS = 3
MIN_P_VALUE = 1e-4  # per test, fixed seeds; some 70 honest tests
MAX_P_VALUE_OF_A_FAULT = 1e-9
START_POSITION = 5  # of the anchor; tokens 0, 0 come before the first drawn token


# The toy decoder ---------------------------------------------------------------------------------


def draw_draft(law_BxD, words_Bx2, ids):
  """Honest draft: returns the tokens and the law they were drawn from."""
  return sample(law_BxD, words_Bx2, ids=ids), law_BxD


def schedule_by_threshold(confidence_BxG, tokens_BxG, threshold):
  """Honest schedule: stops at the first draft whose confidence is below the threshold."""
  del tokens_BxG
  return jnp.sum(jnp.cumprod(confidence_BxG >= threshold, axis=1), axis=1)


def decode_toy(
  tables, params, threshold, *, draw_fn=draw_draft, schedule_fn=schedule_by_threshold,
  accept_fn=accept,
):  # fmt: skip
  """Returns the first three tokens of every request, int32 [B, 3]."""
  batch, num_drafts = len(params.seed), tables["confidence"].shape[0]
  ids = tables["ids"]

  def run_round(_, state):
    tokens_BxN, count_B, before_B, anchor_B = state
    position_B = START_POSITION + count_B

    def draft_slot(context, slot):
      law_BxD = law_logits(tables["draft"][context], params, ids=ids)
      words_Bx2 = noise_words(params.seed, DRAFT, position_B, slot)
      token_B, law_BxD = draw_fn(law_BxD, words_Bx2, ids)
      confidence_B = tables["confidence"][slot][context]
      return (context[1], token_B), (token_B, law_BxD, confidence_B)

    _, drafts = jax.lax.scan(draft_slot, (before_B, anchor_B), jnp.arange(num_drafts))
    tokens_BxG, laws_BxGxD, confidence_BxG = (jnp.moveaxis(a, 0, 1) for a in drafts)
    context_BxN = jnp.concatenate([before_B[:, None], anchor_B[:, None], tokens_BxG], axis=1)
    target_BxWxV = tables["target"][context_BxN[:, :-1], context_BxN[:, 1:]]
    verdict = accept_fn(
      target_BxWxV,
      tokens_BxG,
      draft_logits_BxGxD=laws_BxGxD,
      verify_lens_B=schedule_fn(confidence_BxG, tokens_BxG, threshold),
      params=params,
      anchor_positions_B=position_B,
      draft_ids=ids,
    )
    num_accepted_B, next_B, is_valid_B = jax.tree.leaves(verdict)
    next_B = jnp.where(is_valid_B, next_B, -1)  # would leave a hole that the counts show
    committed_BxW = jnp.concatenate([tokens_BxG, next_B[:, None]], axis=1)
    is_next_BxW = jnp.arange(num_drafts + 1)[None] == num_accepted_B[:, None]
    committed_BxW = jnp.where(is_next_BxW, next_B[:, None], committed_BxW)
    # Token i of the answer is committed token i - count, if that exists in this round.
    offset_BxN = jnp.arange(NUM_TOKENS)[None] - count_B[:, None]
    is_new_BxN = (offset_BxN >= 0) & (offset_BxN <= num_accepted_B[:, None])
    new_BxN = jnp.take_along_axis(committed_BxW, jnp.clip(offset_BxN, 0, num_drafts), axis=1)
    tokens_BxN = jnp.where(is_new_BxN, new_BxN, tokens_BxN)
    last_B = jnp.take_along_axis(context_BxN[:, 1:], num_accepted_B[:, None], axis=1)[:, 0]
    return tokens_BxN, count_B + num_accepted_B + 1, last_B, next_B

  zeros_B = jnp.zeros(batch, jnp.int32)
  state = (jnp.full((batch, NUM_TOKENS), -1), zeros_B, zeros_B, zeros_B)
  return jax.lax.fori_loop(0, NUM_TOKENS, run_round, state)[0]


@functools.cache
def compile_toy(**plants):
  return jax.jit(functools.partial(decode_toy, **dict(plants)))


def make_tables(vocab, num_drafts, *, draft_ids=None, seed=0):
  """Returns random tables: target and draft logits [V, V, V or D], confidence [G, V, V]."""
  rng = np.random.default_rng(seed)
  draft_vocab = vocab if draft_ids is None else len(draft_ids)
  return {
    "target": jnp.asarray(rng.normal(0, 0.9, (vocab,) * 3), jnp.float32),
    "draft": jnp.asarray(rng.normal(0, 0.9, (vocab, vocab, draft_vocab)), jnp.float32),
    "confidence": jnp.asarray(rng.uniform(0, 1, (num_drafts, vocab, vocab)), jnp.float32),
    "ids": None if draft_ids is None else jnp.asarray(draft_ids, jnp.int32),
  }


def count_sequences(tables, threshold, *, num_draws=NUM_DRAWS, plants=None, **fields):
  """Returns counts [V, V, V] of the first three tokens over `num_draws` seeds."""
  vocab = tables["target"].shape[-1]
  params = make_sampling_params(num_draws, seed=np.arange(num_draws), **fields)
  tokens = np.asarray(compile_toy(**(plants or {}))(tables, params, threshold))
  assert tokens.min() >= 0 and tokens.max() < vocab
  flat = np.ravel_multi_index(tokens.T, (vocab,) * NUM_TOKENS)
  return np.bincount(flat, minlength=vocab**NUM_TOKENS).reshape((vocab,) * NUM_TOKENS)


def compute_target_law(tables, **fields):
  """Returns the exact law of the first three tokens, from the oracle."""
  logits = np.asarray(tables["target"])

  @functools.cache
  def law(before, anchor):
    return oracles.compute_law(logits[before, anchor], **fields)

  return oracles.compute_sequence_law(
    lambda prefix: law(*(0, 0, *prefix)[-2:]), NUM_TOKENS, logits.shape[-1]
  )


def compute_p_value(tables, threshold, *, plants=None, **fields):
  law = compute_target_law(tables, **fields)
  assert (law * NUM_DRAWS >= 5).sum() >= 3, "a law with hardly any choice tests nothing"
  counts = count_sequences(tables, threshold, plants=plants, **fields)
  return oracles.compute_p_value(counts, law)


# Honest decoding ---------------------------------------------------------------------------------

TABLES = {
  "3 tokens, 2 drafts": make_tables(3, 2, seed=1),
  "5 tokens, 3 drafts": make_tables(5, 3, seed=2),
  "6 tokens, 4 of them drafted": make_tables(6, 3, draft_ids=[0, 2, 3, 5], seed=3),
}
FILTERS = [
  {},
  {"top_k": 2},
  {"top_p": 0.7},
  {"min_p": 0.25},
  {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("threshold", [0.0, 0.4])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("name", ["3 tokens, 2 drafts", "5 tokens, 3 drafts"])
def test_tokens_follow_the_target(name, temperature, filters, threshold):
  p_value = compute_p_value(TABLES[name], threshold, temperature=temperature, **filters)
  assert p_value > MIN_P_VALUE


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature, threshold", [(1.0, 0.0), (1.7, 0.4)])
def test_tokens_follow_the_target_with_a_reduced_draft_vocabulary(temperature, filters, threshold):
  tables = TABLES["6 tokens, 4 of them drafted"]
  assert compute_p_value(tables, threshold, temperature=temperature, **filters) > MIN_P_VALUE


@pytest.mark.parametrize("threshold", [0.2, 0.8, 1.1])
def test_tokens_follow_the_target_at_every_threshold(threshold):
  # 1.1 verifies nothing: plain decoding.
  assert compute_p_value(TABLES["3 tokens, 2 drafts"], threshold, temperature=1.0) > MIN_P_VALUE


def test_greedy_rows_decode_the_argmax():
  tables = TABLES["5 tokens, 3 drafts"]
  counts = count_sequences(tables, 0.4, num_draws=64, temperature=0.0)
  np.testing.assert_array_equal(counts, 64 * compute_target_law(tables, temperature=0.0))


def test_every_request_of_a_mixed_batch_follows_its_own_law():
  # Three requests' parameters, interleaved, 2^16 seeds each, and greedy rows between them.
  tables = TABLES["5 tokens, 3 drafts"]
  kinds = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0},
    {"temperature": 1.4, "top_p": 0.8, "min_p": 0.1},
  ]
  names = ("temperature", "top_k", "top_p", "min_p")
  off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
  fields = {name: np.tile([kind.get(name, off[name]) for kind in kinds], 2**16) for name in names}
  params = make_sampling_params(2**18, seed=np.arange(2**18), **fields)
  tokens = np.asarray(compile_toy()(tables, params, 0.4)).reshape(2**16, len(kinds), NUM_TOKENS)
  for i, kind in enumerate(kinds):
    flat = np.ravel_multi_index(tokens[:, i].T, (5,) * NUM_TOKENS)
    counts = np.bincount(flat, minlength=125)
    assert oracles.compute_p_value(counts, compute_target_law(tables, **kind)) > MIN_P_VALUE


# Planted faults: each must make the chi-square fail ----------------------------------------------


def split_accept(*, coins_fn=None, words_fn=None, next_fn=None):
  """Returns an `accept` of the same rule from parts that a fault can replace."""

  def accept_by_parts(
    target_BxWxV, tokens_BxG, *, draft_logits_BxGxD, verify_lens_B, params, anchor_positions_B,
    draft_ids,
  ):  # fmt: skip
    num_rows = target_BxWxV.shape[1]
    positions_BxW = anchor_positions_B[:, None] + 1 + jnp.arange(num_rows)[None]
    coins_BxW = uniform(noise_words(params.seed, COIN, positions_BxW, 0))
    coins_BxG = coins_BxW[:, :-1]
    words_BxWx2 = noise_words(params.seed, RECOVER, positions_BxW, 0)
    if coins_fn is not None:
      coins_BxG = coins_fn(params, anchor_positions_B, coins_BxG)
    if words_fn is not None:
      words_BxWx2 = words_fn(params, anchor_positions_B, words_BxWx2)
    law_BxWxV = law_logits(target_BxWxV, params)
    arrays = (law_BxWxV, draft_logits_BxGxD, tokens_BxG)
    keywords = {"coins_BxG": coins_BxG, "noise_words_BxWx2": words_BxWx2, "draft_ids": draft_ids}
    found = rejection_sampling(*arrays, verify_lens_B=verify_lens_B, **keywords)
    if next_fn is not None:
      found = next_fn(found, arrays, verify_lens_B, keywords)
    return found

  return accept_by_parts


def get_draft_words(params, anchor_positions_B, num_slots):
  words = [noise_words(params.seed, DRAFT, anchor_positions_B, slot) for slot in range(num_slots)]
  return jnp.stack(words, axis=1)


def reuse_draft_noise_as_coins(params, anchor_positions_B, coins_BxG):
  words_BxGx2 = get_draft_words(params, anchor_positions_B, coins_BxG.shape[1])
  return uniform_at(words_BxGx2, jnp.array([0]))[..., 0]


def reuse_draft_noise_as_recovery(params, anchor_positions_B, words_BxWx2):
  return get_draft_words(params, anchor_positions_B, words_BxWx2.shape[1])


def reuse_one_coin(params, anchor_positions_B, coins_BxG):
  del params, anchor_positions_B
  return jnp.broadcast_to(coins_BxG[:, :1], coins_BxG.shape)


def reuse_coins_as_recovery(params, anchor_positions_B, words_BxWx2):
  """The recovery noise of id 0 is the number that served as coin (see below)."""
  positions_BxW = anchor_positions_B[:, None] + 1 + jnp.arange(words_BxWx2.shape[1])[None]
  return noise_words(params.seed, COIN, positions_BxW, 0)


def take_coins_from_id_0(params, anchor_positions_B, coins_BxG):
  positions_BxG = anchor_positions_B[:, None] + 1 + jnp.arange(coins_BxG.shape[1])[None]
  return uniform_at(noise_words(params.seed, COIN, positions_BxG, 0), jnp.array([0]))[..., 0]


def take_row(rows_BxWxV, index_B):
  index_B = jnp.minimum(index_B, rows_BxWxV.shape[1] - 1)
  return jnp.take_along_axis(rows_BxWxV, index_B[:, None, None], axis=1)[:, 0]


def draw_correction_from(compute_law):
  """Returns a `next_fn` whose corrections follow compute_law(target, draft laws, rejected row)."""

  def replace_correction(found, arrays, verify_lens_B, keywords):
    num_accepted_B, next_B, is_valid_B = found
    laws = (jax.nn.softmax(logits, axis=-1) for logits in arrays[:2])
    law_BxV = compute_law(*laws, num_accepted_B)
    words_Bx2 = take_row(keywords["noise_words_BxWx2"], num_accepted_B)
    wrong_B = sample(jnp.log(law_BxV), words_Bx2)
    is_rejected_B = num_accepted_B < verify_lens_B
    return num_accepted_B, jnp.where(is_rejected_B, wrong_B, next_B), is_valid_B

  return replace_correction


def residual_of_the_next_row(p_BxWxV, q_BxGxV, row_B):
  return reference.residual_law(take_row(p_BxWxV, row_B + 1), take_row(q_BxGxV, row_B + 1))


def target_of_the_next_row(p_BxWxV, q_BxGxV, row_B):
  del q_BxGxV
  return take_row(p_BxWxV, row_B + 1)


def target_itself(p_BxWxV, q_BxGxV, row_B):
  del q_BxGxV
  return take_row(p_BxWxV, row_B)


def softmax_of_the_residual(p_BxWxV, q_BxGxV, row_B):
  residual, _ = reference.subtract_laws(take_row(p_BxWxV, row_B), take_row(q_BxGxV, row_B))
  return jax.nn.softmax(residual, axis=-1)


def true_residual(p_BxWxV, q_BxGxV, row_B):
  return reference.residual_law(take_row(p_BxWxV, row_B), take_row(q_BxGxV, row_B))


PLANTS = {
  "draft noise reused as coins": split_accept(coins_fn=reuse_draft_noise_as_coins),
  "draft noise reused as recovery": split_accept(words_fn=reuse_draft_noise_as_recovery),
  "one coin for all slots": split_accept(coins_fn=reuse_one_coin),
  "coins reused as recovery": split_accept(
    coins_fn=take_coins_from_id_0, words_fn=reuse_coins_as_recovery
  ),
  "B08 residual of the next row": split_accept(
    next_fn=draw_correction_from(residual_of_the_next_row)
  ),
  "B08 target's next row": split_accept(next_fn=draw_correction_from(target_of_the_next_row)),
  "B08 softmax of the residual": split_accept(
    next_fn=draw_correction_from(softmax_of_the_residual)
  ),
  "target instead of residual": split_accept(next_fn=draw_correction_from(target_itself)),
}


def test_the_parts_without_a_fault_pass():
  plants = {"accept_fn": split_accept(next_fn=draw_correction_from(true_residual))}
  p_value = compute_p_value(TABLES["5 tokens, 3 drafts"], 0.4, plants=plants, temperature=1.0)
  assert p_value > MIN_P_VALUE


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_in_acceptance_is_caught(name):
  plants = {"accept_fn": PLANTS[name]}
  p_value = compute_p_value(TABLES["5 tokens, 3 drafts"], 0.0, plants=plants, temperature=1.0)
  assert p_value < MAX_P_VALUE_OF_A_FAULT


def draw_and_report_raw(raw_scale):
  """Returns a draft function that scores with the law before temperature (raw = law * T)."""

  def draw(law_BxD, words_Bx2, ids):
    return sample(law_BxD, words_Bx2, ids=ids), law_BxD * raw_scale

  return draw


def draw_filtered_and_report_unfiltered(law_BxD, words_Bx2, ids):
  """B01: the draft is drawn from its two best tokens, the ratio uses the whole softmax."""
  best = jax.lax.top_k(law_BxD, 2)[0][:, 1:]
  return sample(jnp.where(law_BxD >= best, law_BxD, -jnp.inf), words_Bx2, ids=ids), law_BxD


def draw_argmax_and_report_softmax(law_BxD, words_Bx2, ids):
  """B02: a deterministic draft scored with its softmax."""
  del words_Bx2, ids
  return jnp.argmax(law_BxD, axis=-1).astype(jnp.int32), law_BxD


@pytest.mark.parametrize(
  "draw_fn, temperature",
  [
    (draw_and_report_raw(0.5), 0.5),
    (draw_filtered_and_report_unfiltered, 1.0),
    (draw_argmax_and_report_softmax, 1.0),
  ],
  ids=["raw temperature", "B01 unfiltered", "B02 argmax"],
)
def test_a_planted_fault_in_the_draft_law_is_caught(draw_fn, temperature):
  tables = TABLES["5 tokens, 3 drafts"]
  p_value = compute_p_value(tables, 0.0, plants={"draw_fn": draw_fn}, temperature=temperature)
  assert p_value < MAX_P_VALUE_OF_A_FAULT


# Coins on a grid of eighths, 0 among them, make the boundary u = 0 as frequent as one in eight.
# With ratios that are 0 or at least 1 the strict rule stays exact on such coins.
GRID = 8


def make_boundary_tables():
  """Returns tables of p = (.5, .5, 0) and q = (.25, .25, .5), ids rotated by the context."""
  p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])
  before, anchor = np.meshgrid(range(3), range(3), indexing="ij")
  columns = (np.arange(3) + (before + anchor)[..., None]) % 3
  with np.errstate(divide="ignore"):
    target, draft = np.log(p[columns]), np.log(q[columns])
  return {
    "target": jnp.asarray(target, jnp.float32),
    "draft": jnp.asarray(draft, jnp.float32),
    "confidence": jnp.ones((2, 3, 3)),
    "ids": None,
  }


def round_coins(params, anchor_positions_B, coins_BxG):
  del params, anchor_positions_B
  return jnp.floor(coins_BxG * GRID) / GRID


def accept_inclusively(*args, **keywords):
  """The rule u <= p/q."""

  def compare(target_logp_BxG, draft_logp_BxG, coins_BxG):
    return coins_BxG <= jnp.exp(target_logp_BxG - draft_logp_BxG)

  with mock.patch.object(reference, "accept_drafts", compare):  # while tracing
    return split_accept(coins_fn=round_coins)(*args, **keywords)


def test_b06_an_inclusive_coin_is_caught_and_the_strict_one_passes():
  tables = make_boundary_tables()
  strict = {"accept_fn": split_accept(coins_fn=round_coins)}
  assert compute_p_value(tables, 0.0, plants=strict, temperature=1.0) > MIN_P_VALUE
  inclusive = {"accept_fn": accept_inclusively}
  assert compute_p_value(tables, 0.0, plants=inclusive, temperature=1.0) == 0.0


# Scheduling that peeks (B53, appendix A of the paper) --------------------------------------------

STEPS_PER_S = (1.0, 0.55, 0.5)  # of a pass with 1, 2, 3 tokens


def make_peeking_tables():
  """Returns tables of p = (.5, .5, 0), q = (.9, .1, 0), c1 = .6 and c2 = .95 after token 0 only."""
  law = {"target": (0.5, 0.5, 0.0), "draft": (0.9, 0.1, 0.0)}
  with np.errstate(divide="ignore"):
    tables = {
      name: jnp.asarray(np.broadcast_to(np.log(np.float32(row)), (3, 3, 3)))
      for name, row in law.items()
    }
  second = np.broadcast_to(np.float32([0.95, 0.0, 0.0]), (3, 3))  # by the last token
  confidence = np.stack([np.full((3, 3), 0.6, np.float32), second])
  return tables | {"confidence": jnp.asarray(confidence), "ids": None}


def compute_tokens_per_s(confidence_BxG):
  survival_BxG = jnp.cumprod(confidence_BxG, axis=1)
  tokens_BxW = 1 + jnp.cumsum(jnp.pad(survival_BxG, ((0, 0), (1, 0))), axis=1)
  return tokens_BxW * jnp.array(STEPS_PER_S)[None]


def schedule_by_global_search(confidence_BxG, tokens_BxG, threshold):
  """The fault: the best length over the whole path, so token 1's fate depends on token 1."""
  del tokens_BxG, threshold
  return jnp.argmax(compute_tokens_per_s(confidence_BxG), axis=1)


def schedule_by_early_stop(confidence_BxG, tokens_BxG, threshold):
  """Algorithm 1: the leading run of strict increases."""
  del tokens_BxG, threshold
  tokens_per_s_BxW = compute_tokens_per_s(confidence_BxG)
  is_increase_BxG = tokens_per_s_BxW[:, 1:] > tokens_per_s_BxW[:, :-1]
  return jnp.sum(jnp.cumprod(is_increase_BxG, axis=1), axis=1)


def schedule_by_the_drafted_token(confidence_BxG, tokens_BxG, threshold):
  """The fault in its plainest form: a draft is verified if we like the token."""
  del confidence_BxG, threshold
  return jnp.sum(jnp.cumprod(tokens_BxG == 0, axis=1), axis=1)


def test_b53_a_schedule_that_peeks_is_caught_and_the_causal_one_passes():
  tables = make_peeking_tables()
  causal = {"schedule_fn": schedule_by_early_stop}
  assert compute_p_value(tables, 0.0, plants=causal, temperature=1.0) > MIN_P_VALUE
  for fault in (schedule_by_global_search, schedule_by_the_drafted_token):
    p_value = compute_p_value(tables, 0.0, plants={"schedule_fn": fault}, temperature=1.0)
    assert p_value < MAX_P_VALUE_OF_A_FAULT
  # The tell of the global search: first token 0 with 0.55.
  plants = {"schedule_fn": schedule_by_global_search}
  counts = count_sequences(tables, 0.0, plants=plants, temperature=1.0)
  first = counts.sum(axis=(1, 2)) / NUM_DRAWS
  np.testing.assert_allclose(first, [0.55, 0.45, 0], atol=0.007)  # 5 sigma


# The oracle itself -------------------------------------------------------------------------------


def test_enumeration_agrees_that_the_rule_is_exact_and_that_peeking_is_not():
  tables = jax.tree.map(np.asarray, TABLES["3 tokens, 2 drafts"])

  def lookup(name):
    return lambda prefix: oracles.compute_law(tables[name][(0, 0, *prefix)[-2:]])

  def verify_len(prefix, drafts):
    context = (0, 0, *prefix, *drafts)
    for slot in range(2):
      if tables["confidence"][slot][context[len(prefix) + slot : len(prefix) + slot + 2]] < 0.4:
        return slot
    return 2

  sizes = {"num_tokens": 3, "num_drafts": 2, "vocab": 3}
  target, drafter = lookup("target"), lookup("draft")
  expected = compute_target_law(tables)
  found = oracles.compute_speculative_law(target, drafter, verify_len, **sizes)
  np.testing.assert_allclose(found, expected, atol=1e-12)
  peeking = oracles.compute_speculative_law(
    target, drafter, lambda _, drafts: 2 if drafts[0] == 0 else 0, **sizes
  )
  assert np.abs(peeking - expected).max() > 0.01


def test_enumeration_gives_appendix_a_of_the_paper():
  # c1 = 0.8, SPS = 1, .5, .45, c2 = 0.9 after token A: global search verifies 2 drafts iff A.
  laws = (np.array([0.7, 0.3]), np.array([0.5, 0.5]))
  found = oracles.compute_speculative_law(
    lambda _: laws[0],
    lambda _: laws[1],
    lambda _, drafts: 2 if drafts[0] == 0 else 0,
    num_tokens=1,
    num_drafts=2,
    vocab=2,
  )
  np.testing.assert_allclose(found, [0.85, 0.15], atol=1e-12)
