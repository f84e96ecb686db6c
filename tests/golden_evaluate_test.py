"""The evaluation's counts against those of the public reference's evaluator: every round, and the
columns that are computed from them."""

import json

import jax
import numpy as np
import pytest

from dspark_jax.decode.answers import answer_prompts
from dspark_jax.decode.state import Frame
from dspark_jax.interop.drafters import open_drafter
from dspark_jax.interop.load import load_target
from dspark_jax.metrics.evaluation import count_rounds, evaluate_counts
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler.policies import ConfidenceThreshold, FixedLength

pytestmark = pytest.mark.golden


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
  jax.config.update("jax_disable_most_optimizations", True)
  with jax.default_matmul_precision("highest"):
    yield
  jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("folder, threshold", [
    ("qwen3_vanilla", 0.3), ("qwen3_dflash", 0.0), ("qwen3_eagle3", 0.0)])
def test_same_lengths_as_the_references_evaluator(goldens, folder, threshold):
  golden = json.loads((goldens / folder / "greedy_decode.json").read_text())
  cases = [c for c in golden["cases"] if c.get("confidence_threshold", 0.0) == threshold]
  assert len(cases) >= 4
  target = load_target(str(goldens / folder / "target"))
  opened = open_drafter(goldens / folder / "draft", target)
  G = opened.proposer.proposal_len
  policy = ConfidenceThreshold(threshold) if threshold else FixedLength(G)
  found = answer_prompts(
      Frame(target.config, opened.proposer, policy),
      {"target": target.params, "drafter": opened.params, "borrowed": opened.borrowed},
      [c["prompt"] for c in cases], max_new_tokens=golden["max_new_tokens"],
      sampling=make_sampling_params(len(cases)),
      stop_ids=[c["stop_token_ids"] or [] for c in cases])

  counts = []
  for case, answer in zip(cases, found.answers):
    assert case["prompt"] + answer.tokens == case["output"]
    rounds = answer.rounds
    # Also the last round, which the reference runs in full and trims afterwards.
    assert rounds.num_new_N.tolist() == case["acceptance_lengths"]
    if folder != "qwen3_eagle3":  # there the reference drafts no further than a stop id
      assert rounds.verify_lens_N.tolist() == case["proposal_lengths"]
    counts.append(count_rounds(len(answer.tokens), verify_lens_N=rounds.verify_lens_N,
                               num_accepted_N=rounds.num_accepted_N, num_new_N=rounds.num_new_N,
                               proposal_len=G))

  # The reference's columns, from its own lists.
  accepted, proposed = (np.concatenate([c[name] for c in cases])
                        for name in ("acceptance_lengths", "proposal_lengths"))
  columns = evaluate_counts(counts, seconds=found.seconds, num_decoded=found.num_decoded)
  assert columns.acceptance.num_rounds == len(accepted)
  assert columns.accepted_len.value == pytest.approx(accepted.mean())
  if folder != "qwen3_eagle3":
    assert columns.acceptance.verify_len == pytest.approx(proposed.mean())
    assert columns.verify_rate == pytest.approx(accepted.sum() / (proposed.sum() + len(proposed)))
    # No golden round ends in an accepted stop token, so one less is the number of accepted drafts.
    assert [(proposed > k).sum() and ((accepted - 1) > k).sum() / (proposed > k).sum()
            for k in range(G)] == pytest.approx([
                rate or 0 for rate in columns.acceptance.accept_rate])
