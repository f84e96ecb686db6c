"""One round of speculative decoding: propose, schedule, judge (verify, accept), commit, learn.

This file is the table of contents of the project (paper figure 1). `speculate_step` is one pure
function of arrays; nothing leaves the device between the five calls, nor between rounds.
Plain decoding is the same round with a proposal of length 0.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import ladder as ladder_lib
from dspark_jax.decode import judge as judge_lib
from dspark_jax.decode.state import DecodeState, Frame, RoundStats
from dspark_jax.scheduler import policies
from dspark_jax.scheduler import schedule as schedule_lib
from dspark_jax.scheduler.estimator import Outcome, Signals
from dspark_jax.types import Proposal, Verdict
from dspark_jax.verification import commit as commit_lib


@flax.struct.dataclass
class Round:
  """What a round showed; calibration and studies read it (`decode.record`)."""
  signals: Signals
  outcome: Outcome


def speculate_step(frame: Frame, params, state: DecodeState) -> DecodeState:
  """Runs one round for every request of the batch that is not done.

  Args:
    frame: static frame.
    params: dict of `target` and, with a drafter, `drafter` (its parameters) and `borrowed`
      (what the drafter borrows from the target: see `drafter.dspark.borrow`).
    state: DecodeState; donate it.
  """
  return run_round(frame, params, state)[0]


def run_round(frame: Frame, params, state: DecodeState) -> tuple[DecodeState, Round]:
  """`speculate_step` that also returns what the round showed."""
  plan = plan_round(frame, state)
  proposal = propose(frame, params, state, plan)
  verify_lens_B, survival_BxG = schedule(frame, state, proposal, plan)
  after, verdict, bucket = judge_and_commit(frame, params, state, proposal, verify_lens_B)

  outcome = Outcome(verify_lens_B, verdict.num_accepted_B, ~state.is_done_B & verdict.is_valid_B)
  signals = Signals(proposal.confidence_logits_BxG, proposal.margin_BxG)
  if state.scheduler is not None:
    after = after.replace(scheduler=schedule_lib.learn(
        frame.policy, frame.estimator, state.scheduler, plan, signals, survival_BxG, outcome,
        ladder=frame.ladder, bucket=bucket))
  return after, Round(signals, outcome)


def count_room(state: DecodeState) -> jax.Array:
  """int32 [B]: drafts that may still be committed besides the next anchor."""
  return jnp.maximum(state.limits_B - state.lens_B - 1, 0)


def plan_round(frame: Frame, state: DecodeState) -> policies.Plan | None:
  """What is decided before drafting: how much to draft, if at all, and a budget."""
  if frame.proposal_len == 0 or state.scheduler is None:
    return None
  return schedule_lib.plan_round(frame.policy, frame.estimator, state.scheduler, ~state.is_done_B,
                                 count_room(state), ladder=frame.ladder)


def propose(frame: Frame, params, state: DecodeState,
            plan: policies.Plan | None = None) -> Proposal:
  """Drafts the full block of every request, or as much of it as the plan says will pay."""
  if plan is None:
    return draft(frame, params, state)
  shapes = jax.eval_shape(lambda: draft(frame, params, state))
  nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  def draft_first(num_drafts):
    found = draft(frame, params, state, num_drafts)
    return jax.tree.map(lambda x, zeros: zeros.at[:, :num_drafts].set(x[:, :num_drafts]), found,
                        nothing)

  lens = ladder_lib.draft_lens(frame.ladder)
  return jax.lax.switch(plan.draft_choice, [lambda: nothing] + [
      functools.partial(draft_first, n) for n in lens])


def draft(frame: Frame, params, state: DecodeState, num_drafts: int | None = None) -> Proposal:
  """The drafter's block, or its start; an empty proposal where there is no drafter."""
  anchor_B = find_anchors(state)
  if frame.drafter is None:
    batch = anchor_B.shape[0]
    empty = jnp.zeros((batch, 0), jnp.float32)
    return Proposal(jnp.zeros((batch, 0), jnp.int32),
                    jnp.zeros((batch, 0, frame.target.vocab_size), jnp.float32), empty, empty)
  drafter = frame.drafter if num_drafts is None else frame.drafter.with_len(num_drafts)
  return drafter.propose(params["drafter"], state.drafter, anchor_B, state.lens_B - 1,
                         state.sampling, tokens_BxS=state.tokens_BxS, **params["borrowed"])


def find_anchors(state: DecodeState) -> jax.Array:
  """int32 [B]: the last token of every request, input of its next round."""
  return jnp.take_along_axis(state.tokens_BxS, state.lens_B[:, None] - 1, axis=1)[:, 0]


def schedule(frame: Frame, state: DecodeState, proposal: Proposal,
             plan: policies.Plan | None = None) -> tuple[jax.Array, jax.Array]:
  """Chooses verify lengths; never more than there is room for. Also returns survivals."""
  if frame.proposal_len == 0:
    return jnp.zeros_like(state.lens_B), proposal.confidence_BxG
  return schedule_lib.choose_lens(
      frame.policy, frame.estimator, state.scheduler, plan,
      Signals(proposal.confidence_logits_BxG, proposal.margin_BxG), is_live_B=~state.is_done_B,
      max_lens_B=count_room(state), ladder=frame.ladder)


def judge_and_commit(frame: Frame, params, state: DecodeState, proposal: Proposal,
                     verify_lens_B: jax.Array) -> tuple[DecodeState, Verdict, jax.Array | None]:
  """Verifies, accepts and commits, in the one rectangle or in the bucket that holds the lengths.

  Returns:
    (state after the round, Verdict, int32 [] index of the bucket; None without a ladder).
  """
  batch = state.lens_B.shape[0]
  width = policies.max_verify_len(frame.policy, frame.proposal_len)
  anchor_B = find_anchors(state)

  def run(shape, state):
    shape = shape[0], min(shape[1], width + 1)
    verified = judge_lib.judge(frame, params, state, proposal, verify_lens_B, anchor_B, shape)
    after = commit(frame, params, state, proposal, verify_lens_B, verified)
    return after, verified.verdict

  if frame.ladder is None:
    return *run((batch * (width + 1), width + 1), state), None
  ladder_lib.check_ladder(frame.ladder, batch, width)
  bucket = ladder_lib.choose_bucket(frame.ladder, verify_lens_B, ~state.is_done_B)
  # Not a `lax.switch`: its branches would copy the caches, where a loop writes them in place.
  shapes = jax.eval_shape(functools.partial(run, frame.ladder[0]), state)[1]
  carry = state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  for n, shape in enumerate(frame.ladder):
    carry = _run_if(bucket == n, lambda carry, s=shape: run(s, carry[0]), carry)
  return *carry, bucket


def _run_if(is_wanted: jax.Array, run, carry):
  """Returns run(carry) or carry: a loop of one turn, or of none."""
  return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(c[0]), run(c[1])),
                            (is_wanted, carry))[1]


def commit(frame: Frame, params, state: DecodeState, proposal: Proposal, verify_lens_B,
           verified: judge_lib.Verified) -> DecodeState:
  """Appends the accepted tokens, their cache rows and features; decides who is done."""
  verdict = verified.verdict
  committed = commit_lib.commit_tokens(
      state.tokens_BxS, state.lens_B, proposal.tokens_BxG, verdict, limits_B=state.limits_B,
      stop_ids_BxE=state.stop_ids_BxE, is_done_B=state.is_done_B)
  # Cache and drafter write all W rows; those beyond the committed tokens are dead (kv_cache.py).
  # The verdict comes after all reading of the cache: writes that wait for it need no copy of what
  # is still to be read (the last layer's rows are there before its attention has run).
  starts_B = jnp.where(verdict.num_accepted_B >= 0, state.lens_B - 1, 0)
  drafter_state = state.drafter
  if frame.drafter is not None:
    if verified.drafter_rows is not None:
      drafter_state = frame.drafter.write_rows(state.drafter, verified.drafter_rows, starts_B)
    else:
      num_rows = verified.rows.keys[0].shape[2]
      drafter_state = frame.drafter.observe(
          params["drafter"], state.drafter, verified.features_BxWxMD, starts_B,
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
      cache=commit_lib.commit_rows(state.cache, verified.rows, starts_B),
      drafter=drafter_state, stats=stats)
