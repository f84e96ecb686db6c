"""EAGLE-3 against the public PyTorch reference: logits of every step, loss, gradients, decoding."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dspark_jax.decode import loop, step
from dspark_jax.decode.state import Frame
from dspark_jax.drafter import dspark
from dspark_jax.drafter.recurrent import RecurrentProposer
from dspark_jax.interop import flat
from dspark_jax.interop.load import load_target
from dspark_jax.sampling import make_sampling_params
from dspark_jax.training import losses
from dspark_jax.training import recurrent_loss
from dspark_jax.training import step as step_lib

MAX_NEW_TOKENS = 40
TOL = 3e-5  # two float32 implementations of the same sums, as in golden_drafter_test

pytestmark = pytest.mark.golden


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
  jax.config.update("jax_disable_most_optimizations", True)
  with jax.default_matmul_precision("highest"):
    yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.lru_cache
def load(folder):
  config, params, stored = flat.load_drafter(folder / "draft")
  borrowed = dspark.borrow(config, stored["embed_VxD"], stored["lm_head_VdxD"])
  with np.load(folder / "train_forward.npz") as file:
    return config, params, borrowed, dict(file)


@pytest.fixture
def folder(goldens):
  return goldens / "qwen3_eagle3"


def counted(golden):
  """Whether position t counts at step s, bool [B, T, G]: what the loss is taken over."""
  return np.asarray(recurrent_loss.make_blocks(
      jnp.asarray(golden["input_ids"], jnp.int32), jnp.asarray(golden["loss_mask"]), num_steps=5,
      exists_BxT=jnp.asarray(golden["attention_mask"], bool)).eval_mask_BxAxG)


def test_logits_of_every_step(folder):
  config, params, borrowed, golden = load(folder)
  network = config.make_network()

  @jax.jit
  def run(params):
    embeds = recurrent_loss.shift_embeddings(
        borrowed["embed_VxD"], jnp.asarray(golden["input_ids"], jnp.int32), num_steps=5)
    hidden = network.apply({"params": params}, jnp.asarray(golden["target_features"]), embeds,
                           method="train_hidden")
    return hidden @ borrowed["lm_head_VdxD"].T

  logits = np.asarray(run(params))
  length = golden["attention_mask"].sum(axis=1)
  for s in range(5):
    # Position t of step s stands for t + s; the reference lets what is past the end see anything.
    keep = np.arange(40)[None] + s < length[:, None]
    assert keep.sum() > 80
    np.testing.assert_allclose(logits[:, :, s][keep], golden[f"draft_logits/{s}"][keep], atol=TOL)


def test_loss_and_gradient_norms(folder):
  """Soft cross-entropy is KL plus the target's entropy, which has no gradient."""
  config, params, _, golden = load(folder)
  target = load_target(str(folder / "target"))
  objective = step_lib.Objective(
      target_config=target.config, drafter_config=config,
      loss=losses.LossConfig(ce_weight=0, tv_weight=0, confidence_weight=0, kl_weight=1, chunk=64,
                             loss_decay=-1 / np.log(config.step_loss_decay)))
  frozen = step_lib.Frozen(target_params=target.params)
  ids = jnp.asarray(golden["input_ids"], jnp.int32)

  @jax.jit
  @jax.value_and_grad
  def run(params):
    total, sums = recurrent_loss.sum_losses(
        params, frozen, step_lib.run_target(frozen, ids, objective=objective), ids,
        jnp.asarray(golden["loss_mask"]), objective=objective,
        exists_BxT=jnp.asarray(golden["attention_mask"], bool))
    return total / sums.weight

  kl, gradient = run(params)
  logp = jax.nn.log_softmax(golden["target_logits"].astype(np.float64))
  entropy_BxT = -(np.exp(logp) * logp).sum(-1)
  mask_BxTxG = counted(golden)
  entropy = sum(0.8**s * entropy_BxT[:, 1 + s:][mask_BxTxG[:, :39 - s, s]].sum() for s in range(5))
  np.testing.assert_allclose(kl + entropy / golden["input_ids"].size, golden["loss"], rtol=1e-5)
  names = [key.removeprefix("grad_norm/") for key in golden if key.startswith("grad_norm/")]
  for name in names:
    path = name.replace("layers.0.", "layers_0.").split(".")
    found = functools.reduce(lambda tree, key: tree[key], path, gradient)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(found, np.float64)),
                               golden[f"grad_norm/{name}"], rtol=1e-3, err_msg=name)
  assert len(names) == len(jax.tree.leaves(gradient))


@functools.partial(jax.jit, static_argnames="frame")
def run_recorded(frame, params, state):
  """Returns (final state, accepted and verified [R, B], drafts [R, B, G]) of all rounds."""
  def body(carry):
    state, r, *records = carry
    drafts = step.draft(frame, params, state).tokens_BxG
    after = step.speculate_step(frame, params, state)
    verified_BxG = after.stats.verified_BxG - state.stats.verified_BxG
    new = after.lens_B - state.lens_B, verified_BxG.sum(axis=1), drafts
    return (after, r + 1, *(a.at[r].set(b) for a, b in zip(records, new)))

  R, B = MAX_NEW_TOKENS, state.lens_B.shape[0]
  zeros = jnp.zeros((R, B), jnp.int32)
  out = lax.while_loop(lambda carry: ~carry[0].is_done_B.all(), body,
                       (state, 0, zeros, zeros, jnp.zeros((R, B, frame.proposal_len), jnp.int32)))
  return out[0], *out[2:]


def check(case, tokens, accepted, verified, drafts_RxG):
  """Equal round by round. Two things end a proposal early: here that only so many tokens may still
  be committed, there a stop id among the drafts (the reference drafts no further)."""
  assert tokens == case["output"]
  num_rounds, left = len(accepted), MAX_NEW_TOKENS - 1
  assert num_rounds in (len(case["acceptance_lengths"]), len(case["acceptance_lengths"]) - 1)
  for r in range(num_rounds):
    is_stop_G = np.isin(drafts_RxG[r], case["stop_token_ids"] or [])
    drafted = is_stop_G.argmax() + 1 if is_stop_G.any() else len(is_stop_G)
    assert case["proposal_lengths"][r] == drafted, f"round {r}"
    assert verified[r] == min(len(is_stop_G), left - 1), f"round {r}"
    assert accepted[r] == min(case["acceptance_lengths"][r], left), f"round {r}"
    left -= accepted[r]
  assert left == 0 or tokens[-1] in case["stop_token_ids"]


def decode(folder, cases):
  config, params, borrowed, _ = load(folder)
  target = load_target(str(folder / "target"))
  frame = Frame(target.config, RecurrentProposer(config))
  params = {"target": target.params, "drafter": params, "borrowed": borrowed}
  state = loop.start(frame, params, [c["prompt"] for c in cases], max_new_tokens=MAX_NEW_TOKENS,
                     sampling=make_sampling_params(len(cases)),
                     stop_ids=[c["stop_token_ids"] or [] for c in cases])
  state, accepted, verified, drafts = jax.device_get(run_recorded(frame, params, state))
  for i, case in enumerate(cases):
    rounds = slice(state.stats.num_rounds_B[i])
    check(case, state.tokens_BxS[i, :state.lens_B[i]].tolist(), accepted[rounds, i].tolist(),
          verified[rounds, i].tolist(), drafts[rounds, i])


def test_greedy_decoding_of_all_cases_in_one_batch(folder):
  cases = json.loads((folder / "greedy_decode.json").read_text())["cases"]
  assert {n for c in cases for n in c["proposal_lengths"]} == {2, 3, 5}  # stop ids were drafted
  decode(folder, cases)


def test_greedy_decoding_alone(folder):
  cases = json.loads((folder / "greedy_decode.json").read_text())["cases"]
  for case in (cases[3], cases[5]):
    decode(folder, [case])


def test_reference_checkpoint_survives_our_round_trip(folder, tmp_path):
  config, params, stored = flat.load_drafter(folder / "draft")
  flat.save_drafter(tmp_path, config, params, **stored)
  again_config, *again = flat.load_drafter(tmp_path)
  assert again_config == config
  jax.tree.map(np.testing.assert_array_equal, again, [params, stored])
  theirs = json.loads((folder / "draft" / "config.json").read_text())
  ours = json.loads((tmp_path / "config.json").read_text())
  for field in set(theirs) & set(ours) - {"dtype"}:
    assert ours[field] == theirs[field], field
