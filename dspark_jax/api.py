"""`DSpark`: a target and a drafter, ready to generate text. What a user imports."""

import copy
import dataclasses
import functools
import pathlib
import time
from typing import Any, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.data import chat
from dspark_jax.decode import loop
from dspark_jax.decode import profile
from dspark_jax.decode.state import DecodeState, Frame
from dspark_jax.interop import drafters
from dspark_jax.interop.load import PACKAGED, Target, load_target, resolve_directory
from dspark_jax.metrics.acceptance import measure_acceptance
from dspark_jax.sampling import make_sampling_params
from dspark_jax.scheduler import calibration
from dspark_jax.scheduler import estimator as estimators
from dspark_jax.scheduler import policies
from dspark_jax.verification.accept import check_rule

STEP_CURVES = pathlib.Path.home() / ".cache" / "dspark_jax"  # measured once a machine
PRETRAINED = pathlib.Path(__file__).parent / "pretrained"  # drafters shipped with the package
STREAM_ROUNDS = 4  # rounds between two looks at the device when streaming
DTYPES = ("float32", "bfloat16")
OPTIONS = ("max_new_tokens", "max_length", "temperature", "top_k", "top_p", "min_p", "seed",
           "stop_ids", "is_raw")


@dataclasses.dataclass(frozen=True)
class Generation:
  """One answer.

  Attributes:
    text: the answer, special tokens left out.
    tokens: its token ids, the stop token included.
    finish_reason: "stop", "length", or "error" (the target's logits were not finite).
    num_prompt_tokens: length of the prompt.
    num_rounds: rounds of drafting and verifying; the first token comes from the prefill.
    accepted_len: tokens committed per round (tau); 1 in plain decoding, 0 without a round.
    accept_rate: for each draft position, the share of verified drafts that were accepted; None
      where none was verified.
    verify_rate: share of accepted among verified drafts; None without any.
    num_verified, num_accepted: for each draft position, how many drafts were.
    seconds: wall time of the call that made it (shared by the whole batch), compilation included.
    prefill_seconds: of which until the first token of every request was there.
  """
  text: str
  tokens: list[int]
  finish_reason: str
  num_prompt_tokens: int
  num_rounds: int
  accepted_len: float
  accept_rate: list[float | None]
  verify_rate: float | None
  num_verified: list[int]
  num_accepted: list[int]
  seconds: float
  prefill_seconds: float


class DSpark:
  """Speculative decoding of one target by one drafter; output follows the target's law exactly.

  Args:
    main_model: packaged name, HF directory, GGUF file, hub id, or a loaded `Target`.
    draft_model: directory or hub id of a drafter or of a small model with the same tokenizer,
      "prompt-lookup", "auto" (the drafter shipped for a packaged target), or None for plain
      decoding; see `interop.drafters`.
    max_draft_len: most drafts verified a round; None = all that the drafter proposes. A small model
      and prompt look-up propose that many.
    confidence_threshold: stop before the first draft whose confidence is below this; 0 = off.
    accept_rule: "token" (rejection sampling draft by draft) or "block" (arXiv 2403.10444: both
      follow the target's law, block accepts at least as much; greedy answers are the same).
    max_slots: longest prompt + answer in tokens; None = the target's max_position_embeddings.
    enable_thinking: the switch of a chat template that has one (Qwen3); None = its default.
    dtype: of weights and activations.
  Raises:
    ValueError, FileNotFoundError: one line naming the field, before anything is decoded.
  """

  def __init__(self, main_model: str | Target = "smollm2-135m-instruct",
               draft_model: str | None = "auto", *, max_draft_len: int | None = None,
               confidence_threshold: float = 0.0, accept_rule: str = "token",
               max_slots: int | None = None, enable_thinking: bool | None = None,
               dtype: str = "float32"):
    check_rule(accept_rule)
    if dtype not in DTYPES:
      raise ValueError(f"dtype: found {dtype!r}, expected one of {', '.join(DTYPES)}")
    if max_slots is not None and max_slots < 2:
      raise ValueError(f"max_slots: found {max_slots}, expected an integer >= 2")
    # Looked for first: a target takes seconds to load, a misspelt name should not.
    drafter_name = None if draft_model is None else find_drafter(main_model, draft_model)
    self.target = main_model if isinstance(main_model, Target) else load_target(
        main_model, dtype=jnp.dtype(dtype))
    self.max_slots = max_slots
    self.tokenizer = chat.set_thinking(chat.load_tokenizer(self.target.path), enable_thinking)
    self.stop_ids = chat.stop_token_ids(self.tokenizer,
                                        generation_eos=list(self.target.stop_token_ids))
    # Rows of the LM head beyond the tokenizer's ids are padding and must never be emitted.
    num_ids = len(self.tokenizer)
    vocab_limit = num_ids if num_ids < self.target.config.vocab_size else None
    self.plain_frame = Frame(self.target.config, vocab_limit=vocab_limit, dtype=dtype)
    self.frame = self.plain_frame
    self.params: dict[str, Any] = {"target": self.target.params}
    self.drafter_directory = None if drafter_name is None else pathlib.Path(drafter_name)
    self.step_curves = STEP_CURVES  # where measured step curves are kept
    self.proposer: Any = None  # the drafter at its full length
    if drafter_name is not None:
      drafter = drafters.open_drafter(drafter_name, self.target, dtype=dtype,
                                      vocab_limit=vocab_limit)
      self.params |= {"drafter": drafter.params, "borrowed": drafter.borrowed}
      self.proposer = drafter.proposer
      self.frame = _set_policy(
          dataclasses.replace(self.plain_frame, accept_rule=accept_rule), self.proposer,
          max_draft_len, confidence_threshold)

  def with_policy(self, policy: policies.Policy | None = None, *,
                  max_draft_len: int | None = None, confidence_threshold: float = 0.0,
                  estimator: estimators.Estimator | None = None) -> "DSpark":
    """Returns the same model under another policy; weights and tokenizer are shared.

    Args:
      policy: any of `scheduler.policies`; None = what the two numbers say, as for `DSpark`. An
        adaptive one measures the step curve when a batch size is first run on this machine.
      estimator: of `scheduler.estimator`; None = the trained confidence head. An adaptive policy
        starts with that head, with the temperatures of `experiments/calibrate.py` where they lie
        beside the drafter, and refits it online, together with the margin: prompts differ from
        those that it was trained and calibrated on.
    """
    if self.frame.drafter is None:
      raise ValueError("draft_model: found none, expected a drafter to set a policy for")
    other = copy.copy(self)
    if policy is None:
      other.frame = _set_policy(self.frame, self.proposer, max_draft_len, confidence_threshold)
    elif max_draft_len is not None or confidence_threshold:
      raise ValueError("policy: found together with max_draft_len or confidence_threshold, "
                       "expected one or the other")
    else:
      num_drafts = policies.max_verify_len(policy, self.proposer.proposal_len)
      other.frame = dataclasses.replace(self.frame, policy=policy,
                                        drafter=self.proposer.with_len(max(num_drafts, 1)))
    if policies.is_adaptive(policy) and estimator is None:
      estimator = self._refitted_head(other.frame.proposal_len)
    other.frame = dataclasses.replace(other.frame, estimator=estimator)
    return other

  def _refitted_head(self, num_drafts: int) -> estimators.OnlineLogistic:
    if not self.proposer.has_confidence:
      raise ValueError("estimator: found none with a drafter that has no confidence head, expected "
                       "one that needs none (scheduler.estimator.OnlineLogistic)")
    temperatures = (1.0,) * self.proposer.proposal_len
    if (self.drafter_directory / calibration.FILE).is_file():
      temperatures = calibration.load_sts(self.drafter_directory, self.proposer.proposal_len)
    return estimators.OnlineLogistic(uses_head=True, temperatures=tuple(temperatures[:num_drafts]))

  def encode(self, prompt, *, is_raw: bool = False) -> list[int]:
    """Token ids of a prompt: text (a user's message, or as it is with `is_raw`), messages, ids."""
    if isinstance(prompt, str):
      if is_raw:
        ids = self.tokenizer(prompt)["input_ids"]
        if not ids:
          raise ValueError("prompt: found no text, expected at least one token")
        return ids
      if not prompt.strip():
        raise ValueError("prompt: found no text, expected a message")
      prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple, np.ndarray)):
      raise ValueError(f"prompt: found a {type(prompt).__name__}, expected text, a list of "
                       "messages, or token ids")
    if len(prompt) and isinstance(prompt[0], dict):
      return chat.render_prompt(self.tokenizer, prompt)
    if not all(isinstance(t, (int, np.integer)) and not isinstance(t, bool) for t in prompt):
      raise ValueError("prompt: found a list that is neither messages nor token ids")
    return [int(t) for t in prompt]

  def generate(self, prompts, *, is_speculative: bool = True, **options):
    """Answers one prompt, or a list of prompts as one batch.

    Args:
      prompts: text, messages (a list of {"role", "content"}), or token ids; or a list of those.
      is_speculative: False = plain decoding of the same target.
      **options: `max_new_tokens` (default 128) or `max_length` (prompt included), `temperature`
        (default 0 = greedy), `top_k`, `top_p`, `min_p`, `seed`, each one value or one a prompt;
        `stop_ids` (default the model's own; one list, or one a prompt); `is_raw` to take text as
        it is, without the template.
    Returns:
      A Generation for one prompt, a list of them for a list.
    """
    is_single = not _is_batch(prompts)
    call = self._start([prompts] if is_single else prompts, is_speculative, options)
    call.run(np.iinfo(np.int32).max)
    results = self._results(call)
    return results[0] if is_single else results

  def stream(self, prompt, *, is_speculative: bool = True, **options) -> Iterator[str]:
    """Yields the text of one answer in pieces as rounds finish; options as for `generate`.

    The pieces joined are the text that `generate` returns. The generator's value (`yield from`)
    is the Generation.
    """
    if _is_batch(prompt):
      raise ValueError("prompt: found a list of prompts, expected one to stream")
    call = self._start([prompt], is_speculative, options)
    shown = ""
    while True:
      result = self._results(call)[0]
      is_done = bool(call.state.is_done_B[0])
      text = result.text
      if not is_done:  # a character may still be cut in the middle of its bytes
        text = text.rstrip("\ufffd")
      if len(text) > len(shown):
        yield text[len(shown):]
        shown = text
      if is_done:
        return result
      call.run(STREAM_ROUNDS)

  def warm_up(self, prompts, *, is_speculative: bool = True, **options) -> float:
    """Compiles what `generate` will run for prompts and options of these lengths.

    Runs the prefill and one round; under an adaptive policy one in each shape of its ladder.
    Returns seconds.
    """
    start_s = time.perf_counter()
    call = self._start(prompts if _is_batch(prompts) else [prompts], is_speculative, options)
    if call.state.scheduler is None or call.state.scheduler.curve is None:
      call.run(1)
    else:
      fresh = functools.partial(jax.tree.map, jnp.copy, call.state)  # a round donates its state
      for state in loop.lead_through_shapes(call.frame, fresh):
        call.state = state
        call.run(1)
    return time.perf_counter() - start_s

  def _start(self, prompts: Sequence, is_speculative: bool, options: dict[str, Any]) -> "_Call":
    start_s = time.perf_counter()
    for name in options:
      if name not in OPTIONS:
        raise ValueError(f"{name}: unknown option, expected one of {', '.join(OPTIONS)}")
    if not len(prompts):
      raise ValueError("prompts: found none, expected at least one")
    ids = [self.encode(p, is_raw=options.get("is_raw", False)) for p in prompts]
    sampling = make_sampling_params(
        len(ids), temperature=options.get("temperature", 0.0), top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 1.0), min_p=options.get("min_p", 0.0),
        seed=options.get("seed", 0))
    stop_ids = options.get("stop_ids")
    stop_ids = self.stop_ids if stop_ids is None else _check_stop_ids(stop_ids)
    # Plain decoding must not see the drafter's vocabulary.
    frame, params = self.frame, self.params
    if not is_speculative:
      frame, params = self.plain_frame, {"target": self.target.params}
    state = loop.start_requests(
        frame, params, ids, max_new_tokens=_count_new_tokens(ids, options), sampling=sampling,
        stop_ids=stop_ids, max_slots=self.max_slots)
    frame, curve = profile.prepare_batch(
        frame, params, len(ids), directory=self.step_curves, name=self.name,
        make_state=lambda: jax.tree.map(jnp.copy, state))
    state = loop.attach_scheduler(frame, state, curve)
    return _Call(frame, params, jax.block_until_ready(state), ids, start_s)

  @property
  def name(self) -> str:
    """Target and drafter, for people who read a step curve."""
    paths = [self.target.path, self.drafter_directory]
    return " + ".join(pathlib.Path(p).name for p in paths if p is not None)

  def _results(self, call: "_Call") -> list[Generation]:
    state = call.state
    tokens_BxS, lens_B, is_valid_B, stops_BxE = jax.device_get(
        (state.tokens_BxS, state.lens_B, state.is_valid_B, state.stop_ids_BxE))
    stats = jax.device_get(state.stats)
    results = []
    for i, prompt in enumerate(call.ids):
      tokens = tokens_BxS[i, len(prompt):lens_B[i]].tolist()
      reason = "stop" if tokens and tokens[-1] in stops_BxE[i] else "length"
      acceptance = measure_acceptance(
          stats.num_rounds_B[i], stats.num_committed_B[i], num_verified_xG=stats.verified_BxG[i],
          num_accepted_xG=stats.accepted_BxG[i])
      results.append(Generation(
          text=self.tokenizer.decode(tokens, skip_special_tokens=True), tokens=tokens,
          finish_reason=reason if is_valid_B[i] else "error", num_prompt_tokens=len(prompt),
          num_rounds=int(stats.num_rounds_B[i]), accepted_len=acceptance.accepted_len,
          accept_rate=acceptance.accept_rate, verify_rate=acceptance.verify_rate,
          num_verified=stats.verified_BxG[i].tolist(), num_accepted=stats.accepted_BxG[i].tolist(),
          seconds=call.seconds, prefill_seconds=call.prefill_seconds))
    return results


class _Call:
  """One running call: its state, and where its time went."""

  def __init__(self, frame: Frame, params, state: DecodeState, ids: list[list[int]],
               start_s: float):
    self.frame, self.params, self.state, self.ids = frame, params, state, ids
    self._start_s = start_s
    self.seconds = self.prefill_seconds = time.perf_counter() - start_s

  def run(self, max_rounds: int) -> None:
    self.state = jax.block_until_ready(
        loop.run_rounds(self.frame, self.params, self.state, jnp.int32(max_rounds)))
    self.seconds = time.perf_counter() - self._start_s


def find_drafter(main_model: str | Target, draft_model: str) -> pathlib.Path | str:
  """Returns the directory of a drafter: its path, a hub id, or "auto" for the one shipped.

  Names that need no directory (`drafters.open_drafter`) are returned as they are.
  """
  if drafters.needs_no_directory(draft_model):
    return draft_model
  if draft_model != "auto":
    if not pathlib.Path(draft_model).is_dir() and draft_model.count("/") != 1:
      raise FileNotFoundError(f"draft_model: found {draft_model!r}, expected a directory, a hub id "
                              f"'owner/name', 'auto', or '{drafters.PROMPT_LOOKUP}'")
    return resolve_directory(draft_model)
  name = str(main_model.path if isinstance(main_model, Target) else main_model)
  directory = PRETRAINED / name.lower()
  if name.lower() not in PACKAGED or not (directory / "config.json").is_file():
    shipped = sorted(p.parent.name for p in PRETRAINED.glob("*/config.json"))
    raise FileNotFoundError(f"draft_model: found 'auto' for {name!r}, expected a directory; "
                            f"drafters are shipped for: {', '.join(shipped) or 'no model'}")
  return directory


def _set_policy(frame: Frame, proposer, max_draft_len: int | None, threshold: float) -> Frame:
  """Returns the frame with a drafter that drafts as much as is asked for, and a policy for it."""
  if max_draft_len is not None and max_draft_len > 0:
    proposer = proposer.with_len(max_draft_len)
  G = proposer.proposal_len
  if max_draft_len is not None and not 0 <= max_draft_len <= G:
    raise ValueError(f"max_draft_len: found {max_draft_len}, expected within 0..proposal_len = {G}")
  if threshold == 0:
    policy = policies.FixedLength(G if max_draft_len is None else max_draft_len)
  elif proposer.has_confidence:
    policy = policies.ConfidenceThreshold(threshold, max_draft_len)
  else:
    raise ValueError(f"confidence_threshold: found {threshold} with a drafter that has no "
                     "confidence head, expected 0")
  return dataclasses.replace(frame, drafter=proposer, policy=policy)


def _count_new_tokens(ids: Sequence[Sequence[int]], options: dict[str, Any]) -> list[int]:
  """Returns each request's max_new_tokens from either of the two options."""
  given = {name: options[name] for name in ("max_new_tokens", "max_length")
           if options.get(name) is not None}
  if len(given) > 1:
    raise ValueError("max_length: found together with max_new_tokens, expected one of them")
  name, value = next(iter(given.items()), ("max_new_tokens", 128))
  found = np.asarray(value)
  if found.dtype.kind not in "iu" or found.shape not in ((), (len(ids),)):
    raise ValueError(f"{name}: found {value!r}, expected an integer, or one a prompt")
  counts = np.broadcast_to(found, (len(ids),)).tolist()
  if name == "max_new_tokens":
    return counts
  for i, prompt in zip(counts, ids):
    if i <= len(prompt):
      raise ValueError(f"max_length: found {i}, expected more than the prompt's {len(prompt)} "
                       "tokens")
  return [i - len(prompt) for i, prompt in zip(counts, ids)]


def _check_stop_ids(stop_ids):
  """Returns stop ids as they are, one list of ids or a list of lists."""
  is_list = isinstance(stop_ids, (list, tuple))
  for entry in stop_ids if is_list else [stop_ids]:
    flat = entry if isinstance(entry, (list, tuple)) else [entry]
    if not is_list or not all(isinstance(t, (int, np.integer)) for t in flat):
      raise ValueError(f"stop_ids: found {stop_ids!r}, expected a list of token ids")
  return stop_ids


def _is_batch(prompts) -> bool:
  """Whether this is a list of prompts, not one prompt (text, messages, or token ids)."""
  if not isinstance(prompts, (list, tuple, np.ndarray)):
    return False  # one prompt, or nothing that `encode` accepts
  if len(prompts) == 0:
    return True
  return not isinstance(prompts[0], (dict, int, np.integer))
