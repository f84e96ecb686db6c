"""One round of speculative decoding: propose, schedule, verify, accept, commit.

This file is the table of contents of the project (paper figure 1). `speculate_step` is one pure
function of arrays; nothing leaves the device between the five calls, nor between rounds.
Plain decoding is the same round with a proposal of length 0.
"""

import jax
import jax.numpy as jnp

from dspark_jax.decode.state import DecodeState, Frame, RoundStats
from dspark_jax.scheduler import policies
from dspark_jax.types import Proposal
from dspark_jax.verification import accept as accept_lib
from dspark_jax.verification import commit as commit_lib
from dspark_jax.verification import verify as verify_lib


def speculate_step(frame: Frame, params, state: DecodeState) -> DecodeState:
  """Runs one round for every request of the batch that is not done.

  Args:
    frame: static frame.
    params: dict of `target` and, with a drafter, `drafter` (its parameters) and `borrowed`
      (what the drafter borrows from the target: see `drafter.dspark.borrow`).
    state: DecodeState; donate it.
  """
  anchor_positions_B = state.lens_B - 1
  anchor_B = jnp.take_along_axis(state.tokens_BxS, anchor_positions_B[:, None], axis=1)[:, 0]

  proposal = propose(frame, params, state, anchor_B, anchor_positions_B)
  verify_lens_B = schedule(frame, state, proposal)
  width = policies.max_verify_len(frame.policy, frame.proposal_len)
  target_out, logits_BxWxV = verify_lib.verify(
      frame.target, params["target"], state.cache, anchor_B, proposal.tokens_BxG[:, :width],
      cache_lens_B=anchor_positions_B, tap_layer_ids=frame.tap_layer_ids, dtype=frame.dtype)
  verdict = accept_lib.accept(
      logits_BxWxV, proposal.tokens_BxG, draft_logits_BxGxD=proposal.draft_logits_BxGxV,
      verify_lens_B=verify_lens_B, params=state.sampling, anchor_positions_B=anchor_positions_B,
      draft_ids=params.get("borrowed", {}).get("draft_ids"), vocab_limit=frame.vocab_limit,
      rule=frame.accept_rule)
  return commit(frame, params, state, proposal, verify_lens_B, target_out, verdict)


def propose(frame: Frame, params, state: DecodeState, anchor_B, anchor_positions_B) -> Proposal:
  """Drafts the full block of every request; an empty proposal where there is no drafter."""
  if frame.drafter is None:
    batch = anchor_B.shape[0]
    empty = jnp.zeros((batch, 0), jnp.float32)
    return Proposal(jnp.zeros((batch, 0), jnp.int32),
                    jnp.zeros((batch, 0, frame.target.vocab_size), jnp.float32), empty, empty)
  return frame.drafter.propose(params["drafter"], state.drafter, anchor_B, anchor_positions_B,
                               state.sampling, tokens_BxS=state.tokens_BxS,
                               **params["borrowed"])


def schedule(frame: Frame, state: DecodeState, proposal: Proposal) -> jax.Array:
  """Chooses verify lengths; never more than may still be committed besides the next anchor."""
  if frame.proposal_len == 0:
    return jnp.zeros_like(state.lens_B)
  verify_lens_B = policies.choose_verify_lens(frame.policy, proposal.confidence_BxG)
  room_B = jnp.maximum(state.limits_B - state.lens_B - 1, 0)
  return jnp.where(state.is_done_B, 0, jnp.minimum(verify_lens_B, room_B))


def commit(frame: Frame, params, state: DecodeState, proposal: Proposal, verify_lens_B, target_out,
           verdict) -> DecodeState:
  """Appends the accepted tokens, their cache rows and features; decides who is done."""
  committed = commit_lib.commit_tokens(
      state.tokens_BxS, state.lens_B, proposal.tokens_BxG, verdict, limits_B=state.limits_B,
      stop_ids_BxE=state.stop_ids_BxE, is_done_B=state.is_done_B)
  # Cache and drafter write all W rows; those beyond the committed tokens are dead (kv_cache.py).
  starts_B = state.lens_B - 1
  drafter_state = state.drafter
  if frame.drafter is not None:
    num_rows = target_out.rows.keys[0].shape[2]
    drafter_state = frame.drafter.observe(
        params["drafter"], state.drafter, target_out.features_BxTxMD, starts_B,
        tokens_BxW1=commit_lib.read_tokens(committed.tokens_BxS, starts_B, num_rows + 1),
        num_new_B=committed.num_new_B, **params["borrowed"])
  is_live_B = ~state.is_done_B
  position_G = jnp.arange(frame.proposal_len)[None, :]
  count = lambda n_B: ((position_G < n_B[:, None]) & is_live_B[:, None]).astype(jnp.int32)
  stats = RoundStats(
      num_rounds_B=state.stats.num_rounds_B + is_live_B,
      num_committed_B=state.stats.num_committed_B + committed.num_new_B,
      verified_BxG=state.stats.verified_BxG + count(verify_lens_B),
      accepted_BxG=state.stats.accepted_BxG + count(verdict.num_accepted_B))
  is_valid_B = state.is_valid_B & (verdict.is_valid_B | state.is_done_B)
  return state.replace(
      tokens_BxS=committed.tokens_BxS, lens_B=committed.lens_B,
      is_done_B=committed.is_done_B | ~is_valid_B, is_valid_B=is_valid_B,
      cache=commit_lib.commit_rows(state.cache, target_out.rows, starts_B),
      drafter=drafter_state, stats=stats)
