"""Cases for every implementation of the family; IMPLEMENTATIONS grows with the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch as dispatch_lib
from pallas_kernels.counter_rng import COIN, DRAFT, RECOVER, gumbel_argmax, noise_words, uniform
from pallas_kernels.rejection_sampling import rejection_sampling
from pallas_kernels.rejection_sampling.reference import count_prefix, residual_law
from tests import oracles

IMPLEMENTATIONS = ["auto"]  # on CPU the reference
pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

rejection_sampling_jit = jax.jit(rejection_sampling, static_argnames="implementation")
make_words = jax.jit(noise_words)
make_coins = jax.jit(lambda *args: uniform(noise_words(*args)))
draw_tokens = jax.jit(gumbel_argmax)


def to_logits(law):
  """Returns float32 logits of a law; -inf for probability 0."""
  with np.errstate(divide="ignore"):
    return np.log(np.asarray(law, np.float64)).astype(np.float32)


def run(target, draft, tokens, *, implementation, coins=None, lens=None, num=1, **kwargs):
  """Returns (num_accepted, next_token, is_valid) of `num` copies of one request of laws.

  `target` [W, V] and `draft` [G, D] are laws, `tokens` [G] or [num, G]; without `coins` they and
  the recovery noise come from seeds 0..num-1.
  """
  target, draft = np.asarray(target), np.asarray(draft)
  num_drafts = len(draft)
  seeds = jnp.arange(num)
  tokens = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (num, num_drafts))
  rows = jnp.broadcast_to(jnp.arange(num_drafts)[None], (num, num_drafts))
  if coins is None:
    coins = make_coins(seeds, COIN, rows, 0)
  words = make_words(
    seeds, RECOVER, jnp.broadcast_to(jnp.arange(len(target))[None], (num, len(target))), 0
  )
  found = rejection_sampling_jit(
    jnp.broadcast_to(jnp.asarray(to_logits(target)), (num, *target.shape)),
    jnp.broadcast_to(jnp.asarray(to_logits(draft)), (num, *draft.shape)),
    tokens,
    verify_lens_B=jnp.full(num, num_drafts if lens is None else lens),
    coins_BxG=jnp.broadcast_to(jnp.asarray(coins, jnp.float32), (num, num_drafts)),
    noise_words_BxWx2=words,
    implementation=implementation,
    **kwargs,
  )
  return tuple(np.asarray(a) for a in found)


def draw_drafts(draft, num):
  """Returns [num, G] tokens drawn from the laws `draft` [G, V] with seeds 0..num-1."""
  draft = np.asarray(draft)
  rows = jnp.broadcast_to(jnp.arange(len(draft))[None], (num, len(draft)))
  words = make_words(jnp.arange(num), DRAFT, 0, rows)
  return draw_tokens(jnp.broadcast_to(jnp.asarray(to_logits(draft)), (num, *draft.shape)), words)


def first_tokens(found, tokens):
  """Returns the first committed token of every copy."""
  num_accepted, next_token, is_valid = found
  assert is_valid.all()
  return np.where(num_accepted > 0, np.asarray(tokens)[:, 0], next_token)


def check_first_law(p, q, expected, accept_rate, tell, implementation, num=200_000):
  """Checks the first-token law for target row p and draft law q, and that `tell` would fail."""
  tokens = draw_drafts([q], num)
  found = run([p, p], [q], tokens, num=num, implementation=implementation)
  counts = np.bincount(first_tokens(found, tokens), minlength=len(p))
  assert oracles.compute_p_value(counts, expected) > 1e-4
  assert oracles.compute_p_value(np.round(num * np.asarray(tell)), expected) < 1e-9
  # Standard error of the acceptance rate is at most 0.0011.
  assert abs((found[0] == 1).mean() - accept_rate) < 0.006


def test_b01_filtered_draft_law(implementation):
  # p after top_k = 2, draft from the filtered q: acceptance min sums to 0.875.
  p, q = (0.625, 0.375, 0), (0.5, 0.5, 0)
  assert oracles.compute_accept_rate(p, q) == 0.875
  check_first_law(p, q, p, 0.875, (0.53125, 0.46875, 0), implementation)


def test_b03_the_law_is_the_targets(implementation):
  # Tell of the p / max(p) rule: token 0 always, token 1 with 0.4286: 0.2 + 0.8 * 0.5714 = 0.657.
  p, q = (0.7, 0.3), (0.2, 0.8)
  check_first_law(p, q, p, 0.5, (0.657, 0.343), implementation)


@pytest.mark.parametrize("q_at_1", [1.0, 0.0])
def test_b06_a_coin_of_0_rejects_probability_0(q_at_1, implementation):
  q = (1 - q_at_1, q_at_1)
  found = run([(1, 0), (1, 0)], [q], [1], coins=[[0.0]], implementation=implementation)
  assert [a.item() for a in found] == [0, 0, True]


def test_b06_a_ratio_of_1_accepts_every_coin(implementation):
  largest = 1 - 2.0**-24
  p = (0.5, 0.5)
  found = run([p, p], [p], [1], coins=[[largest]], implementation=implementation)
  assert found[0] == 1
  # Any law at all, drawn tokens of any probability: p = q bit for bit.
  p = np.random.default_rng(0).dirichlet(np.full(50, 0.1), 8)
  tokens = draw_drafts(p, 1000)
  laws = np.concatenate([p, p[:1]])
  found = run(laws, p, tokens, coins=largest, num=1000, implementation=implementation)
  assert (found[0] == 8).all()


def test_acceptance_is_strict(implementation):
  # p/q = 0.5 with logits 0 and log 2: a coin below 0.5 accepts, 0.5 + 2^-20 rejects.
  for coin, accepted in ((0.5 - 2.0**-20, 1), (0.5 + 2.0**-20, 0)):
    found = run(
      [(0.25, 0.75)] * 2, [(0.5, 0.5)], [0], coins=[[coin]], implementation=implementation
    )
    assert found[0] == accepted
    assert found[1] == 1 or accepted
  # p/q = e^-200 is 0 in float32, and a coin of 0 is not below it.
  found = rejection_sampling_jit(
    jnp.array([[[0.0, -200.0]] * 2]),
    jnp.array([[[-jnp.inf, 0.0]]]),
    jnp.array([[1]]),
    verify_lens_B=jnp.array([1]),
    coins_BxG=jnp.zeros((1, 1)),
    noise_words_BxWx2=jnp.zeros((1, 2, 2), jnp.uint32),
    implementation=implementation,
  )
  assert [a.item() for a in found] == [0, 0, True]


def test_b07_residual_without_mass_falls_back_to_p(implementation):
  tiny = np.float32(6e-8)
  p = np.float32([[0.5, 0.5], [1, 0], [0.5 + tiny, 0.5 - tiny]])
  q = np.float32([[0.5, 0.5], [1, 0], [0.5, 0.5]])
  found = np.asarray(residual_law(p, q))
  np.testing.assert_array_equal(found, [[0.5, 0.5], [1, 0], [1, 0]])


def test_a_rejection_without_residual_draws_from_p(implementation):
  # q[1] = 0 but token 1 was "drafted": rejected, and p = q leaves no residual.
  found = run([(1, 0)] * 2, [(1, 0)], [1], coins=[[0.3]], implementation=implementation)
  assert [a.item() for a in found] == [0, 0, True]


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_b08_correction_comes_from_the_residual_of_the_rejected_row(num_drafts, implementation):
  # p0 = (0.2, 0.8), q0 = (0.7, 0.3): accept sum(min) = 0.5, residual (0, 1).
  target, draft = [(0.2, 0.8), (0.9, 0.1), (0.9, 0.1)], [(0.7, 0.3), (0.5, 0.5)]
  target, draft = target[: num_drafts + 1], draft[:num_drafts]
  num = 200_000
  tokens = draw_drafts(draft, num)
  found = run(target, draft, tokens, num=num, implementation=implementation)
  counts = np.bincount(first_tokens(found, tokens))
  assert oracles.compute_p_value(counts, (0.2, 0.8)) > 1e-4
  for tell in ((0.389, 0.611), (0.7, 0.3), (0.65, 0.35)):
    assert oracles.compute_p_value(np.round(num * np.array(tell)), (0.2, 0.8)) < 1e-9
  if num_drafts == 1:  # rejected tokens only: token 1, always
    assert (found[1][found[0] == 0] == 1).all()


def test_b10_accepted_is_a_prefix(implementation):
  del implementation
  found = count_prefix(jnp.array([[1, 0, 1, 1], [1, 1, 1, 1]], bool), jnp.array([4, 4]))
  np.testing.assert_array_equal(found, [1, 4])


def test_verify_length_ends_the_drafts(implementation):
  # Everything would be accepted; with length l the bonus comes from row l, a point mass on l.
  target = np.concatenate([np.full((3, 4), 0.25), np.full((1, 4), 0.25)])
  for length in range(4):
    target_l = target.copy()
    target_l[length] = np.eye(4)[length]
    found = run(
      target_l,
      np.full((3, 4), 0.25),
      [1, 2, 3],
      coins=0.0,
      lens=length,
      implementation=implementation,
    )
    assert [a.item() for a in found] == [length, length, True]


@pytest.mark.parametrize("length", [0, 1, 2])
def test_the_bonus_is_plain_sampling_bit_for_bit(length, implementation):
  # The row after the last verified draft, whatever the drafter thinks there (rows 0 and 1).
  p = np.random.default_rng(1).dirichlet(np.ones(20), 3)
  kwargs = {"coins": 0.0, "num": 500, "implementation": implementation}
  found = run(p, p[:2, ::-1], [0, 0], lens=length, **kwargs)
  words = make_words(jnp.arange(500), RECOVER, length, 0)
  plain = draw_tokens(jnp.broadcast_to(jnp.asarray(to_logits(p[length])), (500, 20)), words)
  np.testing.assert_array_equal(found[1], plain)
  assert (found[0] == length).all()


def test_verify_length_beyond_the_rows_is_cut(implementation):
  p = np.full((2, 3), 1 / 3)  # one draft row verified of two drafted
  found = run(p, p, [0, 1], coins=0.0, lens=2, implementation=implementation)
  assert found[0] == 1


def test_reduced_vocabulary_equals_the_scattered_full_one(implementation):
  rng = np.random.default_rng(2)
  ids = np.array([0, 3, 4, 7])
  target, reduced = rng.dirichlet(np.ones(9), 4), rng.dirichlet(np.ones(4), 3)
  full = np.zeros((3, 9))
  full[:, ids] = reduced
  tokens = draw_drafts(full, 5000)
  kwargs = {"num": 5000, "implementation": implementation}
  expected = run(target, full, tokens, **kwargs)
  found = run(target, reduced, tokens, draft_ids=jnp.asarray(ids, jnp.int32), **kwargs)
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert len(np.unique(found[0])) == 4


def test_a_draft_outside_the_draft_vocabulary_is_rejected(implementation):
  target = np.full((2, 4), 0.25)
  for token in (1, 3, -1, 99):  # not among the ids; padding; beyond the vocabulary
    found = run(
      target,
      [(0.5, 0.5)],
      [token],
      coins=0.0,
      draft_ids=jnp.array([0, 2]),
      implementation=implementation,
    )
    assert found[0] == 0 and found[1] in (1, 3) and found[2]


@pytest.mark.parametrize("bad", ["nan", "one nan", "-inf", "+inf"])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_b13_broken_rows_are_flagged_where_they_decide(bad, side, implementation):
  # [3 requests, 8 tokens]; row 1 of the target (or draft) is broken in all; coins of 0 accept.
  laws = np.random.default_rng(3).dirichlet(np.ones(8), 4)
  target = np.tile(to_logits(laws), (3, 1, 1))
  draft = target[:, :3].copy()
  row = {
    "nan": np.full(8, np.nan),
    "one nan": np.where(np.arange(8) == 5, np.nan, target[0, 1]),
    "-inf": np.full(8, -np.inf),
    "+inf": np.where(np.arange(8) == 5, np.inf, target[0, 1]),
  }[bad].astype(np.float32)
  (target if side == "target" else draft)[:, 1] = row
  num_accepted, next_token, is_valid = rejection_sampling_jit(
    target,
    draft,
    jnp.array([[1, 2, 3]] * 3),
    verify_lens_B=jnp.array([3, 1, 0]),
    coins_BxG=jnp.zeros((3, 3)),
    noise_words_BxWx2=make_words(jnp.arange(3), RECOVER, jnp.zeros((3, 4), int), 0),
    implementation=implementation,
  )
  # Length 3 stops at the broken row 1. Length 1 needs target row 1 for its bonus, but not draft
  # row 1. Length 0 needs neither.
  np.testing.assert_array_equal(num_accepted, [1, 1, 0])
  np.testing.assert_array_equal(is_valid, [False, side == "draft", True])
  assert ((np.asarray(next_token) >= 0) & (np.asarray(next_token) < 8)).all()


def test_a_row_does_not_depend_on_its_neighbours(implementation):
  rng = np.random.default_rng(4)
  target, draft = rng.normal(size=(5, 4, 6)), rng.normal(size=(5, 3, 6))
  arrays = {
    "verify_lens_B": jnp.array([3, 2, 3, 1, 3]),
    "coins_BxG": jnp.asarray(rng.uniform(size=(5, 3)), jnp.float32),
    "noise_words_BxWx2": make_words(
      jnp.arange(5), RECOVER, jnp.broadcast_to(jnp.arange(4)[None], (5, 4)), 0
    ),
  }
  positional = (
    jnp.asarray(target, jnp.float32),
    jnp.asarray(draft, jnp.float32),
    jnp.asarray(rng.integers(0, 6, (5, 3))),
  )
  together = rejection_sampling_jit(*positional, **arrays, implementation=implementation)
  for b in range(5):
    alone = rejection_sampling_jit(
      *(a[b : b + 1] for a in positional),
      **{name: a[b : b + 1] for name, a in arrays.items()},
      implementation=implementation,
    )
    for one, many in zip(alone, together, strict=True):
      assert one[0] == many[b]


def test_only_one_row_of_probabilities_exists(implementation):
  # The compiled program's temporaries stay below one [B, W, V] array: 4 * 8 * 7 * 65,536 bytes.
  shape = (8, 7, 65536)
  lowered = rejection_sampling_jit.lower(
    jax.ShapeDtypeStruct(shape, jnp.float32),
    jax.ShapeDtypeStruct((8, 6, 65536), jnp.float32),
    jax.ShapeDtypeStruct((8, 6), jnp.int32),
    verify_lens_B=jax.ShapeDtypeStruct((8,), jnp.int32),
    coins_BxG=jax.ShapeDtypeStruct((8, 6), jnp.float32),
    noise_words_BxWx2=jax.ShapeDtypeStruct((8, 7, 2), jnp.uint32),
    implementation=implementation,
  )
  temporaries_bytes = lowered.compile().memory_analysis().temp_size_in_bytes
  assert temporaries_bytes < 4 * np.prod(shape)


def test_bad_shapes_are_refused_by_name(implementation):
  target, draft = jnp.zeros((2, 4, 5)), jnp.zeros((2, 3, 5))
  good = {
    "verify_lens_B": jnp.zeros(2, jnp.int32),
    "coins_BxG": jnp.zeros((2, 3)),
    "noise_words_BxWx2": jnp.zeros((2, 4, 2), jnp.uint32),
    "implementation": implementation,
  }
  tokens = jnp.zeros((2, 3), jnp.int32)
  for args, changed, message in (
    ((target, draft[..., :4], tokens), {}, r"draft_logits: found shape \(2, 3, 4\), expected"),
    ((target, draft, tokens[:, :2]), {}, r"draft_tokens: found shape \(2, 2\)"),
    ((target.astype(jnp.bfloat16), draft, tokens), {}, "target_logits: found bfloat16"),
    ((target, draft, tokens), {"coins_BxG": jnp.zeros((2, 2))}, r"coins: found shape \(2, 2\)"),
    ((target, draft, tokens), {"draft_ids": jnp.arange(4)}, r"draft_logits: .* \(2, 3, 4\)"),
  ):
    with pytest.raises(ValueError, match=message):
      rejection_sampling(*args, **(good | changed))


def test_unknown_implementations_are_refused(implementation):
  del implementation
  with pytest.raises(ValueError, match="implementation: found 'palas', expected one of"):
    dispatch_lib.dispatch("palas", reference=lambda: 0)
  with pytest.raises(ValueError, match="implementation: found 'pallas'"):
    dispatch_lib.dispatch("pallas", reference=lambda: 0)


def test_dispatch_takes_the_platforms_kernel(implementation):
  del implementation
  x = jnp.arange(3.0)

  def call(name, kernels):
    def choose(a):
      return dispatch_lib.dispatch(name, a, reference=lambda a: a, kernels=kernels)

    return jax.jit(choose)(x)

  np.testing.assert_array_equal(call("auto", {"cpu": lambda a: a + 1}), x + 1)
  np.testing.assert_array_equal(call("pallas", {"cpu": lambda a: a + 1}), x + 1)
  np.testing.assert_array_equal(call("auto", {"tpu": lambda a: a + 1}), x)
  np.testing.assert_array_equal(call("reference", {"cpu": lambda a: a + 1}), x)
  with pytest.raises(NotImplementedError):
    call("pallas", {"tpu": lambda a: a + 1})
