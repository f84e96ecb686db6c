"""Tokenizers and chat templates: messages to token ids, loss masks and stop ids."""

import copy
import pathlib

from dspark_jax.data.gguf_tokenizer import load_gguf_tokenizer
from dspark_jax.data.quiet import import_transformers

ROLES = ("system", "developer", "user", "assistant", "tool")

# Turn and text ends that stop a chat model even where its config names only one of them.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")


def load_tokenizer(path):
  """Loads a transformers tokenizer from an HF directory or a `.gguf` file; needs no torch.

  Raises FileNotFoundError where there is nothing, ValueError where it cannot be read.
  """
  path = pathlib.Path(path)
  if path.suffix == ".gguf":
    return load_gguf_tokenizer(path)
  if not path.is_dir():
    raise FileNotFoundError(f"tokenizer: found no {path}, expected a directory or a .gguf file")
  if not any((path / name).is_file() for name in
             ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")):
    raise FileNotFoundError(f"tokenizer: found no tokenizer.json or tokenizer.model in {path}")
  try:
    return import_transformers().AutoTokenizer.from_pretrained(str(path))
  except Exception as error:  # many kinds: broken JSON, unknown class, missing package
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise ValueError(f"tokenizer: cannot read {path}: {reason}") from error


def set_thinking(tokenizer, enable_thinking):
  """Returns the tokenizer with its template's switch `enable_thinking` at True or False.

  None leaves the template its own default. Qwen3 thinks by default, while the public DeepSpec
  reference regenerates and evaluates with False, so acceptance compares with its figures only so.
  Raises ValueError for a template without such a switch.
  """
  if enable_thinking is None:
    return tokenizer
  template = tokenizer.chat_template
  if not isinstance(template, str) or "enable_thinking" not in template:
    raise ValueError(f"enable_thinking: found {enable_thinking}, expected None, since the chat "
                     f"template of tokenizer {_name(tokenizer)} has no such switch")
  tokenizer = copy.copy(tokenizer)
  # In the template itself, so that whoever renders, also a single answer's span, agrees.
  tokenizer.chat_template = f"{{% set enable_thinking = {bool(enable_thinking)} %}}{template}"
  return tokenizer


def check_messages(messages, *, origin="messages"):
  """Raises ValueError, prefixed by `origin`, unless messages are [{"role", "content": str}]."""
  if not isinstance(messages, (list, tuple)) or not messages:
    raise ValueError(f"{origin}: found {_short(messages)}, expected a non-empty list of messages")
  for index, message in enumerate(messages):
    where = f"{origin}[{index}]"
    if not isinstance(message, dict):
      raise ValueError(f"{where}: found {_short(message)}, expected a role and a content")
    if message.get("role") not in ROLES:
      raise ValueError(f"{where}.role: found {_short(message.get('role'))}, expected one of "
                       f"{', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
      raise ValueError(f"{where}.content: found {_short(message.get('content'))}, expected text")
    if not message["content"].strip() and message["role"] != "system":
      raise ValueError(f"{where}.content: found no text, expected a {message['role']} turn")


def render_prompt(tokenizer, messages):
  """Token ids of a conversation up to where the assistant is to answer, as a list of int.

  The template writes every special token itself, so the tokenizer adds none (one BOS, not two).
  Raises ValueError for bad messages, for a last turn of the assistant, or without a template.
  """
  check_messages(messages)
  if messages[-1]["role"] == "assistant":
    raise ValueError("messages: the last turn is the assistant's, expected a turn to answer")
  return _encode(tokenizer, _render(tokenizer, messages, add_generation_prompt=True))


def render_text(tokenizer, messages):
  """Text of a conversation, as the template writes it."""
  check_messages(messages)
  return _render(tokenizer, messages)


def render_conversation(tokenizer, messages):
  """Token ids and loss mask of a whole conversation: (ids, mask), equally long lists of int.

  The mask is 1 on what the assistant says, its end-of-turn token included, and 0 on all else. Each
  answer is encoded apart from its prompt, so that the prompt has the ids it has when decoding.
  Raises ValueError for bad messages, without a template or an assistant turn, and for a template
  that rewrites earlier turns when later ones follow (Qwen3 drops their thoughts): there no one
  sequence holds every answer as it was given.
  """
  check_messages(messages)
  full = _render(tokenizer, messages)
  ids, mask, written = [], [], 0
  for start, end in _answer_spans(tokenizer, messages, full):
    for text, is_answer in ((full[written:start], 0), (full[start:end], 1)):
      piece = _encode(tokenizer, text)
      ids += piece
      mask += [is_answer] * len(piece)
    written = end
  tail = _encode(tokenizer, full[written:])
  ids, mask = ids + tail, mask + [0] * len(tail)
  whole = _encode(tokenizer, full)
  if ids != whole and tokenizer.decode(ids) != tokenizer.decode(whole):
    raise ValueError(f"tokenizer {_name(tokenizer)}: encoding answers apart changes the text, so "
                     "their tokens cannot be told from the prompt's")
  return ids, mask


def stop_token_ids(tokenizer, *, generation_eos=None):
  """Token ids that end an answer, without repeats, as a tuple; empty where nothing names any.

  Takes `eos_token_id` of the generation config (an int, a list, or None where absent), the
  tokenizer's own, and the special tokens <|im_end|> and <|endoftext|> where it has them.
  Raises ValueError for an `eos_token_id` of another kind.
  """
  named = generation_eos if isinstance(generation_eos, (list, tuple)) else (
    [] if generation_eos is None else [generation_eos])
  for token in named:
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
      raise ValueError(f"generation_config.eos_token_id: found {_short(generation_eos)}, "
                       "expected a token id, a list of them, or nothing")
  stops = list(named)
  if tokenizer.eos_token_id is not None:
    stops.append(tokenizer.eos_token_id)
  special = _special_tokens(tokenizer)
  stops += [special[token] for token in _END_TOKENS if token in special]
  return tuple(dict.fromkeys(stops))


def _render(tokenizer, messages, *, add_generation_prompt=False):
  if not tokenizer.chat_template:
    raise ValueError(f"tokenizer {_name(tokenizer)}: has no chat template, expected one to render "
                     "messages; give a plain text prompt or a tokenizer with a template")
  try:
    return tokenizer.apply_chat_template(
      [dict(message) for message in messages], tokenize=False,
      add_generation_prompt=add_generation_prompt)
  except Exception as error:  # jinja2's errors and whatever a template raises
    raise ValueError(f"tokenizer {_name(tokenizer)}: its chat template refuses the messages: "
                     f"{error}") from error


def _answer_spans(tokenizer, messages, full):
  """(start, end) character ranges of the answers in the full text, in order."""
  answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
  if not answers:
    raise ValueError("messages: found no assistant turn, so nothing to learn from")
  if answers[0] == 0:
    raise ValueError("messages[0].role: found 'assistant', expected a turn to answer first")
  spans = []
  for i in answers:
    prompt = _render(tokenizer, messages[:i], add_generation_prompt=True)
    answered = _render(tokenizer, messages[:i + 1])
    is_kept = full.startswith(answered) and answered.startswith(prompt)
    if not is_kept or messages[i]["content"].strip() not in answered[len(prompt):]:
      raise ValueError(
        f"messages[{i}]: the chat template of tokenizer {_name(tokenizer)} rewrites this assistant "
        "turn or its prompt; keep one answer a conversation, the last turn")
    spans.append((len(prompt), _end_of_turn(tokenizer, answered, len(prompt))))
  return spans


def _end_of_turn(tokenizer, answered, start):
  """Where the answer that begins at `start` ends: after its last special token, before white space
  that only the template writes and the model never generates."""
  text = answered[start:]
  closers = [text.rfind(token) + len(token) for token in _special_tokens(tokenizer)
             if token in text]
  end = max(closers, default=len(text))
  return start + (end if not text[end:].strip() else len(text))


def _special_tokens(tokenizer):
  """Special tokens of the vocabulary, named ones and control tokens alike: {text: id}."""
  found = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))
  for index, token in tokenizer.added_tokens_decoder.items():
    if token.special:
      found[token.content] = index
  return found


def _encode(tokenizer, text):
  return tokenizer(text, add_special_tokens=False, verbose=False).input_ids if text else []


def _name(tokenizer):
  return repr(tokenizer.name_or_path or type(tokenizer).__name__)


def _short(value):
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + "..."
