"""One table of walks over every implementation, against NumPy float64: tokens exactly."""

import contextlib
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import special

from pallas_kernels import counter_rng
from pallas_kernels.markov_sampling import kernel_gpu, kernel_tpu
from pallas_kernels.markov_sampling import markov_sampling, pruned_markov_sampling
from pallas_kernels.markov_sampling.kernel_tpu import Tiles
from pallas_kernels.markov_sampling.reference import markov_sampling_reference
from tests import oracles
from tests.pallas_kernels import devices

SMALL = Tiles(batch=4, vocab=128, resident_bytes=0)


def run_reference(*args, tiles=SMALL, **options):
  return markov_sampling_reference(*args, **options)


def run_gpu(*args, tiles=SMALL, **options):
  return kernel_gpu.markov_sampling_gpu(
      *args, tiles=kernel_gpu.Tiles(columns=min(tiles.vocab, 1024)), interpret=True, **options)


run_tpu = functools.partial(kernel_tpu.markov_sampling_tpu, interpret=True)
IMPLEMENTATIONS = {"reference": run_reference, "tpu": run_tpu, "gpu": run_gpu}
over_all = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@functools.cache
def compile_walk(implementation, tiles=SMALL, kind="vanilla"):
  return jax.jit(functools.partial(IMPLEMENTATIONS[implementation], tiles=tiles, kind=kind,
                                   with_logits=True))


def make_case(G, B, V, R, kind="vanilla", *, seed=0, num_embeds=None, scale=1.0):
  """Returns the arguments of a walk; with `num_embeds` the columns are V of so many target ids."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  U = num_embeds or V
  E, X = {"vanilla": (0, 0), "gated": (R, R), "rnn": (3 * R, 2 * R)}[kind]
  cell = (normal(G, B, E), normal(E, X)) if E else (None, None)
  ids = None if U == V else jnp.asarray(np.sort(rng.choice(U, V, replace=False)), jnp.int32)
  words = counter_rng.noise_words(jnp.arange(B)[None] + 100 * seed, counter_rng.DRAFT,
                                  jnp.zeros((1, B), int), jnp.arange(G)[:, None])
  return (normal(G, B, V) * scale, normal(U, R) * scale, normal(V, R),
          jnp.asarray(rng.integers(0, U, B), jnp.int32), words,
          jnp.asarray(rng.choice([0, 0.3, 1, 2], B), jnp.float32), *cell, ids)


def walk_by_hand(base, w1, w2, first, words, temperature, pre, cell, ids, *, kind):
  """Tokens, log-probabilities, log-normalisers and logits in float64; noise is given.

  Raises AssertionError where two tokens are so close that float32 may choose either.
  """
  G, B, V = base.shape
  ids = np.arange(V) if ids is None else np.asarray(ids)
  noise = np.float64(counter_rng.gumbel(words, jnp.asarray(ids)))
  base, w1, w2, temperature = (np.float64(a) for a in (base, w1, w2, temperature))
  previous, state = np.asarray(first), np.zeros((B, w1.shape[1]))
  out = []
  for g in range(G):
    embed = w1[previous]
    if kind == "vanilla":
      bias_in = embed
    else:
      rest = embed if kind == "gated" else np.concatenate([state, embed], 1)
      joint = np.float64(pre[g]) + rest @ np.float64(cell).T
      if kind == "gated":
        bias_in = special.expit(joint) * embed
      else:
        gate, candidate, output = np.split(joint, 3, axis=1)
        state = special.expit(gate) * state + special.expit(-gate) * np.tanh(candidate)
        bias_in = np.tanh(output)
    logits = base[g] + bias_in @ w2.T
    is_greedy = temperature <= 0
    scaled = logits / np.where(is_greedy, 1, temperature)[:, None]
    scores = scaled + np.where(is_greedy[:, None], 0, noise[g])
    best = np.sort(scores, axis=1)[:, -2:]
    assert (best[:, 1] - best[:, 0] > 1e-5 * np.abs(scaled).max()).all()
    column = scores.argmax(1)
    lse = np.where(is_greedy, scaled.max(1), special.logsumexp(scaled, axis=1))
    out.append((ids[column], scaled[np.arange(B), column] - lse, lse, embed, bias_in, logits))
    previous = ids[column]
  return [np.stack(part) for part in zip(*out)]


def check(found, expected, scale=1.0):
  # Sums of up to 16 float32 products of O(scale), through a temperature of at least 0.3.
  np.testing.assert_array_equal(found.tokens_GxB, expected[0])
  for a, b in zip(found[1:], expected[1:]):
    np.testing.assert_allclose(a, b, atol=2e-5 * scale, rtol=1e-5)


CASES = {  # arguments of make_case, tiles
    "smaller than a tile": ((3, 5, 50, 8), {}, Tiles()),
    "rnn; partial tile and batch, one of three tiles resident": (
        (4, 6, 300, 5, "rnn"), {}, Tiles(4, 128, 128 * 5 * 4)),
    "gated; 7 of 20 tokens": ((3, 2, 7, 6, "gated"), dict(num_embeds=20), Tiles()),
    "whole tiles, all resident": ((3, 4, 256, 4), {}, Tiles(4, 128, 1 << 30)),
    "one slot, nothing resident": ((1, 9, 130, 4), {}, SMALL),
    "rank 16, which the GPU takes": ((3, 5, 300, 16, "gated"), dict(num_embeds=333), SMALL),
}


@over_all
@pytest.mark.parametrize("name", CASES)
def test_table(implementation, name):
  sizes, extra, tiles = CASES[name]
  kind = (*sizes, "vanilla")[4]
  args = make_case(*sizes, **extra)
  check(compile_walk(implementation, tiles, kind)(*args), walk_by_hand(*args, kind=kind))


@over_all
@pytest.mark.parametrize("V", [49_152, 129_280, 151_936, 262_144])
def test_vocabularies_of_real_models(implementation, V):
  args = make_case(2, 2, V, 16, num_embeds=300_000 if V == 262_144 else None)
  check(compile_walk(implementation, Tiles(vocab=4096, resident_bytes=4096 * 16 * 4))(*args),
        walk_by_hand(*args, kind="vanilla"))


@over_all
def test_ties_go_to_the_lowest_id(implementation):
  """Greedy rows over two tiles: equals in one tile, in one lane of two tiles, and everywhere."""
  base = np.zeros((1, 3, 200), np.float32)
  base[0, 0, [17, 50]] = 2.0
  base[0, 1, [20, 148]] = 0.5  # 148 = 20 + 128
  found = compile_walk(implementation)(
      jnp.asarray(base), jnp.zeros((200, 16)), jnp.zeros((200, 16)), jnp.zeros(3, jnp.int32),
      jnp.zeros((1, 3, 2), jnp.uint32), jnp.zeros(3))
  np.testing.assert_array_equal(found.tokens_GxB, [[17, 20, 0]])
  np.testing.assert_array_equal(found.logp_GxB, 0)
  np.testing.assert_array_equal(found.lse_GxB, [[2, 0.5, 0]])


@over_all
def test_rows_that_are_no_law_are_flagged(implementation):
  base = np.zeros((2, 4, 200), np.float32)
  base[0, 0, 150] = np.nan
  base[0, 1] = -np.inf
  base[0, 2, 3] = np.inf
  base[:, 3, 1:] = -np.inf  # a law of one token
  found = compile_walk(implementation)(
      jnp.asarray(base), jnp.zeros((200, 16)), jnp.zeros((200, 16)), jnp.zeros(4, jnp.int32),
      jnp.zeros((2, 4, 2), jnp.uint32), jnp.ones(4))
  for values in (found.lse_GxB, found.logp_GxB):
    np.testing.assert_array_equal(np.isnan(values), [[True, True, True, False], [False] * 4])
  assert (found.tokens_GxB >= 0).all() and (found.tokens_GxB < 200).all()
  np.testing.assert_array_equal(found.tokens_GxB[:, 3], 0)
  np.testing.assert_array_equal(found.logp_GxB[:, 3], 0)


@over_all
def test_small_temperature_of_large_logits(implementation):
  # 700 and 700 + 2^-10 at t = 2^-10: one unit apart, probabilities 0.269 and 0.731. Divided
  # first, 716,800 and 716,801 keep 4 bits of the noise.
  num = 512
  base = jnp.full((1, num, 2), 700.0).at[:, :, 1].add(2.0**-10)
  words = counter_rng.noise_words(jnp.arange(num)[None], counter_rng.DRAFT, 0, 0)
  found = compile_walk(implementation, Tiles(batch=num))(
      base, jnp.zeros((2, 1)), jnp.zeros((2, 1)), jnp.zeros(num, jnp.int32), words,
      jnp.full(num, 2.0**-10))
  noise = np.float64(counter_rng.gumbel(words, jnp.arange(2)))[0]
  np.testing.assert_array_equal(found.tokens_GxB[0], noise[:, 1] + 1 > noise[:, 0])
  expected = np.log(np.where(found.tokens_GxB == 1, 1, np.exp(-1.0)) / (1 + np.exp(-1.0)))
  np.testing.assert_allclose(found.logp_GxB, expected, rtol=1e-5)


@over_all
@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.01, 1.0, 8.0]))
def test_random_cases(implementation, seed, scale):
  args = make_case(2, 4, 131, 16, seed=seed, scale=scale)  # one shape: it compiles once
  try:
    expected = walk_by_hand(*args, kind="vanilla")
  except AssertionError:
    hypothesis.reject()
  check(compile_walk(implementation)(*args), expected, scale=max(scale, 1))


@over_all
def test_tokens_follow_the_law(implementation):
  """100,000 walks of two slots: the joint law of both tokens, and that a wrong one would show."""
  num, V = 100_000, 16
  rng = np.random.default_rng(3)
  base, w1, w2 = rng.normal(size=(2, V)), rng.normal(size=(V, 16)) / 2, rng.normal(size=(V, 16))
  words = counter_rng.noise_words(jnp.arange(num)[None], counter_rng.DRAFT, 0,
                                  jnp.arange(2)[:, None])
  as_f32 = lambda a: jnp.asarray(a, jnp.float32)
  found = compile_walk(implementation, Tiles(batch=1000))(
      jnp.broadcast_to(as_f32(base)[:, None], (2, num, V)), as_f32(w1), as_f32(w2),
      jnp.full(num, 2), words, jnp.full(num, 0.8))
  law = lambda g, previous: special.softmax((base[g] + w1[previous] @ w2.T) / 0.8)
  joint = law(0, 2)[:, None] * np.stack([law(1, v) for v in range(V)])
  first, second = np.asarray(found.tokens_GxB)
  counts = np.bincount(first * V + second, minlength=V * V)
  assert oracles.compute_p_value(counts, joint) > 1e-4
  unaware = law(0, 2)[:, None] * law(1, 2)[None]  # the bias of the anchor in both slots
  assert oracles.compute_p_value(counts, unaware) < 1e-9
  np.testing.assert_allclose(
      found.logp_GxB, np.log(np.stack([law(0, 2)[first], joint[first, second] / law(0, 2)[first]])),
      atol=1e-5)


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_all_candidates_are_the_full_walk(kind):
  args = make_case(3, 4, 60, 5, kind)
  full = compile_walk("reference", kind=kind)(*args)
  found, columns = jax.jit(functools.partial(
      pruned_markov_sampling, num_candidates=100, kind=kind))(*args)
  for name in ("tokens_GxB", "embeds_GxBxR", "bias_in_GxBxR"):
    np.testing.assert_allclose(getattr(found, name), getattr(full, name), atol=1e-6)
  for name in ("logp_GxB", "lse_GxB"):
    np.testing.assert_allclose(getattr(found, name), getattr(full, name), atol=2e-5)
  np.testing.assert_allclose(
      found.logits_GxBxV, np.take_along_axis(np.asarray(full.logits_GxBxV), columns, -1), atol=1e-5)


def test_pruned_law_is_the_reported_law():
  """8 of 60 columns, of a reduced vocabulary: tokens are the argmax of reported law plus noise."""
  args = make_case(3, 6, 60, 5, num_embeds=90, seed=4)
  base, temperature, ids = np.asarray(args[0]), np.asarray(args[5]), np.asarray(args[8])
  found, columns = jax.jit(functools.partial(pruned_markov_sampling, num_candidates=8))(*args)
  columns = np.asarray(columns)
  np.testing.assert_array_equal(np.sort(columns), np.sort(base.argsort(-1)[..., -8:]))
  t = np.where(temperature > 0, temperature, 1)[:, None]
  scaled = np.float64(found.logits_GxBxV) / t
  noise = np.float64(counter_rng.gumbel(args[4], jnp.arange(90)))
  noise = np.take_along_axis(noise, ids[columns], -1) * (temperature > 0)[:, None]
  best = (scaled + noise).argmax(-1)[..., None]
  np.testing.assert_array_equal(found.tokens_GxB,
                                np.take_along_axis(ids[columns], best, -1)[..., 0])
  expected = np.take_along_axis(special.log_softmax(scaled, axis=-1), best, -1)[..., 0]
  np.testing.assert_allclose(found.logp_GxB, np.where(temperature > 0, expected, 0), atol=1e-5)


def test_pruned_ties_go_to_the_lowest_id():
  # The bias of token 0 lifts column 3 to column 1's logit; the candidates come as 1, 3 or 3, 1.
  for base in ([0, 2, 0, 1], [0, 1, 0, 2]):
    w2 = np.zeros((4, 1), np.float32)
    w2[int(np.argmin(np.where(np.asarray(base) > 0, base, 9)))] = 1
    found, _ = pruned_markov_sampling(
        jnp.asarray([[base]], jnp.float32), jnp.ones((4, 1)), jnp.asarray(w2),
        jnp.zeros(1, jnp.int32), jnp.zeros((1, 1, 2), jnp.uint32), jnp.zeros(1), num_candidates=2)
    assert found.tokens_GxB == 1


@pytest.mark.parametrize("field, at, value", [
    ("w2_VxR", 2, jnp.zeros((50, 7))), ("words_GxBx2", 4, jnp.zeros((3, 5, 1), jnp.uint32)),
    ("base_logits_GxBxV", 0, jnp.zeros((3, 5, 50), jnp.bfloat16)),
    ("first_token_B", 3, jnp.zeros(4, jnp.int32)), ("temperature_B", 5, jnp.zeros(3))])
def test_names_what_does_not_fit(field, at, value):
  args = list(make_case(3, 5, 50, 8)[:6])
  args[at] = value
  with pytest.raises(ValueError, match=f"^{field}: found"):
    markov_sampling(*args)


def test_names_unknown_kinds_and_missing_cells():
  args = make_case(3, 5, 50, 8)[:6]
  with pytest.raises(ValueError, match="^kind: found 'lstm'"):
    markov_sampling(*args, kind="lstm")
  with pytest.raises(ValueError, match="^pre_GxBxE, cell_ExI: expected both"):
    markov_sampling(*args, kind="rnn")
  with pytest.raises(ValueError, match="^cell_ExI: found shape"):
    markov_sampling(*args, kind="gated", pre_GxBxE=jnp.zeros((3, 5, 8)), cell_ExI=jnp.zeros((8, 9)))


def test_platform_decides():
  args = make_case(2, 8, 256, 128)[:6]
  has_kernel = lambda platform: "tpu_custom_call" in jax.jit(markov_sampling).trace(*args).lower(
      lowering_platforms=(platform,)).as_text()
  assert has_kernel("tpu") and not has_kernel("cpu")


def test_gpu_kernel_lowers_for_cuda():
  args = make_case(2, 8, 300, 16)[:6]
  text = devices.lower_for_cuda(functools.partial(markov_sampling, implementation="pallas"), *args)
  assert text.count("__gpu$xla.gpu.triton") == 1  # the body of the walk


@pytest.mark.parametrize("device_kind, cores, num_kept", [
    ("TPU v5 lite", 1, 149), ("TPU v5", 2, 117), ("TPU7x", 1, 117), (None, None, 117)])
def test_as_much_of_w2_stays_as_the_tpu_has_room_for(device_kind, cores, num_kept):
  """At production shapes all 149 tiles of 0.5 MiB in 128 MiB of VMEM, 58.5 MiB in 64."""
  near = contextlib.nullcontext() if device_kind is None else devices.pretend(
      device_kind, "tpu", num_cores=cores)
  count = functools.partial(kernel_tpu.count_resident, batch=64, tile=1024, num_tiles=149, rank=256,
                            gates=1, itemsize=2, with_logits=False)
  with near:
    found, limit = count(Tiles())
  assert found == num_kept
  assert found * (1 << 19) < limit < (128 if num_kept == 149 else 64) << 20
  assert count(Tiles(resident_bytes=10 << 20))[0] == 20 and count(Tiles(vmem_bytes=1 << 20))[0] == 0
