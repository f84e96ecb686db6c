"""A built-in source of varied user prompts, for users who bring none of their own."""

import hashlib
import random
import re

from dspark_jax.data import prompt_chat, prompt_code, prompt_maths

# domain -> (share of a training set, drawer). Code and maths weigh more because their answers are
# long and their wording is what benchmarks of decoding speed ask for.
_DOMAINS = {
  "code": (6, prompt_code.make_code),
  "arithmetic": (4, prompt_maths.make_arithmetic),
  "reasoning": (2, prompt_maths.make_reasoning),
  "explanation": (3, prompt_chat.make_explanation),
  "knowledge": (2, prompt_chat.make_knowledge),
  "list": (3, prompt_chat.make_list),
  "writing": (4, prompt_chat.make_writing),
  "dialogue": (2, prompt_chat.make_dialogue),
  "text_task": (2, prompt_chat.make_text_task),
  "scenario": (2, prompt_chat.make_scenario),
}
_CHAT_DOMAINS = ("explanation", "list", "writing", "dialogue", "knowledge", "text_task",
                 "scenario", "reasoning")
_HELD_OUT_ONE_IN = 50
_MAX_MISSES = 3000  # draws without a new prompt after which a domain counts as used up


def generate_prompts(num, *, seed):
  """Makes `num` different training prompts, in an order and wording fixed by the seed.

  Each is {"messages": [{"role": "user", "content": text}], "domain": name}, some with a
  "follow_up": a second user turn to ask after the answer. None of them, whatever the seed, shares
  its key (`prompt_key`) with a prompt of `held_out_prompts`.
  Raises ValueError when a domain cannot give its share of `num`.
  """
  schedule = [name for name, (share, _) in _DOMAINS.items() for _ in range(share)]
  return _collect(num, seed=seed, schedule=schedule, is_held_out=False)


def held_out_prompts(num, *, seed):
  """Makes `num` prompts that `generate_prompts` never makes: code, arithmetic, chat, a third each.

  As `generate_prompts`, but "domain" is "code", "arithmetic" or "chat", in turn, and "kind" keeps
  the finer domain. A prompt belongs here by a hash of its key, so the split needs no list.
  Raises ValueError when a domain cannot give its share of `num`.
  """
  schedule = []
  for chat_domain in _CHAT_DOMAINS:
    schedule += ["code", "arithmetic", chat_domain]
  prompts = _collect(num, seed=seed, schedule=schedule, is_held_out=True, shuffle=False)
  for prompt in prompts:
    prompt["kind"] = prompt["domain"]
    prompt["domain"] = "chat" if prompt["kind"] in _CHAT_DOMAINS else prompt["kind"]
  return prompts


def prompt_key(text):
  """The part of a prompt that decides its side of the split: its text with all numbers blanked.

  Blanking keeps one exercise with two sets of numbers from landing on both sides.
  """
  return re.sub(r"\d+", "#", text)


def _is_held_out(key):
  digest = hashlib.sha256(key.encode("utf-8")).digest()
  return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def _collect(num, *, seed, schedule, is_held_out, shuffle=True):
  if isinstance(num, bool) or not isinstance(num, int) or num < 0:
    raise ValueError(f"num: found {num!r}, expected an integer >= 0")
  if isinstance(seed, bool) or not isinstance(seed, int):
    raise ValueError(f"seed: found {seed!r}, expected an integer")
  rng = random.Random(seed)
  seen, prompts = set(), []
  while len(prompts) < num:
    order = rng.sample(schedule, len(schedule)) if shuffle else schedule
    for domain in order[:num - len(prompts)]:
      text, follow_up = _draw_new(rng, domain, seen=seen, is_held_out=is_held_out, num=num)
      prompt = {"messages": [{"role": "user", "content": text}], "domain": domain}
      if follow_up is not None:
        prompt["follow_up"] = follow_up
      prompts.append(prompt)
  return prompts


def _draw_new(rng, domain, *, seen, is_held_out, num):
  tries = _MAX_MISSES * (_HELD_OUT_ONE_IN if is_held_out else 1)
  for _ in range(tries):
    text, key, follow_up = _DOMAINS[domain][1](rng)
    if text not in seen and _is_held_out(key or prompt_key(text)) == is_held_out:
      seen.add(text)
      return text, follow_up
  raise ValueError(
    f"num: found {num}, but domain {domain!r} gave no new prompt after {len(seen)} were made")
