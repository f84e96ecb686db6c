"""The sampling law: logits -> the law that tokens are drawn from, for target and drafter alike.

Order: temperature, top-k, top-p, min-p (the order of Hugging Face's processors). Ties are exact:
tokens are ordered by (tempered logit descending, id ascending); top-k keeps the first k of that
order, top-p its shortest prefix of mass >= top_p (of the law left by top-k), min-p every token with
p >= min_p * max p. At least one token always stays. Temperature 0 is a point mass on the argmax,
lowest id at ties.

Random numbers come from `pallas_kernels.counter_rng`: draw the token of a draft slot with
`noise_words(seed, DRAFT, anchor_position, slot)`; draw a token of plain decoding with
`noise_words(seed, RECOVER, its_position, 0)`, which is what a round without drafts does.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.counter_rng import gumbel_argmax
from pallas_kernels.rows import find_laws, first_argmax

# Rows whose kept tokens are among their best MAX_CANDIDATES need no search over the vocabulary.
MAX_CANDIDATES = 256
_RANK_OF_MINUS_INF = 0x7F800000  # bits of float32 infinity


@flax.struct.dataclass
class SamplingParams:
  """Sampling parameters of B requests, each field [B]; a row of zeros is greedy."""

  temperature: jax.Array  # float32; 0 (or anything not positive) = greedy
  top_k: jax.Array  # int32; 0 = off
  top_p: jax.Array  # float32 in (0, 1]; 1 = off
  min_p: jax.Array  # float32 in [0, 1]; 0 = off
  seed: jax.Array  # uint32


def make_sampling_params(
  batch: int, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0
) -> SamplingParams:
  """Returns SamplingParams for `batch` requests; every argument is one value or one per request.

  Raises ValueError naming the field for temperature < 0 or not finite, top_k < 0,
  top_p outside (0, 1], min_p outside [0, 1], seed outside uint32, or a wrong number of values. Host
  only, not for traced values.
  """
  temperature = _as_field("temperature", temperature, batch, np.float32)
  top_k = _as_field("top_k", top_k, batch, np.int32)
  top_p = _as_field("top_p", top_p, batch, np.float32)
  min_p = _as_field("min_p", min_p, batch, np.float32)
  seed = _as_field("seed", seed, batch, np.uint32)
  is_ok = np.isfinite(temperature) & (temperature >= 0)
  _check("temperature", temperature, is_ok, "a finite number >= 0")
  _check("top_k", top_k, top_k >= 0, "an integer >= 0 (0 = off)")
  _check("top_p", top_p, (top_p > 0) & (top_p <= 1), "a number in (0, 1] (1 = off)")
  _check("min_p", min_p, (min_p >= 0) & (min_p <= 1), "a number in [0, 1] (0 = off)")
  return SamplingParams(*(jnp.asarray(a) for a in (temperature, top_k, top_p, min_p, seed)))


def _as_field(name, value, batch, dtype):
  found = np.asarray(value)
  if found.dtype.kind not in "iuf" or found.shape not in ((), (batch,)):
    raise ValueError(f"{name}: found {value!r}, expected one number or {batch} numbers")
  if np.dtype(dtype).kind in "iu":
    info = np.iinfo(dtype)
    is_fit = (found == np.floor(found)) & (found >= info.min) & (found <= info.max)
    _check(name, found, is_fit, f"an integer in [{info.min}, {info.max}]")
  return np.broadcast_to(found.astype(dtype), (batch,))


def _check(name, found, is_ok, expected):
  if not np.all(is_ok):
    bad = np.atleast_1d(found)[~np.atleast_1d(is_ok)][0]
    raise ValueError(f"{name}: found {bad}, expected {expected}")


def law_logits(
  logits: jax.Array,
  params: SamplingParams,
  *,
  vocab_limit: int | None = None,
  ids: jax.Array | None = None,
) -> jax.Array:
  """Returns the law after temperature and filters as float32 logits, -inf for removed tokens.

  `logits` is [B, ..., V] of any float type, `params` SamplingParams of [B]. The result has its
  shape, is unnormalised, and has maximum 0; greedy rows hold 0 at the argmax and -inf elsewhere.
  `vocab_limit` (static int) removes ids >= vocab_limit, the padded rows of an LM head, before
  anything else; `ids` (int [V]) are the target ids of the columns when the vocabulary is reduced
  (default 0..V-1).
  A row that is no law (a NaN, +inf, or nothing finite) comes back as NaN
  throughout, so that acceptance can flag it. Not for vmap: the branches that keep greedy and
  unfiltered batches cheap would all run.
  """
  rows_xV = logits.astype(jnp.float32).reshape(-1, logits.shape[-1])
  if vocab_limit is not None:
    ids = jnp.arange(rows_xV.shape[-1]) if ids is None else ids
    rows_xV = jnp.where((ids < vocab_limit)[None], rows_xV, -jnp.inf)
  repeats = rows_xV.shape[0] // logits.shape[0]
  temperature_x, top_k_x, top_p_x, min_p_x = (
    jnp.repeat(a, repeats)
    for a in (params.temperature, params.top_k, params.top_p, params.min_p)
  )
  is_greedy_x = ~(temperature_x > 0)
  is_filtered_x = ~is_greedy_x & ((top_k_x > 0) | (top_p_x < 1) | (min_p_x > 0))

  def temper(rows_xV):
    # Subtracting the maximum first keeps a tiny temperature from overflowing; the law is the same.
    shifted_xV = rows_xV - jnp.max(rows_xV, axis=-1, keepdims=True)
    scaled_xV = shifted_xV / jnp.where(is_greedy_x, 1.0, temperature_x)[:, None]
    scaled_xV = jnp.where(scaled_xV == 0, 0.0, scaled_xV)  # -0.0 and 0.0 are one tie
    top_k = jnp.where(is_filtered_x, top_k_x, 0)
    top_p = jnp.where(is_filtered_x, top_p_x, 1.0)
    min_p = jnp.where(is_filtered_x, min_p_x, 0.0)
    kept_xV = lax.cond(
      jnp.any(is_filtered_x), lambda x: _filter(x, top_k, top_p, min_p), lambda x: x, scaled_xV
    )
    return lax.cond(
      jnp.any(is_greedy_x),
      lambda x: jnp.where(is_greedy_x[:, None], _point_mass(rows_xV), x),
      lambda x: x,
      kept_xV,
    )

  law_xV = lax.cond(jnp.all(is_greedy_x), _point_mass, temper, rows_xV)
  return jnp.where(find_laws(rows_xV)[:, None], law_xV, jnp.nan).reshape(logits.shape)


def sample(
  law_logits: jax.Array, words: jax.Array, *, ids: jax.Array | None = None
) -> jax.Array:
  """Draws one token id per row, int32 [...], from law logits [..., V] and noise words [..., 2].

  `ids` (int [V]) are the target ids of the columns of a reduced vocabulary; noise belongs to the
  id, so the same law on a reduced, full or padded vocabulary draws the same token. A broken (NaN)
  row draws its first column: check validity at acceptance. Point masses only cost one pass.
  """
  columns = lax.cond(
    jnp.max(jnp.sum(law_logits > -jnp.inf, axis=-1)) <= 1,
    lambda: first_argmax(law_logits),
    lambda: gumbel_argmax(law_logits, words, ids),
  )
  return columns if ids is None else jnp.take(ids, columns, axis=0).astype(jnp.int32)


def _point_mass(rows_xV):
  index_xV = lax.broadcasted_iota(jnp.int32, rows_xV.shape, 1)
  return jnp.where(index_xV == first_argmax(rows_xV)[:, None], 0.0, -jnp.inf)


def _filter(scaled_xV, top_k_x, top_p_x, min_p_x):
  """Removes tokens by top-k, top-p, then min-p from tempered logits whose maximum is 0."""
  num_tokens = scaled_xV.shape[-1]
  limit_x = jnp.where((top_k_x <= 0) | (top_k_x > num_tokens), num_tokens, top_k_x)
  values_xC, index_xC = lax.top_k(scaled_xV, min(MAX_CANDIDATES, num_tokens))
  last_value_x, last_index_x, does_fit_x = _cut_candidates(
    values_xC, index_xC, scaled_xV, limit_x, top_p_x
  )
  if num_tokens > MAX_CANDIDATES:
    # Rows that fit keep the candidates' cut even when a neighbour needs the search: a request's
    # tokens must not depend on who shares the batch, not even in a last bit.
    last_value_x, last_index_x = lax.cond(
      jnp.all(does_fit_x),
      lambda: (last_value_x, last_index_x),
      lambda: jax.tree.map(
        lambda fit, full: jnp.where(does_fit_x, fit, full),
        (last_value_x, last_index_x),
        _cut_by_search(scaled_xV, limit_x, top_p_x),
      ),
    )
  index_xV = lax.broadcasted_iota(jnp.int32, scaled_xV.shape, 1)
  is_kept_xV = (scaled_xV > last_value_x[:, None]) | (
    (scaled_xV == last_value_x[:, None]) & (index_xV <= last_index_x[:, None])
  )
  is_kept_xV &= scaled_xV >= jnp.log(min_p_x)[:, None]
  return jnp.where(is_kept_xV, scaled_xV, -jnp.inf)


def _cut_candidates(values_xC, index_xC, scaled_xV, limit_x, top_p_x):
  """Returns (value, index) of the last token kept and whether the candidates suffice to know it."""
  num_tokens, num_candidates = scaled_xV.shape[-1], values_xC.shape[-1]
  rank_C = jnp.arange(num_candidates)
  is_in_top_k_xC = rank_C[None] < limit_x[:, None]
  mass_xC = jnp.cumsum(jnp.where(is_in_top_k_xC, jnp.exp(values_xC), 0.0), axis=-1)
  is_unlimited_x = limit_x >= num_tokens
  total_x = jnp.where(is_unlimited_x, jnp.sum(jnp.exp(scaled_xV), axis=-1), mass_xC[:, -1])
  goal_x = top_p_x * total_x
  num_nucleus_x = 1 + jnp.sum(mass_xC < goal_x[:, None], axis=-1)
  num_kept_x = jnp.where(top_p_x < 1, jnp.minimum(num_nucleus_x, limit_x), limit_x)
  # An unlimited row without top-p keeps everything: a threshold below every value.
  keeps_all_x = is_unlimited_x & (top_p_x >= 1)
  does_fit_x = keeps_all_x | (
    (num_kept_x <= num_candidates) & (is_unlimited_x | (limit_x <= num_candidates))
  )
  last_x = jnp.clip(num_kept_x, 1, num_candidates) - 1
  last_value_x = jnp.take_along_axis(values_xC, last_x[:, None], axis=-1)[:, 0]
  last_index_x = jnp.take_along_axis(index_xC, last_x[:, None], axis=-1)[:, 0]
  return jnp.where(keeps_all_x, -jnp.inf, last_value_x), last_index_x, does_fit_x


def _cut_by_search(scaled_xV, limit_x, top_p_x):
  """Same cut for any number of kept tokens, by bisection on the bits of the values: no sort.

  A full sort of 8 rows of 49,152 costs 90 ms on CPU, this 6 ms.
  """
  # Values are <= 0, so the bits of their magnitudes, read as integers, are in descending value
  # order.
  rank_xV = lax.bitcast_convert_type(jnp.abs(scaled_xV), jnp.int32)
  index_xV = lax.broadcasted_iota(jnp.int32, scaled_xV.shape, 1)
  index_bits = max(1, (scaled_xV.shape[-1] - 1).bit_length())

  def find_prefix(weight_xV, goal_x):
    last_rank_x = _find_first(rank_xV, weight_xV, goal_x, num_bits=31)
    is_tie_xV = rank_xV == last_rank_x[:, None]
    above_x = jnp.sum(jnp.where(rank_xV < last_rank_x[:, None], weight_xV, 0.0), axis=-1)
    tie_weight_xV = jnp.where(is_tie_xV, weight_xV, 0.0)
    last_index_x = _find_first(index_xV, tie_weight_xV, goal_x - above_x, num_bits=index_bits)
    return last_rank_x, last_index_x

  def is_within(last_rank_x, last_index_x):
    return (rank_xV < last_rank_x[:, None]) | (
      (rank_xV == last_rank_x[:, None]) & (index_xV <= last_index_x[:, None])
    )

  top_k_cut = find_prefix(jnp.ones_like(scaled_xV), limit_x.astype(jnp.float32))
  weight_xV = jnp.where(is_within(*top_k_cut), jnp.exp(scaled_xV), 0.0)
  top_p_cut = find_prefix(weight_xV, top_p_x * jnp.sum(weight_xV, axis=-1))
  last_rank_x, last_index_x = (
    jnp.where(top_p_x < 1, p, k) for p, k in zip(top_p_cut, top_k_cut, strict=True)
  )
  last_rank_x = jnp.minimum(last_rank_x, _RANK_OF_MINUS_INF)
  return -lax.bitcast_convert_type(last_rank_x, jnp.float32), last_index_x


def _find_first(key_xV, weight_xV, goal_x, *, num_bits):
  """Returns the smallest key K with sum(weight where key <= K) >= goal, int32 [R].

  All ones when rounding keeps the sum of everything below the goal: then nothing is cut.
  """

  def set_bit(i, found_x):
    trial_x = found_x | (1 << (num_bits - 1 - i))
    mass_x = jnp.sum(jnp.where(key_xV < trial_x[:, None], weight_xV, 0.0), axis=-1)
    return jnp.where(mass_x < goal_x, trial_x, found_x)

  return lax.fori_loop(0, num_bits, set_bit, jnp.zeros_like(goal_x, jnp.int32))
