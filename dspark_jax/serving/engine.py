"""Continuous batching: fixed slots, and requests that join and leave between two rounds.

`step` is the whole engine: end what must end, prefill who fits, dispatch a round, and read what
came before it. Results are read one round behind: while the device runs round n, the host reads
round n - 1 and decides about round n + 1, so the device never waits for the host. The price is that
a slot whose request ended by a stop id is free one round late; one that is bound to end by its
length in the round still running is known to be free, and filled at once.

The tokens of a request are those of its run alone, whoever joins or leaves: greedy ones always,
sampled ones (noise is keyed by seed and position) where the policy decides by the request itself.
Under a policy that looks at the whole batch, sampled tokens follow the same law, but the draws
depend on where rounds begin, hence on the others.
"""

import collections
import dataclasses
import itertools
import pathlib
import time
from typing import Any, Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode import loop
from dspark_jax.decode import profile
from dspark_jax.decode.state import PAD, DecodeState, Frame
from dspark_jax.sampling import SamplingParams, make_sampling_params
from dspark_jax.serving import slots
from dspark_jax.serving.request import Request

_ONE = np.int32(1)


class QueueFull(RuntimeError):
  """The engine refuses a request because too many are waiting; nothing has changed."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
  """Sizes of an engine, all static.

  Attributes:
    batch: slots, requests decoded together.
    max_len: longest prompt + answer of a request, in tokens.
    prompt_buckets: lengths that prompts are padded to, one program each; () = 64, 128, 256, ... up
      to max_len.
    max_queue: requests that may wait for a slot; one more is refused.
    max_stop_ids: stop ids that a request may have.
  """
  batch: int = 8
  max_len: int = 512
  prompt_buckets: tuple[int, ...] = ()
  max_queue: int = 256
  max_stop_ids: int = 8

  def __post_init__(self):
    for name, least in (("batch", 1), ("max_len", 2), ("max_queue", 0), ("max_stop_ids", 1)):
      value = getattr(self, name)
      if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: found {value!r}, expected an integer >= {least}")
    buckets = self.prompt_buckets or make_buckets(self.max_len)
    if list(buckets) != sorted(set(buckets)) or not 1 <= buckets[0] <= buckets[-1] <= self.max_len:
      raise ValueError(f"prompt_buckets: found {buckets}, expected growing lengths in "
                       f"[1, max_len = {self.max_len}]")
    object.__setattr__(self, "prompt_buckets", tuple(buckets))


def make_buckets(max_len: int) -> tuple[int, ...]:
  """Returns 64, 128, 256, ... and max_len."""
  sizes = itertools.takewhile(lambda n: n < max_len, (loop.PROMPT_BUCKET << i for i in range(30)))
  return (*sizes, max_len)


@dataclasses.dataclass
class Counts:
  """Totals since the engine was made.

  Attributes:
    num_rounds: rounds in which somebody took part.
    num_request_rounds: the same, summed over who did.
    num_verified, num_accepted: drafts.
    num_tokens: tokens committed, prefills' included.
    num_prefills: requests that got a slot.
    num_refused: requests refused because the queue was full.
  """
  num_rounds: int = 0
  num_request_rounds: int = 0
  num_verified: int = 0
  num_accepted: int = 0
  num_tokens: int = 0
  num_prefills: int = 0
  num_refused: int = 0


@dataclasses.dataclass
class _Pending:
  """Something dispatched and not yet read: a prefill of one request, or a round of all slots."""
  kind: str
  index: int
  owners: tuple[Request | None, ...]
  arrays: Any


class Engine:
  """Serves requests with one target, one drafter and one policy; call from one thread.

  Args:
    frame, params: as for `decode.step.speculate_step`.
    options: EngineOptions.
    step_curves: directory of measured step curves. With it, a policy that schedules by a curve gets
      the one of this device, model and number of slots, measured now (seconds) if it never was, and
      policies whose lengths vary get buckets. None = the frame as it is, without a curve.
    name: of the model, for people who read a step curve.
    clock: returns seconds; replaced by tests.
    on_event: called with ("prefill" | "round" | "read prefill" | "read round", index) when
      something is dispatched or read: the record that the host reads behind.
  Raises:
    ValueError: max_len beyond the target's max_position_embeddings.
  """

  def __init__(self, frame: Frame, params, options: EngineOptions = EngineOptions(), *,
               step_curves: str | pathlib.Path | None = None, name: str = "",
               clock: Callable[[], float] = time.perf_counter,
               on_event: Callable[[str, int], None] | None = None):
    bound = frame.target.max_position_embeddings
    if options.max_len > bound:
      raise ValueError(f"max_len: found {options.max_len}, expected at most the target's {bound}")
    self.frame, self.params, self.options, self.counts = frame, params, options, Counts()
    self.clock, self._on_event = clock, on_event or (lambda kind, index: None)
    self._num_stop_ids = loop.round_up(options.max_stop_ids, loop.STOP_BUCKET)
    self._curve = None
    if step_curves is not None:
      self.frame, self._curve = profile.prepare_batch(
          frame, params, options.batch, name=name, directory=step_curves,
          make_state=self._make_slots, run=_run_one_round)
    self.state = self._make_state()
    self._slots: list[Request | None] = [None] * options.batch
    self._queue: collections.deque[Request] = collections.deque()
    self._pending: collections.deque[_Pending] = collections.deque()
    self._ended_slots: set[int] = set()  # ended by the host; the device has not been told yet
    self._next_id = self._next_round = 0

  # --- what callers do -------------------------------------------------------------------------

  def submit(self, prompt: Sequence[int], *, max_new_tokens: int = 128,
             stop_ids: Sequence[int] = (), on_tokens=None, deadline_s: float | None = None,
             arrival_s: float | None = None, **sampling) -> Request:
    """Puts a request into the queue and returns its handle.

    Args:
      prompt: token ids.
      stop_ids: at most `max_stop_ids`.
      on_tokens: see Request; an error that it raises ends its request, and no other.
      deadline_s: seconds after its arrival by which it must be finished.
      arrival_s: when it came, by the engine's clock; None = now.
      **sampling: temperature, top_k, top_p, min_p, seed, as for `make_sampling_params`.
    Raises:
      ValueError: what was asked cannot be done; one line naming the field.
      QueueFull: too many are waiting.
    """
    options = self.options
    law = self.check(prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids,
                     deadline_s=deadline_s, **sampling)
    num_free = sum(map(self._is_free, range(options.batch)))
    if len(self._queue) - num_free >= options.max_queue:
      self.counts.num_refused += 1
      raise QueueFull(f"queue: found {len(self._queue)} requests waiting, expected fewer than "
                      f"max_queue = {options.max_queue}; try again later")
    arrival_s = self.clock() if arrival_s is None else arrival_s
    request = Request(
        id=self._next_id, prompt=tuple(int(t) for t in prompt), sampling=law,
        max_new_tokens=min(int(max_new_tokens), options.max_len - len(prompt)),
        stop_ids=tuple(int(t) for t in stop_ids), arrival_s=arrival_s, on_tokens=on_tokens,
        deadline_s=None if deadline_s is None else arrival_s + deadline_s)
    self._next_id += 1
    self._queue.append(request)
    return request

  def check(self, prompt: Sequence[int], *, max_new_tokens: int = 128,
            stop_ids: Sequence[int] = (), deadline_s: float | None = None,
            **sampling) -> SamplingParams:
    """Raises ValueError for what `submit` could not do; returns the sampling law, NumPy arrays."""
    options = self.options
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, (int, np.integer)):
      raise ValueError(f"max_new_tokens: found {max_new_tokens!r}, expected an integer >= 1")
    longest = min(options.max_len, options.prompt_buckets[-1] + 1)
    loop.check_prompts([prompt], [max_new_tokens], bound=longest,
                       vocab_size=self.frame.target.vocab_size)
    if len(stop_ids) > options.max_stop_ids:
      raise ValueError(f"stop_ids: found {len(stop_ids)}, expected at most max_stop_ids = "
                       f"{options.max_stop_ids}")
    if deadline_s is not None and not deadline_s > 0:
      raise ValueError(f"deadline_s: found {deadline_s}, expected a number of seconds > 0")
    # NumPy: the handle of a request holds nothing of the device.
    return jax.device_get(make_sampling_params(1, **sampling))

  def cancel(self, request: Request) -> bool:
    """Ends a request, waiting or running, with what it has; False where it was done already."""
    return self._finish(request, "cancelled")

  @property
  def is_busy(self) -> bool:
    """Whether anything is left to do."""
    return bool(self._queue or self._pending or any(self._slots))

  @property
  def num_waiting(self) -> int:
    return len(self._queue)

  def run(self) -> None:
    """Steps until nothing is left to do."""
    while self.is_busy:
      self.step()

  def step(self) -> None:
    """Ends, admits, dispatches one round, and reads everything dispatched before that round."""
    self._expire()
    if self._ended_slots:
      mask_B = np.isin(np.arange(self.options.batch), list(self._ended_slots))
      self.state = self.state.replace(is_done_B=self.state.is_done_B | jnp.asarray(mask_B))
      self._ended_slots.clear()
    while self._queue and self._free_slot() is not None:
      self._admit(self._queue.popleft(), self._free_slot())
    num_unread = 0
    if not all(map(self._is_free, range(self.options.batch))):
      self._dispatch_round()
      num_unread = 1
    while len(self._pending) > num_unread:
      self._read(self._pending.popleft())

  def warm_up(self) -> None:
    """Compiles everything that serving will run, and runs it; only while nothing is going on.

    What the scheduler has learnt is lost. A shape of the ladder that never ran costs half a second
    at its first round on a CPU, so an adaptive policy is led through all of them; the requests that
    are pushed through besides have one token to write.
    """
    if self.is_busy:
      raise ValueError("warm_up: found a busy engine, expected one without requests")
    counts, next_id, next_round = dataclasses.replace(self.counts), self._next_id, self._next_round
    longest = self.options.max_len - 1
    for size in self.options.prompt_buckets:
      self.submit([0] * min(size, longest), max_new_tokens=1)
      self.run()
    self._ended_slots.add(0)  # an empty slot: the host ending a request is compiled too
    self.step()
    for state in self._rounds_to_run():
      jax.block_until_ready(slots.run_round(self.frame, self.params, state, _ONE))
    self.state = jax.block_until_ready(self._make_state())
    self.counts, self._next_id, self._next_round = counts, next_id, next_round

  def _make_state(self) -> DecodeState:
    """Empty slots, and a scheduler that knows nothing yet."""
    curve = jax.tree.map(jnp.copy, self._curve)  # a round donates its state, with all that is in it
    return loop.attach_scheduler(self.frame, self._make_slots(), curve)

  def _make_slots(self) -> DecodeState:
    return slots.init_slots(self.frame, batch=self.options.batch, max_len=self.options.max_len,
                            num_stop_ids=self._num_stop_ids)

  def _rounds_to_run(self) -> Iterator[DecodeState]:
    """States whose next round runs in each shape; one state where the shape is none's choice."""
    if self._curve is not None:
      return loop.lead_through_shapes(self.frame, self._make_state)
    state = self._make_state()
    return iter([state.replace(is_done_B=jnp.zeros(self.options.batch, bool),
                               limits_B=state.lens_B + 1 + self.frame.proposal_len)])

  # --- what a step does ------------------------------------------------------------------------

  def _expire(self) -> None:
    now = self.clock()
    for request in [*self._queue, *filter(None, self._slots)]:
      if request.deadline_s is not None and now >= request.deadline_s:
        self._finish(request, "deadline")

  def _is_free(self, slot: int) -> bool:
    """Whether the slot is empty by the time of the next dispatch.

    Every round adds a token at least, so a request may be known to end before its end is read.
    """
    request = self._slots[slot]
    if request is None:
      return True
    num_unread = sum(p.owners[slot] is request for p in self._pending if p.kind == "round")
    return bool(request.tokens) and len(request.tokens) + num_unread >= request.max_new_tokens

  def _free_slot(self) -> int | None:
    return next((b for b in range(self.options.batch) if self._is_free(b)), None)

  def _admit(self, request: Request, slot: int) -> None:
    """Dispatches a prefill and the request's entry into a slot."""
    n = len(request.prompt)
    T = next(size for size in self.options.prompt_buckets if size >= n)
    prompt_1xT = np.zeros((1, T), np.int32)
    prompt_1xT[0, :n] = request.prompt
    stop_ids_1xE = np.full((1, self._num_stop_ids), PAD, np.int32)
    stop_ids_1xE[0, :len(request.stop_ids)] = request.stop_ids
    frame = self.frame.for_prefill()
    fresh = loop.prefill(
        frame, self.params, jnp.asarray(prompt_1xT), jnp.asarray([n], jnp.int32),
        limits_B=jnp.asarray([n + request.max_new_tokens], jnp.int32), sampling=request.sampling,
        stop_ids_BxE=jnp.asarray(stop_ids_1xE), num_slots=T + frame.slack)
    self.state = slots.insert(self.state, fresh, slot)
    self._slots[slot] = request
    request.admitted_s = self.clock()
    self.counts.num_prefills += 1
    self._dispatched("prefill", request.id, (request,),
                     (fresh.tokens_BxS, fresh.is_done_B, fresh.is_valid_B))

  def _dispatch_round(self) -> None:
    self.state, report = slots.run_round(self.frame, self.params, self.state, _ONE)
    self._dispatched("round", self._next_round, tuple(self._slots), report)
    self._next_round += 1

  def _dispatched(self, kind: str, index: int, owners, arrays) -> None:
    for array in jax.tree.leaves(arrays):
      array.copy_to_host_async()
    self._pending.append(_Pending(kind, index, owners, arrays))
    self._on_event(kind, index)

  def _read(self, pending: _Pending) -> None:
    """Waits for something dispatched before the newest round, and hands its tokens out."""
    found = jax.device_get(pending.arrays)
    self._on_event(f"read {pending.kind}", pending.index)
    if pending.kind == "prefill":
      (request,), (tokens_1xS, is_done_1, is_valid_1) = pending.owners, found
      n = len(request.prompt)
      self._take(request, tokens_1xS[0, n:n + 1], is_done_1[0], is_valid_1[0])
      return
    counts = self.counts
    counts.num_rounds += bool(found.is_live_B.any())
    counts.num_request_rounds += int(found.is_live_B.sum())
    counts.num_verified += int(found.num_verified_B.sum())
    counts.num_accepted += int(found.num_accepted_B.sum())
    for b, request in enumerate(pending.owners):
      if request is None or request.is_done or not found.is_live_B[b]:
        continue
      request.num_rounds += 1
      request.num_verified += int(found.num_verified_B[b])
      request.num_accepted += int(found.num_accepted_B[b])
      self._take(request, found.tokens_BxW[b, :found.num_new_B[b]], found.is_done_B[b],
                 found.is_valid_B[b])

  def _take(self, request: Request, tokens: np.ndarray, is_done: bool, is_valid: bool) -> None:
    """Appends tokens to a request; ends it where the device did."""
    if request.is_done:  # ended by the host meanwhile
      return
    tokens = tokens.tolist() if is_valid else []
    if tokens and request.first_token_s is None:
      request.first_token_s = self.clock()
    request.tokens += tokens
    self.counts.num_tokens += len(tokens)
    if not is_valid:
      self._finish(request, "error", error="logits: found numbers that are not finite")
    elif is_done:
      self._finish(request, "stop" if tokens[-1] in request.stop_ids else "length", tokens)
    else:
      self._tell(request, tokens)

  def _finish(self, request: Request, reason: str, tokens: Sequence[int] = (), *,
              error: str | None = None) -> bool:
    """Ends a request and frees its place; its last tokens are told with it."""
    if request.is_done:
      return False
    request.finish_reason, request.error, request.finished_s = reason, error, self.clock()
    if request in self._queue:
      self._queue.remove(request)
    for b, owner in enumerate(self._slots):
      if owner is request:
        self._slots[b] = None
        if reason in ("cancelled", "deadline") or error is not None:
          self._ended_slots.add(b)
    self._tell(request, list(tokens))
    return True

  def _tell(self, request: Request, tokens: list[int]) -> None:
    if request.on_tokens is None or not (tokens or request.is_done):
      return
    try:
      request.on_tokens(request, tokens)
    except Exception as e:  # whatever a caller's function does, the others go on
      request.on_tokens = None
      error = f"on_tokens: {type(e).__name__}: {' '.join(str(e).split())}"
      if not self._finish(request, "error", error=error):
        request.finish_reason, request.error = "error", error


def _run_one_round(frame: Frame, params, state: DecodeState) -> DecodeState:
  return slots.run_round(frame, params, state, _ONE)[0]
