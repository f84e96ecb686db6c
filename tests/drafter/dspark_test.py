import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import sampling
from dspark_jax.drafter import dspark
from pallas_kernels import counter_rng
from tests.drafter import cases
from tests.drafter.cases import KINDS, apply, make_borrowed, make_features, make_params

ANCHORS = np.array([3, 11, 20], np.int32)
POSITIONS = np.array([4, 9, 1], np.int32)
DRAFT_IDS = np.array([0, 1, 5, 6, 9, 12, 20, 21, 30, 35], np.int32)

make_config = functools.partial(cases.make_config, proposal_len=3)  # the walk is what compiles


@pytest.fixture(autouse=True)
def _full_precision():
  with jax.default_matmul_precision("highest"):
    yield


@functools.lru_cache
def jit_propose(config, vocab_limit=None, num_drafts=None):
  """Prefill and one block, as (features, anchor, position, sampling, borrowed) -> Proposal."""
  proposer = dspark.DSparkProposer(config, vocab_limit=vocab_limit, num_drafts=num_drafts)
  params = make_params(config)

  @jax.jit
  def run(features, anchor, positions, sampling_params, borrowed):
    state = proposer.init_state(features.shape[0], 16)
    state = proposer.prefill(params, state, features, positions)
    return proposer.propose(params, state, anchor, positions, sampling_params, **borrowed)

  return run


def propose(config, *, temperature=0.0, rows=slice(None), borrowed=None, vocab_limit=None,
            num_drafts=None, **filters):
  seeds = np.array([7, 8, 9])[rows]
  temperature = np.broadcast_to(np.asarray(temperature, np.float32), 3)[rows]
  params = sampling.make_sampling_params(len(seeds), temperature=temperature, seed=seeds, **filters)
  return jit_propose(config, vocab_limit, num_drafts)(
      make_features(config, 3, 10)[rows], jnp.asarray(ANCHORS[rows]), jnp.asarray(POSITIONS[rows]),
      params, make_borrowed(config) if borrowed is None else borrowed)


def compute_forced_logits(config, tokens_BxG):
  """Draft and confidence logits of the training form, teacher-forced with the drafts."""
  params, borrowed = make_params(config), make_borrowed(config)
  anchor = jnp.asarray(ANCHORS)[:, None]
  prev = jnp.concatenate([anchor, tokens_BxG[:, :-1]], axis=1)[:, None]

  @jax.jit
  def run(prev):
    hidden, bias_in, confidence = dspark.DSparkDrafter(config).apply(
        {"params": params}, make_features(config, 3, 10), jnp.asarray(POSITIONS)[:, None],
        dspark.embed_block(config, borrowed["embed_VxD"], anchor), prev)
    bias = bias_in @ apply(config, params, "bias_weight").T
    return hidden @ borrowed["lm_head_VdxD"].T + bias, confidence

  logits, confidence = run(prev)
  return np.asarray(logits[:, 0]), np.asarray(confidence[:, 0])


@pytest.mark.parametrize("config", [make_config(markov_head_type=k) for k in KINDS] + [
    make_config(sample_from_anchor=False)])
def test_a_short_block_is_the_start_of_a_long_one(config):
  """The last layer, the heads and the walk end early; what they draft is the same."""
  whole, short = propose(config, temperature=0.7), propose(config, temperature=0.7, num_drafts=1)
  np.testing.assert_array_equal(short.tokens_BxG, whole.tokens_BxG[:, :1])
  for name in ("draft_logits_BxGxV", "confidence_logits_BxG", "margin_BxG"):
    np.testing.assert_allclose(getattr(short, name), getattr(whole, name)[:, :1], atol=5e-5)
  proposer = dspark.DSparkProposer(config)
  assert proposer.with_len(config.proposal_len) == proposer.with_len(99) == proposer


@pytest.mark.parametrize("config", [make_config(markov_head_type=k) for k in KINDS] + [
    make_config(sample_from_anchor=False),
    make_config(markov_rank=0, confidence_head_with_markov=False)])
def test_greedy_drafts_are_the_argmax_of_the_training_form(config):
  proposal = propose(config)
  logits, confidence = compute_forced_logits(config, proposal.tokens_BxG)
  top2 = np.sort(logits, axis=-1)[..., -2:]
  assert (top2[..., 1] - top2[..., 0] > 1e-3).all()  # no tie that rounding could turn
  np.testing.assert_array_equal(proposal.tokens_BxG, logits.argmax(-1))
  is_point = np.isfinite(proposal.draft_logits_BxGxV)
  np.testing.assert_array_equal(is_point, np.eye(37, dtype=bool)[proposal.tokens_BxG])
  np.testing.assert_allclose(proposal.confidence_logits_BxG, confidence, atol=1e-4, rtol=1e-4)
  np.testing.assert_allclose(proposal.confidence_BxG, 1 / (1 + np.exp(-confidence)), atol=1e-4)
  assert proposal.tokens_BxG.dtype == jnp.int32 and proposal.draft_logits_BxGxV.dtype == jnp.float32


def test_draft_law_and_draft_noise_are_the_contracts():
  """Law = softmax of the filtered logits; noise keyed (seed, anchor position, slot)."""
  config = make_config()
  proposal = propose(config, temperature=0.7, top_k=5)
  logits, _ = compute_forced_logits(config, proposal.tokens_BxG)
  law = np.asarray(jax.nn.softmax(proposal.draft_logits_BxGxV))
  want = np.exp((logits - logits.max(-1, keepdims=True)) / 0.7)
  want[logits < np.sort(logits)[..., -5:-4]] = 0
  np.testing.assert_allclose(law, want / want.sum(-1, keepdims=True), atol=1e-4)
  for k in range(config.proposal_len):
    words = counter_rng.noise_words(jnp.array([7, 8, 9]), counter_rng.DRAFT,
                                    jnp.asarray(POSITIONS), jnp.full(3, k))
    noise = counter_rng.gumbel(words, np.arange(37))
    scores = np.asarray(proposal.draft_logits_BxGxV[:, k] + noise)
    np.testing.assert_array_equal(proposal.tokens_BxG[:, k], scores.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_walk_is_the_walk(kind):
  """What a TPU runs, with the family's reference in the kernel's place; filters: one walk alone."""
  config = make_config(markov_head_type=kind, draft_vocab_size=len(DRAFT_IDS))
  params, proposer = make_params(config), dspark.DSparkProposer(config, vocab_limit=33)
  rng = np.random.default_rng(3)
  hidden = jnp.asarray(rng.normal(size=(3, 3, 12)), jnp.float32)
  base = jnp.asarray(rng.normal(size=(3, 3, len(DRAFT_IDS))), jnp.float32)
  words = counter_rng.noise_words(jnp.arange(3)[None], counter_rng.DRAFT, 0, jnp.arange(3)[:, None])
  walks = [jax.jit(lambda p, f=f: f(params, hidden, base, words, jnp.asarray(ANCHORS), p,
                                    jnp.asarray(DRAFT_IDS)))
           for f in (proposer._walk, functools.partial(
               proposer._walk_tempered, implementation="reference"))]
  for filters in ({}, {"top_k": [3, 0, 0]}):
    law = sampling.make_sampling_params(3, temperature=[0.7, 0.0, 1.5], **filters)
    expected, found = (walk(law) for walk in walks)
    np.testing.assert_array_equal(found[0], expected[0])
    # One linear map of at most 22 products, split in two, through exp of a few units.
    for a, b in zip(found[1:], expected[1:]):
      np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_request_does_not_depend_on_its_neighbours():
  config = make_config(markov_head_type="rnn")
  together = propose(config, temperature=[0.0, 0.9, 1.3])
  for b in range(3):
    alone = propose(config, temperature=[0.0, 0.9, 1.3], rows=slice(b, b + 1))
    np.testing.assert_array_equal(alone.tokens_BxG[0], together.tokens_BxG[b])
    np.testing.assert_allclose(alone.confidence_logits_BxG[0], together.confidence_logits_BxG[b],
                               atol=1e-5, rtol=1e-5)


def test_reduced_vocabulary_drafts_target_ids():
  full, reduced = make_config(), make_config(draft_vocab_size=len(DRAFT_IDS))
  params = make_params(full)
  head = params["markov_head"]
  params = params | {"markov_head": head | {"markov_w2": head["markov_w2"][DRAFT_IDS]}}
  proposer = dspark.DSparkProposer(reduced)
  borrowed = make_borrowed(reduced, jnp.asarray(DRAFT_IDS))
  assert borrowed["lm_head_VdxD"].shape == (10, 12)
  state = proposer.prefill(params, proposer.init_state(3, 16), make_features(full, 3, 10),
                           jnp.asarray(POSITIONS))
  sampling_params = sampling.make_sampling_params(3, temperature=[0.0, 0.8, 0.8], seed=[7, 8, 9])
  proposal = jax.jit(functools.partial(proposer.propose, params))(
      state, jnp.asarray(ANCHORS), jnp.asarray(POSITIONS), sampling_params, **borrowed)
  assert proposal.draft_logits_BxGxV.shape == (3, 3, 10)
  assert np.isin(proposal.tokens_BxG, DRAFT_IDS).all()
  # W1 is indexed by target ids: the logits are the full drafter's, at the kept columns.
  logits, _ = compute_forced_logits(full, proposal.tokens_BxG)
  law = np.asarray(jax.nn.softmax(proposal.draft_logits_BxGxV[1:]))
  np.testing.assert_allclose(law, jax.nn.softmax(logits[1:][..., DRAFT_IDS] / 0.8), atol=1e-4)
  best = DRAFT_IDS[logits[0][:, DRAFT_IDS].argmax(-1)]
  np.testing.assert_array_equal(proposal.tokens_BxG[0], best)


def test_padded_vocabulary_rows_are_never_drafted():
  """Fault B32: a head of 37 rows, 30 of them decodable, the others with the largest logits."""
  config = make_config(markov_rank=0, enable_confidence_head=False)
  borrowed = make_borrowed(config)
  borrowed["lm_head_VdxD"] = borrowed["lm_head_VdxD"].at[30:].multiply(20.0)
  temperature = [0.0, 1.0, 1.0]
  free = propose(config, borrowed=borrowed, temperature=temperature)
  assert (free.tokens_BxG >= 30).all()  # the trap is set
  cut = propose(config, borrowed=borrowed, temperature=temperature, vocab_limit=30)
  assert (cut.tokens_BxG < 30).all() and np.isneginf(cut.draft_logits_BxGxV[..., 30:]).all()
  # What is left is renormalised: the softmax of the first 30 columns of the unlimited law.
  law = jax.nn.softmax(cut.draft_logits_BxGxV[1:, 0, :30])
  want = jax.nn.softmax(free.draft_logits_BxGxV[1:, 0, :30])
  np.testing.assert_allclose(law, want, atol=1e-5)


def test_observe_continues_the_context_wherever_rows_were_rejected():
  """Fault B23: anchor 4 over context 0..3, then anchor 6 over 0..5, dead rows overwritten."""
  config = make_config()
  params, proposer = make_params(config), dspark.DSparkProposer(config)
  features = make_features(config, 3, 10)
  lens = jnp.full(3, 4)
  state = proposer.prefill(params, proposer.init_state(3, 12), features[:, :6], lens)
  wrong = state  # 6 rows written, rows 4 and 5 from padding
  junk = jnp.full_like(features[:, :3], 5.0)
  state = proposer.observe(params, state, jnp.concatenate([features[:, 4:6], junk], 1), lens)
  whole = proposer.prefill(params, proposer.init_state(3, 12), features, lens)
  block = dspark.embed_block(config, make_borrowed(config)["embed_VxD"], jnp.asarray(ANCHORS))
  slots = jnp.arange(config.num_slots)[None]
  run = jax.jit(lambda state, anchors: apply(
      config, params, "draft_hidden", block, anchors[:, None] + slots, state, anchors))
  for have in (state, wrong):
    np.testing.assert_array_equal(run(have, lens), run(whole, lens))
  after = run(state, lens + 2)
  np.testing.assert_allclose(after, run(whole, lens + 2), atol=1e-5, rtol=1e-5)
  assert np.abs(after - run(state, lens)).max() > 1e-2


def test_whole_block_is_drafted_whatever_is_verified():
  """Fault B30: `propose` has no length to give; a prefix of its block is what gets verified."""
  proposal = propose(make_config())
  assert proposal.tokens_BxG.shape == (3, 3)


def test_missing_confidence_head_means_certain():
  proposal = propose(make_config(markov_rank=0, enable_confidence_head=False))
  np.testing.assert_array_equal(proposal.confidence_BxG, np.ones((3, 3)))


def test_mismatches_are_named():
  config = make_config()
  borrowed = make_borrowed(config)
  with pytest.raises(ValueError, match="^lm_head_VdxD: found shape .*expected"):
    propose(config, borrowed=borrowed | {"lm_head_VdxD": borrowed["lm_head_VdxD"][:36]})
  with pytest.raises(ValueError, match="^embed_VxD: found shape .*expected"):
    propose(config, borrowed=borrowed | {"embed_VxD": borrowed["embed_VxD"][:36]})
  with pytest.raises(ValueError, match="^draft_ids: found shape .*expected None"):
    propose(config, borrowed=borrowed | {"draft_ids": jnp.arange(37)})
  with pytest.raises(ValueError, match="^draft_ids: found none .*draft_vocab_size 10"):
    make_borrowed(make_config(draft_vocab_size=10))
  proposer, params = dspark.DSparkProposer(config), make_params(config)
  with pytest.raises(ValueError, match="^features: found width 35, expected 36"):
    proposer.prefill(params, proposer.init_state(1, 8), jnp.zeros((1, 4, 35)), jnp.zeros(1, int))
  with pytest.raises(ValueError, match="^features: found 9 rows, expected at most"):
    proposer.prefill(params, proposer.init_state(1, 8), jnp.zeros((1, 9, 36)), jnp.zeros(1, int))
