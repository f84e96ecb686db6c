"""Sequential temperature scaling (STS, paper section 3.2.1): raw confidence -> calibrated survival.

For draft position k = 0, 1, .. in order, temperature T_k is the grid point with the least expected
calibration error (ECE) of the survival prod_{i<=k} sigmoid(logit_i / T_i) against what happened,
"drafts 0..k were all accepted", with the earlier temperatures fixed. Offline the data is a run that
verified every draft; online the same sums are kept on the device and forgotten exponentially.
"""

import dataclasses
import json
import pathlib
from typing import Any, Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

FILE = "sts.json"  # beside a drafter's config.json
FORMAT, VERSION = "dspark_jax.sts", 1
GRID = tuple(2.0 ** (i / 16) for i in range(-48, 49))  # 1/8 .. 8
NUM_BINS = 20
MIN_RECORDS = 32  # fewer than these fit noise


@dataclasses.dataclass(frozen=True)
class StsFit:
  """Temperatures, and how each came about.

  Attributes:
    temperatures: one a draft position, 1 where `status` is not "fitted".
    status: "fitted", "no data", "few data", or "one class" (all or none accepted, which says
      nothing about a slope).
    num_records: rounds used.
    ece_before, ece_after: of the survival of each position; None without data.
  """
  temperatures: tuple[float, ...]
  status: tuple[str, ...]
  num_records: int
  ece_before: tuple[float | None, ...]
  ece_after: tuple[float | None, ...]


def fit_sts(logits_NxG, num_accepted_N, *, verify_lens_N=None, grid: Sequence[float] = GRID,
            num_bins: int = NUM_BINS, min_records: int = MIN_RECORDS) -> StsFit:
  """Fits temperatures from rounds that verified the full block.

  Args:
    logits_NxG: raw confidence logits, +-inf allowed.
    num_accepted_N: accepted drafts of each round, 0..G.
    verify_lens_N: drafts verified in each round, None = all G. A record that was cut short says
      nothing about what came after the cut, and those that reach far would be the good ones alone.
    grid: temperatures > 0 to choose from; at a tie the one nearest to 1 wins.
  Raises:
    ValueError: records cut short, a NaN logit, counts outside 0..G, a temperature not > 0.
  """
  logits = np.asarray(logits_NxG, np.float64)
  if logits.ndim != 2:
    raise ValueError(f"logits: found shape {logits.shape}, expected [records, positions]")
  num_records, proposal_len = logits.shape
  accepted = np.asarray(num_accepted_N)
  if accepted.shape != (num_records,) or (
      num_records and (accepted.min() < 0 or accepted.max() > proposal_len)):
    raise ValueError(f"num_accepted: found shape {accepted.shape} or numbers outside "
                     f"0..{proposal_len}, expected one a record")
  if np.isnan(logits).any():
    raise ValueError("logits: found NaN, expected numbers or +-inf")
  if verify_lens_N is not None and (np.asarray(verify_lens_N) < proposal_len).any():
    raise ValueError(f"verify_lens: found {int(np.min(verify_lens_N))}, expected {proposal_len} in "
                     "every record: calibrate on a run that verifies every draft")
  grid = np.asarray(grid, np.float64)
  if not (np.isfinite(grid) & (grid > 0)).all():
    raise ValueError(f"grid: found {grid.min()}, expected temperatures > 0")
  grid = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]  # nearest to 1 first

  temperatures, status, before, after = [], [], [], []
  survived_N, plain_N = np.ones(num_records), np.ones(num_records)
  for k in range(proposal_len):
    outcome_N = accepted > k
    plain_N = plain_N * _sigmoid(logits[:, k])
    temperature, found = 1.0, "fitted"
    if num_records < max(min_records, 1):
      found = "few data" if num_records else "no data"
    elif outcome_N.all() or not outcome_N.any():
      found = "one class"
    else:
      errors = [_ece(survived_N * _sigmoid(logits[:, k] / t), outcome_N, num_bins) for t in grid]
      temperature = float(grid[int(np.argmin(errors))])
    survived_N = survived_N * _sigmoid(logits[:, k] / temperature)
    temperatures.append(temperature)
    status.append(found)
    for figures, predicted_N in ((before, plain_N), (after, survived_N)):
      figures.append(_ece(predicted_N, outcome_N, num_bins) if num_records else None)
  return StsFit(tuple(temperatures), tuple(status), num_records, tuple(before), tuple(after))


def _sigmoid(x_N):
  with np.errstate(over="ignore"):
    return 1.0 / (1.0 + np.exp(-x_N))


def _ece(predicted_N, outcome_N, num_bins: int) -> float:
  bin_N = np.minimum((predicted_N * num_bins).astype(int), num_bins - 1)
  gaps = np.bincount(bin_N, predicted_N - outcome_N, minlength=num_bins)
  return float(np.abs(gaps).sum() / len(predicted_N))


def save_sts(directory: str | pathlib.Path, temperatures: Sequence[float],
             **about: Any) -> pathlib.Path:
  """Writes `sts.json` into a drafter's directory; `about` is kept beside (data, figures)."""
  path = pathlib.Path(directory) / FILE
  content = dict(format=FORMAT, version=VERSION, temperatures=list(temperatures), **about)
  # allow_nan: a bare NaN is no JSON; missing figures are null.
  draft = path.with_suffix(path.suffix + ".new")
  draft.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
  return draft.replace(path)


def load_sts(directory: str | pathlib.Path, proposal_len: int) -> tuple[float, ...]:
  """Reads the temperatures of a drafter of `proposal_len`.

  Raises FileNotFoundError, or ValueError naming the field that does not fit.
  """
  path = pathlib.Path(directory) / FILE
  if not path.is_file():
    raise FileNotFoundError(f"{path}: not found; experiments/calibrate.py writes it")
  try:
    content = json.loads(path.read_text())
  except json.JSONDecodeError as e:
    raise ValueError(f"{path}: found no JSON ({e.msg})") from e
  if not isinstance(content, Mapping):
    raise ValueError(f"{path}: found a {type(content).__name__}, expected an object")
  for name, expected in (("format", FORMAT), ("version", VERSION)):
    if content.get(name) != expected:
      raise ValueError(f"{path}: {name}: found {content.get(name)!r}, expected {expected!r}")
  return check_temperatures(content.get("temperatures"), proposal_len)


def check_temperatures(temperatures, proposal_len: int) -> tuple[float, ...]:
  """Returns temperatures as a tuple; ValueError unless they are `proposal_len` numbers > 0."""
  is_list = isinstance(temperatures, (list, tuple))
  if not is_list or len(temperatures) != proposal_len:
    raise ValueError(f"temperatures: found {temperatures!r}, expected {proposal_len} numbers")
  for t in temperatures:
    if isinstance(t, bool) or not isinstance(t, (int, float)) or not (np.isfinite(t) and t > 0):
      raise ValueError(f"temperatures: found {t!r}, expected numbers > 0")
  return tuple(float(t) for t in temperatures)


# --- online --------------------------------------------------------------------------------------

ONLINE_STEPS = np.arange(-12, 13) / 4.0  # powers of two around the start: 1/8 .. 8 times
ONLINE_BINS = 10


@flax.struct.dataclass
class OnlineStsState:
  """What is kept of past rounds.

  Attributes:
    gap_GxTxN: for each position, grid temperature and bin, the sum of (survival - outcome).
    temperatures_G: the present choice.
  """
  gap_GxTxN: jax.Array
  temperatures_G: jax.Array


def init_online_sts(start_G: jax.Array) -> OnlineStsState:
  shape = (start_G.shape[0], len(ONLINE_STEPS), ONLINE_BINS)
  return OnlineStsState(jnp.zeros(shape, jnp.float32), start_G)


def update_online_sts(state: OnlineStsState, logits_BxG: jax.Array, num_accepted_B: jax.Array, *,
                      is_known_BxG: jax.Array, start_G: jax.Array, half_life: float,
                      prior: float) -> OnlineStsState:
  """Adds a round and chooses temperatures anew.

  T_k minimises (weight x ECE) + prior x |ln T_k - ln start_k|, over a grid around the start: what
  little data there is moves nothing, and nothing is left of a workload after a few half-lives.

  Args:
    is_known_BxG: bool, drafts whose outcome was seen, i.e. verified ones of live requests.
    start_G: temperatures that hold without data.
    half_life: records after which a record counts half.
    prior: records that have to speak for a change by a factor e.
  """
  grid_GxT = start_G[:, None] * jnp.exp2(jnp.asarray(ONLINE_STEPS, jnp.float32))[None]
  # A survival is a product: after a NaN there is none.
  is_number_BxG = jnp.cumprod((logits_BxG == logits_BxG).astype(jnp.int32), axis=1) > 0
  is_known_BxG = is_known_BxG & is_number_BxG
  logits_BxG = jnp.where(is_known_BxG, logits_BxG, 0.0)
  now_BxG = jnp.cumprod(jax.nn.sigmoid(logits_BxG / state.temperatures_G[None]), axis=1)
  before_BxG = jnp.concatenate([jnp.ones_like(now_BxG[:, :1]), now_BxG[:, :-1]], axis=1)
  survival_BxGxT = before_BxG[..., None] * jax.nn.sigmoid(logits_BxG[..., None] / grid_GxT[None])
  outcome_BxG = num_accepted_B[:, None] > jnp.arange(logits_BxG.shape[1])[None]
  gap_BxGxT = jnp.where(is_known_BxG[..., None],
                        survival_BxGxT - outcome_BxG[..., None].astype(jnp.float32), 0.0)
  bin_BxGxT = jnp.minimum((survival_BxGxT * ONLINE_BINS).astype(jnp.int32), ONLINE_BINS - 1)
  is_bin_BxGxTxN = bin_BxGxT[..., None] == jnp.arange(ONLINE_BINS)[None, None, None]
  num_records_G = jnp.sum(is_known_BxG, axis=0, dtype=jnp.float32)
  kept_G = jnp.exp2(-num_records_G / half_life)  # a position that was not verified forgets nothing
  gap_GxTxN = kept_G[:, None, None] * state.gap_GxTxN + jnp.sum(
      jnp.where(is_bin_BxGxTxN, gap_BxGxT[..., None], 0.0), axis=0)
  pull_T = jnp.asarray(np.abs(ONLINE_STEPS) * np.log(2.0), jnp.float32)
  cost_GxT = jnp.abs(gap_GxTxN).sum(axis=-1) + prior * pull_T[None]
  best_G = jnp.argmin(cost_GxT, axis=1)
  return OnlineStsState(gap_GxTxN, jnp.take_along_axis(grid_GxT, best_G[:, None], axis=1)[:, 0])
