"""Answers with their rounds, cut where the public reference's evaluator cuts them.

A round counts if no more than `max_new_tokens` tokens were there when it began, and then with its
whole proposal: requests run on past the limit, and what is beyond is cut off afterwards. So no
length is shorter because an answer ended there.
"""

import dataclasses
import time
from typing import Sequence

import jax
import numpy as np

from dspark_jax.decode import loop
from dspark_jax.decode.record import Records, record_rounds
from dspark_jax.decode.state import Frame
from dspark_jax.sampling import SamplingParams
from dspark_jax.scheduler.step_curve import StepCurve


@dataclasses.dataclass(frozen=True)
class Answer:
  """One answer.

  Attributes:
    tokens: at most max_new_tokens, the stop token included.
    rounds: those that count; a draft behind an accepted stop token counts as not verified.
  """
  tokens: list[int]
  rounds: Records


@dataclasses.dataclass(frozen=True)
class Batch:
  """Answers that were decoded together.

  Attributes:
    seconds: of decoding, the prefill included, until the last request was done.
    num_decoded: tokens of all requests in that time, those cut off included.
    ms_per_round: of all rounds, None where the prefill was all.
  """
  answers: list[Answer]
  seconds: float
  num_decoded: int
  ms_per_round: float | None


def find_shape(frame: Frame, prompts: Sequence[Sequence[int]],
               max_new_tokens: int) -> tuple[int, int, int]:
  """Returns what `answer_prompts` compiles for: two batches of one shape share their programs."""
  longest = max(len(p) for p in prompts)
  last = longest + max_new_tokens + frame.slack
  return (len(prompts), loop.round_up(longest, loop.PROMPT_BUCKET),
          loop.round_up(last + frame.slack, loop.SLOT_BUCKET))


def answer_prompts(frame: Frame, params, prompts: Sequence[Sequence[int]], *, max_new_tokens: int,
                   sampling: SamplingParams, stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
                   max_slots: int | None = None, curve: StepCurve | None = None,
                   max_rounds: int | None = None) -> Batch:
  """Decodes a batch of prompts; arguments as for `loop.start`.

  Args:
    max_rounds: stop after so many, to compile.
  Raises:
    ValueError: as `loop.start`; or the target's logits were not finite.
  """
  if max_new_tokens < 1:
    raise ValueError(f"max_new_tokens: found {max_new_tokens}, expected an integer >= 1")
  started = time.perf_counter()
  state = jax.block_until_ready(loop.start(
      frame, params, prompts, max_new_tokens=max_new_tokens + frame.slack, sampling=sampling,
      stop_ids=stop_ids, max_slots=max_slots, curve=curve))
  prefilled = time.perf_counter()
  state, records = record_rounds(frame, params, state, chunk_rounds=64, max_rounds=max_rounds)
  tokens_BxS, lens_B, is_valid_B = jax.device_get(
      (state.tokens_BxS, state.lens_B, state.is_valid_B))
  finished = time.perf_counter()
  if not is_valid_B.all():
    raise ValueError(f"prompt {int(np.argmin(is_valid_B))}: the target's logits were not finite")
  answers = []
  for i, prompt in enumerate(prompts):
    end = min(lens_B[i], len(prompt) + max_new_tokens)
    answers.append(Answer(tokens_BxS[i, len(prompt):end].tolist(), count_whole_rounds(
        records.select(records.request_N == i), max_new_tokens)))
  num_rounds = int(records.round_N.max(initial=-1)) + 1
  return Batch(
      answers, seconds=finished - started,
      num_decoded=int(lens_B.sum()) - sum(len(p) for p in prompts),
      ms_per_round=1e3 * (finished - prefilled) / num_rounds if num_rounds else None)


def count_whole_rounds(rounds: Records, max_new_tokens: int) -> Records:
  """The rounds of one request that count, without the drafts behind an accepted stop token."""
  num_before_N = 1 + np.cumsum(rounds.num_new_N) - rounds.num_new_N  # the prefill made the first
  rounds = rounds.select(num_before_N <= max_new_tokens)
  # Whoever commits no token after its accepted drafts ended among them.
  is_ended_N = rounds.num_new_N <= rounds.num_accepted_N
  cut = lambda lens_N: np.where(is_ended_N, np.minimum(lens_N, rounds.num_new_N), lens_N)
  return dataclasses.replace(rounds, verify_lens_N=cut(rounds.verify_lens_N),
                             num_accepted_N=cut(rounds.num_accepted_N))
