"""EAGLE-3, MTP and Medusa: what is served is what was trained; and prompt look-up by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafter import dspark
from dspark_jax.drafter.eagle3 import Eagle3Config
from dspark_jax.drafter.medusa import MedusaConfig, MedusaDrafter, MedusaProposer
from dspark_jax.drafter.mtp import MTPConfig
from dspark_jax.drafter.prompt_lookup import PromptLookupConfig, PromptLookupProposer
from dspark_jax.drafter.recurrent import RecurrentProposer
from dspark_jax.sampling import make_sampling_params
from dspark_jax.training.recurrent_loss import shift_embeddings
from tests.drafter import every

ANCHORS = np.array([6, 1, 4], np.int32)  # positions; of 1, nothing but itself is in the context
T, G = 12, 3


@pytest.mark.parametrize("kind, draft_vocab", [
    ("eagle3", None), ("mtp", None), ("medusa", None), ("eagle3", 20), ("medusa", 20)])
def test_the_law_served_is_the_law_trained(kind, draft_vocab):
  """Drafts drawn at temperature 1 become the sequence; the training form has the same laws there.

  Features are noise everywhere, so that a row read too early or too late shows, and the serving
  cache holds rubbish from earlier rejected drafts.
  """
  target_config, target = every.make_target()
  config, params = every.make_network(kind, target_config, proposal_len=G,
                                      draft_vocab_size=draft_vocab)
  proposer = (MedusaProposer if kind == "medusa" else RecurrentProposer)(config)
  ids = None if draft_vocab is None else jnp.arange(draft_vocab, dtype=jnp.int32) * 2
  borrowed = dspark.borrow(config, target["embed_tokens"], target["lm_head"], draft_ids=ids)
  rng = np.random.default_rng(0)
  width = len(config.target_layer_ids) * config.hidden_size
  features = jnp.asarray(rng.standard_normal((3, T, width)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, 41, (3, T + 1)), jnp.int32)
  anchors = jnp.asarray(ANCHORS)

  @jax.jit
  def serve(params):
    state = proposer.init_state(3, 32)
    short = jnp.maximum(anchors - 2, 1)
    state = proposer.prefill(params, state, 3 * features, short, tokens_BxW1=(tokens + 1) % 41,
                             **borrowed)
    take = lambda x, at, n: jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, n))(x, at)
    # Rows before the anchor, others after them, and a round that commits nothing.
    state = proposer.observe(params, state, features[:, :8], jnp.zeros(3, jnp.int32),
                             tokens_BxW1=tokens[:, :9], num_new_B=anchors, **borrowed)
    state = proposer.observe(params, state, take(features, anchors, 2) * 0, anchors,
                             tokens_BxW1=take(tokens, anchors, 3), num_new_B=jnp.zeros(3, int),
                             **borrowed)
    return proposer.propose(
        params, state, jnp.take_along_axis(tokens, anchors[:, None], 1)[:, 0], anchors,
        make_sampling_params(3, temperature=1.0, seed=[1, 2, 3]), **borrowed)

  proposal = serve(params)
  text = np.array(tokens)
  for row, anchor, drafts in zip(text, ANCHORS, np.asarray(proposal.tokens_BxG)):
    row[anchor + 1:anchor + 1 + G] = drafts
  if kind == "medusa":
    hidden = jax.jit(lambda x: MedusaDrafter(config).apply({"params": params}, x))(features)
  else:
    embeds = shift_embeddings(target["embed_tokens"], jnp.asarray(text[:, :T]), num_steps=G)
    hidden = jax.jit(lambda x: config.make_network().apply(
        {"params": params}, x, embeds, method="train_hidden"))(features)
  before = np.asarray(hidden)[np.arange(3), ANCHORS - 1]
  expected = jax.nn.log_softmax(before @ np.asarray(borrowed["lm_head_VdxD"]).T)
  found = jax.nn.log_softmax(proposal.draft_logits_BxGxV)
  assert found.shape == (3, G, draft_vocab or 41)
  np.testing.assert_allclose(found, expected, atol=1e-4)
  assert np.ptp(np.asarray(found), axis=-1).min() > 1  # laws with something to get wrong
  if ids is not None:
    assert np.isin(proposal.tokens_BxG, ids).all()


def test_fewer_steps_are_the_first_of_more():
  frame, params = every.make_pair("mtp")
  anchors = jnp.asarray([5, 2])
  run = lambda proposer: proposer.propose(
      params["drafter"], proposer.init_state(2, 16), anchors, anchors,
      make_sampling_params(2, temperature=1.0, seed=[1, 2]), **params["borrowed"])
  whole, short = run(frame.drafter), run(frame.drafter.with_len(2))
  np.testing.assert_array_equal(short.tokens_BxG, whole.tokens_BxG[:, :2])
  assert frame.drafter.with_len(9).proposal_len == 3 and frame.drafter.with_len(2) != frame.drafter


@pytest.mark.parametrize("config, change, message", [
    (Eagle3Config, dict(target_layer_ids=(1, 1)), "target_layer_ids: found"),
    (Eagle3Config, dict(target_layer_ids=(2,)), "target_layer_ids: found"),
    (Eagle3Config, dict(head_dim=5), "num_kv_heads, head_dim: found 2, 5"),
    (Eagle3Config, dict(proposal_len=0), "proposal_len: found 0"),
    (Eagle3Config, dict(draft_vocab_size=42), "draft_vocab_size: found 42"),
    (MTPConfig, dict(target_layer_ids=(0, 1)), "target_layer_ids: found .* expected one layer")])
def test_bad_configs_are_named(config, change, message):
  good = dict(vocab_size=41, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2,
              head_dim=12, target_layer_ids=(1,), num_target_layers=2, proposal_len=3)
  config(**good)
  with pytest.raises(ValueError, match=message):
    config(**(good | change))


def test_bad_medusa_configs_are_named():
  with pytest.raises(ValueError, match="target_layer_ids: found .* expected one id within -1..1"):
    MedusaConfig(41, 32, (0, 1), 2, 3)


# --- prompt look-up ----------------------------------------------------------------------------


@pytest.mark.parametrize("text, drafts, matches", [
    # ".. 5 6" came before, followed by 7 8 5 6: copied, and then on from the drafts themselves.
    ([5, 6, 7, 8, 5, 6], [7, 8, 5, 6], [1, 1, 1, 1]),
    # One equal token is no match with min_ngram 2.
    ([6, 7, 8, 5, 6], None, [0, 0, 0, 0]),
    # The later of two matches of the same length; a longer one beats it.
    ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4], [1, 1, 1, 1]),
    ([9, 1, 2, 3, 1, 2, 4, 9, 1, 2], [3, 1, 2, 4], [1, 1, 1, 1])])
def test_prompt_lookup(text, drafts, matches):
  proposer = PromptLookupProposer(PromptLookupConfig(10, proposal_len=4, max_ngram=3, min_ngram=2))
  tokens = jnp.full((1, 16), -1, jnp.int32).at[0, :len(text)].set(jnp.asarray(text))
  proposal = proposer.propose({}, (), tokens[:, len(text) - 1], jnp.asarray([len(text) - 1]), None,
                              tokens_BxS=tokens)
  np.testing.assert_array_equal(proposal.confidence_BxG[0], matches)
  if drafts:
    assert proposal.tokens_BxG[0].tolist() == drafts
  law = np.asarray(jax.nn.softmax(proposal.draft_logits_BxGxV))
  np.testing.assert_array_equal(law, np.eye(10)[np.asarray(proposal.tokens_BxG)])


def test_prompt_lookup_configs():
  with pytest.raises(ValueError, match="max_ngram: found 1, expected at least min_ngram = 2"):
    PromptLookupConfig(10, max_ngram=1)
  assert PromptLookupProposer(PromptLookupConfig(10)).with_len(3).proposal_len == 3
