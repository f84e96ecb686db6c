"""The drafter against the public PyTorch reference (shared goldens): every head, and DFlash."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache, sampling
from dspark_jax.drafter import dspark
from dspark_jax.interop.deepspec import load_drafter, save_drafter
from dspark_jax.interop.load import load_target
from dspark_jax.target.transformer import Transformer

FOLDERS = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_dflash")
# Two float32 implementations of the same sums: logits of up to 15 agree to 1e-5 (measured 8e-6);
# the greedy file has confidence logits rounded to 5 digits and is fed by our own target.
TOL = 3e-5

pytestmark = pytest.mark.golden


@pytest.fixture(autouse=True)
def _full_precision():
  with jax.default_matmul_precision("highest"):
    yield


@functools.lru_cache
def load(folder: pathlib.Path):
  config, params, stored = load_drafter(folder / "draft")
  borrowed = dspark.borrow(config, stored["embed_VxD"], stored["lm_head_VdxD"])
  with np.load(folder / "train_forward.npz") as file:
    return config, params, borrowed, dict(file)


@functools.lru_cache
def run_training_form(folder: pathlib.Path):
  """Returns (hidden [B, A, G, D], logits [B, A, G, V], confidence logits [B, A, G])."""
  config, params, borrowed, golden = load(folder)
  anchor_positions = jnp.asarray(golden["anchor_positions"], jnp.int32)
  anchors = jnp.take_along_axis(jnp.asarray(golden["input_ids"], jnp.int32), anchor_positions, 1)
  labels = jnp.asarray(golden["target_ids"], jnp.int32)
  prev_tokens = jnp.concatenate([anchors[..., None], labels[..., :-1]], axis=-1)
  drafter = dspark.DSparkDrafter(config)

  @jax.jit
  def run(params, features):
    block = dspark.embed_block(config, borrowed["embed_VxD"], anchors)
    hidden, bias_in, confidence = drafter.apply(
        {"params": params}, features, anchor_positions, block, prev_tokens)
    w2 = drafter.apply({"params": params}, method="bias_weight")
    return hidden, hidden @ borrowed["lm_head_VdxD"].T + bias_in @ w2.T, confidence

  return jax.tree.map(np.asarray, run(params, jnp.asarray(golden["target_features"])))


@pytest.mark.parametrize("name", FOLDERS)
def test_training_form_equals_the_reference(goldens, name):
  config, _, _, golden = load(goldens / name)
  _, logits, confidence = run_training_form(goldens / name)
  keep = golden["block_keep_mask"]  # the reference lets dropped blocks attend to everything
  assert keep.sum() > 20
  np.testing.assert_allclose(logits[keep], golden["draft_logits"][keep], atol=TOL)
  if config.enable_confidence_head:
    np.testing.assert_allclose(confidence[keep], golden["confidence_logits"][keep], atol=TOL)


@pytest.mark.parametrize("name", FOLDERS)
def test_serving_form_equals_the_training_form(goldens, name):
  """Fault B23, on trained weights: one cache of a sequence serves all of its anchors."""
  config, params, borrowed, golden = load(goldens / name)
  hidden, _, _ = run_training_form(goldens / name)
  positions = jnp.asarray(golden["anchor_positions"][0], jnp.int32)
  anchors = jnp.asarray(golden["input_ids"][0], jnp.int32)[positions]
  state = make_state(config, params, jnp.asarray(golden["target_features"][:1]), len(positions))
  served = jax.jit(functools.partial(
      dspark.DSparkDrafter(config).apply, {"params": params}, method="draft_hidden"))(
          dspark.embed_block(config, borrowed["embed_VxD"], anchors),
          positions[:, None] + jnp.arange(config.num_slots)[None], state, positions)
  np.testing.assert_allclose(served, hidden[0], atol=TOL)


def make_state(config, params, features_1xTxMD, num_requests):
  """The context of one sequence, seen by `num_requests` requests at different anchors."""
  proposer, T = dspark.DSparkProposer(config), features_1xTxMD.shape[1]
  state = jax.jit(proposer.prefill)(params, proposer.init_state(1, T), features_1xTxMD,
                                    jnp.full(1, T, jnp.int32))
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_requests, *x.shape[1:])), state)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_round_of_greedy_decoding_drafts_what_the_reference_drafted(goldens, name):
  """Serving form against the reference: all rounds of the longest case as one batch.

  Of a round the file tells the anchor, how many drafts were right, and the confidences.
  """
  folder = goldens / name
  config, params, borrowed, _ = load(folder)
  cases = json.loads((folder / "greedy_decode.json").read_text())["cases"]
  case = next(c for c in cases if c["confidence_threshold"] == 0 and not c["stop_token_ids"])
  accepted = np.array(case["acceptance_lengths"])
  positions = len(case["prompt"]) + np.concatenate([[0], np.cumsum(accepted)[:-1]])
  output = np.array(case["output"])
  whole = positions + accepted < len(output)  # the last round was trimmed
  positions, accepted = positions[whole], accepted[whole]

  target = load_target(str(folder / "target"))
  features = jax.jit(functools.partial(
      Transformer(target.config).apply, tap_layer_ids=config.target_layer_ids))(
          {"params": target.params}, jnp.asarray(output)[None]).features_BxTxMD
  state = make_state(config, params, features, len(positions))
  proposal = jax.jit(functools.partial(dspark.DSparkProposer(config).propose, params))(
      state, jnp.asarray(output[positions], jnp.int32), jnp.asarray(positions, jnp.int32),
      sampling.make_sampling_params(len(positions)), **borrowed)
  assert isinstance(state, kv_cache.KVCache) and len(positions) > 10 and accepted.max() > 1
  for i, (position, num_new) in enumerate(zip(positions, accepted)):
    drafts, truth = np.asarray(proposal.tokens_BxG[i]), output[position + 1:position + 1 + num_new]
    np.testing.assert_array_equal(drafts[:num_new - 1], truth[:-1])
    assert num_new > config.proposal_len or drafts[num_new - 1] != truth[-1]
    if config.enable_confidence_head:
      np.testing.assert_allclose(proposal.confidence_logits_BxG[i], case["confidence_logits"][i],
                                 atol=2 * TOL)


@pytest.mark.parametrize("name", FOLDERS)
def test_reference_checkpoint_survives_our_round_trip(goldens, name, tmp_path):
  config, params, stored = load_drafter(goldens / name / "draft")
  save_drafter(tmp_path, config, params, embed_VxD=stored["embed_VxD"],
               lm_head_VdxD=stored["lm_head_VdxD"])
  again_config, again_params, again_stored = load_drafter(tmp_path)
  assert again_config == config
  jax.tree.map(np.testing.assert_array_equal, (again_params, again_stored), (params, stored))
  theirs = json.loads((goldens / name / "draft" / "config.json").read_text())
  ours = json.loads((tmp_path / "config.json").read_text())
  for field in set(theirs) & set(ours) - {"dtype", "rope_parameters"}:
    assert ours[field] == theirs[field], field


def test_other_references_are_refused_by_name(goldens):
  for name, architecture in (("qwen3_eagle3", "Qwen3Eagle3"), ("gemma4_vanilla", "Gemma4DSpark")):
    with pytest.raises(ValueError, match=f"config.json: architectures: found .*{architecture}"):
      load_drafter(goldens / name / "draft")
