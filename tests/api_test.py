"""`DSpark`: every form of prompt and option, streaming, statistics, and bad input."""

import shutil

import numpy as np
import pytest
import safetensors.numpy

from dspark_jax.api import DSpark, find_drafter
from dspark_jax.decode import loop
from dspark_jax.interop.load import load_target
from dspark_jax.scheduler import policies
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401

PROMPT = "Six?"  # with its template it fits the smallest shape, as all lengths below do
MESSAGES = [{"role": "user", "content": PROMPT}]
HEADER = "<|im_start|>user\n" + PROMPT + "<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  root = tmp_path_factory.mktemp("tiny")
  return tiny.save_target(root / "target"), tiny.save_drafter(root / "drafter")


@pytest.fixture(scope="module")
def model(directories):
  target, drafter = directories
  return DSpark(str(target), str(drafter))


def without_time(generation):
  return {k: v for k, v in vars(generation).items() if "seconds" not in k}


def test_forms_of_one_prompt_give_one_answer(model):
  ids = model.tokenizer(HEADER, add_special_tokens=False)["input_ids"]
  assert ids[0] == tiny.NUM_IDS - 3  # <|im_start|>: specials are single tokens
  by_text = model.generate(PROMPT, max_new_tokens=12)
  assert by_text.num_prompt_tokens == len(ids)
  for prompt in (MESSAGES, tuple(MESSAGES), ids, np.array(ids)):
    assert model.generate(prompt, max_new_tokens=12).tokens == by_text.tokens
  assert model.generate(HEADER, is_raw=True, max_new_tokens=12).tokens == by_text.tokens
  assert model.generate(PROMPT, is_raw=True, max_new_tokens=12).num_prompt_tokens == len(PROMPT)


def test_a_list_is_a_batch_and_neighbours_do_not_matter(model):
  prompts = [[{"role": "user", "content": "Hi"}], [1, 2, 3]]
  for values in (dict(temperature=[0.0, 1.0], seed=[1, 2], top_k=[0, 20], top_p=[1.0, 0.9]),
                 dict(temperature=[0.7, 0.0], seed=[3, 0], min_p=[0.05, 0.0])):
    batch = model.generate(prompts, max_new_tokens=[9, 12], stop_ids=[], **values)
    assert [len(g.tokens) for g in batch] == [9, 12]
    for i, prompt in enumerate(prompts):
      options = {name: value[i] for name, value in values.items()}
      alone = model.generate(prompt, max_new_tokens=(9, 12)[i], stop_ids=[], **options)
      assert without_time(alone) == without_time(batch[i])
  assert isinstance(model.generate([PROMPT], max_new_tokens=1), list)


@pytest.mark.smoke
def test_greedy_is_plain_and_drafts_are_accepted(model):
  fast = model.generate(PROMPT, max_new_tokens=40, stop_ids=[])
  plain = model.generate(PROMPT, max_new_tokens=40, stop_ids=[], is_speculative=False)
  assert fast.tokens == plain.tokens and len(plain.tokens) == 40
  assert plain.num_rounds == 39 and plain.accepted_len == 1.0
  assert plain.verify_rate is None and plain.accept_rate == []
  assert 0.15 < fast.verify_rate < 0.95, f"too poor or too good to test with: {fast.verify_rate}"
  assert fast.num_rounds < 39


def test_statistics_agree_with_each_other(model):
  g = model.generate(PROMPT, max_new_tokens=30, stop_ids=[])
  assert sum(g.num_accepted) + g.num_rounds == len(g.tokens) - 1  # the prefill gave the first
  assert g.accepted_len == (len(g.tokens) - 1) / g.num_rounds
  assert g.num_verified[0] == g.num_rounds or g.num_verified[0] == g.num_rounds - 1
  assert g.accept_rate == [a / v for a, v in zip(g.num_accepted, g.num_verified)]
  assert g.num_accepted == sorted(g.num_accepted, reverse=True)
  assert 0 < g.prefill_seconds < g.seconds
  assert g.text == model.tokenizer.decode(g.tokens, skip_special_tokens=True)


def test_length_options(model):
  num = model.generate(PROMPT, max_new_tokens=1).num_prompt_tokens
  assert len(model.generate(PROMPT, max_new_tokens=1, stop_ids=[]).tokens) == 1
  g = model.generate(PROMPT, max_length=num + 7, stop_ids=[])
  assert len(g.tokens) == 7 and g.finish_reason == "length"
  pair = model.generate([PROMPT, [1, 2]], max_length=[num + 2, 5], stop_ids=[])
  assert [len(g.tokens) for g in pair] == [2, 3]
  # The context of 120 tokens ends the answer, not the default of 128 new ones.
  long = model.generate([7] * 60, stop_ids=[])
  assert len(long.tokens) == 60 and long.finish_reason == "length"


def test_stop_ids_end_an_answer_exactly(model):
  free = model.generate(PROMPT, max_new_tokens=30, stop_ids=[]).tokens
  stop = free[11]
  g = model.generate(PROMPT, max_new_tokens=30, stop_ids=[stop])
  assert g.tokens == free[:free.index(stop) + 1] and g.finish_reason == "stop"
  a, b = model.generate([PROMPT, PROMPT], max_new_tokens=30, stop_ids=[[stop], [tiny.STOP_ID]])
  assert a.tokens == g.tokens and b.tokens[:len(a.tokens)] == a.tokens
  assert model.stop_ids == (tiny.STOP_ID,)


@pytest.mark.parametrize("options", [
    dict(max_new_tokens=40), dict(max_new_tokens=1), dict(max_new_tokens=2, is_speculative=False),
    dict(max_new_tokens=40, temperature=1.0, seed=3, stop_ids=[]),
    dict(max_new_tokens=40, temperature=1.0, seed=4, stop_ids=[], is_speculative=False)])
def test_streamed_pieces_joined_are_the_answer(model, options):
  whole = model.generate(PROMPT, **options)
  stream, pieces = model.stream(PROMPT, **options), []
  while True:
    try:
      pieces.append(next(stream))
    except StopIteration as end:
      assert without_time(end.value) == without_time(whole)
      break
  assert "".join(pieces) == whole.text and all(pieces)
  if len(whole.tokens) == 40:
    assert len(pieces) > 2


def test_seeds(model):
  answers = [model.generate(PROMPT, max_new_tokens=20, temperature=1.0, seed=s).tokens
             for s in (1, 1, 2)]
  assert answers[0] == answers[1] != answers[2]


def test_policies(model):
  short = model.with_policy(max_draft_len=2)
  assert short.frame.policy.length == 2
  # What is never verified is not drafted either.
  assert len(short.generate(PROMPT, max_new_tokens=20, stop_ids=[]).num_verified) == 2
  assert short.target is model.target and model.frame.policy.length == 4
  never = model.with_policy(confidence_threshold=1.0, max_draft_len=3)
  expected = model.generate(PROMPT, max_new_tokens=20, stop_ids=[])
  found = never.generate(PROMPT, max_new_tokens=20, stop_ids=[])
  assert found.tokens == expected.tokens and sum(found.num_verified) == 0
  assert found.accepted_len == 1.0
  with pytest.raises(ValueError, match="max_draft_len: found 5, expected within 0..proposal_len"):
    model.with_policy(max_draft_len=5)
  with pytest.raises(ValueError, match="confidence_threshold: found 1.5"):
    model.with_policy(confidence_threshold=1.5)


def test_warm_up_compiles_and_changes_nothing(model):
  assert model.warm_up(PROMPT, max_new_tokens=20) > 0
  assert model.warm_up([PROMPT], is_speculative=False, max_new_tokens=20) > 0


def test_without_a_drafter(directories, model):
  plain = DSpark(str(directories[0]), None)
  expected = model.generate(PROMPT, max_new_tokens=20)
  assert plain.generate(PROMPT, max_new_tokens=20).tokens == expected.tokens
  with pytest.raises(ValueError, match="draft_model: found none"):
    plain.with_policy(max_draft_len=2)


def test_loaded_target_and_reduced_vocabulary(directories, model, tmp_path):
  # Plain decoding must not see the drafter's reduced vocabulary.
  drafter = tiny.save_drafter(tmp_path / "small", draft_vocab_size=200)
  small = DSpark(load_target(str(directories[0])), str(drafter), max_draft_len=3)
  expected = model.generate(PROMPT, max_new_tokens=30, stop_ids=[])
  for is_speculative in (True, False):
    found = small.generate(PROMPT, max_new_tokens=30, stop_ids=[], is_speculative=is_speculative)
    assert found.tokens == expected.tokens


def test_padded_rows_of_the_head_are_never_emitted(model):
  assert len(model.tokenizer) == tiny.NUM_IDS < tiny.CONFIG.vocab_size
  tokens = []
  for seed in range(4):
    g = model.generate(PROMPT, max_new_tokens=60, temperature=5.0, seed=seed, stop_ids=[])
    tokens += g.tokens
  assert max(tokens) < tiny.NUM_IDS  # 240 nearly uniform draws miss 5 of 264 rows 1 time in 100


def test_stored_head_of_a_drafter_is_used(directories, model, tmp_path):
  # With a head of its own that only knows id 3, a drafter drafts nothing else.
  path = tmp_path / "own_head"
  shutil.copytree(directories[1], path)
  tensors = safetensors.numpy.load_file(path / "model.safetensors")
  for name in [n for n in tensors if n.startswith("markov_head.markov_w")]:
    tensors[name] = np.zeros_like(tensors[name])
  tensors["lm_head.weight"] = np.zeros((tiny.CONFIG.vocab_size, 16), np.float32)
  tensors["lm_head.weight"][3] = 100 * np.sign(np.random.default_rng(0).normal(size=16))
  safetensors.numpy.save_file(tensors, path / "model.safetensors")
  other = DSpark(str(directories[0]), str(path))
  assert float(abs(other.params["borrowed"]["lm_head_VdxD"][3]).max()) == 100
  expected = model.generate(PROMPT, max_new_tokens=12, stop_ids=[]).tokens
  assert other.generate(PROMPT, max_new_tokens=12, stop_ids=[]).tokens == expected


BAD_CALLS = [
    (dict(temperature=-0.1), "temperature: found -0.1"),
    (dict(temperature=float("nan")), "temperature: found nan"),
    (dict(temperature=[0.0, 1.0]), "temperature: found .* expected one number or 1"),
    (dict(top_p=0.0), "top_p: found 0.0"), (dict(top_p=1.1), "top_p: found 1.1"),
    (dict(top_k=-1), "top_k: found -1"), (dict(top_k=1.5), "top_k: found 1.5"),
    (dict(min_p=-0.1), "min_p: found -0.1"), (dict(seed=-1), "seed: found -1"),
    (dict(max_new_tokens=0), "max_new_tokens: found 0, expected an integer >= 1"),
    (dict(max_new_tokens=-3), "max_new_tokens: found -3"),
    (dict(max_new_tokens=2.5), "max_new_tokens: found 2.5, expected an integer"),
    (dict(max_new_tokens=[1, 2]), "max_new_tokens: found .* one a prompt"),
    (dict(max_length=5), "max_length: found 5, expected more than the prompt's"),
    (dict(max_length=90, max_new_tokens=3), "max_length: found together with max_new_tokens"),
    (dict(max_tokens=3), "max_tokens: unknown option, expected one of max_new_tokens"),
    (dict(stop_ids=2), "stop_ids: found 2"), (dict(stop_ids=["a"]), "stop_ids: found"),
    (dict(stop_ids=[[1], [2]]), "stop_ids: found 2 lists")]


@pytest.mark.parametrize("options, message", BAD_CALLS)
def test_bad_options_are_named(model, options, message):
  with pytest.raises(ValueError, match=message) as error:
    model.generate(PROMPT, **options)
  assert "\n" not in str(error.value)
  with pytest.raises(ValueError, match=message):
    list(model.stream(PROMPT, **options))


BAD_PROMPTS = [
    ("", "prompt: found no text"), ("  \n", "prompt: found no text"), ([], "prompts: found none"),
    ([[]], "prompt: found no tokens"), (None, "prompt: found a NoneType"),
    ({"role": "user", "content": "x"}, "prompt: found a dict"), (7, "prompt: found a int"),
    ([1, "x"], "neither messages nor token ids"), ([True, False], "neither"),
    ([[{"role": "user", "content": " "}]], r"messages\[0\].content: found no text"),
    ([{"role": "robot", "content": "x"}], r"messages\[0\].role: found 'robot'"),
    ([*MESSAGES, {"role": "assistant", "content": "x"}], "the last turn is the assistant's"),
    ([1, tiny.CONFIG.vocab_size], r"token ids outside \[0, 264\)"), ([-1, 3], "token ids outside"),
    ([5] * 120, "found 120 tokens, expected at most 119"),
    ([PROMPT, [5] * 120], "prompt 1: found 120 tokens")]


@pytest.mark.parametrize("prompt, message", BAD_PROMPTS)
def test_bad_prompts_are_named(model, prompt, message):
  with pytest.raises(ValueError, match=message):
    model.generate(prompt, max_new_tokens=4)


def test_cache_bound(directories):
  small = DSpark(str(directories[0]), str(directories[1]), max_slots=20)
  assert len(small.generate([1] * 18, max_new_tokens=9, stop_ids=[]).tokens) == 2
  with pytest.raises(ValueError, match="found 20 tokens, expected at most 19"):
    small.generate([1] * 20)
  with pytest.raises(ValueError, match="max_slots: found 1"):
    DSpark(str(directories[0]), None, max_slots=1)


def test_streaming_takes_one_prompt(model):
  with pytest.raises(ValueError, match="found a list of prompts"):
    next(model.stream([PROMPT]))


@pytest.mark.parametrize("changes, message", [
    (dict(mask_token_id=999), "mask_token_id: found 999"),
    (dict(target_layer_ids=[0, 2]), "target_layer_ids: found"),
    (dict(num_target_layers=4), "num_target_layers: found 4, expected the target's 3"),
    (dict(vocab_size=300), "vocab_size: found 300|tensor markov_head.* shape"),
    (dict(hidden_size=24), "hidden_size: found 24|tensor .* shape"),
    (dict(mask_tokenid=3), "mask_tokenid: found an unknown field, expected 'mask_token_id'"),
    (dict(architectures=["DSparkJaxModel"], sample_from_anchor=None), "sample_from_anchor: missing")
])
def test_drafter_that_does_not_fit(directories, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message) as error:
    DSpark(str(directories[0]), str(tiny.edit_config(directories[1], tmp_path / "drafter",
                                                          **changes)))
  assert "\n" not in str(error.value)


def test_drafter_of_another_target(directories, tmp_path):
  from dspark_jax.drafter.config import DrafterConfig, check_fits
  other = DrafterConfig(**{**vars(DSpark(*map(str, directories)).frame.drafter.config),
                           "vocab_size": 300})
  with pytest.raises(ValueError, match="vocab_size: found 300, expected the target's 264"):
    check_fits(other, tiny.CONFIG)


def test_threshold_needs_a_confidence_head(directories, tmp_path):
  drafter = tiny.save_drafter(tmp_path / "plain", enable_confidence_head=False,
                              confidence_head_with_markov=False)
  assert DSpark(str(directories[0]), str(drafter)).frame.policy.length == 4
  with pytest.raises(ValueError, match="confidence_threshold: found 0.5 with a drafter that"):
    DSpark(str(directories[0]), str(drafter), confidence_threshold=0.5)


def test_names_that_are_nothing(directories, tmp_path):
  with pytest.raises(FileNotFoundError, match="draft_model: found 'no-such-drafter'"):
    DSpark(str(directories[0]), "no-such-drafter")
  with pytest.raises(FileNotFoundError, match="draft_model: found 'auto' for .*shipped for"):
    find_drafter(str(directories[0]), "auto")
  # The message about a loaded target must not print its weights.
  with pytest.raises(FileNotFoundError) as error:
    DSpark(load_target(str(directories[0])), "auto")
  assert len(str(error.value)) < 300
  with pytest.raises(FileNotFoundError, match="model: found 'smollm3'"):
    DSpark("smollm3", None)
  with pytest.raises(ValueError, match="dtype: found 'float8'"):
    DSpark(str(directories[0]), None, dtype="float8")


def test_an_adaptive_policy_measures_its_step_curve_once(directories, tmp_path, monkeypatch):
  """`with_policy(EarlyStop(...))`: the curve is measured once a batch size, tokens are plain's."""
  monkeypatch.setattr("dspark_jax.api.STEP_CURVES", tmp_path)
  model = DSpark(*map(str, directories))
  adaptive = model.with_policy(policies.EarlyStop(max_draft=2))  # few buckets to be compiled
  plain = model.generate("a?", max_new_tokens=8, stop_ids=[], is_speculative=False)
  loop.run_rounds.clear_cache()
  found = adaptive.generate("a?", max_new_tokens=8, stop_ids=[])
  assert loop.run_rounds._cache_size() == 1  # what was measured is what decodes
  assert found.tokens == plain.tokens
  [path] = tmp_path.iterdir()
  before = path.stat().st_mtime_ns
  adaptive.generate("b?", max_new_tokens=8, stop_ids=[])
  assert list(tmp_path.iterdir()) == [path] and path.stat().st_mtime_ns == before
  # Warming up runs every shape of the ladder once.
  counts, run_rounds = [], loop.run_rounds

  def spy(*args):
    state = run_rounds(*args)
    counts.append(np.asarray(state.scheduler.bucket_counts_N))
    return state

  monkeypatch.setattr(loop, "run_rounds", spy)
  adaptive.warm_up("a?", max_new_tokens=8, stop_ids=[])
  assert len(counts) > 1 and np.array_equal(counts, np.eye(len(counts)))
  with pytest.raises(ValueError, match="policy: found together with max_draft_len"):
    model.with_policy(policies.EarlyStop(), max_draft_len=2)
