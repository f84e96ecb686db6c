"""The copy head: which token it finds, and that training and serving see the same."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import sampling
from dspark_jax.drafter import copy_head, dspark
from tests.drafter import cases


def find_slowly(tokens, position, max_ngram):
  """Longest match first, most recent first, by plain loops."""
  for n in range(max_ngram, 0, -1):
    if n > position:
      continue
    for j in range(position - 1, n - 1, -1):
      if tokens[j - n:j] == tokens[position - n:position]:
        return tokens[j], n
  return 0, 0


def test_hand_worked():
  tokens = jnp.array([5, 6, 7, 5, 6, 9, 5, 6, -1, -1])
  # Before position 8 stand (5, 6): last followed by 9, earlier by 7; the recent one wins.
  found = copy_head.find_copy(tokens, jnp.int32(8), 4)
  assert (int(found.token), int(found.level)) == (9, 2)
  # Before position 5 stand (5, 6), as at the start: 7.
  found = copy_head.find_copy(tokens, jnp.int32(5), 4)
  assert (int(found.token), int(found.level)) == (7, 2)
  # Position 2 has seen 6 nowhere before, positions 0 and 1 nothing at all.
  for position in (0, 1, 2):
    assert int(copy_head.find_copy(tokens, jnp.int32(position), 4).level) == 0


def test_a_longer_match_beats_a_recent_one():
  tokens = jnp.array([1, 2, 3, 8, 4, 3, 9, 1, 2, 3])
  found = copy_head.find_copy(tokens, jnp.int32(10), 4)  # (1, 2, 3) -> 8; (3) -> 9 is nearer
  assert (int(found.token), int(found.level)) == (8, 3)


def test_equals_plain_loops():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 4, (3, 40))
  found = copy_head.find_copies(jnp.asarray(tokens), 3)
  for b in range(3):
    for p in range(40):
      expected = find_slowly(tokens[b].tolist(), p, 3)
      assert (int(found.token[b, p]), int(found.level[b, p])) == expected, (b, p)


def test_ignores_what_comes_later():
  tokens = jnp.array([1, 2, 1, 2, 1, 2, 3, 3])
  for position in range(6):
    garbage = jnp.where(jnp.arange(8) >= position, 99, tokens)
    for a, b in zip(jax.tree.leaves(copy_head.find_copy(tokens, jnp.int32(position), 3)),
                    jax.tree.leaves(copy_head.find_copy(garbage, jnp.int32(position), 3))):
      assert int(a) == int(b)


def propose(config, params, tokens, *, length):
  """Greedy drafts after the first `length` tokens, with an empty context."""
  proposer = dspark.DSparkProposer(config)
  state = proposer.init_state(1, 32)
  embed = jax.random.normal(jax.random.key(1), (config.vocab_size, config.hidden_size))
  draft_ids = None
  if config.draft_vocab_size is not None:
    draft_ids = jnp.arange(config.draft_vocab_size, dtype=jnp.int32)
  buffer = jnp.full((1, 32), -1, jnp.int32).at[0, :length].set(jnp.asarray(tokens[:length]))
  return proposer.propose(
      params, state, buffer[:, length - 1], jnp.array([length - 1]),
      sampling.make_sampling_params(1), tokens_BxS=buffer,
      **dspark.borrow(config, embed, embed, draft_ids=draft_ids))


def test_a_strong_copy_head_continues_a_repetition():
  config = cases.make_config(copy_ngram=3)
  params = dict(dspark.init_params(config, jax.random.key(0)))
  G = config.proposal_len
  tokens = [3, 1, 4, 2] * 6
  params["copy_head"] = {**params["copy_head"], "gate_bias": jnp.full(3, 100.0),
                         "confidence": jnp.full(4, 50.0)}
  proposal = propose(config, params, tokens, length=10)
  # Drafted tokens are copied from in their turn, or the repetition could not go on.
  assert proposal.tokens_BxG[0].tolist() == tokens[10:10 + G]
  assert bool(jnp.all(proposal.confidence_BxG > 0.99))
  params["copy_head"] = {**params["copy_head"], "gate_bias": jnp.full(3, -100.0)}
  proposal = propose(config, params, tokens, length=10)
  assert int(proposal.tokens_BxG[0, 0]) != tokens[10]


def test_a_copy_outside_the_draft_vocabulary_is_ignored():
  config = cases.make_config(copy_ngram=3, draft_vocab_size=6)
  params = dict(dspark.init_params(config, jax.random.key(0)))
  tokens = [3, 11, 4, 12] * 6  # 11 and 12 are not drafted
  params["copy_head"] = {**params["copy_head"], "gate_bias": jnp.full(3, 100.0)}
  drafts = propose(config, params, tokens, length=9).tokens_BxG[0]
  assert bool(jnp.all(drafts < 6))
