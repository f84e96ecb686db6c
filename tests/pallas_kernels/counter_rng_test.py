import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import random as jex_random
from scipy import stats

from pallas_kernels import counter_rng
from pallas_kernels.counter_rng import COIN, DRAFT, RECOVER

noise_words = jax.jit(counter_rng.noise_words)
uniform = jax.jit(counter_rng.uniform)
gumbel = jax.jit(counter_rng.gumbel)


@pytest.mark.parametrize(
  "key, counter, block",
  [  # Known answers published with the Random123 library, threefry2x32, 20 rounds.
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
  ],
)
def test_threefry_gives_the_published_blocks(key, counter, block):
  key, counter = (tuple(np.uint32(v) for v in pair) for pair in (key, counter))
  assert tuple(int(v) for v in counter_rng.threefry2x32(key, counter)) == block


def test_threefry_equals_jax():
  words = np.random.default_rng(0).integers(0, 2**32, (4, 1000), dtype=np.uint32)
  ours = jax.jit(counter_rng.threefry2x32)(words[:2, 0], words[2:])
  theirs = jex_random.threefry_2x32(jnp.asarray(words[:2, 0]), jnp.asarray(words[2:]))
  np.testing.assert_array_equal(np.stack(ours), np.asarray(theirs).reshape(2, -1))


def test_words_align_seeds_with_the_leading_axis_of_positions():
  words = noise_words(jnp.array([7, 8]), COIN, jnp.array([[3, 4, 5], [3, 4, 5]]), 2)
  assert words.shape == (2, 3, 2) and words.dtype == jnp.uint32
  for b, seed in enumerate((7, 8)):
    for w, position in enumerate((3, 4, 5)):
      alone = noise_words(seed, COIN, position, 2)
      np.testing.assert_array_equal(words[b, w], alone)


def test_words_differ_by_seed_purpose_position_and_slot():
  grid = [
    noise_words(seed, purpose, jnp.arange(50)[:, None], jnp.arange(8)[None])
    for seed in range(20)
    for purpose in (DRAFT, COIN, RECOVER)
  ]
  words = np.stack(grid).reshape(-1, 2)
  assert len(np.unique(words, axis=0)) == len(words)


def test_noise_belongs_to_the_id():
  words = noise_words(jnp.arange(3), DRAFT, 5, 0)
  full = gumbel(words, jnp.arange(100))
  ids = jnp.array([2, 17, 63, 99])
  np.testing.assert_array_equal(gumbel(words, ids), full[:, ids])
  per_row = jnp.array([[1, 2], [50, 3], [99, 0]])
  expected = np.take_along_axis(np.asarray(full), np.asarray(per_row), axis=1)
  np.testing.assert_array_equal(gumbel(words, per_row), expected)
  np.testing.assert_array_equal(gumbel(words[1], ids), full[1, ids])


def test_coins_are_uniform_and_independent_of_the_noise_of_ids():
  words = noise_words(jnp.arange(100_000), COIN, 3, 0)
  coins = np.asarray(uniform(words), np.float64)
  noise = np.asarray(counter_rng.uniform_at(words, jnp.arange(2)), np.float64)
  assert stats.kstest(coins, "uniform").pvalue > 1e-3
  assert stats.kstest(noise[:, 1], "uniform").pvalue > 1e-3
  # Independence over a 10 x 10 grid, chi-square with 81 degrees of freedom.
  for other in (noise[:, 0], noise[:, 1]):
    table, _, _ = np.histogram2d(coins, other, bins=10, range=[[0, 1]] * 2)
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_neighbouring_positions_and_purposes_are_independent():
  seeds = jnp.arange(100_000)
  draws = [
    np.asarray(uniform(noise_words(seeds, purpose, position, slot)))
    for purpose, position, slot in ((DRAFT, 4, 0), (DRAFT, 4, 1), (DRAFT, 5, 0), (RECOVER, 4, 0))
  ]
  for i, first in enumerate(draws):
    for second in draws[i + 1 :]:
      table, _, _ = np.histogram2d(first, second, bins=10, range=[[0, 1]] * 2)
      assert stats.chi2_contingency(table).pvalue > 1e-3


def test_uniforms_reach_both_ends_but_never_0_or_1(monkeypatch):
  ends = jnp.array([0, 1, 2**31, 2**32 - 1], jnp.uint32)
  monkeypatch.setattr(counter_rng, "threefry2x32", lambda key, counter: (ends[None], ends[None]))
  found = np.asarray(counter_rng.uniform_at(jnp.zeros((1, 2), jnp.uint32), jnp.arange(4)))[0]
  # bits 0 -> 2^-33; 1 -> 1.5 * 2^-32; 2^31 -> 0.5 (the half rounds away); the top is clipped.
  np.testing.assert_array_equal(found, np.float32([2**-33, 1.5 * 2**-32, 0.5, 1 - 2**-24]))
  noise = np.asarray(counter_rng.gumbel(jnp.zeros((1, 2), jnp.uint32), jnp.arange(4)))[0]
  # -log(-log1p(-u)): 33 log 2 = 22.874 at the small end, -log(24 log 2) = -2.8115 at the large.
  np.testing.assert_allclose(noise[[0, 3]], [22.874, -2.8115], atol=1e-3)


def test_rare_noise_is_as_frequent_as_it_should_be():
  # P(u < x) = x down to 1e-6: 2^26 numbers, so 67 +- 8 below 1e-6 (5 sigma: 26..108), 6711 +- 82
  # below 1e-4. Uniforms of 23 bits (jax's default) step by
  # 1.2e-7 and would give 8 below 1e-7 or none.
  def count(block):
    words = noise_words(block * 1024 + jnp.arange(1024), RECOVER, 9, 0)
    uniforms = counter_rng.uniform_at(words, jnp.arange(4096))
    return jnp.array([jnp.sum(uniforms < x) for x in (1e-8, 1e-7, 1e-6, 1e-4)])

  counts = np.asarray(jax.lax.map(count, jnp.arange(16))).sum(axis=0)
  expected = 2.0**26 * np.array([1e-8, 1e-7, 1e-6, 1e-4])  # 0.67, 6.7, 67, 6711
  p_values = stats.poisson.cdf(counts, expected), stats.poisson.sf(counts - 1, expected)
  assert np.minimum(*p_values).min() > 1e-5, counts


def test_first_argmax_takes_the_lowest_id_and_stays_in_range():
  rows = jnp.array([[1.0, 3.0, 3.0], [-jnp.inf] * 3, [jnp.nan, 1.0, 2.0], [-0.0, 0.0, -1.0]])
  np.testing.assert_array_equal(counter_rng.first_argmax(rows), [1, 0, 0, 0])


def test_gumbel_argmax_follows_softmax():
  logits = jnp.log(jnp.array([0.1, 0.2, 0.7]))
  words = noise_words(jnp.arange(100_000), DRAFT, 0, 0)
  drawn = counter_rng.gumbel_argmax(jnp.broadcast_to(logits, (100_000, 3)), words)
  counts = np.bincount(np.asarray(drawn), minlength=3)
  assert stats.chisquare(counts, 100_000 * np.array([0.1, 0.2, 0.7])).pvalue > 1e-3
