"""Greedy decoding of every DSpark and DFlash golden: tokens, accepted and proposal lengths.

Each case is decoded alone, and all cases of a folder in one batch: prompts of 6 and 17 tokens,
thresholds 0, 0.3 and 0.6, with and without stop ids. The rounds run in one `lax.while_loop` that
also writes down the lengths; thresholds are an array there, so that two programs serve a folder.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from dspark_jax.decode import loop
from dspark_jax.decode.state import Frame
from dspark_jax.decode.step import speculate_step
from dspark_jax.drafter.dspark import DSparkProposer, borrow
from dspark_jax.interop.deepspec import load_drafter
from dspark_jax.interop.load import load_target
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler.policies import ConfidenceThreshold

FOLDERS = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash")
MAX_NEW_TOKENS = 40

pytestmark = pytest.mark.golden


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
  """Full float32 matmuls; and LLVM's expensive passes off, which saves a third of compilation.

  What those passes do to the same programs is covered by tests/decode.
  """
  jax.config.update("jax_disable_most_optimizations", True)
  with jax.default_matmul_precision("highest"):
    yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.lru_cache
def load_pair(folder: pathlib.Path):
  target = load_target(str(folder / "target"))
  config, drafter_params, _ = load_drafter(folder / "draft")
  params = {"target": target.params, "drafter": drafter_params,
            "borrowed": borrow(config, target.params["embed_tokens"], target.params["lm_head"])}
  cases = json.loads((folder / "greedy_decode.json").read_text())["cases"]
  return Frame(target.config, DSparkProposer(config)), params, cases


@functools.partial(jax.jit, static_argnames="frame")
def run_recorded(frame, params, state, thresholds_B):
  """Returns (final state, accepted lengths [R, B], proposal lengths [R, B]) of all rounds."""
  policy = ConfidenceThreshold(0.0)
  # One threshold a request: the field is a Python number only so that a policy can be hashed.
  object.__setattr__(policy, "threshold", thresholds_B[:, None])
  frame = Frame(frame.target, frame.drafter, policy)

  def body(carry):
    state, r, accepted_RxB, proposed_RxB = carry
    after = speculate_step(frame, params, state)
    verified_BxG = after.stats.verified_BxG - state.stats.verified_BxG
    return (after, r + 1, accepted_RxB.at[r].set(after.lens_B - state.lens_B),
            proposed_RxB.at[r].set(verified_BxG.sum(axis=1)))

  zeros = jnp.zeros((MAX_NEW_TOKENS, thresholds_B.shape[0]), jnp.int32)
  out = lax.while_loop(lambda carry: ~carry[0].is_done_B.all(), body, (state, 0, zeros, zeros))
  return out[0], out[2], out[3]


def decode(frame, params, cases):
  """Returns (tokens, accepted lengths, proposal lengths) of each case, decoded as one batch."""
  state = loop.start(frame, params, [c["prompt"] for c in cases], max_new_tokens=MAX_NEW_TOKENS,
                     sampling=make_sampling_params(len(cases)),
                     stop_ids=[c["stop_token_ids"] or [] for c in cases])
  thresholds_B = jnp.asarray([c["confidence_threshold"] for c in cases])
  state, accepted, proposed = jax.device_get(run_recorded(frame, params, state, thresholds_B))
  assert state.is_valid_B.all()
  return [(state.tokens_BxS[i, :state.lens_B[i]].tolist(),
           accepted[:state.stats.num_rounds_B[i], i].tolist(),
           proposed[:state.stats.num_rounds_B[i], i].tolist()) for i in range(len(cases))]


def check(case, tokens, accepted, proposed):
  """Equal round by round, up to the end: we stop at 40 tokens, the reference trims afterwards.

  A draft that could not be committed any more is not verified, so a proposal is the reference's
  or what room is left, whichever is less.
  """
  assert tokens == case["output"]
  num_rounds = len(accepted)
  assert num_rounds in (len(case["acceptance_lengths"]), len(case["acceptance_lengths"]) - 1)
  left = MAX_NEW_TOKENS - 1  # the prefill committed the first token
  for r in range(num_rounds):
    assert proposed[r] == min(case["proposal_lengths"][r], left - 1), f"round {r}"
    assert accepted[r] == min(case["acceptance_lengths"][r], left), f"round {r}"
    left -= accepted[r]
  assert left == 0 or tokens[-1] in case["stop_token_ids"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_case_alone(goldens, folder):
  frame, params, cases = load_pair(goldens / folder)
  # Half of the cases repeat another with a stop id that never comes; those are for the batch.
  outputs = [(c["output"], c["confidence_threshold"]) for c in cases]
  cases = [c for i, c in enumerate(cases) if outputs[i] not in outputs[:i]]
  assert len(cases) >= 4
  for case in cases:
    check(case, *decode(frame, params, [case])[0])


@pytest.mark.parametrize("folder", FOLDERS)
def test_all_cases_in_one_batch(goldens, folder):
  frame, params, cases = load_pair(goldens / folder)
  assert len({len(c["prompt"]) for c in cases}) > 1
  assert {tuple(c["stop_token_ids"] or ()) for c in cases} == {(), (3,)}
  if folder != "qwen3_dflash":  # has no confidence head
    assert {c["confidence_threshold"] for c in cases} == {0.0, 0.3, 0.6}
  for case, found in zip(cases, decode(frame, params, cases)):
    check(case, *found)
