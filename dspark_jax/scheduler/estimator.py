"""Estimators: what a round shows of itself -> confidence of each draft, and learning from rounds.

One interface: `init(proposal_len)` makes the state, `estimate(state, signals)` gives confidences
(each conditional on the drafts before it being accepted), `observe(state, ..)` returns the state
after a round. Everything is on the device; the state belongs to the engine, not to a request. An
estimate uses states of earlier rounds and signals that are known before the draft they judge is
drawn, so no estimator can bias what is decoded.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.scheduler import calibration

LIMIT = 20.0  # logits and margins are clipped here: a sigmoid is 1 to float32 by then


@flax.struct.dataclass
class Signals:
  """What is known of a draft before it is drawn (`types.Proposal`)."""
  confidence_logits_BxG: jax.Array
  margin_BxG: jax.Array | None = None


@flax.struct.dataclass
class Outcome:
  """What became of a round: verified drafts, accepted drafts, and who took part."""
  verify_lens_B: jax.Array
  num_accepted_B: jax.Array
  is_live_B: jax.Array

  def is_verified(self, proposal_len: int) -> jax.Array:
    """bool [B, G]: drafts whose fate is known."""
    slot_1xG = jnp.arange(proposal_len)[None]
    return (slot_1xG < self.verify_lens_B[:, None]) & self.is_live_B[:, None]


@dataclasses.dataclass(frozen=True)
class TrainedHead:
  """The drafter's confidence head, with STS temperatures where there are some."""
  temperatures: tuple[float, ...] | None = None

  does_learn = False  # whether `observe` changes what is estimated

  def init(self, proposal_len: int) -> Any:
    if self.temperatures is not None:
      calibration.check_temperatures(self.temperatures, proposal_len)
    return None

  def estimate(self, state, signals: Signals) -> jax.Array:
    logits_BxG = signals.confidence_logits_BxG
    if self.temperatures is not None:
      logits_BxG = logits_BxG / jnp.asarray(self.temperatures, jnp.float32)[None]
    return jax.nn.sigmoid(logits_BxG)

  def observe(self, state, signals: Signals, outcome: Outcome):
    return state


@dataclasses.dataclass(frozen=True)
class OnlineSts:
  """The confidence head with temperatures that follow the workload.

  Attributes:
    temperatures: at the start and without data, None = ones.
    half_life, prior: see `calibration.update_online_sts`.
  """
  temperatures: tuple[float, ...] | None = None
  half_life: float = 512.0
  prior: float = 8.0

  does_learn = True  # whether `observe` changes what is estimated

  def __post_init__(self):
    _check_positive(half_life=self.half_life, prior=self.prior)

  def init(self, proposal_len: int) -> calibration.OnlineStsState:
    return calibration.init_online_sts(self._start(proposal_len))

  def estimate(self, state, signals: Signals) -> jax.Array:
    return jax.nn.sigmoid(signals.confidence_logits_BxG / state.temperatures_G[None])

  def observe(self, state, signals: Signals, outcome: Outcome):
    proposal_len = signals.confidence_logits_BxG.shape[1]
    return calibration.update_online_sts(
        state, signals.confidence_logits_BxG, outcome.num_accepted_B,
        is_known_BxG=outcome.is_verified(proposal_len), start_G=self._start(proposal_len),
        half_life=self.half_life, prior=self.prior)

  def _start(self, proposal_len: int) -> jax.Array:
    if self.temperatures is None:
      return jnp.ones(proposal_len, jnp.float32)
    return jnp.asarray(calibration.check_temperatures(self.temperatures, proposal_len),
                       jnp.float32)


@flax.struct.dataclass
class LogisticState:
  """Weights and precision of one logistic regression a draft position."""
  weights_GxF: jax.Array
  precision_GxFxF: jax.Array


@dataclasses.dataclass(frozen=True)
class OnlineLogistic:
  """Logistic regression of "accepted" on the draft's margin, refitted every round; no training.

  The margin is that between the two best draft logits, so it looks at the law and not at the
  drafted token. One Newton step a round on exponentially forgotten curvature (an extended Kalman
  filter), pulled to a fixed prior.

  Attributes:
    uses_margin, uses_head: the features, beside a constant; `uses_head` is the trained head's
      logit, with slope 1 to start with (0.5 beside the margin).
    temperatures: of STS; with them it starts as the calibrated head, and the margin with slope 0.
    half_life: records after which a record counts half.
    prior: records that the starting weights count for.
  """
  uses_margin: bool = True
  uses_head: bool = False
  temperatures: tuple[float, ...] | None = None
  half_life: float = 512.0
  prior: float = 16.0

  does_learn = True  # whether `observe` changes what is estimated

  def __post_init__(self):
    _check_positive(half_life=self.half_life, prior=self.prior)
    if not (self.uses_margin or self.uses_head):
      raise ValueError("uses_margin: found false with uses_head false, expected a feature")
    if self.temperatures is not None and not self.uses_head:
      raise ValueError("temperatures: found some with uses_head false, expected None")

  def init(self, proposal_len: int) -> LogisticState:
    weights_GxF, precision_FxF = self._prior(proposal_len)
    return LogisticState(weights_GxF, jnp.tile(precision_FxF[None], (proposal_len, 1, 1)))

  def estimate(self, state, signals: Signals) -> jax.Array:
    features_BxGxF, _ = self._features(signals)
    return jax.nn.sigmoid(jnp.sum(features_BxGxF * state.weights_GxF[None], axis=-1))

  def observe(self, state, signals: Signals, outcome: Outcome):
    x_BxGxF, is_finite_BxG = self._features(signals)
    slot_1xG = jnp.arange(x_BxGxF.shape[1])[None]
    # Conditional on the drafts before: those that came after a rejection show nothing.
    is_seen_BxG = outcome.is_verified(x_BxGxF.shape[1]) & is_finite_BxG & (
        slot_1xG <= outcome.num_accepted_B[:, None])
    outcome_BxG = (slot_1xG < outcome.num_accepted_B[:, None]).astype(jnp.float32)
    weight_BxG = is_seen_BxG.astype(jnp.float32)
    p_BxG = jax.nn.sigmoid(jnp.sum(x_BxGxF * state.weights_GxF[None], axis=-1))
    kept_G = jnp.exp2(-weight_BxG.sum(axis=0) / self.half_life)
    prior_GxF, prior_FxF = self._prior(x_BxGxF.shape[1])
    forgotten_Gx1x1 = (1.0 - kept_G)[:, None, None]
    curvature_GxFxF = jnp.einsum("bg,bgf,bgh->gfh", weight_BxG * p_BxG * (1 - p_BxG), x_BxGxF,
                                 x_BxGxF)
    precision_GxFxF = (kept_G[:, None, None] * state.precision_GxFxF
                       + forgotten_Gx1x1 * prior_FxF[None] + curvature_GxFxF)
    gradient_GxF = jnp.einsum("bg,bgf->gf", weight_BxG * (outcome_BxG - p_BxG), x_BxGxF)
    gradient_GxF += jnp.einsum("gfh,gh->gf", forgotten_Gx1x1 * prior_FxF[None],
                               prior_GxF - state.weights_GxF)
    step_GxF = _solve(precision_GxFxF, gradient_GxF)
    return LogisticState(state.weights_GxF + step_GxF, precision_GxFxF)

  def _features(self, signals: Signals):
    """Returns (features [B, G, F] with a leading 1, bool [B, G] where they are numbers)."""
    columns = []
    if self.uses_margin:
      if signals.margin_BxG is None:
        raise ValueError("margin: found none in the proposal, expected a drafter that tells it")
      columns.append(signals.margin_BxG)
    if self.uses_head:
      columns.append(signals.confidence_logits_BxG)
    is_number_BxG = jnp.ones(columns[0].shape, bool)
    for column in columns:
      is_number_BxG &= column == column
    clean = [jnp.where(c == c, jnp.clip(c, -LIMIT, LIMIT), -LIMIT) for c in columns]
    return jnp.stack([jnp.ones_like(clean[0])] + clean, axis=-1), is_number_BxG

  def _prior(self, proposal_len: int) -> tuple[jax.Array, jax.Array]:
    """Starting weights [G, F] and their precision [F, F]; features vary by about 3."""
    num_features = 1 + self.uses_margin + self.uses_head
    weights_GxF = np.zeros((proposal_len, num_features), np.float32)
    if self.temperatures is not None:
      weights_GxF[:, -1] = 1.0 / np.asarray(calibration.check_temperatures(
          self.temperatures, proposal_len))
    else:
      share = 0.5 if self.uses_margin and self.uses_head else 1.0
      if self.uses_margin:
        weights_GxF[:, 0], weights_GxF[:, 1] = -share, 0.5 * share
      if self.uses_head:
        weights_GxF[:, -1] = share
    scale_F = np.array([1.0] + [9.0] * (num_features - 1))
    return (jnp.asarray(weights_GxF),
            jnp.asarray(np.diag(self.prior * 0.25 * scale_F), jnp.float32))


Estimator = TrainedHead | OnlineSts | OnlineLogistic


def _solve(a_GxFxF: jax.Array, b_GxF: jax.Array) -> jax.Array:
  """Solves small positive definite systems by elimination, unrolled: no LAPACK call a round."""
  size = b_GxF.shape[1]
  a = [[a_GxFxF[:, i, j] for j in range(size)] for i in range(size)]
  b = [b_GxF[:, i] for i in range(size)]
  for i in range(size):
    for j in range(i + 1, size):
      ratio = a[j][i] / a[i][i]
      a[j] = [x - ratio * y for x, y in zip(a[j], a[i])]
      b[j] = b[j] - ratio * b[i]
  x = [None] * size
  for i in reversed(range(size)):
    known = sum(a[i][j] * x[j] for j in range(i + 1, size))
    x[i] = (b[i] - known) / a[i][i]
  return jnp.stack(x, axis=1)


def _check_positive(**fields: float) -> None:
  for name, value in fields.items():
    if not (np.isfinite(value) and value > 0):
      raise ValueError(f"{name}: found {value}, expected a number > 0")
