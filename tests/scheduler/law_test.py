"""Every policy decodes the target's law, where confidence depends on the drafted tokens.

By enumeration for the paper's appendix A and fault B53, and by chi-square over 131,072 seeds of the
toy decoder for policies and estimators that carry memory from round to round. A schedule that looks
at the draft it judges has to fail both.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.scheduler import schedule
from dspark_jax.scheduler.estimator import OnlineLogistic, OnlineSts, Outcome, Signals
from dspark_jax.scheduler.policies import EarlyStop, Lagged
from dspark_jax.scheduler.step_curve import Timings, make_step_curve
from pallas_kernels.length_selection import length_selection
from tests import oracles
from tests.scheduler import oracle
from tests.toy_decoder import compute_p_value, make_tables

MIN_P_VALUE = 1e-4
MAX_P_VALUE_OF_A_FAULT = 1e-9


# --- appendix A and fault B53, every event enumerated --------------------------------------------


def search_everything(survival, steps):
  """The schedule the paper warns of: the best length of all, judged by this round's survivals."""
  rates = [(1 + survival[:n].sum()) * steps[n + 1] for n in range(len(survival) + 1)]
  return int(np.argmax(rates))


def stop_early(survival, steps):
  lens = length_selection(jnp.asarray(survival[None], jnp.float32),
                          step_curve_C=jnp.asarray(steps, jnp.float32))
  assert lens.tolist() == oracle.run_algorithm_1(survival[None], steps)
  return int(lens[0])


@pytest.mark.parametrize("choose, biased", [(search_everything, True), (stop_early, False)])
@pytest.mark.parametrize("name, p, q, c1, c2, steps, tell", [
    ("appendix A", (.7, .3), (.5, .5), .8, .9, (9, 1, .5, .45), (.85, .15)),
    ("B53", (.5, .5), (.9, .1), .6, .95, (9, 1, .55, .5), (.55, .45))])
def test_paper_counterexample(choose, biased, name, p, q, c1, c2, steps, tell):
  """The second confidence is c2 if the first draft is token 0, else 0."""
  def verify_len(prefix, drafts):
    c = np.array([c1, c2 if drafts[0] == 0 else 0.0])
    return choose(np.cumprod(c), np.array(steps))

  law = oracles.compute_speculative_law(lambda _: np.array(p), lambda _: np.array(q), verify_len,
                                        num_tokens=1, num_drafts=2, vocab=2)
  np.testing.assert_allclose(law, tell if biased else p, atol=1e-12)


# --- policies with memory ------------------------------------------------------------------------

GROUP = 4  # requests that share a budget
VOCAB, NUM_DRAFTS = 3, 2
LADDER = ((4, 1), (6, 2), (8, 3), (12, 3))
TABLES = make_tables(VOCAB, NUM_DRAFTS, seed=11)


@dataclasses.dataclass(frozen=True)
class Scheduler:
  """Our scheduler over groups of GROUP requests of the toy decoder."""
  policy: object
  estimator: object = None
  verify_ms: tuple = (4.0, 4.9, 5.6, 7.5)
  draft_ms: tuple = (.2, .3)

  def init(self, batch, num_drafts):
    curve = make_step_curve(Timings(LADDER, self.verify_ms, self.draft_ms))
    state = schedule.init_scheduler(GROUP, num_drafts, policy=self.policy,
                                    estimator=self.estimator, ladder=LADDER, curve=curve)
    return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (batch // GROUP, *x.shape)), state)

  def signals(self, confidence):
    logits = jnp.log(confidence) - jnp.log1p(-confidence)
    return Signals(logits, 3 * confidence)

  def look(self, state, confidence):
    is_live, room = jnp.ones(GROUP, bool), jnp.full(GROUP, confidence.shape[1])
    plan = schedule.plan_round(self.policy, self.estimator, state, is_live, room, ladder=LADDER)
    return plan, *schedule.choose_lens(self.policy, self.estimator, state, plan,
                                       self.signals(confidence), is_live_B=is_live,
                                       max_lens_B=room, ladder=LADDER)

  def choose(self, memory, confidence_BxG, tokens_BxG):
    groups = confidence_BxG.reshape(-1, GROUP, confidence_BxG.shape[1])
    return jax.vmap(lambda s, c: self.look(s, c)[1])(memory, groups).reshape(-1)

  def learn(self, memory, confidence_BxG, lens_B, num_accepted_B):
    def learn_group(state, confidence, lens, num_accepted):
      plan, _, survival = self.look(state, confidence)
      outcome = Outcome(lens, num_accepted, jnp.ones(GROUP, bool))
      return schedule.learn(self.policy, self.estimator, state, plan, self.signals(confidence),
                            survival, outcome, ladder=LADDER, bucket=None)
    fold = lambda x: x.reshape(-1, GROUP, *x.shape[1:])
    return jax.vmap(learn_group)(memory, fold(confidence_BxG), fold(lens_B), fold(num_accepted_B))


@dataclasses.dataclass(frozen=True)
class Peeking(Scheduler):
  """The same, but shown the drafted token: surer of a draft that is token 0."""

  def choose(self, memory, confidence_BxG, tokens_BxG):
    sure = jnp.where(tokens_BxG == 0, .95, .05)
    return super().choose(memory, sure, tokens_BxG)


HONEST = [
    Scheduler(EarlyStop(may_skip_draft=False, fills_bucket=False)),
    Scheduler(Lagged(memory=0.0, explore_every=2, explore_share=1e9),
              OnlineSts(half_life=4.0, prior=.5)),
]


@pytest.mark.parametrize("scheduler", HONEST, ids=lambda s: type(s.policy).__name__)
def test_tokens_follow_the_target(scheduler):
  p_value = compute_p_value(TABLES, 0.0, temperature=1.0, plants={"scheduler": scheduler})
  assert p_value > MIN_P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [
    Scheduler(EarlyStop(explore_every=2, explore_share=1e9),
              OnlineLogistic(half_life=4.0)),
    Scheduler(Lagged(memory=.5, min_draft=1, may_skip_draft=False)),
], ids=lambda s: type(s.policy).__name__)
def test_tokens_follow_the_target_more(scheduler):
  p_value = compute_p_value(TABLES, 0.0, temperature=1.3, plants={"scheduler": scheduler})
  assert p_value > MIN_P_VALUE


def test_a_schedule_that_peeks_is_found_out():
  peeking = Peeking(EarlyStop(may_skip_draft=False, fills_bucket=False))
  assert compute_p_value(TABLES, 0.0, temperature=1.0,
                         plants={"scheduler": peeking}) < MAX_P_VALUE_OF_A_FAULT

