"""Whole generations: where they end, whom they depend on, and the errors at the door."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import loop
from dspark_jax.decode.state import PAD, Frame
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler.policies import ConfidenceThreshold, FixedLength
from tests.decode import cases
from tests.decode.cases import ALL_ROUNDS, BATCH, PROMPTS, ScriptedProposer, decode

G = 7


@functools.lru_cache
def scripted_frame():
  return Frame(cases.make_target()[0], ScriptedProposer(G), ConfidenceThreshold(0.5))


def new_tokens(tokens, prompts=PROMPTS):
  return [t[len(p):] for t, p in zip(tokens, prompts)]


def plain(num_new: int):
  """Plain greedy decoding of PROMPTS, that many new tokens, as lists with the prompts."""
  return [t[:len(p) + num_new] for t, p in zip(cases.plain_tokens(), PROMPTS)]


# --- speculative greedy decoding is plain greedy decoding (fault B15) ---------------------------


@pytest.mark.parametrize("right, sure", [
    (99, [1, 2, 3, 4, 5, 6]), (99, 7), (0, 7), ([0, 1, 2, 3, 4, 5], 7), (2, [7, 6, 5, 4, 3, 2])])
def test_b15_every_verify_and_accept_length(right, sure):
  """Verify lengths 1..7, drafts right up to 0..7, float32: the tokens of plain decoding."""
  params = cases.scripted_params(cases.plain_tokens(), right=right, sure=sure)
  tokens, state = decode(scripted_frame(), params)
  assert tokens == plain(20) and bool(state.is_valid_B.all())
  per_round = np.minimum(np.minimum(right, sure), G) + 1
  np.testing.assert_array_equal(state.stats.num_rounds_B, -(-19 // per_round) * np.ones(BATCH))
  np.testing.assert_array_equal(state.stats.num_committed_B, 19)


def test_b15_changing_acceptance():
  """A new number of right drafts at every position."""
  right = np.random.default_rng(3).integers(0, G + 1, (BATCH, 256))
  sure = np.random.default_rng(4).integers(0, G + 1, (BATCH, 256))
  params = cases.scripted_params(cases.plain_tokens(), right=right, sure=sure)
  assert decode(scripted_frame(), params)[0] == plain(20)


@pytest.mark.parametrize("policy", [FixedLength(0), FixedLength(2)])
def test_policies_that_verify_fewer_rows(policy):
  """The pass is narrower, the greedy tokens are the same; length 0 is plain decoding."""
  frame, params = scripted_frame(), cases.scripted_params(cases.plain_tokens())
  state = loop.start(frame, params, PROMPTS, max_new_tokens=20,
                     sampling=make_sampling_params(BATCH))
  narrow = Frame(frame.target, frame.drafter, policy)
  state = loop.run_rounds(narrow, params, state, ALL_ROUNDS)
  assert cases.tokens_of(state) == plain(20)
  rounds = -(-19 // (policy.length + 1))
  np.testing.assert_array_equal(state.stats.num_rounds_B, rounds)
  assert not state.stats.verified_BxG[:, policy.length:].any()


def test_dspark_equals_plain_and_gets_drafts_accepted():
  frame, params = cases.make_pair()
  tokens, state = decode(frame, params)
  assert tokens == plain(20)
  stats = state.stats
  assert 8 <= int(stats.accepted_BxG.sum()) < int(stats.verified_BxG.sum())  # neither all nor none
  np.testing.assert_array_equal(stats.num_committed_B, 19)
  np.testing.assert_array_equal(
      stats.num_committed_B, stats.num_rounds_B + stats.accepted_BxG.sum(axis=1))


# --- where a generation ends -------------------------------------------------------------------


@pytest.mark.smoke
def test_b16_a_stop_id_at_every_slot():
  """One prompt six times; request i stops at its i-th new token: i = 0 is the prefill's, 1..5 are
  slots of the first block. Nothing follows, and nobody else is disturbed."""
  prompt, whole = PROMPTS[5], plain(20)[5]
  answer = whole[len(prompt):]
  assert len(set(answer[:6])) == 6
  params = cases.scripted_params([whole] * BATCH)
  tokens, state = decode(scripted_frame(), params, [prompt] * BATCH,
                         stop_ids=[[answer[i]] for i in range(BATCH)])
  assert new_tokens(tokens, [prompt] * BATCH) == [answer[:i + 1] for i in range(BATCH)]
  np.testing.assert_array_equal(state.stats.num_rounds_B, [0, 1, 1, 1, 1, 1])
  np.testing.assert_array_equal(state.stats.num_committed_B, np.arange(BATCH))
  # Only two of six rows end, the rest go on to the limit.
  stop_ids = [[answer[2]], [], [], [39, answer[4]], [], [VOCAB_UNUSED]]
  tokens, _ = decode(scripted_frame(), params, [prompt] * BATCH, stop_ids=stop_ids)
  assert new_tokens(tokens, [prompt] * BATCH) == [answer[:3], answer, answer, answer[:1], answer,
                                                  answer]


VOCAB_UNUSED = 40  # not among the 20 tokens above


def test_b16_a_stop_id_in_the_prompt_stops_nothing():
  params = cases.scripted_params(cases.plain_tokens())
  stop_ids = [p[:1] if p[0] not in t[1:] else [] for p, t in zip(PROMPTS, plain(20))]
  assert sum(map(len, stop_ids)) >= 2
  assert decode(scripted_frame(), params, stop_ids=stop_ids)[0] == plain(20)


def test_b19_max_new_tokens_to_the_token():
  """Everything accepted, so that rounds commit 8: 1, 2, 8, 9, 10 and 17 new tokens are cut in
  different places of a block."""
  counts = [1, 2, 8, 9, 10, 17]
  params = cases.scripted_params(cases.plain_tokens())
  tokens, state = decode(scripted_frame(), params, max_new_tokens=counts)
  assert tokens == [t[:len(p) + n] for t, p, n in zip(cases.plain_tokens(), PROMPTS, counts)]
  np.testing.assert_array_equal(state.stats.num_committed_B, np.array(counts) - 1)
  # No draft is verified that could not be committed besides the next anchor.
  np.testing.assert_array_equal(state.stats.verified_BxG.sum(axis=1), [0, 0, 6, 7, 7, 14])


def test_b24_the_cache_ends_inside_a_block():
  """Cache of 16: prompts of 13, 14 and 15 tokens leave 3, 2 and 1 new ones, whatever is asked for;
  after the first token, drafts are capped at 16 - committed - 1."""
  whole = cases.plain_tokens()[4]
  prompts = [whole[:n] for n in (13, 14, 15, 13, 14, 7)]
  params = cases.scripted_params([whole] * BATCH)
  tokens, state = decode(scripted_frame(), params, prompts, max_new_tokens=40, max_slots=16)
  assert tokens == [whole[:16]] * BATCH
  np.testing.assert_array_equal(state.stats.verified_BxG.sum(axis=1), [1, 0, 0, 1, 0, 7])
  for n in (16, 17):
    with pytest.raises(ValueError, match=f"prompt: found {n} tokens, expected at most 15"):
      loop.start(scripted_frame(), params, [whole[:n]], max_new_tokens=1,
                 sampling=make_sampling_params(1), max_slots=16)


def test_the_targets_own_limit_is_a_limit():
  whole = cases.plain_tokens()[4]
  limit = cases.make_target()[0].max_position_embeddings
  with pytest.raises(ValueError, match=f"found {limit} tokens, expected at most {limit - 1}"):
    loop.start(scripted_frame(), {}, [(whole * 10)[:limit]], max_new_tokens=1,
               sampling=make_sampling_params(1))


def test_a_batch_that_is_done_runs_no_round():
  params = cases.scripted_params(cases.plain_tokens())
  tokens, state = decode(scripted_frame(), params, max_new_tokens=1)
  assert tokens == plain(1) and not state.stats.num_rounds_B.any()


# --- a request depends on itself only (faults B14, B21, B25, B27) -------------------------------

MIXED = dict(
    temperature=[0.0, 1.0, 0.7, 1.3, 0.9, 1.0], top_k=[0, 0, 5, 0, 12, 0],
    top_p=[1.0, 1.0, 1.0, 0.8, 0.9, 1.0], min_p=[0.0, 0.0, 0.0, 0.0, 0.05, 0.1],
    seed=[0, 7, 7, 123, 2**32 - 1, 5])
MIXED_STOPS = [[], [7], [2, 24], [39], [], [16]]
MIXED_COUNTS = [20, 20, 13, 20, 1, 7]


@functools.lru_cache
def mixed_state():
  """The six different requests in one batch, decoded to the end."""
  frame, params = cases.make_pair()
  state = loop.start(frame, params, PROMPTS, max_new_tokens=MIXED_COUNTS, stop_ids=MIXED_STOPS,
                     sampling=make_sampling_params(BATCH, **MIXED))
  return loop.run_rounds(frame, params, state, ALL_ROUNDS)


def assert_same_requests(found, expected, rows=slice(None)):
  """Tokens and counts of `found` are those of the rows of `expected`."""
  assert cases.tokens_of(found) == cases.tokens_of(expected)[rows]
  for a, b in zip(jax.tree.leaves(found.stats), jax.tree.leaves(expected.stats)):
    np.testing.assert_array_equal(a, b[rows])
  np.testing.assert_array_equal(found.is_valid_B, expected.is_valid_B[rows])


@pytest.mark.smoke
def test_each_request_alone_and_in_a_mixed_batch():
  frame, params = cases.make_pair()
  expected = mixed_state()
  lens = [len(t) for t in new_tokens(cases.tokens_of(expected))]
  assert all(n <= limit for n, limit in zip(lens, MIXED_COUNTS))
  assert lens[4] == 1 and lens[0] == 20 and min(lens[1:4]) < 13  # limits and stop ids both end some
  assert len({tuple(t[:5]) for t in new_tokens(cases.tokens_of(expected))}) == BATCH
  for i, prompt in enumerate(PROMPTS):
    _, state = decode(frame, params, [prompt], max_new_tokens=MIXED_COUNTS[i],
                      stop_ids=MIXED_STOPS[i], **{k: v[i] for k, v in MIXED.items()})
    assert_same_requests(state, expected, slice(i, i + 1))


def test_the_order_of_the_batch_does_not_matter():
  frame, params = cases.make_pair()
  order = [3, 0, 5, 1, 4, 2]
  pick = lambda xs: [xs[i] for i in order]
  state = loop.start(frame, params, pick(PROMPTS), max_new_tokens=pick(MIXED_COUNTS),
                     stop_ids=pick(MIXED_STOPS),
                     sampling=make_sampling_params(BATCH, **{k: pick(v) for k, v in MIXED.items()}))
  state = loop.run_rounds(frame, params, state, ALL_ROUNDS)
  assert cases.tokens_of(state) == pick(cases.tokens_of(mixed_state()))
  np.testing.assert_array_equal(state.stats.num_rounds_B,
                                np.asarray(mixed_state().stats.num_rounds_B)[order])


@pytest.mark.parametrize("chunk", [1, 3])
def test_b14_resumed_in_chunks(chunk):
  """Stopping after some rounds and going on changes nothing, as streaming does."""
  frame, params = cases.make_pair()
  state = loop.start(frame, params, PROMPTS, max_new_tokens=MIXED_COUNTS, stop_ids=MIXED_STOPS,
                     sampling=make_sampling_params(BATCH, **MIXED))
  num_calls, seen = 0, cases.tokens_of(state)
  while not bool(state.is_done_B.all()):
    state = loop.run_rounds(frame, params, state, jnp.int32(chunk))
    num_calls += 1
    now = cases.tokens_of(state)
    assert all(b[:len(a)] == a for a, b in zip(seen, now))  # a stream only ever grows
    seen = now
  assert_same_requests(state, mixed_state())
  assert num_calls == -(-int(mixed_state().stats.num_rounds_B.max()) // chunk)


def test_b27_right_padding():
  """Prompts padded to 16 and not to 64, with junk: the same requests."""
  frame, params = cases.make_pair()
  padded = np.random.default_rng(0).integers(0, cases.VOCAB, (BATCH, 16))
  for row, prompt in zip(padded, PROMPTS):
    row[:len(prompt)] = prompt
  lens = np.array([len(p) for p in PROMPTS])
  state = loop.prefill(
      frame, params, jnp.asarray(padded), jnp.asarray(lens),
      limits_B=jnp.asarray(lens + MIXED_COUNTS), sampling=make_sampling_params(BATCH, **MIXED),
      stop_ids_BxE=loop.pad_stop_ids(MIXED_STOPS, BATCH), num_slots=128)
  assert_same_requests(loop.run_rounds(frame, params, state, ALL_ROUNDS), mixed_state())


def test_b14_seeds():
  """The same seed gives the same tokens again, another seed others; greedy rows ignore it."""
  frame, params = cases.make_pair()
  run = lambda seed: decode(frame, params, [PROMPTS[1]] * BATCH, seed=seed,
                            temperature=[1.0, 1.0, 1.0, 1.0, 0.0, 0.0])[0]
  first = run([7, 7, 8, 9, 1, 2])
  assert first == run([7, 7, 8, 9, 3, 4])
  assert first[0] == first[1] and first[4] == first[5] == plain(20)[1]
  assert len({tuple(t) for t in first}) == 4


def test_caches_after_a_generation_are_those_of_a_prefill():
  """Keys and values of target and drafter: rows before each anchor (faults B20, B23)."""
  frame, params = cases.make_pair()
  state = mixed_state()
  tokens = cases.tokens_of(state)
  fresh = loop.start(frame, params, tokens, max_new_tokens=1, sampling=make_sampling_params(BATCH))
  for name in ("cache", "drafter"):
    found, expected = (jax.tree.leaves(getattr(s, name)) for s in (state, fresh))
    assert len(found) == len(expected) >= 2
    for f, e in zip(found, expected):
      for b, row in enumerate(tokens):
        # float32 keys and values through 2 layers, as in the target's own test.
        np.testing.assert_allclose(f[b, :, :len(row) - 1], e[b, :, :len(row) - 1], rtol=0,
                                   atol=5e-5)


# --- errors at the door ------------------------------------------------------------------------


@pytest.mark.parametrize("prompts, kwargs, message", [
    ([], {}, "prompts: found none"),
    ([[]], {}, "^prompt: found no tokens"),
    ([[1], []], {}, "^prompt 1: found no tokens"),
    ([[1, 41]], {}, r"found token ids outside \[0, 41\)"),
    ([[-1]], {}, r"found token ids outside \[0, 41\)"),  # fault B26: no placeholder is embedded
    ([[1]], dict(max_new_tokens=0), "max_new_tokens: found 0, expected an integer >= 1"),
    ([[1], [1]], dict(max_new_tokens=[3, -1]), "max_new_tokens: found -1"),
    ([[1], [1]], dict(max_new_tokens=[3]), r"max_new_tokens: found \[3\], expected one int"),
    ([[1]], dict(max_new_tokens=2.5), "max_new_tokens: found 2.5, expected one integer"),
    ([[1], [1]], dict(stop_ids=[[2]]), "stop_ids: found 1 lists, expected one for all or 2"),
    ([[1] * 300], {}, "found 300 tokens, expected at most 255"),
])
def test_bad_requests_are_named(prompts, kwargs, message):
  kwargs = dict(max_new_tokens=4, stop_ids=()) | kwargs
  with pytest.raises(ValueError, match=message) as error:
    loop.start(scripted_frame(), {}, prompts, sampling=make_sampling_params(max(len(prompts), 1)),
               **kwargs)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("stop_ids, expected", [
    ((), [[], []]), ([], [[], []]), ([3], [[3], [3]]), ((3, 4), [[3, 4], [3, 4]]),
    ([[], [5]], [[], [5]]), ([[1, 2], (3,)], [[1, 2], [3]]), (np.array([3]), [[3], [3]]),
    ([5, 4, 3, 2, 1], [[5, 4, 3, 2, 1]] * 2)])
def test_stop_ids_for_all_or_for_each(stop_ids, expected):
  """Padded to a multiple of 4, so that one program serves most lists."""
  width = 8 if len(expected[0]) > 4 else 4
  np.testing.assert_array_equal(loop.pad_stop_ids(stop_ids, 2),
                                [row + [PAD] * (width - len(row)) for row in expected])
