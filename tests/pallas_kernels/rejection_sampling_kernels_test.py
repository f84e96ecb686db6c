"""Every implementation of the family on one table of cases, against NumPy float64.

Kernels run in interpret mode, which proves their arithmetic and not that they lower: the compilers'
word is in tests/aot_test.py (TPU) and at the end of this file (CUDA).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import counter_rng, kernel_math
from pallas_kernels.rejection_sampling import kernel_gpu, kernel_tpu, reference
from tests import oracles
from tests.pallas_kernels import devices

# Small tiles, so that small rows have several, the last one partial.
TPU_TILES = kernel_tpu.Tiles(rows=16, columns=256, unroll=1, draw_columns=256, draw_width=128)
GPU_TILES = kernel_gpu.Tiles(measure_columns=128, draw_columns=128)
run_tpu = functools.partial(kernel_tpu.rejection_sampling_tpu, interpret=True)
run_gpu = functools.partial(kernel_gpu.rejection_sampling_gpu, interpret=True)
IMPLEMENTATIONS = {
  "reference": jax.jit(reference.rejection_sampling_reference),
  "tpu": jax.jit(functools.partial(run_tpu, tiles=TPU_TILES)),
  "gpu": jax.jit(functools.partial(run_gpu, tiles=GPU_TILES)),
}
# With the tiles of production, for rows of production.
FULL_SIZE = IMPLEMENTATIONS | {"tpu": jax.jit(run_tpu), "gpu": jax.jit(run_gpu)}
over_all = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def to_logits(law):
  with np.errstate(divide="ignore"):
    return np.log(np.asarray(law, np.float64)).astype(np.float32)


def decide_by_hand(target, draft, tokens, length, coins, words):
  """Returns (num_accepted, next_token, margin) of one request of valid laws, in float64.

  `margin` is how far the nearest decision was from falling otherwise, relative to what it compares:
  float32 must agree where it is well above 1e-6.
  """
  with np.errstate(divide="ignore"):
    p, q = (np.exp(np.float64(a) - np.float64(a).max(axis=1, keepdims=True))
            for a in (target, draft))
    p, q = (a / a.sum(axis=1, keepdims=True) for a in (p, q))
    margin, row = np.inf, 0
    for row in range(length + 1):
      if row == length:
        break
      ratio = p[row, tokens[row]] / q[row, tokens[row]]
      # A ratio of 1 accepts whatever the rounding, so only coins near smaller ratios are close.
      margin = min(margin, abs(min(ratio, 2.0) - coins[row]) if ratio < 1 else np.inf)
      if not coins[row] < min(1.0, ratio):
        break
    law = oracles.compute_residual(p[row], q[row]) if row < length else p[row]
    uniforms = np.float64(counter_rng.uniform_at(jnp.asarray(words[row]), jnp.arange(len(law))))
    scores = np.log(law) - np.log(-np.log1p(-uniforms))
  best, second = np.sort(scores)[::-1][:2] if len(scores) > 1 else (scores[0], -np.inf)
  return row, int(scores.argmax()), min(margin, best - second)


def make_case(seed, batch, num_rows, num_drafts, vocab, *, scale=3.0, keep=None):
  """Returns the arguments of a batch of random laws; tokens are drawn from the drafter's.

  `keep` filters every row to that share of its tokens, the drafted one among them.
  """
  rng = np.random.default_rng(seed)
  target = np.float32(scale * rng.normal(size=(batch, num_rows, vocab)))
  draft = np.float32(scale * rng.normal(size=(batch, num_drafts, vocab)))
  draft[:, :num_rows] = draft[:, :num_rows] / 3 + target[:, :num_drafts]
  tokens = (draft + rng.gumbel(size=draft.shape)).argmax(axis=2).astype(np.int32)
  if keep is not None:
    drop = rng.uniform(size=target.shape) > keep
    drop[:, :num_drafts][np.arange(vocab) == tokens[:, :num_rows, None]] = False
    drop[..., 0] = False
    target[drop] = -np.inf
    draft[drop[:, :num_drafts] & (rng.uniform(size=draft.shape) > keep)
          & (np.arange(vocab) != tokens[..., None])] = -np.inf
  return (target, draft, tokens, rng.integers(0, num_drafts + 1, batch).astype(np.int32),
          np.float32(rng.uniform(size=(batch, num_drafts))),
          rng.integers(0, 2**32, (batch, num_rows, 2), dtype=np.uint32))


def check_against_oracle(implementation, arrays):
  num_accepted, next_token, is_valid = map(np.asarray, implementation(*arrays))
  assert is_valid.all()
  num_checked = 0
  for b in range(len(num_accepted)):
    accepted, token, margin = decide_by_hand(*(a[b] for a in arrays))
    if margin > 1e-4:
      assert (num_accepted[b], next_token[b]) == (accepted, token)
      num_checked += 1
  assert num_checked >= 0.9 * len(num_accepted)


# One request each of 3 rows, 2 drafts, 7 tokens: (target laws, draft laws, tokens, length, coins,
# accepted, tokens that may come next). A law is padded with zeros to 7.
F = (0.5, 0.5)
HAND = {
  "B06 coin 0 rejects p = 0": ([(1, 0)], [(0, 1)], [1], 1, [0.0], 0, {0}),
  "B06 coin 0, faulty q = 0": ([(1, 0)], [(1, 0)], [1], 1, [0.0], 0, {0}),
  "B06 ratio 1 accepts the largest coin": ([F, (0, 1)], [F], [1], 1, [1 - 2.0**-24], 1, {1}),
  "below the ratio 0.5": ([(0.25, 0.75), (0, 1)], [F], [0], 1, [0.5 - 2.0**-20], 1, {1}),
  "above the ratio 0.5": ([(0.25, 0.75)], [F], [0], 1, [0.5 + 2.0**-20], 0, {1}),
  "no residual falls back to p": ([(1, 0)], [(1, 0)], [1], 1, [0.3], 0, {0}),
  "B07 p = q without mass": ([F], [F], [2], 1, [0.3], 0, {0, 1}),
  "residual of one token": ([(0.2, 0.8)], [(0.7, 0.3)], [0], 1, [0.9], 0, {1}),
  "residual of row 1": ([F, (0, 0, 0.5, 0.5)], [F, (0, 0, 1)], [0, 2], 2, [0.0, 0.7], 1, {3}),
  "bonus of row 2": ([F, F, (0, 0, 0, 0, 0, 0, 1)], [F, F], [0, 1], 2, [0.9, 0.9], 2, {6}),
  "length 0 ignores the drafts": ([(0, 0, 1)], [(1,)], [0], 0, [0.9], 0, {2}),
  "length 1 of 2": ([F, (0, 0, 1)], [F, F], [0, 0], 1, [0.9, 0.9], 1, {2}),
  "greedy, match": ([(0, 1), (0, 0, 1)], [(0, 1)], [1], 1, [1 - 2.0**-24], 1, {2}),
  "greedy, no match": ([(0, 0, 1)], [(0, 1)], [1], 1, [0.0], 0, {2}),
  "a token outside the vocabulary": ([F], [F], [-1], 1, [0.0], 0, {0, 1}),
  "a token beyond it": ([F], [F], [99], 1, [0.0], 0, {0, 1}),
}


def batch_by_hand():
  def pad(laws, num_rows):
    laws = list(laws) + [(1,)] * (num_rows - len(laws))
    return to_logits([tuple(law) + (0,) * (7 - len(law)) for law in laws])

  rows = list(HAND.values())
  stretch = lambda values, fill: [list(v) + [fill] * (2 - len(v)) for v in values]
  return (np.stack([pad(r[0], 3) for r in rows]), np.stack([pad(r[1], 2) for r in rows]),
          np.int32(stretch([r[2] for r in rows], 0)), np.int32([r[3] for r in rows]),
          np.float32(stretch([r[4] for r in rows], 0)),
          np.random.default_rng(0).integers(0, 2**32, (len(rows), 3, 2), dtype=np.uint32))


@over_all
def test_cases_by_hand(name):
  num_accepted, next_token, is_valid = IMPLEMENTATIONS[name](*batch_by_hand())
  for i, (case, (*_, accepted, may_follow)) in enumerate(HAND.items()):
    assert is_valid[i] and num_accepted[i] == accepted, case
    assert int(next_token[i]) in may_follow, case


@over_all
@pytest.mark.parametrize("kind", ["nan", "one nan", "-inf", "+inf"])
def test_broken_rows_are_flagged_where_they_decide(name, kind):
  # Requests 0-2: row 1 of the target is broken, 3-5: of the drafter; lengths 2, 1, 0 each.
  arrays = [a[:6].copy() for a in make_case(5, 6, 3, 2, 7)]
  target, draft, _, lens, coins, _ = arrays
  row = target[0, 1].copy()
  row[{"nan": slice(None), "one nan": 5, "-inf": slice(None), "+inf": 5}[kind]] = {
    "n": np.nan, "o": np.nan, "-": -np.inf, "+": np.inf}[kind[0]]
  target[:3, 1], draft[3:, 1] = row, row
  lens[:], coins[:] = [2, 1, 0] * 2, 0.0
  num_accepted, next_token, is_valid = map(np.asarray, IMPLEMENTATIONS[name](*arrays))
  # Length 1 draws its bonus from target row 1 and never looks at draft row 1.
  np.testing.assert_array_equal(num_accepted, [1, 1, 0] * 2)
  np.testing.assert_array_equal(is_valid, [False, False, True, False, True, True])
  assert (next_token[~is_valid] == 0).all() and ((next_token >= 0) & (next_token < 7)).all()


@over_all
@pytest.mark.parametrize("seed, shape, keep", [
  (0, (9, 3, 2, 300), None),  # neither tiles nor lanes divide; a last block of one request
  (1, (8, 5, 4, 640), 0.1),  # rows of 8 requests are the sublanes
  (2, (2, 8, 7, 384), None),  # eight rows of a request are
])
def test_random_laws_equal_the_oracle(name, seed, shape, keep):
  check_against_oracle(IMPLEMENTATIONS[name], make_case(seed, *shape, keep=keep))


@pytest.mark.parametrize("vocab", [49_152, 129_280, 151_936, 262_144])
@pytest.mark.parametrize("name", FULL_SIZE)
def test_real_vocabularies_equal_the_oracle(name, vocab):
  arrays = make_case(vocab, 2, 2, 1, vocab)
  arrays[3][:] = 1
  # The last id lies in the last, partial tile: request 1 can draw nothing else.
  arrays[0][1] = -np.inf
  arrays[0][1, :, -1] = 0.0
  check_against_oracle(FULL_SIZE[name], arrays)
  assert FULL_SIZE[name](*arrays)[1][1] == vocab - 1


@over_all
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.0, 0.5, 5.0, 50.0]),
       keep=st.sampled_from([None, 0.1, 0.6]))
def test_any_laws_equal_the_oracle(name, seed, scale, keep):
  check_against_oracle(IMPLEMENTATIONS[name], make_case(seed, 9, 3, 2, 300, scale=scale, keep=keep))


@over_all
def test_a_reduced_vocabulary_equals_the_scattered_full_one(name):
  target, draft, _, lens, coins, words = make_case(3, 9, 3, 2, 300)
  ids = np.sort(np.random.default_rng(3).permutation(300)[:140]).astype(np.int32)
  full = np.full_like(draft, -np.inf)
  full[..., ids] = draft[..., ids]
  tokens = ids[draft[..., ids].argmax(axis=2)]
  tokens[0] = next(t for t in range(300) if t not in ids)
  lens[:], coins[:] = 2, coins / 2
  run = IMPLEMENTATIONS[name]
  expected = run(target, full, tokens, lens, coins, words)
  found = run(target, draft[..., ids], tokens, lens, coins, words, ids)
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert found[0][0] == 0 and len(np.unique(found[0])) > 1


@over_all
def test_ties_go_to_the_lowest_id(name, monkeypatch):
  """Without noise, on dyadic laws: equals in one lane of three tiles, in one tile, everywhere."""
  silence = lambda word0, word1, ids: jnp.zeros(jnp.broadcast_shapes(word0.shape, ids.shape))
  for kernel in (kernel_tpu, kernel_gpu):
    monkeypatch.setattr(kernel, "gumbel_block", silence)
  monkeypatch.setattr(counter_rng, "gumbel", lambda words, ids: jnp.zeros((4, 300)))
  run = {"reference": reference.rejection_sampling_reference,
         "tpu": functools.partial(run_tpu, tiles=TPU_TILES),
         "gpu": functools.partial(run_gpu, tiles=GPU_TILES)}[name]
  target, draft = np.full((4, 2, 300), -np.inf, np.float32), np.zeros((4, 1, 300), np.float32)
  target[0, 0, [276, 148, 20]] = target[1, 0, [50, 17]] = target[2, 1, [299, 130]] = 0.0
  target[2:, 0], target[3, 1] = 0.0, 0.0
  # Requests 0 and 1 reject token 5 and draw from the residual, 2 and 3 accept and draw a bonus.
  num_accepted, next_token, is_valid = run(
    target, draft, np.full((4, 1), 5, np.int32), np.ones(4, np.int32),
    np.full((4, 1), 0.5, np.float32), np.zeros((4, 2, 2), np.uint32))
  np.testing.assert_array_equal(num_accepted, [0, 0, 1, 1])
  np.testing.assert_array_equal(next_token, [20, 17, 130, 0])
  assert np.asarray(is_valid).all()


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_100_000_requests_follow_the_law(name):
  # p0 = (0.2, 0.8, 0) against q0 = (0.6, 0.3, 0.1): the first token must follow p0.
  num = 100_000
  target, draft = [(0.2, 0.799, 0.001), (0.3, 0.3, 0.4)], [(0.6, 0.3, 0.1)]
  seeds = jnp.arange(num)
  tokens = jax.jit(lambda: counter_rng.gumbel_argmax(
    jnp.broadcast_to(jnp.asarray(to_logits(draft[0])), (num, 3)),
    counter_rng.noise_words(seeds, counter_rng.DRAFT, 0, 0)))()
  words = counter_rng.noise_words(seeds, counter_rng.RECOVER,
                                  jnp.broadcast_to(jnp.arange(2)[None], (num, 2)), 0)
  coins = counter_rng.uniform(counter_rng.noise_words(seeds, counter_rng.COIN, 0, 0))
  run = {"tpu": functools.partial(run_tpu, tiles=kernel_tpu.Tiles(rows=8192, unroll=1)),
         "gpu": run_gpu}[name]
  num_accepted, next_token, is_valid = jax.jit(run)(
    jnp.broadcast_to(to_logits(target)[None], (num, 2, 3)),
    jnp.broadcast_to(to_logits(draft)[None], (num, 1, 3)), tokens[:, None],
    jnp.ones(num, jnp.int32), coins[:, None], words)
  assert np.asarray(is_valid).all()
  first = np.where(np.asarray(num_accepted) == 1, np.asarray(tokens), np.asarray(next_token))
  counts = np.bincount(first, minlength=3)
  assert oracles.compute_p_value(counts, target[0]) > 1e-4
  # What it would be if corrections came from the target itself: 0.2 + 0.5 * 0.8 - ...
  p, q = np.array(target[0]), np.array(draft[0])
  tell = np.minimum(p, q) + (1 - np.minimum(p, q).sum()) * p
  assert oracles.compute_p_value(np.round(num * tell), target[0]) < 1e-9


def test_kernel_noise_is_the_references():
  words = jax.random.bits(jax.random.key(0), (64, 2), jnp.uint32)
  ids = jnp.arange(4096, dtype=jnp.int32)
  bits, _ = jax.jit(counter_rng.threefry2x32)((words[:, :1], words[:, 1:]), (ids[None], 0))
  np.testing.assert_array_equal(jax.jit(kernel_math.uniform_block)(bits),
                                jax.jit(counter_rng.uniform_at)(words, ids))
  found = jax.jit(kernel_math.gumbel_block)(words[:, :1], words[:, 1:], ids[None])
  # Each logarithm is good to 2^-23 of its value and the inner one's error adds 2^-22 at most.
  np.testing.assert_allclose(found, jax.jit(counter_rng.gumbel)(words, ids), atol=6e-7, rtol=5e-7)


def test_kernel_exponentials_are_exact_in_the_tail():
  # From the smallest uniform there is to the largest, where log(1 - u) would be 0 below 2^-25.
  uniforms = np.concatenate([np.geomspace(2.0**-33, 0.3, 2000), np.linspace(0.2, 0.3, 2000),
                             1 - np.geomspace(2.0**-24, 0.7, 2000)]).astype(np.float32)
  uniforms = np.minimum(uniforms, np.float32(1 - 2.0**-24))
  found = jax.jit(kernel_math.exponential_block)(uniforms)
  np.testing.assert_allclose(found, -np.log1p(-np.float64(uniforms)), rtol=4 * 2.0**-23)


def test_a_token_of_probability_1e_6_comes_as_often_as_it_should():
  # Of 10^7 draws 10 +- 3.2 in the mean; a float32 noise of 23 bits gives a third of it or none.
  def count(block):
    words = counter_rng.noise_words(block * 10_000 + jnp.arange(10_000), counter_rng.RECOVER, 7, 0)
    noise = kernel_math.gumbel_block(words[:, :1], words[:, 1:], jnp.arange(2)[None])
    return jnp.sum(jnp.float32(np.log(1e-6)) + noise[:, 1] > noise[:, 0], dtype=jnp.int32)

  found = int(jnp.sum(jax.jit(lambda: jax.lax.map(count, jnp.arange(1000)))()))
  assert 1 <= found <= 100
  assert 2 <= found <= 26  # a Poisson variable of mean 10 is outside with probability 1e-4


def test_the_gpu_kernel_lowers_for_cuda():
  shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)
  arrays = (shape(64, 8, 151_936), shape(64, 7, 151_936), shape(64, 7, dtype=jnp.int32),
            shape(64, dtype=jnp.int32), shape(64, 7), shape(64, 8, 2, dtype=jnp.uint32))
  text = devices.lower_for_cuda(kernel_gpu.rejection_sampling_gpu, *arrays)
  # Target rows, draft rows, and the draw.
  assert text.count("__gpu$xla.gpu.triton") == 3
