"""What `evaluate` and `compare_drafters` share: sets of prompts decoded, with all their rounds."""

import dataclasses
from typing import Any, Mapping, Sequence

import numpy as np
import tqdm

from dspark_jax import DSpark
from dspark_jax.decode.answers import Batch, answer_prompts, find_shape
from dspark_jax.decode.profile import prepare_batch
from dspark_jax.decode.record import Records, join_records
from dspark_jax.metrics.evaluation import Counts, count_rounds
from dspark_jax.sampling import make_sampling_params


@dataclasses.dataclass(frozen=True)
class Decoded:
  """Answers to a set of prompts: one Counts an answer, all rounds, and what they took."""
  counts: list[Counts]
  rounds: Records
  seconds: float
  num_decoded: int


def recommend_law(model: DSpark) -> dict[str, float]:
  """Returns the sampling parameters that the target's makers recommend."""
  if not model.target.sampling:
    raise ValueError(f"law: found 'recommended', but {model.target.path} recommends none, expected "
                     "'greedy' or numbers")
  return dict(temperature=1.0) | dict(model.target.sampling)


def decode(model: DSpark, prompts: Sequence[Mapping[str, Any]], *, law: Mapping[str, float],
           max_new_tokens: int, batch_size: int = 1, num_turns: int = 1, seed: int = 0,
           desc: str = "decode", is_plain: bool = False) -> Decoded:
  """Answers prompts by batches; every shape is compiled before it is timed.

  Args:
    law: temperature, top_k, top_p, min_p.
    num_turns: 1 asks the first turn alone, 2 also a follow-up where there is one.
    seed: prompt i draws with seed + i.
  """
  if num_turns not in (1, 2):
    raise ValueError(f"num_turns: found {num_turns}, expected 1 or 2")
  if batch_size < 1:
    raise ValueError(f"batch_size: found {batch_size}, expected an integer >= 1")
  frame, params = model.frame, model.params
  if is_plain:
    frame, params = model.plain_frame, {"target": model.target.params}
  warm, batches = set(), []

  def answer(conversations: list[tuple[int, list]]) -> Batch:
    ids = [model.encode(messages) for _, messages in conversations]
    ready, curve = prepare_batch(frame, params, len(ids), directory=model.step_curves,
                                 name=model.name)
    options = dict(
        max_new_tokens=max_new_tokens, stop_ids=model.stop_ids, max_slots=model.max_slots,
        curve=curve, sampling=make_sampling_params(
            len(ids), **law, seed=np.array([seed + i for i, _ in conversations])))
    shape = find_shape(ready, ids, max_new_tokens)
    if shape not in warm:
      answer_prompts(ready, params, ids, **options, max_rounds=1)
      warm.add(shape)
    batches.append(answer_prompts(ready, params, ids, **options))
    return batches[-1]

  for start in tqdm.tqdm(range(0, len(prompts), batch_size), desc=desc, unit="batch"):
    group = list(enumerate(prompts))[start:start + batch_size]
    answers = answer([(i, p["messages"]) for i, p in group]).answers
    further = []
    for (i, prompt), found in zip(group, answers):
      text = model.tokenizer.decode(found.tokens, skip_special_tokens=True)
      if num_turns == 2 and "follow_up" in prompt and text.strip():
        further.append((i, prompt["messages"] + [
            {"role": "assistant", "content": text},
            {"role": "user", "content": prompt["follow_up"]}]))
    if further:
      answer(further)
  answers = [a for batch in batches for a in batch.answers]
  return Decoded(
      [count_rounds(len(a.tokens), verify_lens_N=a.rounds.verify_lens_N,
                    num_accepted_N=a.rounds.num_accepted_N, num_new_N=a.rounds.num_new_N,
                    proposal_len=frame.proposal_len) for a in answers],
      join_records([a.rounds for a in answers]), seconds=sum(b.seconds for b in batches),
      num_decoded=sum(b.num_decoded for b in batches))
