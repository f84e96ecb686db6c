"""The first three tokens of speculative decoding follow the target's law, and the test can tell.

131,072 seeds of the toy decoder (`toy_decoder.py`) decode three tokens in at most three rounds; a
chi-square compares the joint counts with the exact law. Every fault this could hide is then
planted in the toy decoder, and the same chi-square has to fail.
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.sampling import law_logits, make_sampling_params, sample
from pallas_kernels.counter_rng import COIN, DRAFT, RECOVER, noise_words, uniform, uniform_at
from pallas_kernels.rejection_sampling import reference, rejection_sampling
from tests import oracles
from tests.toy_decoder import NUM_DRAWS, NUM_TOKENS, compile_toy, compute_p_value
from tests.toy_decoder import compute_target_law, count_sequences, make_tables

MIN_P_VALUE = 1e-4  # per test, fixed seeds; some 65 honest tests
MAX_P_VALUE_OF_A_FAULT = 1e-9

# Honest decoding ---------------------------------------------------------------------------------

TABLES = {
  "3 tokens, 2 drafts": make_tables(3, 2, seed=1),
  "5 tokens, 3 drafts": make_tables(5, 3, seed=2),
  "6 tokens, 4 of them drafted": make_tables(6, 3, draft_ids=[0, 2, 3, 5], seed=5),
}
FILTERS = [
  {},
  {"top_k": 2},
  {"top_p": 0.7},
  {"min_p": 0.25},
  {"top_k": 4, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
  "name, threshold",
  [("3 tokens, 2 drafts", 0.0), ("3 tokens, 2 drafts", 0.4), ("5 tokens, 3 drafts", 0.4)],
)
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
  jax.clear_caches()  # or the strict rule, traced just now, is used again
  try:
    assert compute_p_value(tables, 0.0, plants=inclusive, temperature=1.0) == 0.0
  finally:
    jax.clear_caches()  # and nobody after us gets the inclusive one


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
