"""The target's judgement of a round: verify and accept, in one rectangle or in a ragged bucket.

In a bucket the dense layers of the target, the LM head, and the drafter's reading of the features
run on the packed rows only; a `lax.switch` on the device picks the bucket. The caches are read
there and written later (`step.commit`): a branch that returned a cache would copy it.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax import ladder as ladder_lib
from dspark_jax.decode.state import DecodeState, Frame
from dspark_jax.scheduler import policies
from dspark_jax.types import Packing, Proposal, Verdict
from dspark_jax.verification import accept as accept_lib
from dspark_jax.verification import pack as pack_lib
from dspark_jax.verification import verify as verify_lib


@flax.struct.dataclass
class Verified:
  """What a round commits.

  Attributes:
    rows: the target's keys and values of the verified rows, [B, K, W, H].
    features_BxWxMD: the target's features of them, for the drafter to observe; or
    drafter_rows: what the drafter has already made of these, for it to write.
    verdict: Verdict.
  """
  rows: kv_cache.KVCache
  features_BxWxMD: jax.Array | None
  drafter_rows: kv_cache.KVCache | None
  verdict: Verdict


def judge(frame: Frame, params, state: DecodeState, proposal: Proposal, verify_lens_B: jax.Array,
          anchor_B: jax.Array) -> tuple[Verified, jax.Array | None]:
  """Returns what was verified, and the index of its bucket (None without a ladder)."""
  if frame.ladder is None:
    return _judge_rectangle(frame, params, state, proposal, verify_lens_B, anchor_B), None
  width = policies.max_verify_len(frame.policy, frame.proposal_len)
  ladder_lib.check_ladder(frame.ladder, state.lens_B.shape[0], width)
  is_live_B = ~state.is_done_B
  branches = []
  for num_tokens, num_rows in frame.ladder:
    make_packing = functools.partial(pack_lib.make_packing, verify_lens_B, is_live_B,
                                     num_tokens=num_tokens, num_rows=min(num_rows, width + 1))
    branches.append(functools.partial(_judge_packed, frame, params, state, proposal,
                                      verify_lens_B, anchor_B, make_packing))
  bucket = ladder_lib.choose_bucket(frame.ladder, verify_lens_B, is_live_B)
  return jax.lax.switch(bucket, branches), bucket


def _judge_rectangle(frame, params, state, proposal, verify_lens_B, anchor_B) -> Verified:
  width = policies.max_verify_len(frame.policy, frame.proposal_len)
  out, logits_BxWxV = verify_lib.verify(
      frame.target, params["target"], state.cache, anchor_B, proposal.tokens_BxG[:, :width],
      cache_lens_B=state.lens_B - 1, tap_layer_ids=frame.tap_layer_ids, dtype=frame.dtype)
  verdict = _accept(frame, params, state, proposal, verify_lens_B, logits_BxWxV)
  return Verified(out.rows, out.features_BxTxMD, None, verdict)


def _judge_packed(frame, params, state, proposal, verify_lens_B, anchor_B,
                  make_packing) -> Verified:
  """One bucket; results have the full width, whatever the bucket's, as `lax.switch` needs."""
  width = policies.max_verify_len(frame.policy, frame.proposal_len)
  packing, lens_B = make_packing(), state.lens_B - 1
  out, logits_1xPxV = verify_lib.verify_packed(
      frame.target, params["target"], state.cache, anchor_B, proposal.tokens_BxG[:, :width],
      packing, cache_lens_B=lens_B, tap_layer_ids=frame.tap_layer_ids, dtype=frame.dtype)
  verdict = _accept(frame, params, state, proposal, verify_lens_B, logits_1xPxV, packing)
  features_BxWxMD = drafter_rows = None
  if hasattr(frame.drafter, "encode_rows"):
    positions_1xP = (lens_B[packing.request_P] + packing.row_P)[None]
    rows_1xKxPxH = frame.drafter.encode_rows(params["drafter"], out.features_BxTxMD, positions_1xP)
    drafter_rows = jax.tree.map(
        lambda x: _widen(packing.unpack(x.transpose(0, 2, 1, 3)), width + 1).transpose(0, 2, 1, 3),
        rows_1xKxPxH)
  elif out.features_BxTxMD is not None:
    features_BxWxMD = _widen(packing.unpack(out.features_BxTxMD), width + 1)
  rows = jax.tree.map(
      lambda x: _widen(x.transpose(0, 2, 1, 3), width + 1).transpose(0, 2, 1, 3), out.rows)
  return Verified(rows, features_BxWxMD, drafter_rows, verdict)


def _accept(frame, params, state, proposal, verify_lens_B, logits,
            packing: Packing | None = None) -> Verdict:
  return accept_lib.accept(
      logits, proposal.tokens_BxG, draft_logits_BxGxD=proposal.draft_logits_BxGxV,
      verify_lens_B=verify_lens_B, params=state.sampling, anchor_positions_B=state.lens_B - 1,
      draft_ids=params.get("borrowed", {}).get("draft_ids"), vocab_limit=frame.vocab_limit,
      packing=packing, rule=frame.accept_rule)


def _widen(x_BxWx: jax.Array, num_rows: int) -> jax.Array:
  """Adds rows of zeros up to `num_rows`."""
  return jnp.pad(x_BxWx, [(0, num_rows - x_BxWx.shape[1] if axis == 1 else 0)
                          for axis in range(x_BxWx.ndim)])
