"""The device half of the engine: a batch of fixed slots that requests enter and leave.

Three functions on one `DecodeState`, none of which waits for anything: `loop.prefill` of a single
request, `insert` of its result into a slot, `run_round` over all slots. Shapes depend on the number
of slots, their length and the prompt's bucket alone, so whoever comes and goes, nothing is compiled
again.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.decode import loop
from dspark_jax.decode.state import PAD, DecodeState, Frame, init_stats
from dspark_jax.sampling import SamplingParams
from dspark_jax.scheduler.schedule import SchedulerState, forget_requests

# Fields of the state with one row a request, that `insert` overwrites; tokens need a fill of PAD.
_REQUEST_FIELDS = ("lens_B", "limits_B", "is_done_B", "is_valid_B", "cache", "drafter", "sampling",
                   "stop_ids_BxE", "stats")


@flax.struct.dataclass
class RoundReport:
  """What the host is told of a round; small, and no part of the state.

  Attributes:
    tokens_BxW: int32, the committed tokens; only the first num_new are any.
    num_new_B: int32.
    is_live_B: bool, whether the request took part in the round.
    is_done_B, is_valid_B: bool, after the round.
    num_verified_B, num_accepted_B: int32, drafts of this round.
  """
  tokens_BxW: jax.Array
  num_new_B: jax.Array
  is_live_B: jax.Array
  is_done_B: jax.Array
  is_valid_B: jax.Array
  num_verified_B: jax.Array
  num_accepted_B: jax.Array


@functools.partial(jax.jit, static_argnames=("frame", "batch", "max_len", "num_stop_ids"))
def init_slots(frame: Frame, *, batch: int, max_len: int, num_stop_ids: int) -> DecodeState:
  """Returns `batch` empty slots: requests of one token that are done.

  Args:
    max_len: longest prompt + answer.
    num_stop_ids: stop ids that a request may have.
  """
  num_slots = loop.round_up(max_len + frame.slack, loop.SLOT_BUCKET)
  c = frame.target
  full = lambda value, dtype: jnp.full((batch,), value, dtype)
  return DecodeState(
      # Token 0, not PAD, is the anchor of an empty slot: it will be embedded.
      tokens_BxS=jnp.full((batch, num_slots), PAD, jnp.int32).at[:, 0].set(0),
      lens_B=full(1, jnp.int32), limits_B=full(1, jnp.int32), is_done_B=full(True, bool),
      is_valid_B=full(True, bool),
      cache=kv_cache.init_cache(batch, num_slots, num_layers=c.num_layers,
                                num_kv_heads=c.num_kv_heads, head_dim=c.head_dim,
                                dtype=frame.dtype),
      drafter=None if frame.drafter is None else frame.drafter.init_state(batch, num_slots),
      sampling=SamplingParams(full(0, jnp.float32), full(0, jnp.int32), full(1, jnp.float32),
                              full(0, jnp.float32), full(0, jnp.uint32)),
      stop_ids_BxE=jnp.full((batch, num_stop_ids), PAD, jnp.int32),
      stats=init_stats(batch, frame.proposal_len))


def insert(state: DecodeState, fresh: DecodeState, slot: int) -> DecodeState:
  """Writes a prefilled batch of one into a slot, and clears what its last occupant left there.

  Cache rows past the new prompt become zeros: a request that broke down may have left NaN in
  them, and dead values must be finite (`layers.attend`).

  Args:
    state: DecodeState of B slots; donated. Every leaf of its drafter state has the requests first.
    fresh: DecodeState of one request, with as many stop ids and no more cache slots or drafts than
      `state`.
  """
  # The scheduler is the engine's and keeps what it has learnt. It stays outside, so that all
  # policies share one program.
  scheduler = state.scheduler
  if scheduler is not None:
    scheduler = _forget(scheduler, jnp.int32(slot))
  return _insert(state.replace(scheduler=None), fresh, jnp.int32(slot)).replace(
      scheduler=scheduler)


@functools.partial(jax.jit, donate_argnames=("scheduler",))
def _forget(scheduler: SchedulerState, slot: jax.Array) -> SchedulerState:
  return forget_requests(scheduler, jnp.arange(scheduler.num_drawn_B.shape[0]) == slot)


@functools.partial(jax.jit, donate_argnames=("state",))
def _insert(state: DecodeState, fresh: DecodeState, slot: jax.Array) -> DecodeState:
  def put(old_Bx, new_1x, fill=0):
    widths = [(0, 0)] + [(0, b - n) for b, n in zip(old_Bx.shape[1:], new_1x.shape[1:])]
    new_1x = jnp.pad(new_1x.astype(old_Bx.dtype), widths, constant_values=fill)
    return jax.lax.dynamic_update_slice_in_dim(old_Bx, new_1x, slot, axis=0)

  return state.replace(
      tokens_BxS=put(state.tokens_BxS, fresh.tokens_BxS, fill=PAD),
      **{name: jax.tree.map(put, getattr(state, name), getattr(fresh, name))
         for name in _REQUEST_FIELDS})


@functools.partial(jax.jit, static_argnames=("frame",), donate_argnames=("state",))
def run_round(frame: Frame, params, state: DecodeState,
              max_rounds: jax.Array) -> tuple[DecodeState, RoundReport]:
  """Runs one round of all slots, or nothing where every request is done.

  Args:
    max_rounds: int32 [], 1 (not a constant, so that the loop stays one: see `kv_cache.write_rows`).
  """
  # A request that is done has no law to obey: one that sampled must not keep the greedy rest from
  # their cheap path.
  temperature_B = jnp.where(state.is_done_B, 0.0, state.sampling.temperature)
  before = state
  after = loop.run_rounds(
      frame, params, state.replace(sampling=state.sampling.replace(temperature=temperature_B)),
      max_rounds)
  slots_BxW = before.lens_B[:, None] + jnp.arange(frame.proposal_len + 1)[None, :]
  count = lambda name: (getattr(after.stats, name) - getattr(before.stats, name)).sum(
      axis=1, dtype=jnp.int32)
  report = RoundReport(
      tokens_BxW=jnp.take_along_axis(after.tokens_BxS, slots_BxW, axis=1),
      num_new_B=after.lens_B - before.lens_B,
      is_live_B=after.stats.num_rounds_B > before.stats.num_rounds_B,
      is_done_B=after.is_done_B, is_valid_B=after.is_valid_B,
      num_verified_B=count("verified_BxG"), num_accepted_B=count("accepted_BxG"))
  return after, report
