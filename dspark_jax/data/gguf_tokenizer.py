"""Byte-level BPE tokenizers rebuilt from the metadata of a GGUF file."""

# transformers reads GGUF tokenizers only with torch installed, and then leaves out the splitting of
# digits that `tokenizer.ggml.pre` asks for, so runs of spaces before a number get other ids.

import pathlib

from dspark_jax.data.gguf_file import open_gguf
from dspark_jax.data.quiet import import_transformers

_GPT2_WORDS = None  # the regex built into ByteLevel
_QWEN2_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# tokenizer.ggml.pre -> (regex of a word, digits stand alone, NFC, whole words skip merging). All
# agree with llama.cpp; only NFC is the models' own tokenizers' and absent there.
_SPLITS = {
  "gpt-2": (_GPT2_WORDS, False, False, False),
  "smollm": (_GPT2_WORDS, True, False, False),
  "qwen2": (_QWEN2_WORDS, False, True, False),
  "llama-bpe": (_LLAMA3_WORDS, False, False, True),
}
_CONTROL, _USER_DEFINED = 3, 4  # token types of llama.cpp


def load_gguf_tokenizer(path):
  """Builds a transformers fast tokenizer, chat template included, from a GGUF file.

  Reads `tokenizer.ggml.{model, pre, tokens, merges, token_type, *_token_id, add_bos_token}` and
  `tokenizer.chat_template`.
  Raises FileNotFoundError for a missing file, ValueError for a tokenizer of another kind or a
  field that is missing, inconsistent or outside the vocabulary.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"tokenizer: found no file {path}")
  fields = _read_fields(path)
  backend = _build_backend(fields, origin=str(path))
  return import_transformers().PreTrainedTokenizerFast(
    tokenizer_object=backend, name_or_path=str(path), clean_up_tokenization_spaces=False,
    chat_template=fields.get("tokenizer.chat_template"), **_special_names(fields, str(path)),
    **_context_length(fields))


def _read_fields(path):
  return {name: field.contents() for name, field in open_gguf(path).fields.items()
          if name.startswith("tokenizer.") or name.endswith(".context_length")}


def _need(fields, name, origin):
  if name not in fields:
    raise ValueError(f"{origin}: found no {name}, expected a byte-level BPE tokenizer")
  return fields[name]


def _build_backend(fields, *, origin):
  import tokenizers
  from tokenizers import decoders, models, normalizers, processors

  model = _need(fields, "tokenizer.ggml.model", origin)
  if model != "gpt2":
    raise ValueError(f"{origin}: tokenizer.ggml.model: found {model!r}, expected 'gpt2'")
  tokens = _need(fields, "tokenizer.ggml.tokens", origin)
  types = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
  if len(types) != len(tokens):
    raise ValueError(f"{origin}: tokenizer.ggml.token_type: found {len(types)} entries, expected "
                     f"{len(tokens)}, one a token")
  vocabulary = {token: index for index, token in enumerate(tokens)}
  merges = [tuple(merge.split(" ", 1)) for merge in _need(fields, "tokenizer.ggml.merges", origin)]
  words, digits_alone, is_nfc, ignores_merges = _split_rule(fields, origin)
  try:
    bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignores_merges)
  except Exception as error:  # the Rust side raises bare Exception
    raise ValueError(f"{origin}: tokenizer.ggml.merges: {error}") from None
  backend = tokenizers.Tokenizer(bpe)
  if is_nfc:
    backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = _pre_tokenizer(words, digits_alone)
  backend.decoder = decoders.ByteLevel()
  if fields.get("tokenizer.ggml.add_bos_token", fields.get("tokenizer.ggml.pre") == "llama-bpe"):
    bos = tokens[_need(fields, "tokenizer.ggml.bos_token_id", origin)]
    backend.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])])
  for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
    add([tokenizers.AddedToken(token, normalized=False, special=kind == _CONTROL)
         for token, token_type in zip(tokens, types) if token_type == kind])
  return backend


def _split_rule(fields, origin):
  name = _need(fields, "tokenizer.ggml.pre", origin)
  if name not in _SPLITS:
    raise ValueError(f"{origin}: tokenizer.ggml.pre: found {name!r}, expected one of "
                     f"{', '.join(sorted(_SPLITS))}")
  return _SPLITS[name]


def _pre_tokenizer(words, digits_alone):
  import tokenizers
  from tokenizers import pre_tokenizers
  steps = []
  if digits_alone:
    steps.append(pre_tokenizers.Digits(individual_digits=True))
  if words is not None:
    steps.append(pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated"))
  steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
  return pre_tokenizers.Sequence(steps)


def _special_names(fields, origin):
  """The bos, eos, unk and pad tokens as keyword arguments of the tokenizer."""
  tokens = fields["tokenizer.ggml.tokens"]
  names = {}
  for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
    field = f"tokenizer.ggml.{theirs}_token_id"
    if field not in fields:
      continue
    if not 0 <= fields[field] < len(tokens):
      raise ValueError(f"{origin}: {field}: found {fields[field]}, expected 0..{len(tokens) - 1}")
    names[f"{ours}_token"] = tokens[fields[field]]
  return names


def _context_length(fields):
  lengths = [value for name, value in fields.items() if name.endswith(".context_length")]
  return {"model_max_length": int(lengths[0])} if lengths else {}
