import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.sampling import law_logits, make_sampling_params, sample
from dspark_jax.verification import accept as accept_lib
from dspark_jax.verification.accept import accept
from pallas_kernels.counter_rng import DRAFT, RECOVER, noise_words
from tests import oracles

accept_jit = jax.jit(accept, static_argnames=("vocab_limit", "rule"))
law_logits_jit = jax.jit(law_logits, static_argnames="vocab_limit")
make_words = jax.jit(noise_words)
sample_jit = jax.jit(sample)


def propose(draft_logits, params, *, anchors, ids=None, vocab_limit=None):
  """Returns (tokens [B, G], law logits) of independent draft rows [B, G, D]."""
  law = law_logits_jit(jnp.asarray(draft_logits), params, ids=ids, vocab_limit=vocab_limit)
  slots = jnp.broadcast_to(jnp.arange(law.shape[1])[None], law.shape[:2])
  return sample_jit(law, make_words(params.seed, DRAFT, anchors, slots), ids=ids), law


def decide(target, draft, params, *, lens=None, anchors=None, tokens=None, **kwargs):
  """Proposes from raw draft logits [B, G, D], accepts against raw target logits [B, W, V]."""
  batch, num_drafts = draft.shape[:2]
  anchors = jnp.zeros(batch, jnp.int32) if anchors is None else jnp.asarray(anchors)
  drawn, law = propose(
    draft,
    params,
    anchors=anchors,
    ids=kwargs.get("draft_ids"),
    vocab_limit=kwargs.get("vocab_limit"),
  )
  tokens = drawn if tokens is None else jnp.asarray(tokens)
  verdict = accept_jit(
    jnp.asarray(target),
    tokens,
    draft_logits_BxGxD=law,
    verify_lens_B=jnp.full(batch, num_drafts) if lens is None else jnp.asarray(lens),
    params=params,
    anchor_positions_B=anchors,
    **kwargs,
  )
  return verdict, np.asarray(tokens)


def point(tokens, vocab):
  """Returns logits whose argmaxes are `tokens`."""
  return np.eye(vocab, dtype=np.float32)[np.asarray(tokens)] * 5


def count_first(verdict, tokens, vocab):
  assert np.asarray(verdict.is_valid_B).all()
  first = np.where(np.asarray(verdict.num_accepted_B) > 0, tokens[:, 0], verdict.next_token_B)
  return np.bincount(first, minlength=vocab)


@pytest.mark.parametrize(
  "drafts, committed", [([9], [5]), ([9, 0, 1], [5]), ([5, 9, 7], [5, 6]), ([5, 6], [5, 6, 7])]
)
def test_b09_the_first_draft_is_checked(drafts, committed):
  # Greedy target next(t) = (t + 1) mod 10, last token 4: row k sees the k-th of (4, *drafts).
  target = point([[(t + 1) % 10 for t in (4, *drafts)]], 10)
  verdict, _ = decide(target, point([drafts], 10), make_sampling_params(1))
  found = drafts[: int(verdict.num_accepted_B[0])] + [int(verdict.next_token_B[0])]
  assert found == committed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verify_length_0_is_plain_decoding(temperature):
  rng = np.random.default_rng(0)
  params = make_sampling_params(300, temperature=temperature, top_p=0.9, seed=np.arange(300))
  target, anchors = rng.normal(size=(300, 3, 7)).astype(np.float32), np.arange(300) % 50
  verdict, _ = decide(target, rng.normal(size=(300, 2, 7)), params, lens=[0] * 300, anchors=anchors)
  words = make_words(params.seed, RECOVER, jnp.asarray(anchors + 1), 0)
  plain = sample_jit(law_logits_jit(target[:, 0], params), words)
  np.testing.assert_array_equal(verdict.next_token_B, plain)
  assert (np.asarray(verdict.num_accepted_B) == 0).all()


def test_b01_target_and_draft_are_filtered_alike():
  # Target (0.6, 0.3, 0.1), top_p 0.8, draft (2/3, 1/3, 0): token 2 never, law (2/3, 1/3, 0).
  num = 100_000
  target = np.broadcast_to(np.log(np.float32([0.6, 0.3, 0.1])), (num, 2, 3))
  params = make_sampling_params(num, temperature=1.0, top_p=0.8, seed=np.arange(num))
  verdict, tokens = decide(target, target[:, :1], params)
  assert oracles.compute_p_value(count_first(verdict, tokens, 3), [2 / 3, 1 / 3, 0]) > 1e-4
  assert (np.asarray(verdict.num_accepted_B) == 1).all()


def test_b02_a_deterministic_draft_is_a_point_mass():
  # p = (0.5, 0.5), draft always token 0 with point-mass q: accepted half the time, law (0.5, 0.5).
  # Scored with its softmax (0.6, 0.4), token 0 would come with 0.8333.
  num = 100_000
  params = make_sampling_params(num, temperature=1.0, seed=np.arange(num))
  law = law_logits(jnp.log(jnp.array([[[0.6, 0.4]]])), make_sampling_params(1))  # greedy drafter
  verdict = accept_jit(
    jnp.zeros((num, 2, 2)),
    jnp.zeros((num, 1), jnp.int32),
    draft_logits_BxGxD=jnp.broadcast_to(law, (num, 1, 2)),
    verify_lens_B=jnp.ones(num, jnp.int32),
    params=params,
    anchor_positions_B=jnp.zeros(num, jnp.int32),
  )
  num_accepted = np.asarray(verdict.num_accepted_B)
  assert oracles.compute_p_value(np.bincount(num_accepted), [0.5, 0.5]) > 1e-4
  first = np.where(num_accepted > 0, 0, verdict.next_token_B)
  assert oracles.compute_p_value(np.bincount(first), [0.5, 0.5]) > 1e-4


def test_b04_bf16_target_and_draft_with_one_law_accept_everything():
  num = 50_000
  logits = jnp.broadcast_to(jnp.array([12.0, 12.0625], jnp.bfloat16), (num, 2, 2))
  params = make_sampling_params(num, temperature=0.05, seed=np.arange(num))
  verdict, tokens = decide(logits, logits[:, :1], params)
  assert (np.asarray(verdict.num_accepted_B) == 1).all()
  # exp(1.25) = 3.4903: (0.2227, 0.7773); bf16 division would give (0.2689, 0.7311).
  q0 = 1 / (1 + np.exp(1.25))
  assert oracles.compute_p_value(count_first(verdict, tokens, 2), [q0, 1 - q0]) > 1e-4


def test_b12_ties_break_alike_in_draft_and_target():
  # Two tied best tokens, greedy and top_k = 1: the draft is id 0 and id 0 is accepted.
  logits = jnp.broadcast_to(jnp.array([21.375, 21.375, 3.0], jnp.bfloat16), (64, 2, 3))
  for fields in ({"temperature": 0.6, "top_k": 1}, {"temperature": 0.0}):
    verdict, tokens = decide(
      logits, logits[:, :1], make_sampling_params(64, seed=np.arange(64), **fields)
    )
    assert (tokens == 0).all() and (np.asarray(verdict.num_accepted_B) == 1).all()
    assert (np.asarray(verdict.next_token_B) == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_b13_a_broken_target_row_is_flagged(temperature, bad):
  # [2 requests, 3 rows, 8 tokens]; row 1 of request 0 is broken; rows 0 accept (target = draft).
  target = np.random.default_rng(1).normal(size=(2, 3, 8)).astype(np.float32)
  draft = target[:, :2].copy()
  target[0, 1] = bad
  params = make_sampling_params(2, temperature=temperature, seed=[1, 2])
  verdict, _ = decide(target, draft, params)
  np.testing.assert_array_equal(verdict.is_valid_B, [False, True])
  np.testing.assert_array_equal(verdict.num_accepted_B, [1, 2])
  assert ((verdict.next_token_B >= 0) & (verdict.next_token_B < 8)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b13_a_broken_draft_row_is_flagged(temperature):
  target = np.random.default_rng(1).normal(size=(2, 3, 8)).astype(np.float32)
  draft = target[:, :2].copy()
  draft[0, 1, 3] = np.nan
  params = make_sampling_params(2, temperature=temperature, seed=[1, 2])
  verdict, _ = decide(target, draft, params)
  np.testing.assert_array_equal(verdict.is_valid_B, [False, True])
  np.testing.assert_array_equal(verdict.num_accepted_B, [1, 2])
  verdict, _ = decide(target, draft, params, lens=[1, 2])  # the broken draft is not verified
  np.testing.assert_array_equal(verdict.is_valid_B, [True, True])


def make_batch(seed=0, batch=60, num_drafts=3, vocab=6):
  """Returns raw (target, draft) logits with many near misses and exact ties."""
  rng = np.random.default_rng(seed)
  target = rng.integers(0, 4, (batch, num_drafts + 1, vocab)).astype(np.float32)
  draft = target[:, :num_drafts] + rng.integers(0, 2, (batch, num_drafts, vocab))
  return target, draft.astype(np.float32)


def test_the_greedy_path_equals_the_sampled_path_on_greedy_rows():
  # Rows 0..59 greedy; the second batch adds one sampled row, so the general path decides them.
  target, draft = make_batch()
  target[7, 1], draft[9, 0], target[11, 0, 2] = np.nan, np.nan, np.inf
  lens, anchors = np.arange(60) % 4, np.arange(60)
  found, _ = decide(target, draft, make_sampling_params(60), lens=lens, anchors=anchors)

  def append(a):
    return np.concatenate([a, a[:1]])

  mixed = make_sampling_params(61, temperature=[0.0] * 60 + [1.0])
  expected, _ = decide(
    append(target), append(draft), mixed, lens=append(lens), anchors=append(anchors)
  )
  for ours, theirs in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_array_equal(ours, theirs[:60])
  assert set(np.asarray(found.num_accepted_B).tolist()) == {0, 1, 2, 3}
  assert 1 <= (~np.asarray(found.is_valid_B)).sum() <= 3


def test_the_greedy_path_accepts_any_draft_law():
  # A drafter that samples at its own temperature under a greedy target: argmax alone decides.
  target, _ = make_batch()
  best = target[:, :3].argmax(axis=-1)
  tokens = np.where(np.arange(60)[:, None] % 4 == np.arange(3), (best + 1) % 6, best)
  flat = jnp.zeros((61, 3, 6))

  def run(rows, temperature):
    return accept_jit(
      jnp.asarray(target[rows]),
      jnp.asarray(tokens[rows]),
      draft_logits_BxGxD=flat[: len(rows)],
      verify_lens_B=jnp.full(len(rows), 3),
      params=make_sampling_params(len(rows), temperature=temperature),
      anchor_positions_B=jnp.zeros(len(rows), jnp.int32),
    )

  rows = list(range(60))
  greedy, mixed = run(rows, 0.0), run([*rows, 0], [0.0] * 60 + [1.0])
  np.testing.assert_array_equal(greedy.num_accepted_B, np.minimum(np.arange(60) % 4, 3))
  for ours, theirs in zip(jax.tree.leaves(greedy), jax.tree.leaves(mixed), strict=True):
    np.testing.assert_array_equal(ours, theirs[:60])


def test_b14_a_request_does_not_depend_on_neighbours_or_padding():
  target, draft = make_batch()
  fields = {
    "temperature": np.arange(60) % 3 * 0.6,
    "top_k": np.arange(60) % 4,
    "top_p": np.where(np.arange(60) % 5, 1.0, 0.8),
    "seed": np.arange(60),
  }
  together, tokens = decide(
    target, draft, make_sampling_params(60, **fields), anchors=np.arange(60)
  )

  def pad(a):
    return np.pad(a, ((0, 0), (0, 0), (0, 2)), constant_values=9.0)

  padded, padded_tokens = decide(
    pad(target),
    pad(draft),
    make_sampling_params(60, **fields),
    anchors=np.arange(60),
    vocab_limit=6,
  )
  np.testing.assert_array_equal(padded_tokens, tokens)
  for ours, theirs in zip(jax.tree.leaves(padded), jax.tree.leaves(together), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  for b in range(0, 60, 7):
    params = make_sampling_params(1, **{name: value[b] for name, value in fields.items()})
    alone, _ = decide(target[b : b + 1], draft[b : b + 1], params, anchors=[b])
    for one, many in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
      assert one[0] == many[b]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b32_padded_vocabulary_is_never_emitted(temperature):
  # Head of 8 rows, 6 decodable; row 7 highest in draft and target.
  target = np.random.default_rng(0).normal(size=(200, 3, 8)).astype(np.float32)
  target[..., 7] = 20
  params = make_sampling_params(200, temperature=temperature, seed=np.arange(200))
  verdict, tokens = decide(target, target[:, :2], params, vocab_limit=6)
  assert tokens.max() < 6 and np.asarray(verdict.next_token_B).max() < 6
  assert (np.asarray(verdict.num_accepted_B) == 2).all()


def test_coins_and_recovery_noise_are_keyed_by_the_position_of_the_token():
  # The same request verified again from an anchor one further on decides the shared positions with
  # the same coins and noise: row j from anchor a is row j - 1 from anchor a + 1.
  keyed = []

  def record(target_logits, draft_logits, draft_tokens, *, coins_BxG, noise_words_BxWx2, **_):
    keyed.append((np.asarray(coins_BxG), np.asarray(noise_words_BxWx2)))
    batch = len(target_logits)
    return jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool)

  target, draft = make_batch(batch=4)
  params = make_sampling_params(4, temperature=1.0, seed=[5, 5, 6, 6])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(accept_lib, "rejection_sampling", record)
    with jax.disable_jit():
      accept(
        jnp.asarray(target),
        jnp.zeros((4, 3), jnp.int32),
        draft_logits_BxGxD=jnp.asarray(draft),
        verify_lens_B=jnp.full(4, 3),
        params=params,
        anchor_positions_B=jnp.array([10, 11, 10, 11]),
      )
  (coins, words), = keyed
  np.testing.assert_array_equal(coins[0, 1:], coins[1, :-1])
  np.testing.assert_array_equal(words[0, 1:], words[1, :-1])
  assert len(np.unique(coins[[0, 2]])) == 6 and len(np.unique(words[[0, 2], :, 0])) == 8
