"""One round: that it is one traced function, what it leaves in the caches, and whom it touches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import loop
from dspark_jax.decode.state import Frame
from dspark_jax.decode.step import speculate_step
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler.policies import ConfidenceThreshold, FixedLength
from dspark_jax.target.transformer import Transformer
from dspark_jax.verification import verify as verify_lib
from tests.decode import cases
from tests.decode.cases import BATCH, PROMPTS, ScriptedProposer

G = 7
TOL = 5e-5  # keys and values of a verify pass against those of a prefill (see the target's test)


@functools.lru_cache
def scripted_frame():
  return Frame(cases.make_target()[0], ScriptedProposer(G), ConfidenceThreshold(0.5))


def start(frame, params, prompts=PROMPTS, **kwargs):
  kwargs = dict(max_new_tokens=30, sampling=make_sampling_params(len(prompts))) | kwargs
  return loop.start(frame, params, prompts, **kwargs)


def run_round(frame, params, state):
  """Runs one round; `state` stays usable, because a copy is donated."""
  return loop.run_rounds(frame, params, jax.tree.map(jnp.copy, state), jnp.int32(1))


# --- one traced function -----------------------------------------------------------------------


def abstract_state(frame, params):
  return jax.eval_shape(lambda: start(frame, params))


def walk(jaxpr):
  """Yields (equation, depth of loops and branches around it) of a jaxpr and all inner ones."""
  stack = [(jaxpr, 0)]
  while stack:
    jaxpr, depth = stack.pop()
    for equation in jaxpr.eqns:
      yield equation, depth
      is_control = equation.primitive.name in ("while", "scan", "cond")
      for inner in jax.tree.leaves(list(equation.params.values()),
                                   is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          stack.append((inner, depth + is_control))


@pytest.mark.parametrize("kind", ["plain", "scripted", "dspark"])
def test_generation_is_one_loop_without_host(kind):
  """Everything is traced, so no value reaches Python; and nothing calls back from the device."""
  if kind == "dspark":
    frame, params = cases.make_pair()
  else:
    params = cases.scripted_params(PROMPTS)
    frame = scripted_frame() if kind == "scripted" else Frame(cases.make_target()[0])
  jaxpr = jax.make_jaxpr(loop.run_rounds, static_argnums=0)(
      frame, params, abstract_state(frame, params), jnp.int32(3))
  equations = list(walk(jaxpr.jaxpr))
  names = {equation.primitive.name for equation, _ in equations}
  assert "while" in names and "dot_general" in names
  assert not [n for n in names if "callback" in n or "infeed" in n or "outfeed" in n]
  outermost = [e.primitive.name for e, depth in equations
               if depth == 0 and e.primitive.name in ("while", "scan", "cond")]
  assert outermost == ["while"]
  assert not [e for e, depth in equations if depth == 0 and e.primitive.name == "dot_general"]


@dataclasses.dataclass(frozen=True)
class PeekingProposer(ScriptedProposer):
  """Brings a value to the host in every round."""

  def propose(self, params, state, anchor_B, *args, **kwargs):
    int(anchor_B[0])
    return super().propose(params, state, anchor_B, *args, **kwargs)


def test_a_value_on_the_host_is_an_error():
  """The proof above has teeth: a drafter that reads a value cannot be traced."""
  frame = Frame(cases.make_target()[0], PeekingProposer(G))
  params = cases.scripted_params(PROMPTS)
  with pytest.raises(jax.errors.ConcretizationTypeError):
    jax.eval_shape(functools.partial(speculate_step, frame), params, abstract_state(frame, params))


@pytest.mark.parametrize("policy, width", [
    (None, 7), (FixedLength(0), 0), (FixedLength(3), 3), (FixedLength(9), 7),
    (ConfidenceThreshold(0.5), 7), (ConfidenceThreshold(0.5, 2), 2)])
def test_no_more_rows_are_verified_than_the_policy_can_use(monkeypatch, policy, width):
  widths = []

  def spy(config, params, cache, anchor_B, drafts_BxG, **kwargs):
    widths.append(drafts_BxG.shape[1])
    return verify(config, params, cache, anchor_B, drafts_BxG, **kwargs)

  verify = verify_lib.verify
  monkeypatch.setattr(verify_lib, "verify", spy)
  frame = dataclasses.replace(scripted_frame(), policy=policy)
  params = cases.scripted_params(PROMPTS)
  jax.eval_shape(functools.partial(speculate_step, frame), params, abstract_state(frame, params))
  assert widths == [width]


@pytest.mark.parametrize("drafter", [None, ScriptedProposer(G)])
def test_an_unknown_policy_is_named(drafter):
  frame = Frame(cases.make_target()[0], drafter, policy="fixed")
  params = cases.scripted_params(PROMPTS)
  with pytest.raises(TypeError, match="policy: found 'fixed', expected FixedLength"):
    jax.eval_shape(functools.partial(speculate_step, frame), params, abstract_state(frame, params))


# --- caches after a round ----------------------------------------------------------------------


def test_b20_b21_any_number_of_accepted_drafts():
  """Right drafts 0, 1, 2, 3, 6, 7 of 7, prompts of different lengths: each row moves on its own.

  Tokens grow by a + 1; the target's cache holds tokens - 1 rows, equal to those of a prefill of
  the committed tokens; the drafter observes from the old anchor on.
  """
  plain = cases.plain_tokens()
  right = np.array([0, 1, 2, 3, 6, 7])
  frame, params = scripted_frame(), cases.scripted_params(plain, right=right)
  before = start(frame, params)
  after = run_round(frame, params, before)
  n = np.array([len(p) for p in PROMPTS])
  np.testing.assert_array_equal(before.lens_B, n + 1)
  np.testing.assert_array_equal(after.lens_B, n + 1 + right + 1)
  np.testing.assert_array_equal(after.drafter, n)  # starts of `observe`: the old anchors
  np.testing.assert_array_equal(after.stats.accepted_BxG.sum(axis=1), right)
  np.testing.assert_array_equal(after.stats.verified_BxG, np.ones((BATCH, G)))
  np.testing.assert_array_equal(after.stats.num_committed_B, right + 1)
  tokens = cases.tokens_of(after)
  assert tokens == [p[:k] for p, k in zip(plain, n + right + 2)]
  fresh = start(frame, params, tokens)
  for found, expected in zip(jax.tree.leaves(after.cache), jax.tree.leaves(fresh.cache)):
    for b, length in enumerate(n + right + 1):
      np.testing.assert_allclose(found[b, :, :length], expected[b, :, :length], rtol=0, atol=TOL)
      # The first row past the valid ones is not there yet: the new anchor has no row.
      assert np.abs(found[b, :, length] - expected[b, :, length]).max() > 1e-3


def test_b20_dead_rows_are_never_read():
  """Keys of dead rows NaN, values huge but finite (the contract of `layers.attend`)."""
  plain = cases.plain_tokens()
  frame, params = scripted_frame(), cases.scripted_params(plain, right=[0, 1, 2, 3, 6, 7])
  state = run_round(frame, params, start(frame, params))
  is_dead = (jnp.arange(state.cache.num_slots)[None] >= state.lens_B[:, None] - 1)[:, None, :, None]
  fill = lambda layers, value: tuple(jnp.where(is_dead, value, x) for x in layers)
  cache = state.cache.replace(keys=fill(state.cache.keys, jnp.nan),
                              values=fill(state.cache.values, 1e38))
  poisoned = run_round(frame, params, state.replace(cache=cache))
  clean = run_round(frame, params, state)
  assert bool(poisoned.is_valid_B.all())
  assert cases.tokens_of(poisoned) == cases.tokens_of(clean)
  is_live = jnp.arange(state.cache.num_slots)[None] < clean.lens_B[:, None] - 1
  is_live = is_live[:, None, :, None]
  for found, expected in zip(jax.tree.leaves(poisoned.cache), jax.tree.leaves(clean.cache)):
    np.testing.assert_array_equal(jnp.where(is_live, found, 0), jnp.where(is_live, expected, 0))


def test_b25_ragged_verify_lengths():
  """Verify lengths 0, 1, 3, 7, 5, 2 in one rectangle of 8 rows."""
  plain = cases.plain_tokens()
  sure = np.array([0, 1, 3, 7, 5, 2])
  frame, params = scripted_frame(), cases.scripted_params(plain, sure=sure)
  after = run_round(frame, params, start(frame, params))
  np.testing.assert_array_equal(after.stats.verified_BxG.sum(axis=1), sure)
  np.testing.assert_array_equal(after.stats.accepted_BxG.sum(axis=1), sure)
  assert cases.tokens_of(after) == [t[:len(p) + 2 + k] for t, p, k in zip(plain, PROMPTS, sure)]


# --- a broken request (fault B13) --------------------------------------------------------------


def break_token(params, token):
  """A target whose embedding of one token is NaN: whoever meets the token has no law any more."""
  embed = params["target"]["embed_tokens"].at[token].set(jnp.nan)
  return params | {"target": params["target"] | {"embed_tokens": embed}}


def test_b13_nan_in_the_prompt():
  """Request 2 alone holds token 35: it is invalid from the start, the others are untouched."""
  plain = cases.plain_tokens()
  frame, params = scripted_frame(), cases.scripted_params(plain)
  state = loop.run_rounds(frame, params, start(frame, params), cases.ALL_ROUNDS)
  broken = break_token(params, 35)
  first = start(frame, broken)
  np.testing.assert_array_equal(first.is_valid_B, np.arange(BATCH) != 2)
  assert cases.tokens_of(first)[2] == PROMPTS[2] and bool(first.is_done_B[2])
  found = loop.run_rounds(frame, broken, first, cases.ALL_ROUNDS)
  np.testing.assert_array_equal(found.is_valid_B, np.arange(BATCH) != 2)
  expected = cases.tokens_of(state)
  expected[2] = PROMPTS[2]
  assert cases.tokens_of(found) == expected
  assert int(found.stats.num_rounds_B[2]) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_b13_nan_in_the_middle(temperature):
  """A request meets the broken token some tokens in: valid up to it, not after; neighbours, greedy
  or sampled, keep every token unless they meet it too."""
  config, params = cases.make_target()
  frame, params = Frame(config), {"target": params}
  sampling = make_sampling_params(BATCH, temperature=temperature, seed=np.arange(BATCH))
  run = lambda params: loop.run_rounds(
      frame, params, start(frame, params, sampling=sampling), cases.ALL_ROUNDS)
  clean = cases.tokens_of(run(params))
  meets = {t: [b for b in range(BATCH) if t in clean[b]] for t in range(cases.VOCAB)}
  # Met by the fewest, and by none of them in the prompt or as the very last token.
  bad = min((t for t in meets if meets[t] and all(
      t not in PROMPTS[b] and t != clean[b][-1] for b in meets[t])), key=lambda t: len(meets[t]))
  assert len(meets[bad]) <= 2
  found = run(break_token(params, bad))
  is_hit = np.isin(np.arange(BATCH), meets[bad])
  np.testing.assert_array_equal(found.is_valid_B, ~is_hit)
  assert bool(found.is_done_B.all())
  assert cases.tokens_of(found) == [
      tokens[:tokens.index(bad) + 1] if hit else tokens for tokens, hit in zip(clean, is_hit)]


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_b13_a_head_without_a_law_fails_every_request(value):
  """All logits NaN, +inf or -inf: flagged at the first token, no id is made up."""
  frame, params = scripted_frame(), cases.scripted_params(cases.plain_tokens())
  embed_V = jnp.full((cases.VOCAB,), value)
  # |h| > 0 in some direction: rows of the head that are +-inf give +-inf or NaN everywhere.
  head = params["target"]["lm_head"].at[:, 0].set(embed_V)
  broken = params | {"target": params["target"] | {"lm_head": head}}
  state = start(frame, broken)
  assert not state.is_valid_B.any() and state.is_done_B.all()
  assert cases.tokens_of(state) == [list(p) for p in PROMPTS]


# --- the law of plain decoding -----------------------------------------------------------------


def test_temperature_0_is_the_exact_argmax():
  """Every plain greedy token is the argmax of one pass over what came before."""
  config, params = cases.make_target()
  plain = cases.plain_tokens()
  padded = np.zeros((BATCH, max(map(len, plain))), np.int32)
  for row, tokens in zip(padded, plain):
    row[:len(tokens)] = tokens
  model = Transformer(config)

  @jax.jit
  def run(params, tokens):
    out = model.apply({"params": params}, tokens)
    return model.apply({"params": params}, out.hidden_BxTxD, method="head")

  logits = np.asarray(run(params, jnp.asarray(padded)))
  for b, (prompt, tokens) in enumerate(zip(PROMPTS, plain)):
    rows = logits[b, len(prompt) - 1:len(tokens) - 1]
    assert rows.argmax(axis=-1).tolist() == tokens[len(prompt):]
