"""Chat rendering: one BOS, masks on answers only, stop ids, clear refusals (B17, B37)."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from dspark_jax.data.chat import (load_tokenizer, render_conversation, render_prompt, set_thinking,
                                  stop_token_ids)
from dspark_jax.data.quiet import import_transformers

VOCABULARY = ["[U]", "[T]", "[E]", "<s>", "u1", "u2", "a1", "a2", "sys", "[UNK]", "<|endoftext|>"]
ID = {token: index for index, token in enumerate(VOCABULARY)}

PLAIN = ("{% for m in messages %}{{ '[U] ' if m.role == 'user' else '' }}{{ m.content }}"
         "{{ ' [E] ' if m.role == 'assistant' else ' ' }}{% endfor %}")
# Writes a thought [T] before the last answer only, as Qwen3 does.
REWRITING = ("{% for m in messages %}{{ '[T] ' if m.role == 'assistant' and loop.last else '' }}"
             "{{ m.content }} {% endfor %}")
WITH_BOS = "<s> " + PLAIN


def _tokenizer(template, *, adds_bos=False, **special):
  backend = tokenizers.Tokenizer(models.WordLevel(ID, unk_token="[UNK]"))
  backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  if adds_bos:
    backend.post_processor = processors.TemplateProcessing(
      single="<s> $A", special_tokens=[("<s>", ID["<s>"])])
  return import_transformers().PreTrainedTokenizerFast(
    tokenizer_object=backend, chat_template=template, name_or_path="toy/tokenizer", **special)


def _messages(*contents):
  return [{"role": "assistant" if c.startswith("a") else "user", "content": c} for c in contents]


def _ids(text):
  return [ID[word] for word in text.split()]


def test_masks_every_answer_with_its_end_token():
  ids, mask = render_conversation(_tokenizer(PLAIN), _messages("u1", "a1", "u2", "a2"))
  assert ids == _ids("[U] u1 a1 [E] [U] u2 a2 [E]")
  assert mask == [0, 0, 1, 1, 0, 0, 1, 1]


def test_a_turn_after_the_last_answer_is_not_masked():
  ids, mask = render_conversation(_tokenizer(PLAIN), _messages("u1", "a1", "u2"))
  assert (ids, mask) == (_ids("[U] u1 a1 [E] [U] u2"), [0, 0, 1, 1, 0, 0])


def test_template_that_rewrites_history_is_refused():
  """Prefix lengths of [u1 T a1] point into u2 of [u1 a1 u2 T a2]: the tell is a masked u2."""
  tokenizer = _tokenizer(REWRITING)
  ids, mask = render_conversation(tokenizer, _messages("u1", "a1"))
  assert (ids, mask) == (_ids("u1 [T] a1"), [0, 1, 1])
  with pytest.raises(ValueError, match=r"messages\[1\]: .*'toy/tokenizer' rewrites this assistant"):
    render_conversation(tokenizer, _messages("u1", "a1", "u2", "a2"))


def test_template_that_changes_the_answer_is_refused():
  with pytest.raises(ValueError, match="rewrites this assistant turn"):
    render_conversation(_tokenizer("{% for m in messages %}{{ m.content | upper }} {% endfor %}"),
                        _messages("u1", "a1"))


def test_one_bos_only():
  tokenizer = _tokenizer(WITH_BOS, adds_bos=True, bos_token="<s>")
  assert tokenizer("u1").input_ids == _ids("<s> u1")  # the trap is set
  assert render_prompt(tokenizer, _messages("u1")) == _ids("<s> [U] u1")
  ids, mask = render_conversation(tokenizer, _messages("u1", "a1", "u2", "a2"))
  assert ids == _ids("<s> [U] u1 a1 [E] [U] u2 a2 [E]")
  assert mask == [0, 0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("render", [render_prompt, render_conversation])
def test_no_template_names_the_tokenizer(render):
  messages = _messages("u1") if render is render_prompt else _messages("u1", "a1")
  with pytest.raises(ValueError, match="tokenizer 'toy/tokenizer': has no chat template"):
    render(_tokenizer(None), messages)


def test_template_error_names_the_tokenizer():
  template = "{{ raise_exception('roles must alternate') }}"
  with pytest.raises(ValueError, match="'toy/tokenizer': .*refuses.*roles must alternate"):
    render_prompt(_tokenizer(template), _messages("u1"))


def test_nothing_to_learn_or_to_answer_is_refused():
  tokenizer = _tokenizer(PLAIN)
  with pytest.raises(ValueError, match="found no assistant turn"):
    render_conversation(tokenizer, _messages("u1"))
  with pytest.raises(ValueError, match=r"messages\[0\].role: found 'assistant'"):
    render_conversation(tokenizer, _messages("a1", "u1"))
  with pytest.raises(ValueError, match="the last turn is the assistant's"):
    render_prompt(tokenizer, _messages("u1", "a1"))


@pytest.mark.parametrize("messages,message", [
  ([], r"messages: found \[\]"), ("u1", "messages: found 'u1'"),
  ([{"role": "bot", "content": "u1"}], r"messages\[0\].role: found 'bot'"),
  ([{"role": "user", "content": None}], r"messages\[0\].content: found None"),
  ([{"role": "user", "content": " "}], r"messages\[0\].content: found no text"),
])
def test_bad_messages_are_refused(messages, message):
  with pytest.raises(ValueError, match=message):
    render_prompt(_tokenizer(PLAIN), messages)


@pytest.mark.parametrize("generation_eos,eos,stops", [
  ([1, 6], "[T]", (1, 6)), ([1, 6], "u1", (1, 6, 4)), (6, "[T]", (6, 1)), (None, "[T]", (1,)),
  (6, None, (6,)), (None, None, ()), ([], None, ())])
def test_stop_ids(generation_eos, eos, stops):  # fault B17
  tokenizer = _tokenizer(PLAIN, **({"eos_token": eos} if eos else {}))
  assert stop_token_ids(tokenizer, generation_eos=generation_eos) == stops


def test_end_of_text_stops_only_where_it_is_special():
  assert stop_token_ids(_tokenizer(PLAIN, eos_token="[E]")) == (ID["[E]"],)
  tokenizer = _tokenizer(PLAIN, eos_token="[E]", pad_token="<|endoftext|>")
  assert stop_token_ids(tokenizer) == (ID["[E]"], ID["<|endoftext|>"])


@pytest.mark.parametrize("bad", ["2", -1, 1.5, [2, None], True])
def test_bad_stop_ids_are_refused(bad):
  with pytest.raises(ValueError, match="generation_config.eos_token_id: found"):
    stop_token_ids(_tokenizer(PLAIN), generation_eos=bad)


def test_loads_an_hf_directory(tmp_path):
  _tokenizer(PLAIN, eos_token="[E]").save_pretrained(tmp_path)
  tokenizer = load_tokenizer(tmp_path)
  assert render_prompt(tokenizer, _messages("u1")) == _ids("[U] u1")
  assert tokenizer.eos_token_id == ID["[E]"]


def test_refuses_what_is_no_tokenizer(tmp_path):
  with pytest.raises(FileNotFoundError, match="tokenizer: found no .*absent, expected a directory"):
    load_tokenizer(tmp_path / "absent")
  with pytest.raises(FileNotFoundError, match="tokenizer: found no file .*absent.gguf"):
    load_tokenizer(tmp_path / "absent.gguf")
  with pytest.raises(FileNotFoundError, match="found no tokenizer.json"):
    load_tokenizer(tmp_path)
  (tmp_path / "tokenizer.json").write_text("{broken")
  with pytest.raises(ValueError, match="tokenizer: cannot read "):
    load_tokenizer(tmp_path)


# Thoughts by default, an empty one when switched off, as in Qwen3's.
SWITCHED = ("{% for m in messages %}{{ '[U] ' if m.role == 'user' else '' }}{{ m.content }} "
            "{{ '[E] ' if m.role == 'assistant' else '' }}{% endfor %}{% if add_generation_prompt "
            "and enable_thinking is defined and enable_thinking is false %}[T] {% endif %}")


def test_thinking_is_switched_in_every_rendering():
  tokenizer = _tokenizer(SWITCHED)
  off = set_thinking(tokenizer, False)
  assert render_prompt(off, _messages("u1")) == _ids("[U] u1 [T]")
  for on in (tokenizer, set_thinking(tokenizer, None), set_thinking(tokenizer, True)):
    assert render_prompt(on, _messages("u1")) == _ids("[U] u1")
  assert off.decode(off("u1 u2").input_ids) == "u1 u2"


@pytest.mark.parametrize("template", [PLAIN, None])
def test_no_switch_to_think_is_told(template):
  with pytest.raises(ValueError, match="^enable_thinking: found False, .*'toy/tokenizer' has no"):
    set_thinking(_tokenizer(template), False)
