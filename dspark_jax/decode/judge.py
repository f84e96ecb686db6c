"""The target's judgement of a round: verify and accept, in one rectangle or in a ragged bucket.

In a bucket the dense layers of the target, the LM head, and the drafter's reading of the features
run on the packed rows only.
"""

import flax.struct
import jax

from dspark_jax import kv_cache
from dspark_jax.decode.state import DecodeState, Frame
from dspark_jax.ladder import Shape
from dspark_jax.types import Packing, Proposal, Verdict
from dspark_jax.verification import accept as accept_lib
from dspark_jax.verification import pack as pack_lib
from dspark_jax.verification import verify as verify_lib


@flax.struct.dataclass
class Verified:
  """What a round commits, of W rows a request.

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
          anchor_B: jax.Array, shape: Shape) -> Verified:
  """Verifies and accepts in one shape, which must hold anchor and drafts of every live request.

  A full shape is the rectangle of the whole batch, done or not: nothing is packed.
  """
  num_tokens, num_rows = shape
  if num_tokens >= state.lens_B.shape[0] * num_rows:
    return _judge_rectangle(frame, params, state, proposal, verify_lens_B, anchor_B, num_rows)
  packing = pack_lib.make_packing(verify_lens_B, ~state.is_done_B, num_tokens=num_tokens,
                                  num_rows=num_rows)
  return _judge_packed(frame, params, state, proposal, verify_lens_B, anchor_B, packing)


def _judge_rectangle(frame, params, state, proposal, verify_lens_B, anchor_B,
                     num_rows: int) -> Verified:
  out, logits_BxWxV = verify_lib.verify(
      frame.target, params["target"], state.cache, anchor_B, proposal.tokens_BxG[:, :num_rows - 1],
      cache_lens_B=state.lens_B - 1, tap_layer_ids=frame.tap_layer_ids, dtype=frame.dtype)
  verdict = _accept(frame, params, state, proposal, verify_lens_B, logits_BxWxV)
  return Verified(out.rows, out.features_BxTxMD, None, verdict)


def _judge_packed(frame, params, state, proposal, verify_lens_B, anchor_B,
                  packing: Packing) -> Verified:
  lens_B = state.lens_B - 1
  out, logits_1xPxV = verify_lib.verify_packed(
      frame.target, params["target"], state.cache, anchor_B, proposal.tokens_BxG, packing,
      cache_lens_B=lens_B, tap_layer_ids=frame.tap_layer_ids, dtype=frame.dtype)
  verdict = _accept(frame, params, state, proposal, verify_lens_B, logits_1xPxV, packing)
  features_BxWxMD = drafter_rows = None
  if hasattr(frame.drafter, "encode_rows"):
    positions_1xP = (lens_B[packing.request_P] + packing.row_P)[None]
    rows_1xKxPxH = frame.drafter.encode_rows(params["drafter"], out.features_BxTxMD, positions_1xP)
    drafter_rows = jax.tree.map(
        lambda x: packing.unpack(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), rows_1xKxPxH)
  elif out.features_BxTxMD is not None:
    features_BxWxMD = packing.unpack(out.features_BxTxMD)
  return Verified(out.rows, features_BxWxMD, drafter_rows, verdict)


def _accept(frame, params, state, proposal, verify_lens_B, logits,
            packing: Packing | None = None) -> Verdict:
  return accept_lib.accept(
      logits, proposal.tokens_BxG, draft_logits_BxGxD=proposal.draft_logits_BxGxV,
      verify_lens_B=verify_lens_B, params=state.sampling, anchor_positions_B=state.lens_B - 1,
      draft_ids=params.get("borrowed", {}).get("draft_ids"), vocab_limit=frame.vocab_limit,
      packing=packing, rule=frame.accept_rule)
