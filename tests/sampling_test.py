import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dspark_jax import sampling
from dspark_jax.sampling import law_logits, make_sampling_params, sample
from pallas_kernels.counter_rng import DRAFT, RECOVER, noise_words
from tests import oracles

law_logits_jit = jax.jit(law_logits, static_argnames="vocab_limit")
sample_jit = jax.jit(sample)
make_words = jax.jit(noise_words)


@functools.cache
def compile_law(num_candidates):
  """Returns law_logits under jit with another number of candidates."""

  def law_with_candidates(logits, params):
    with mock.patch.object(sampling, "MAX_CANDIDATES", num_candidates):
      return law_logits(logits, params)

  return jax.jit(law_with_candidates)


def compute_laws(logits, *, vocab_limit=None, **fields):
  """Returns float64 laws of rows [B, V] through law_logits."""
  params = make_sampling_params(len(logits), **fields)
  found = np.asarray(law_logits_jit(jnp.asarray(logits), params, vocab_limit=vocab_limit))
  return np.asarray(jax.nn.softmax(found.astype(np.float32), axis=-1), np.float64)


def draw(law, num_draws, *, position=0, ids=None):
  """Returns [num_draws] tokens of one law logits row [V], one seed each."""
  words = make_words(jnp.arange(num_draws), DRAFT, position, 0)
  return np.asarray(sample_jit(jnp.broadcast_to(law, (num_draws, len(law))), words, ids=ids))


FILTERS = [
  {},
  {"top_k": 1},
  {"top_k": 7},
  {"top_p": 0.3},
  {"top_p": 0.9},
  {"min_p": 0.1},
  {"top_k": 40, "top_p": 0.8},
  {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("num_candidates", [256, 5])
def test_law_equals_the_oracle(temperature, filters, num_candidates):
  # 5 candidates force the search over the vocabulary; with 256 of 301 tokens nobody needs it.
  logits = np.random.default_rng(0).normal(0, 3, (6, 301)).astype(np.float32)
  params = make_sampling_params(6, temperature=temperature, **filters)
  found = np.asarray(compile_law(num_candidates)(logits, params))
  laws = np.asarray(jax.nn.softmax(found, axis=-1), np.float64)
  for row, law in zip(logits, laws, strict=True):
    expected = oracles.compute_law(row, temperature=temperature, **filters)
    np.testing.assert_array_equal(law > 0, expected > 0)
    # float32 softmax: relative error of the logits (|x| / T <= 30 times 2^-24) plus the sum's.
    np.testing.assert_allclose(law, expected, rtol=1e-5, atol=1e-9)
  assert found.dtype == np.float32 and abs(laws.sum(axis=-1) - 1).max() < 1e-6


@pytest.mark.parametrize("num_candidates", [256, 4])
def test_ties_keep_exactly_the_first_ids(num_candidates):
  rng = np.random.default_rng(1)
  logits = rng.integers(0, 4, (64, 50)).astype(np.float32)  # four values: ties everywhere
  logits[:32] -= 3
  logits[:32, 7:40:8] = -0.0  # in these rows the best value is 0.0, and -0.0 is no less
  for filters in ({"top_k": 3}, {"top_k": 20}, {"top_k": 9, "top_p": 0.55}, {"top_p": 0.37}):
    params = make_sampling_params(64, temperature=1.0, **filters)
    found = np.asarray(compile_law(num_candidates)(logits, params))
    expected = np.stack([oracles.compute_law(row, **filters) for row in logits])
    np.testing.assert_array_equal(found > -np.inf, expected > 0)
    if "top_p" not in filters:
      assert ((found > -np.inf).sum(axis=-1) == filters["top_k"]).all()


def test_b12_top_k_1_keeps_one_of_two_ties():
  # B12 (a): bf16 logits equal; (b): [1, 2, 2, 2, 3] with top_k 3 keeps ids 4, 1, 2, not 4 tokens.
  logits = jnp.array([[21.375, 21.375, 3.0]], jnp.bfloat16)
  law = law_logits_jit(logits, make_sampling_params(1, temperature=0.6, top_k=1))[0]
  assert (draw(law, 64) == 0).all()
  laws = compute_laws(np.float32([[1, 2, 2, 2, 3]]), temperature=1.0, top_k=3)
  np.testing.assert_array_equal(laws[0] > 0, [False, True, True, False, True])


def test_top_p_keeps_the_shortest_prefix_reaching_the_mass():
  # Masses 4, 2, 1, 1 of 8: 0.5 is reached by one token exactly, 0.51 needs two, 0.8 three.
  logits = np.log(np.float32([[4, 2, 1, 1]]))
  for top_p, num_kept in ((0.01, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.8, 3), (0.9, 4), (1.0, 4)):
    laws = compute_laws(logits, temperature=1.0, top_p=top_p)
    assert (laws[0] > 0).sum() == num_kept, top_p


@pytest.mark.parametrize("num_candidates", [256, 3])
def test_top_p_stops_where_the_mass_is_reached_exactly(num_candidates):
  # Eight equal logits weigh 1 each, exactly: 0.5 is reached by four of them, ids 0..3.
  params = make_sampling_params(1, temperature=1.0, top_p=0.5)
  law = compile_law(num_candidates)(np.full((1, 8), 2.5, np.float32), params)
  np.testing.assert_array_equal(np.asarray(law)[0] > -np.inf, np.arange(8) < 4)


def test_filters_apply_after_temperature_and_top_p_after_top_k():
  # T = 0.5 squares (4, 2, 1, 1)/8 into (16, 4, 1, 1)/22: 0.72 of it is one token. top_k = 2 leaves
  # (2/3, 1/3) at T = 1, so top_p = 0.6 keeps one token, although 4/8 < 0.6.
  logits = np.log(np.float32([[4, 2, 1, 1]]))
  np.testing.assert_allclose(compute_laws(logits, temperature=0.5, top_p=0.72)[0], [1, 0, 0, 0])
  laws = compute_laws(logits, temperature=1.0, top_k=2, top_p=0.6)
  np.testing.assert_allclose(laws[0], [1, 0, 0, 0])


def test_min_p_is_relative_to_the_best_token():
  # Ratios to the best: 1, 0.5, 0.25, 0.25.
  logits = np.log(np.float32([[4, 2, 1, 1]]))
  for min_p, num_kept in ((0.0, 4), (0.2, 4), (0.3, 2), (0.6, 1), (1.0, 1)):
    laws = compute_laws(logits, temperature=1.0, min_p=min_p)
    assert (laws[0] > 0).sum() == num_kept, min_p
  # Tokens tied with the best are all within min_p = 1.
  assert (compute_laws(np.float32([[2, 2, 1]]), temperature=1.0, min_p=1.0)[0] > 0).sum() == 2


def test_temperature_0_is_the_lowest_argmax_and_needs_no_noise():
  law = law_logits_jit(jnp.array([[1.0, 5.0, 5.0, 2.0]]), make_sampling_params(1))
  np.testing.assert_array_equal(law, [[-np.inf, 0.0, -np.inf, -np.inf]])
  assert (draw(law[0], 100) == 1).all()


def test_tiny_temperature_does_not_overflow():
  laws = compute_laws(np.float32([[500.0, 499.0, -1e30]]), temperature=1e-30)
  np.testing.assert_array_equal(laws[0], [1, 0, 0])


def test_b04_bf16_logits_are_tempered_in_float32():
  # 12.0 and 12.0625 at T = 0.05 differ by 1.25: (0.2227, 0.7773). Dividing in bf16 gives 240 and
  # 241, so (0.2689, 0.7311).
  laws = compute_laws(jnp.array([[12.0, 12.0625]], jnp.bfloat16), temperature=0.05)
  np.testing.assert_allclose(laws[0], [0.2227, 0.7773], atol=5e-5)
  law = law_logits_jit(
    jnp.asarray(np.random.default_rng(0).normal(size=(1, 1000)), jnp.bfloat16),
    make_sampling_params(1, temperature=1.0),
  )
  assert law.dtype == jnp.float32 and abs(float(jax.nn.softmax(law).sum()) - 1) <= 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [np.nan, np.inf, "all -inf"])
def test_b13_a_row_that_is_no_law_becomes_nan_and_leaves_others_alone(temperature, bad):
  logits = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
  broken = logits.copy()
  broken[1] = -np.inf
  if not isinstance(bad, str):
    broken[1, 2:5] = bad
  params = make_sampling_params(3, temperature=temperature, top_k=3)
  found = np.asarray(law_logits_jit(broken, params))
  assert np.isnan(found[1]).all()
  expected = np.asarray(law_logits_jit(logits, params))
  np.testing.assert_array_equal(found[[0, 2]], expected[[0, 2]])
  drawn = sample_jit(jnp.asarray(found), make_words(jnp.arange(3), DRAFT, 0, 0))
  assert ((drawn >= 0) & (drawn < 8)).all()


def test_a_broken_row_does_not_make_its_neighbour_greedy():
  law = jnp.array([[np.nan, np.nan], [0.0, 0.0]])
  words = make_words(jnp.arange(400).reshape(200, 2), DRAFT, 0, 0)
  drawn = np.asarray(jax.lax.map(lambda w: sample(law, w), words))[:, 1]
  assert 60 < drawn.sum() < 140  # fair coin: 100 +- 7


def test_b14_tokens_depend_neither_on_neighbours_nor_on_padding():
  logits = np.random.default_rng(2).normal(0, 2, (40, 3)).astype(np.float32)

  def decode(extra_rows, extra_columns, steps=range(40)):
    """Request A (row 0, seed 7), one token a position."""
    batch = 1 + extra_rows
    params = make_sampling_params(
      batch, temperature=[0.8] + [1.3] * extra_rows, seed=[7] + [9] * extra_rows
    )
    found = []
    for step in steps:
      rows = np.full((batch, 3 + extra_columns), 50.0, np.float32)
      rows[:, :3] = logits[step] + np.arange(batch)[:, None]
      law = law_logits_jit(rows, params, vocab_limit=3)
      found.append(int(sample_jit(law, make_words(params.seed, RECOVER, step, 0))[0]))
    return found

  alone = decode(0, 0)
  assert len(set(alone)) == 3
  assert decode(2, 0) == alone
  assert decode(0, 1) == alone
  assert decode(0, 0, range(2, 40)) == alone[2:]


def test_b14_the_search_for_a_neighbour_changes_no_bit_of_a_row():
  # Row 0 fits the candidates; row 1 (flat, nucleus 900 of 1000) sends the batch to the search.
  rng = np.random.default_rng(3)
  logits = np.stack([rng.normal(0, 4, 1000), rng.normal(0, 0.01, 1000)]).astype(np.float32)
  for top_p in np.linspace(0.05, 0.95, 19):
    alone = law_logits_jit(logits[:1], make_sampling_params(1, temperature=1.0, top_p=top_p))
    both = law_logits_jit(logits, make_sampling_params(2, temperature=1.0, top_p=top_p))
    np.testing.assert_array_equal(both[0], alone[0])


def test_b14_a_row_that_fits_the_candidates_never_takes_the_searchs_answer():
  def cut_nothing(scaled_xV, limit_x, top_p_x):
    del limit_x, top_p_x
    return jnp.full(len(scaled_xV), -jnp.inf), jnp.zeros(len(scaled_xV), jnp.int32)

  logits = np.zeros((2, 1000), np.float32)
  logits[0, 3] = 20
  params = make_sampling_params(2, temperature=1.0, top_p=0.5)
  with mock.patch.object(sampling, "_cut_by_search", cut_nothing):
    law = np.asarray(jax.jit(lambda x, p: law_logits(x, p))(logits, params))
  np.testing.assert_array_equal((law > -np.inf).sum(axis=-1), [1, 1000])


def test_b32_padded_vocabulary_rows_are_never_kept():
  # LM head of 8 rows, 6 ids; row 7 is highest. Draft columns (0, 2, 7) are ids of the same 8.
  logits = np.float32([[0, 1, 2, 0, 1, 2, 5, 9]])
  for temperature in (0.0, 1.0):
    laws = compute_laws(logits, temperature=temperature, vocab_limit=6)
    expected = oracles.compute_law(logits[0], temperature=temperature, vocab_limit=6)
    np.testing.assert_allclose(laws[0], expected, atol=1e-6)
  ids = jnp.array([0, 2, 7])
  params = make_sampling_params(1, temperature=1.0)
  law = law_logits(jnp.asarray(logits)[:, ids], params, vocab_limit=6, ids=ids)
  np.testing.assert_array_equal(law > -jnp.inf, [[True, True, False]])


def test_a_reduced_vocabulary_draws_the_token_of_the_full_one():
  ids = jnp.array([1, 4, 6])
  reduced = jnp.log(jnp.array([0.2, 0.5, 0.3]))
  full = jnp.full(9, -jnp.inf).at[ids].set(reduced)
  np.testing.assert_array_equal(draw(full, 1000), draw(reduced, 1000, ids=ids))


def test_b58_the_tail_is_not_starved():
  # V = 65,536, p[0] = 255/256, the rest equal: 6,400 draws give 25 +- 5 tail tokens. jax's default
  # categorical gave 7: a tail token of 6e-8 needs noise above 16.6, its noise ends at 15.94.
  logits = jnp.zeros(65536).at[0].set(jnp.log(255.0) + jnp.log(65535.0))

  @jax.jit
  def count_tail(block):
    words = make_words(block * 128 + jnp.arange(128), RECOVER, 0, 0)
    return jnp.sum(sample(jnp.broadcast_to(logits, (128, 65536)), words) != 0)

  hits = sum(int(count_tail(block)) for block in range(50))
  assert 12 <= hits <= 45, hits


def test_a_token_of_probability_1e_6_is_drawn_once_in_a_million():
  # 2^25 draws: 33.6 +- 5.8 hits; 8..66 is +- 4.4 sigma.
  logits = jnp.log(jnp.array([1 - 1e-6, 1e-6]))

  def count(block):
    words = make_words(block * 65536 + jnp.arange(65536), RECOVER, 1, 0)
    return jnp.sum(sample(jnp.broadcast_to(logits, (65536, 2)), words))

  hits = int(jax.jit(lambda: jnp.sum(jax.lax.map(count, jnp.arange(512))))())
  assert 8 <= hits <= 66, hits


def test_b59_padding_rows_do_not_shift_parameters():
  # Live row T = 0.7 on (2, 1): (0.8067, 0.1933). A pad row's T = -1 must stay its own and finite.
  params = make_sampling_params(2, temperature=0.7)
  params = params.replace(temperature=jnp.array([0.7, -1.0]))
  laws = jax.nn.softmax(law_logits_jit(jnp.array([[2.0, 1.0], [2.0, 1.0]]), params))
  np.testing.assert_allclose(laws[0], [0.8067, 0.1933], atol=5e-5)
  assert np.isfinite(laws[1]).all()
  params = make_sampling_params(4, temperature=[0.7, 0, 1.4, 0])
  laws = jax.nn.softmax(law_logits_jit(jnp.tile(jnp.array([[2.0, 1.0]]), (4, 1)), params))
  np.testing.assert_allclose(laws[:, 0], [0.8067, 1, 0.6713, 1], atol=5e-5)


def test_rows_of_one_request_share_its_parameters():
  logits = np.random.default_rng(4).normal(size=(3, 5, 11)).astype(np.float32)
  fields = {"temperature": [0.0, 0.6, 1.5], "top_k": [0, 4, 0], "top_p": [1.0, 1.0, 0.7]}
  found = np.asarray(law_logits_jit(logits, make_sampling_params(3, **fields)))
  for b in range(3):
    for n in range(5):
      law = oracles.compute_law(logits[b, n], **{name: value[b] for name, value in fields.items()})
      np.testing.assert_allclose(np.asarray(jax.nn.softmax(found[b, n])), law, atol=1e-6)


def test_samples_follow_the_filtered_law():
  logits = np.float32([[1.0, 2.0, 0.5, 1.5, -1.0]])
  fields = {"temperature": 1.3, "top_k": 4, "top_p": 0.85}
  law = law_logits_jit(logits, make_sampling_params(1, **fields))[0]
  counts = np.bincount(draw(law, 100_000), minlength=5)
  assert oracles.compute_p_value(counts, oracles.compute_law(logits[0], **fields)) > 1e-3


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"temperature": -0.5}, r"temperature: found -0.5, expected a finite number >= 0"),
    ({"temperature": float("nan")}, r"temperature: found nan"),
    ({"temperature": float("inf")}, r"temperature: found inf"),
    ({"temperature": "hot"}, r"temperature: found 'hot'"),
    ({"top_k": -1}, r"top_k: found -1, expected an integer >= 0"),
    ({"top_k": 2.5}, r"top_k: found 2.5, expected an integer"),
    ({"top_p": 0.0}, r"top_p: found 0.0, expected a number in \(0, 1\]"),
    ({"top_p": [0.5, 1.5]}, r"top_p: found 1.5"),
    ({"min_p": 1.1}, r"min_p: found 1.1"),
    ({"min_p": float("nan")}, r"min_p: found nan"),
    ({"seed": -1}, r"seed: found -1"),
    ({"seed": 2**32}, r"seed: found 4294967296"),
    ({"temperature": [1.0, 1.0, 1.0]}, r"expected one number or 2 numbers"),
  ],
)
def test_bad_parameters_are_refused_by_name(fields, message):
  with pytest.raises(ValueError, match=message) as error:
    make_sampling_params(2, **fields)
  assert "\n" not in str(error.value)


def test_law_logits_of_a_peaked_vocabulary_of_a_real_size():
  # Nucleus of 49,152 tokens in the flat row, of a few in the peaked one; both against the oracle.
  rng = np.random.default_rng(5)
  logits = np.stack([rng.normal(0, 1, 49152), rng.normal(0, 2, 49152)]).astype(np.float32)
  logits[1, :30] += 15
  for filters in ({"top_p": 0.9}, {"top_k": 1000, "top_p": 0.95}, {"top_k": 50}):
    laws = compute_laws(logits, temperature=1.0, **filters)
    for row, law in zip(logits, laws, strict=True):
      expected = oracles.compute_law(row, **filters)
      # float32 sums of 49,152 terms: the cut may move by tokens of mass 1e-6 in all.
      assert np.abs(law - expected).sum() < 1e-4
      assert abs((law > 0).sum() - (expected > 0).sum()) <= 3
      if "top_p" not in filters:
        np.testing.assert_array_equal(law > 0, expected > 0)


def test_statistics_library_agrees_with_our_p_value():
  counts = np.array([480, 320, 200])
  expected = stats.chisquare(counts, 1000 * np.array([0.5, 0.3, 0.2])).pvalue
  assert abs(oracles.compute_p_value(counts, [0.5, 0.3, 0.2]) - expected) < 1e-12
