"""The table of what TPU compilers are asked to compile: for `compile_report` and tests/aot_test.py.

To add a kernel: one line in CASES. A Case names a function without arguments that returns
(f, args): f is pure and jittable; args is a tuple of pytrees of `jax.ShapeDtypeStruct`, at
production shapes. Nothing is allocated, so shapes may be as large as the real ones. The function is
called in the process that compiles, so heavy imports belong inside it. What a case promises
(`max_ratio`, `max_temp_bytes`, `no_copies_of`) is what the test holds it to, on every target;
leave out what it does not promise.

  python -m experiments._compile CASE TARGET      compiles one and prints a line of JSON
"""

import dataclasses
import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp

# The production shapes: Qwen3-4B, G = 7 drafts, 64 requests.
V, B, G, W, D, R = 151_936, 64, 7, 8, 2560, 256

TARGETS = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")


@dataclasses.dataclass(frozen=True)
class Case:
  """One program to compile.

  Attributes:
    name: shown in the report and as the test's id.
    build: () -> (f, args).
    donate: positions of args that are donated.
    ci_targets: targets that the test compiles for.
    targets: those that the report compiles for.
    floor_bytes: bytes that must move; None = every input and output once.
    max_ratio: bound of bytes accessed over the floor.
    max_temp_bytes: bound of the temporaries.
    no_copies_of: (dtype as XLA writes it, shape): the program must not copy an array of it.
  """
  name: str
  build: Callable[[], tuple[Callable, tuple[Any, ...]]]
  donate: tuple[int, ...] = ()
  ci_targets: tuple[str, ...] = TARGETS
  targets: tuple[str, ...] = TARGETS
  floor_bytes: int | None = None
  max_ratio: float | None = None
  max_temp_bytes: int | None = None
  no_copies_of: tuple[str, tuple[int, ...]] | None = None


def shape(*dims: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(dims, dtype)


def build_rejection_sampling(implementation: str = "auto", vocab: int = V, batch: int = B,
                             num_drafts: int = G):
  from pallas_kernels.rejection_sampling import rejection_sampling

  def f(target, draft, tokens, lens, coins, words):
    return rejection_sampling(target, draft, tokens, verify_lens_B=lens, coins_BxG=coins,
                              noise_words_BxWx2=words, implementation=implementation)

  return f, (shape(batch, num_drafts + 1, vocab), shape(batch, num_drafts, vocab),
             shape(batch, num_drafts, dtype=jnp.int32), shape(batch, dtype=jnp.int32),
             shape(batch, num_drafts), shape(batch, num_drafts + 1, 2, dtype=jnp.uint32))


def build_length_selection(rule: str, batch: int = 512, num_drafts: int = 16,
                           implementation: str = "auto"):
  from pallas_kernels.length_selection import length_selection
  argument = shape(batch * (num_drafts + 1) + 1) if rule == "step_curve_C" else shape(
      dtype=jnp.int32)
  f = lambda survival, x: length_selection(survival, **{rule: x}, implementation=implementation)
  return f, (shape(batch, num_drafts), argument)


def build_markov_sampling(implementation: str = "pallas", vmem_mib: int = 64,
                          kind: str = "vanilla", with_logits: bool = False, num_drafts: int = G):
  from pallas_kernels.markov_sampling import kernel_tpu, reference
  cell = {"vanilla": (), "gated": (R, R), "rnn": (3 * R, 2 * R)}[kind]
  options = dict(kind=kind, with_logits=with_logits)
  f = functools.partial(reference.markov_sampling_reference, **options)
  if implementation == "pallas":
    f = functools.partial(kernel_tpu.markov_sampling_tpu, **options,
                          tiles=kernel_tpu.Tiles(vmem_bytes=vmem_mib << 20))
  weight = shape(V, R, dtype=jnp.bfloat16)
  args = (shape(num_drafts, B, V), weight, weight, shape(B, dtype=jnp.int32),
          shape(num_drafts, B, 2, dtype=jnp.uint32), shape(B))
  if cell:
    args += (shape(num_drafts, B, cell[0]), shape(*cell, dtype=jnp.bfloat16))
  return f, args


# Of W1 only the rows of the tokens must move; counting it whole would flatter the kernel.
MARKOV_FLOOR = G * B * V * 4 + V * R * 2
LARGE_VMEM, SMALL_VMEM = ("v5e:2x2", "v6e:2x2"), ("v5p:2x2x1", "tpu7x:2x2x1")
# Every slot needs all of W2 after the token before it; what 64 MiB cannot hold is read again.
MARKOV_FLOOR_64 = MARKOV_FLOOR + (G - 1) * (V * R * 2 - (64 << 20))


def build_distillation_loss(num_tokens: int, *, with_gradients: bool = False,
                            implementation: str = "pallas",
                            sizes: tuple[int, int, int] = (V, D, R)):
  from pallas_kernels.distillation_loss import distillation_loss, weighted_distillation_loss
  options = dict(implementation=implementation, chunk=512)

  def terms(hidden, target, head, bias_in, w2, labels):
    return distillation_loss(hidden, target, head, bias_in, w2, labels, **options)

  def gradients(hidden, target, head, bias_in, w2, labels, weights):
    loss = lambda hidden, bias_in, w2: weighted_distillation_loss(
        hidden, target, head, bias_in, w2, labels, weights, weights, **options)
    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, bias_in, w2)

  half = functools.partial(shape, dtype=jnp.bfloat16)
  vocab, width, rank = sizes
  args = (half(num_tokens, width), half(num_tokens, width), half(vocab, width),
          half(num_tokens, rank), half(vocab, rank), shape(num_tokens, dtype=jnp.int32))
  return (gradients, args + (shape(num_tokens),)) if with_gradients else (terms, args)


# TV needs both normalisers before its first term, so no form reads the LM head less than twice
# (unless the logits stay, which is what this family is there to avoid).
TWO_PASSES = 2 * V * (D + R) * 2 + 512 * (2 * D + R) * 2
SMOLLM2 = dict(num_tokens=512, with_gradients=True, sizes=(49_152, 576, 64))

STEP_BATCH, STEP_SLOTS = 8, 1088  # a number of slots that nothing else in the program has


def build_step(num_layers: int = 36):
  """One round of a Qwen3-4B-shaped pair, in bfloat16; fewer layers compile faster."""
  from dspark_jax.decode import loop
  from dspark_jax.decode.state import Frame
  from dspark_jax.decode.step import speculate_step
  from dspark_jax.drafter import dspark
  from dspark_jax.drafter.config import config_for_target
  from dspark_jax.layers import RopeConfig
  from dspark_jax.sampling import make_sampling_params
  from dspark_jax.target.config import TransformerConfig
  from dspark_jax.target.transformer import Transformer

  target = TransformerConfig(
      model_type="qwen3", vocab_size=V, hidden_size=D, intermediate_size=9728,
      num_layers=num_layers, num_heads=32, num_kv_heads=8, head_dim=128,
      rope=RopeConfig(rope_theta=1e6), tie_word_embeddings=True, qk_norm=True,
      max_position_embeddings=40960)
  config = config_for_target(target, mask_token_id=151669, num_layers=min(5, num_layers),
                             markov_rank=R, proposal_len=G)
  frame = Frame(target, dspark.DSparkProposer(config, dtype="bfloat16", vocab_limit=151_669),
                vocab_limit=151_669, dtype="bfloat16")
  key = jax.random.key(0)
  init = Transformer(target, "bfloat16").init
  params = jax.eval_shape(lambda: {
      "target": init(key, jnp.zeros((1, 1), jnp.int32))["params"],
      "drafter": dspark.init_params(config, key)})
  params = jax.tree.map(lambda a: shape(*a.shape, dtype=jnp.bfloat16), params)

  def lend(params):
    """Adds what the drafter borrows: embedding and LM head, which are one array here."""
    embed_VxD = params["target"]["embed_tokens"]
    return params | {"borrowed": dspark.borrow(config, embed_VxD, embed_VxD)}

  batch_i32 = shape(STEP_BATCH, dtype=jnp.int32)
  state = jax.eval_shape(
      lambda params, prompts, lens, stops: loop.prefill(
          frame, lend(params), prompts, lens, limits_B=lens, num_slots=STEP_SLOTS,
          stop_ids_BxE=stops, sampling=make_sampling_params(STEP_BATCH, temperature=1.0)),
      params, shape(STEP_BATCH, 64, dtype=jnp.int32), batch_i32,
      shape(STEP_BATCH, 4, dtype=jnp.int32))

  # Shapes are found on the host, where `init_cache` makes caches float32.
  half = lambda cache: jax.tree.map(lambda a: shape(*a.shape, dtype=jnp.bfloat16), cache)
  state = state.replace(cache=half(state.cache), drafter=half(state.drafter))

  return lambda params, state: speculate_step(frame, lend(params), state), (params, state)


STEP_PROMISES = dict(donate=(1,), no_copies_of=("bf16", (STEP_BATCH, 8, STEP_SLOTS, 128)))

CASES = {case.name: case for case in (
    Case("rejection_sampling", build_rejection_sampling, max_ratio=1.2, max_temp_bytes=4 << 20),
    Case("rejection_sampling, XLA", lambda: build_rejection_sampling("reference"), ci_targets=()),
    Case("length_selection, early stop", lambda: build_length_selection("step_curve_C"),
         max_temp_bytes=1 << 20),
    Case("length_selection, budget", lambda: build_length_selection("budget"),
         max_temp_bytes=1 << 20),
    Case("length_selection, early stop, XLA", lambda: build_length_selection(
        "step_curve_C", implementation="reference"), ci_targets=()),
    Case("length_selection, budget, XLA", lambda: build_length_selection(
        "budget", implementation="reference"), ci_targets=()),
    Case("markov_sampling, 128 MiB of VMEM", lambda: build_markov_sampling(vmem_mib=128),
         ci_targets=LARGE_VMEM, targets=LARGE_VMEM, floor_bytes=MARKOV_FLOOR, max_ratio=1.2,
         max_temp_bytes=4 << 20),
    Case("markov_sampling, 64 MiB of VMEM", build_markov_sampling, ci_targets=SMALL_VMEM,
         floor_bytes=MARKOV_FLOOR_64, max_ratio=1.2, max_temp_bytes=4 << 20),
    Case("markov_sampling, rnn, with logits", lambda: build_markov_sampling(
        kind="rnn", with_logits=True), ci_targets=("v5e:2x2",),
         floor_bytes=MARKOV_FLOOR_64 + G * B * V * 4, max_ratio=1.2, max_temp_bytes=16 << 20),
    Case("markov_sampling, gated", lambda: build_markov_sampling(kind="gated"),
         ci_targets=("v5p:2x2x1",), floor_bytes=MARKOV_FLOOR_64, max_ratio=1.2,
         max_temp_bytes=16 << 20),
    # XLA counts a loop's body once, so one slot, to be taken G times.
    Case("markov_sampling, one slot, XLA",
         lambda: build_markov_sampling("reference", num_drafts=1), ci_targets=(),
         floor_bytes=B * V * 4 + V * R * 2),
    Case("distillation_loss, 512 tokens", lambda: build_distillation_loss(512),
         floor_bytes=TWO_PASSES, max_ratio=1.2, max_temp_bytes=16 << 20),
    Case("distillation_loss, 512 tokens, XLA",
         lambda: build_distillation_loss(512, implementation="reference"), ci_targets=(),
         floor_bytes=TWO_PASSES),
    Case("distillation_loss, 4096 tokens", lambda: build_distillation_loss(4096), ci_targets=(),
         max_temp_bytes=200 << 20),
    # 4,096 tokens x V would be 2.5 GB a float32 array; the gradient of W2 in float32 is 156 MB.
    Case("distillation_loss, 4096 tokens, gradients",
         lambda: build_distillation_loss(4096, with_gradients=True), ci_targets=("v5e:2x2",),
         max_temp_bytes=400 << 20),
    Case("distillation_loss, 512 tokens, gradients",
         lambda: build_distillation_loss(512, with_gradients=True), ci_targets=("tpu7x:2x2x1",),
         max_temp_bytes=200 << 20),
    Case("distillation_loss, 512 tokens, gradients, XLA",
         lambda: build_distillation_loss(512, with_gradients=True, implementation="reference"),
         ci_targets=()),
    Case("distillation_loss of SmolLM2, gradients", lambda: build_distillation_loss(
        implementation="auto", **SMOLLM2), ci_targets=()),
    Case("distillation_loss of SmolLM2, gradients, XLA", lambda: build_distillation_loss(
        implementation="reference", **SMOLLM2), ci_targets=()),
    Case("step of Qwen3-4B, 4 layers", lambda: build_step(4), ci_targets=("v5e:2x2",),
         **STEP_PROMISES),
    Case("step of Qwen3-4B", build_step, ci_targets=(), **STEP_PROMISES),
)}
