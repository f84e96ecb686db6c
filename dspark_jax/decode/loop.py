"""Prefill and the generation loop: one jit each, nothing on the host between rounds."""

import functools
from typing import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import kv_cache
from dspark_jax.decode.state import PAD, DecodeState, Frame, init_stats
from dspark_jax.decode.step import speculate_step
from dspark_jax.ladder import fill_shape
from dspark_jax.sampling import SamplingParams, law_logits, sample
from dspark_jax.scheduler import policies
from dspark_jax.scheduler.schedule import init_scheduler
from dspark_jax.scheduler.step_curve import StepCurve
from dspark_jax.target.transformer import Transformer
from dspark_jax.verification import commit as commit_lib
from pallas_kernels import counter_rng

PROMPT_BUCKET = 64  # prompts are padded to multiples of this, so that few shapes are compiled
SLOT_BUCKET = 64
STOP_BUCKET = 4


def round_up(n: int, multiple: int) -> int:
  return -(-n // multiple) * multiple


@functools.partial(jax.jit, static_argnames=("frame", "num_slots"))
def prefill(frame: Frame, params, prompts_BxT: jax.Array, prompt_lens_B: jax.Array, *,
            limits_B: jax.Array, sampling: SamplingParams, stop_ids_BxE: jax.Array,
            num_slots: int) -> DecodeState:
  """Runs the prompts and draws each request's first token, the first anchor.

  Args:
    prompts_BxT: int32, right-padded with anything in [0, V).
    prompt_lens_B: int32 >= 1.
    limits_B: int32 total length at which a request ends, > prompt length.
    num_slots: cache and token slots, >= limit + frame.slack and > T.
  """
  batch, T = prompts_BxT.shape
  c = frame.target
  model = Transformer(c, frame.dtype)
  out = model.apply({"params": params["target"]}, prompts_BxT, tap_layer_ids=frame.tap_layer_ids)
  last_BxD = jnp.take_along_axis(out.hidden_BxTxD, (prompt_lens_B - 1)[:, None, None], axis=1)
  logits_BxV = model.apply({"params": params["target"]}, last_BxD[:, 0], method=model.head)
  law_BxV = law_logits(logits_BxV, sampling, vocab_limit=frame.vocab_limit)
  words = counter_rng.noise_words(sampling.seed, counter_rng.RECOVER, prompt_lens_B,
                                  jnp.zeros_like(prompt_lens_B))
  first_B = sample(law_BxV, words)
  is_valid_B = ~jnp.isnan(law_BxV[:, 0])

  zeros_B = jnp.zeros_like(prompt_lens_B)
  cache = kv_cache.init_cache(batch, num_slots, num_layers=c.num_layers,
                              num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=frame.dtype)
  cache = kv_cache.write_rows(cache, out.rows, zeros_B)
  tokens_BxS = jnp.full((batch, num_slots), PAD, jnp.int32)
  tokens_BxS = tokens_BxS.at[:, :T].set(
      jnp.where(jnp.arange(T)[None, :] < prompt_lens_B[:, None], prompts_BxT, PAD))
  tokens_BxS = jax.vmap(lambda row, i, t: row.at[i].set(t))(
      tokens_BxS, prompt_lens_B, jnp.where(is_valid_B, first_B, PAD))
  drafter_state = None
  if frame.drafter is not None:
    drafter_state = frame.drafter.init_state(batch, num_slots)
    drafter_state = frame.drafter.prefill(
        params["drafter"], drafter_state, out.features_BxTxMD, prompt_lens_B,
        tokens_BxW1=commit_lib.read_tokens(tokens_BxS, zeros_B, T + 1), **params["borrowed"])
  lens_B = jnp.where(is_valid_B, prompt_lens_B + 1, prompt_lens_B)
  is_stop_B = (first_B[:, None] == stop_ids_BxE).any(axis=1)
  return DecodeState(
      tokens_BxS=tokens_BxS, lens_B=lens_B, limits_B=limits_B,
      is_done_B=is_stop_B | (lens_B >= limits_B) | ~is_valid_B, is_valid_B=is_valid_B,
      cache=cache, drafter=drafter_state, sampling=sampling, stop_ids_BxE=stop_ids_BxE,
      stats=init_stats(batch, frame.proposal_len))


@functools.partial(jax.jit, static_argnames=("frame",), donate_argnames=("state",))
def run_rounds(frame: Frame, params, state: DecodeState, max_rounds: jax.Array) -> DecodeState:
  """Runs rounds until every request is done, or `max_rounds` were run; one `lax.while_loop`."""
  def is_open(carry):
    state, num_rounds = carry
    return ~state.is_done_B.all() & (num_rounds < max_rounds)

  def body(carry):
    state, num_rounds = carry
    return speculate_step(frame, params, state), num_rounds + 1

  return jax.lax.while_loop(is_open, body, (state, jnp.int32(0)))[0]


def run_one_round(frame: Frame, params, state: DecodeState) -> DecodeState:
  """`run_rounds` of one round, or none where every request is done."""
  return run_rounds(frame, params, state, jnp.int32(1))


def attach_scheduler(frame: Frame, state: DecodeState,
                     curve: StepCurve | None = None) -> DecodeState:
  """Returns the state with a scheduler, where the frame has a use for one.

  That is an adaptive policy (which says so when it gets no curve), an estimator, or a ladder.
  """
  is_adaptive = policies.is_adaptive(frame.policy)
  if frame.drafter is None or not (is_adaptive or frame.estimator or frame.ladder):
    return state
  return state.replace(scheduler=init_scheduler(
      state.lens_B.shape[0], frame.proposal_len, policy=frame.policy, estimator=frame.estimator,
      ladder=frame.ladder, curve=curve))


def lead_through_shapes(frame: Frame, make_state: Callable[[], DecodeState]
                        ) -> Iterator[DecodeState]:
  """Yields states whose next round runs in each shape of the frame's ladder, one after another.

  For warming up: a shape that never ran costs half a second at its first round on a CPU.

  Args:
    frame: with an adaptive policy.
    make_state: makes a state with a curve, whose requests lie anywhere; it is made to choose.
  """
  for n, shape in enumerate(frame.ladder):
    # Only this shape is cheap, every draft pays, and each request has room for its part of it.
    state = make_state()
    curve, batch = state.scheduler.curve, state.lens_B.shape[0]
    lens_B, is_live_B = fill_shape(batch, shape)
    dear_N = jnp.full(len(frame.ladder), 1e6, jnp.float32).at[n].set(1.0)
    yield state.replace(
        is_done_B=~is_live_B, limits_B=state.lens_B + 1 + lens_B,
        scheduler=state.scheduler.replace(curve=curve.replace(
            verify_ms_N=dear_N, draft_ms_D=jnp.zeros_like(curve.draft_ms_D),
            steps_per_ms_DxC=jnp.ones_like(curve.steps_per_ms_DxC))))


def start(frame: Frame, params, prompts: Sequence[Sequence[int]], *,
          max_new_tokens: int | Sequence[int], sampling: SamplingParams,
          stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
          max_slots: int | None = None, curve: StepCurve | None = None) -> DecodeState:
  """`start_requests`, with the scheduler that the frame has a use for.

  Args:
    curve: measured for this batch size and `frame.ladder` (`decode.profile`), for policies that
      schedule by it.
  """
  return attach_scheduler(frame, start_requests(
      frame, params, prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids,
      max_slots=max_slots), curve)


def start_requests(frame: Frame, params, prompts: Sequence[Sequence[int]], *,
                   max_new_tokens: int | Sequence[int], sampling: SamplingParams,
                   stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
                   max_slots: int | None = None) -> DecodeState:
  """Checks a batch of prompts, pads it, and prefills.

  Args:
    prompts: token ids of each request.
    max_new_tokens: one number, or one a request.
    stop_ids: one list for all, or one list a request.
    max_slots: longest prompt + new tokens that a request may have (cache size); None = no bound
      beyond the target's max_position_embeddings.

  Raises:
    ValueError: empty prompt, id outside the vocabulary, max_new_tokens < 1, prompt too long.
  """
  batch = len(prompts)
  max_new = _read_max_new_tokens(max_new_tokens, batch)
  bound = frame.target.max_position_embeddings if max_slots is None else max_slots
  check_prompts(prompts, max_new, bound=bound, vocab_size=frame.target.vocab_size)
  lens = np.array([len(p) for p in prompts], np.int32)
  limits = np.minimum(lens + max_new, bound).astype(np.int32)
  T = round_up(int(lens.max()), PROMPT_BUCKET)
  padded = np.zeros((batch, T), np.int32)
  for i, p in enumerate(prompts):
    padded[i, :len(p)] = p
  num_slots = round_up(max(int(limits.max()), T) + frame.slack, SLOT_BUCKET)
  state = prefill(frame.for_prefill(), params, jnp.asarray(padded), jnp.asarray(lens),
                  limits_B=jnp.asarray(limits), sampling=sampling,
                  stop_ids_BxE=pad_stop_ids(stop_ids, batch), num_slots=num_slots)
  return state.replace(stats=init_stats(batch, frame.proposal_len))


def generate(frame: Frame, params, prompts: Sequence[Sequence[int]], **kwargs) -> DecodeState:
  """Decodes a batch of prompts to the end; arguments as for `start`."""
  return run_rounds(frame, params, start(frame, params, prompts, **kwargs),
                    jnp.int32(np.iinfo(np.int32).max))


def _read_max_new_tokens(max_new_tokens, batch: int) -> np.ndarray:
  """Returns int64 [batch] from one integer, or one a request."""
  found = np.asarray(max_new_tokens)
  if found.dtype.kind not in "iu" or found.shape not in ((), (batch,)):
    raise ValueError(f"max_new_tokens: found {max_new_tokens!r}, expected one integer or {batch}")
  return np.broadcast_to(found.astype(np.int64), (batch,))


def check_prompts(prompts, max_new_tokens, *, bound: int, vocab_size: int) -> None:
  """Raises ValueError naming the request and the field for prompts that cannot be decoded."""
  if not len(prompts):
    raise ValueError("prompts: found none, expected at least one")
  for i, (prompt, max_new) in enumerate(zip(prompts, max_new_tokens)):
    where = f"prompt {i}" if len(prompts) > 1 else "prompt"
    if len(prompt) == 0:
      raise ValueError(f"{where}: found no tokens, expected at least one")
    if max_new < 1:
      raise ValueError(f"max_new_tokens: found {max_new}, expected an integer >= 1")
    if len(prompt) + 1 > bound:
      raise ValueError(f"{where}: found {len(prompt)} tokens, expected at most {bound - 1}, so "
                       f"that one new token fits a cache of {bound}")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
      raise ValueError(f"{where}: found token ids outside [0, {vocab_size})")


def pad_stop_ids(stop_ids, batch: int) -> jax.Array:
  """Returns int32 [B, E] from one list for all or one list a request; E is a multiple of 4."""
  is_nested = len(stop_ids) > 0 and not np.isscalar(stop_ids[0])
  lists = [list(s) for s in stop_ids] if is_nested else [list(stop_ids)] * batch
  if len(lists) != batch:
    raise ValueError(f"stop_ids: found {len(lists)} lists, expected one for all or {batch}")
  width = round_up(max(1, max(len(s) for s in lists)), STOP_BUCKET)
  return jnp.asarray([s + [PAD] * (width - len(s)) for s in lists], jnp.int32)
