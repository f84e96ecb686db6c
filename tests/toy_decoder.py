"""A toy speculative decoder put together from our own functions, and its exact target law.

`law_logits` and `sample` draw the drafts, a confidence threshold cuts them, `accept` decides.
Target, drafter and confidence are arbitrary tables over the last two tokens. Tests plant faults by
passing their own draft, schedule or accept function.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.sampling import law_logits, make_sampling_params, sample
from dspark_jax.verification.accept import accept
from pallas_kernels.counter_rng import DRAFT, noise_words
from tests import oracles

NUM_DRAWS = 2**17
NUM_TOKENS = 3
START_POSITION = 5  # of the anchor; tokens 0, 0 come before the first drawn token


def draw_draft(law_BxD, words_Bx2, ids):
  """Honest draft: returns the tokens and the law they were drawn from."""
  return sample(law_BxD, words_Bx2, ids=ids), law_BxD


def schedule_by_threshold(confidence_BxG, tokens_BxG, threshold):
  """Honest schedule: stops at the first draft whose confidence is below the threshold."""
  del tokens_BxG
  return jnp.sum(jnp.cumprod(confidence_BxG >= threshold, axis=1), axis=1)


def decode_toy(
  tables, params, threshold, *, draw_fn=draw_draft, schedule_fn=schedule_by_threshold,
  accept_fn=accept, scheduler=None,
):  # fmt: skip
  """Returns the first three tokens of every request, int32 [B, 3].

  `scheduler` takes the place of `schedule_fn` where rounds leave something behind: its
  `init(batch, num_drafts)` makes a memory, `choose(memory, confidence, tokens)` returns verify
  lengths, `learn(memory, confidence, lens, num_accepted)` the next memory.
  """
  batch, num_drafts = len(params.seed), tables["confidence"].shape[0]
  ids = tables["ids"]

  def run_round(_, state):
    tokens_BxN, count_B, before_B, anchor_B, memory = state
    position_B = START_POSITION + count_B

    def draft_slot(context, slot):
      law_BxD = law_logits(tables["draft"][context], params, ids=ids)
      words_Bx2 = noise_words(params.seed, DRAFT, position_B, slot)
      token_B, law_BxD = draw_fn(law_BxD, words_Bx2, ids)
      confidence_B = tables["confidence"][slot][context]
      return (context[1], token_B), (token_B, law_BxD, confidence_B)

    _, drafts = jax.lax.scan(draft_slot, (before_B, anchor_B), jnp.arange(num_drafts))
    tokens_BxG, laws_BxGxD, confidence_BxG = (jnp.moveaxis(a, 0, 1) for a in drafts)
    context_BxN = jnp.concatenate([before_B[:, None], anchor_B[:, None], tokens_BxG], axis=1)
    target_BxWxV = tables["target"][context_BxN[:, :-1], context_BxN[:, 1:]]
    if scheduler is None:
      verify_lens_B = schedule_fn(confidence_BxG, tokens_BxG, threshold)
    else:
      verify_lens_B = scheduler.choose(memory, confidence_BxG, tokens_BxG)
    verdict = accept_fn(
      target_BxWxV,
      tokens_BxG,
      draft_logits_BxGxD=laws_BxGxD,
      verify_lens_B=verify_lens_B,
      params=params,
      anchor_positions_B=position_B,
      draft_ids=ids,
    )
    num_accepted_B, next_B, is_valid_B = jax.tree.leaves(verdict)
    next_B = jnp.where(is_valid_B, next_B, -1)  # would leave a hole that the counts show
    committed_BxW = jnp.concatenate([tokens_BxG, next_B[:, None]], axis=1)
    is_next_BxW = jnp.arange(num_drafts + 1)[None] == num_accepted_B[:, None]
    committed_BxW = jnp.where(is_next_BxW, next_B[:, None], committed_BxW)
    # Token i of the answer is committed token i - count, if that exists in this round.
    offset_BxN = jnp.arange(NUM_TOKENS)[None] - count_B[:, None]
    is_new_BxN = (offset_BxN >= 0) & (offset_BxN <= num_accepted_B[:, None])
    new_BxN = jnp.take_along_axis(committed_BxW, jnp.clip(offset_BxN, 0, num_drafts), axis=1)
    tokens_BxN = jnp.where(is_new_BxN, new_BxN, tokens_BxN)
    last_B = jnp.take_along_axis(context_BxN[:, 1:], num_accepted_B[:, None], axis=1)[:, 0]
    if scheduler is not None:
      memory = scheduler.learn(memory, confidence_BxG, verify_lens_B, num_accepted_B)
    return tokens_BxN, count_B + num_accepted_B + 1, last_B, next_B, memory

  zeros_B = jnp.zeros(batch, jnp.int32)
  state = (jnp.full((batch, NUM_TOKENS), -1), zeros_B, zeros_B, zeros_B,
           None if scheduler is None else scheduler.init(batch, num_drafts))
  return jax.lax.fori_loop(0, NUM_TOKENS, run_round, state)[0]


@functools.cache
def compile_toy(**plants):
  return jax.jit(functools.partial(decode_toy, **dict(plants)))


def make_tables(vocab, num_drafts, *, draft_ids=None, seed=0):
  """Returns random tables: target and draft logits [V, V, V or D], confidence [G, V, V]."""
  rng = np.random.default_rng(seed)
  draft_vocab = vocab if draft_ids is None else len(draft_ids)
  return {
    "target": jnp.asarray(rng.normal(0, 0.9, (vocab,) * 3), jnp.float32),
    "draft": jnp.asarray(rng.normal(0, 0.9, (vocab, vocab, draft_vocab)), jnp.float32),
    "confidence": jnp.asarray(rng.uniform(0, 1, (num_drafts, vocab, vocab)), jnp.float32),
    "ids": None if draft_ids is None else jnp.asarray(draft_ids, jnp.int32),
  }


def count_sequences(tables, threshold, *, num_draws=NUM_DRAWS, plants=None, **fields):
  """Returns counts [V, V, V] of the first three tokens over `num_draws` seeds."""
  vocab = tables["target"].shape[-1]
  params = make_sampling_params(num_draws, seed=np.arange(num_draws), **fields)
  tokens = np.asarray(compile_toy(**(plants or {}))(tables, params, threshold))
  assert tokens.min() >= 0 and tokens.max() < vocab
  flat = np.ravel_multi_index(tokens.T, (vocab,) * NUM_TOKENS)
  return np.bincount(flat, minlength=vocab**NUM_TOKENS).reshape((vocab,) * NUM_TOKENS)


def compute_target_law(tables, **fields):
  """Returns the exact law of the first three tokens, from the oracle."""
  logits = np.asarray(tables["target"])

  @functools.cache
  def law(before, anchor):
    return oracles.compute_law(logits[before, anchor], **fields)

  return oracles.compute_sequence_law(
    lambda prefix: law(*(0, 0, *prefix)[-2:]), NUM_TOKENS, logits.shape[-1]
  )


def compute_p_value(tables, threshold, *, plants=None, **fields):
  law = compute_target_law(tables, **fields)
  assert (law * NUM_DRAWS >= 5).sum() >= 3, "a law with hardly any choice tests nothing"
  counts = count_sequences(tables, threshold, plants=plants, **fields)
  return oracles.compute_p_value(counts, law)
