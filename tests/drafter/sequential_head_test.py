import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.drafter.cases import KINDS, apply, make_config, make_params

TOL = 1e-6  # one linear map of at most 22 products of O(1) values, in float32


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def compute_bias_in_by_hand(config, params, hidden_GxD, prev_G):
  """Reference-semantics section 3, one block, float64."""
  head = jax.tree.map(lambda x: np.asarray(x, np.float64), params)["markov_head"]
  state, out = np.zeros(config.markov_rank), []
  for h, token in zip(np.asarray(hidden_GxD, np.float64), np.asarray(prev_G)):
    e = head["markov_w1"][token]
    if config.markov_head_type == "vanilla":
      out.append(e)
    elif config.markov_head_type == "gated":
      gate = head["gate_proj"]["weight"] @ np.concatenate([h, e]) + head["gate_proj"]["bias"]
      out.append(sigmoid(gate) * e)
    else:
      joint = head["joint_proj"]["weight"] @ np.concatenate([state, e, h])
      gate, candidate, output = np.split(joint + head["joint_proj"]["bias"], 3)
      state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
      out.append(np.tanh(output))
  return np.stack(out)


@pytest.mark.parametrize("kind", KINDS)
def test_head_is_the_formula_in_both_forms(kind):
  config = make_config(markov_head_type=kind)
  params = make_params(config)
  hidden = jax.random.normal(jax.random.key(5), (2, 3, 4, config.hidden_size))
  prev = jax.random.randint(jax.random.key(6), (2, 3, 4), 0, config.vocab_size)

  @jax.jit
  def run(params, hidden, prev):
    with jax.default_matmul_precision("highest"):
      forced = apply(config, params, "head_inputs", hidden, prev)
      confidence = apply(config, params, "confidence_logits", hidden, prev)
      carry, steps = apply(config, params, "init_carry", 2), []
      for k in range(4):  # serving walks block 0 of each request
        carry, *step = apply(config, params, "head_step", carry, hidden[:, 0, k], prev[:, 0, k])
        steps.append(step)
    return forced, confidence, steps

  forced, confidence, steps = run(params, hidden, prev)
  for b in range(2):
    for a in range(3):  # every block starts from a zero state: fault B29, last sentence
      want = compute_bias_in_by_hand(config, params, hidden[b, a], prev[b, a])
      np.testing.assert_allclose(forced[b, a], want, atol=TOL, rtol=TOL)
  proj = jax.tree.map(lambda x: np.asarray(x, np.float64), params["confidence_head"]["proj"])
  embeds = np.asarray(params["markov_head"]["markov_w1"], np.float64)[np.asarray(prev)]
  inputs = np.concatenate([np.asarray(hidden, np.float64), embeds], -1)
  np.testing.assert_allclose(confidence, inputs @ proj["weight"][0] + proj["bias"][0],
                             atol=10 * TOL, rtol=TOL)
  for k, (bias_in, confidence_logit) in enumerate(steps):
    np.testing.assert_allclose(bias_in, forced[:, 0, k], atol=TOL, rtol=TOL)
    np.testing.assert_allclose(confidence_logit, confidence[:, 0, k], atol=10 * TOL, rtol=TOL)


def test_bias_follows_the_previous_token():
  """Fault B29: V = r = 5, W1 = I, previous token t gives +10 to t + 1; labels 1, 2, 3 after 0."""
  config = make_config(vocab_size=5, markov_rank=5, mask_token_id=4, proposal_len=3)
  params = jax.tree.map(jnp.zeros_like, make_params(config))
  params["markov_head"] = {"markov_w1": jnp.eye(5), "markov_w2": 10 * jnp.roll(jnp.eye(5), 1, 0)}
  weight = jnp.concatenate([jnp.zeros(config.hidden_size), jnp.arange(5.0)])[None]
  params["confidence_head"] = {"proj": {"weight": weight, "bias": jnp.zeros(1)}}
  hidden, prev = jnp.zeros((3, config.hidden_size)), jnp.array([0, 1, 2])
  logits = apply(config, params, "head_inputs", hidden, prev) @ apply(
      config, params, "bias_weight").T
  np.testing.assert_array_equal(logits.argmax(-1), [1, 2, 3])
  np.testing.assert_array_equal(logits.max(-1), [10, 10, 10])
  np.testing.assert_array_equal(apply(config, params, "confidence_logits", hidden, prev),
                                [0, 1, 2])


def test_without_a_head_everything_has_width_zero():
  config = make_config(markov_rank=0, enable_confidence_head=False)
  params = make_params(config)
  assert set(params) == {"backbone"}
  hidden, prev = jnp.zeros((2, 4, config.hidden_size)), jnp.zeros((2, 4), jnp.int32)
  assert apply(config, params, "head_inputs", hidden, prev).shape == (2, 4, 0)
  assert apply(config, params, "bias_weight").shape == (config.vocab_size, 0)
  assert np.isposinf(apply(config, params, "confidence_logits", hidden, prev)).all()


@pytest.mark.parametrize("is_cut", [False, True])
def test_confidence_gradient_is_cut_only_on_request(is_cut):
  """Fault B42: gradient of the confidence alone, on backbone, W1 and the head itself."""
  config = make_config(confidence_stop_gradient=is_cut)
  params = make_params(config)
  hidden = jax.random.normal(jax.random.key(5), (2, 4, config.hidden_size))
  prev = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1))
  def pull(params, hidden):
    return jnp.sum(apply(config, params, "confidence_logits", hidden, prev))

  on_params, on_hidden = pull(params, hidden)
  on_w1 = on_params["markov_head"]["markov_w1"]
  if is_cut:
    assert not on_hidden.any() and not on_w1.any()
  else:
    assert (np.abs(on_hidden).max(-1) > 0.01).all()
    np.testing.assert_array_equal(np.abs(on_w1).max(-1) > 0.01,
                                  (np.arange(config.vocab_size) >= 1)
                                  & (np.arange(config.vocab_size) <= 8))
  # The head's own gradient is the same: d/db = number of drafts, d/dw_h = sum of the hiddens.
  own = on_params["confidence_head"]["proj"]
  np.testing.assert_array_equal(own["bias"], [8.0])
  np.testing.assert_allclose(own["weight"][0, :config.hidden_size], hidden.sum((0, 1)), rtol=1e-5)
