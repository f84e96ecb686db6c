"""What `bench_kernels` times: one line a family in BENCHES, and the naive form it is compared with.

A Bench names a function that takes sizes and returns (args, forms): `args` are arrays on the
device, `forms` maps "naive", "reference" and "kernel" to jitted functions of them. "kernel" is
called with implementation="pallas" and left out of the table where the platform has none.
"""

import dataclasses
import functools
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import counter_rng
from pallas_kernels.distillation_loss import distillation_loss, weighted_distillation_loss
from pallas_kernels.length_selection import length_selection
from pallas_kernels.markov_sampling import markov_sampling
from pallas_kernels.rejection_sampling import rejection_sampling


@dataclasses.dataclass(frozen=True)
class Bench:
  """One row group of the table.

  Attributes:
    build: (**sizes) -> (args, forms).
    sizes: {platform: sizes}; "default" for platforms that are not named.
    floor_bytes: bytes of args to outputs that must move; None = the args once.
  """
  name: str
  build: Callable
  sizes: dict[str, dict[str, int]]
  floor_bytes: int | None = None


def bench_rejection_sampling(*, batch: int, vocab: int, num_drafts: int):
  rng = np.random.default_rng(0)
  target = jnp.asarray(rng.normal(size=(batch, num_drafts + 1, vocab)), jnp.float32) * 3
  draft = target[:, :-1] + jnp.asarray(rng.normal(size=(batch, num_drafts, vocab)), jnp.float32)
  rows = jnp.broadcast_to(jnp.arange(num_drafts + 1)[None], (batch, num_drafts + 1))
  words = counter_rng.noise_words(jnp.arange(batch), counter_rng.RECOVER, rows, 0)
  draft_words = counter_rng.noise_words(jnp.arange(batch), counter_rng.DRAFT, rows[:, :-1], 0)
  args = (target, draft, counter_rng.gumbel_argmax(draft, draft_words),
          jnp.full(batch, num_drafts), jnp.asarray(rng.uniform(size=(batch, num_drafts)),
                                                   jnp.float32), words)

  def call(target, draft, tokens, lens, coins, words, *, implementation):
    return rejection_sampling(target, draft, tokens, verify_lens_B=lens, coins_BxG=coins,
                              noise_words_BxWx2=words, implementation=implementation)

  def naive(target, draft, tokens, lens, coins, words):
    """As usually written: both tensors of probabilities, and the residual of every row."""
    p, q = jax.nn.softmax(target, axis=-1), jax.nn.softmax(draft, axis=-1)
    pick = lambda x: jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]
    is_accepted = coins < pick(p[:, :-1]) / pick(q)
    is_run = jnp.cumprod(is_accepted & (jnp.arange(num_drafts)[None] < lens[:, None]), axis=1)
    num_accepted = is_run.sum(axis=1, dtype=jnp.int32)
    residual = jnp.maximum(p[:, :-1] - q, 0.0)
    residual = residual / (residual.sum(axis=-1, keepdims=True) + 1e-10)
    laws = jnp.concatenate([residual, p[:, -1:]], axis=1)
    law = jnp.take_along_axis(laws, num_accepted[:, None, None], axis=1)[:, 0]
    row_words = jnp.take_along_axis(words, num_accepted[:, None, None], axis=1)[:, 0]
    scores = jnp.log(law) + counter_rng.gumbel(row_words, jnp.arange(vocab))
    return num_accepted, jnp.argmax(scores, axis=-1)

  return args, {"naive": jax.jit(naive)} | make_forms(call)


def bench_length_selection(*, batch: int, num_drafts: int):
  rng = np.random.default_rng(0)
  survival = jnp.cumprod(jnp.asarray(rng.beta(5, 1, (batch, num_drafts)), jnp.float32), axis=1)
  tokens = jnp.arange(batch * (num_drafts + 1) + 1, dtype=jnp.float32)
  curve = 1 / (1 + jnp.maximum(tokens - batch, 0) / (2 * batch))

  def naive(survival, curve):
    """All rates of the sorted path by one prefix sum, then the leading run of rises."""
    order = jnp.argsort(-survival.T.reshape(-1), stable=True)
    expected = batch + jnp.cumsum(survival.T.reshape(-1)[order])
    rates = expected * curve[batch + 1:]
    is_rise = rates > jnp.concatenate([batch * curve[batch][None], rates[:-1]])
    num = jnp.cumprod(is_rise).sum()
    admitted = jnp.zeros(order.size, bool).at[order].set(jnp.arange(order.size) < num)
    return admitted.reshape(num_drafts, batch).sum(axis=0)

  def call(survival, curve, *, implementation):
    return length_selection(survival, step_curve_C=curve, implementation=implementation)

  return (survival, curve), {"naive": jax.jit(naive)} | make_forms(call)


def bench_markov_sampling(*, batch: int, vocab: int, num_drafts: int, rank: int):
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, dtype=np.float32))
  words = counter_rng.noise_words(jnp.arange(batch)[None], counter_rng.DRAFT, 0,
                                  jnp.arange(num_drafts)[:, None])
  args = (normal(num_drafts, batch, vocab), normal(vocab, rank), normal(vocab, rank),
          jnp.zeros(batch, jnp.int32), words, jnp.ones(batch))

  def naive(base, w1, w2, first_token, words, temperature):
    """As usually written: slot by slot, a row of bias, one of probabilities, one of noise."""
    tokens, logps, token = [], [], first_token
    for g in range(num_drafts):
      law = jax.nn.softmax((base[g] + w1[token] @ w2.T) / temperature[:, None], axis=-1)
      noise = counter_rng.gumbel(words[g], jnp.arange(vocab))
      token = jnp.argmax(jnp.log(law) + noise, axis=-1)
      tokens.append(token)
      logps.append(jnp.log(jnp.take_along_axis(law, token[:, None], axis=-1)[:, 0]))
    return jnp.stack(tokens), jnp.stack(logps)

  return args, {"naive": jax.jit(naive)} | make_forms(markov_sampling)


def bench_distillation_loss(*, num_tokens: int, vocab: int, width: int, rank: int,
                            with_gradients: bool):
  """Terms alone, or with gradients, which have no kernel on GPU: that row is the reference's."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, dtype=np.float32))
  args = (normal(num_tokens, width), normal(num_tokens, rank), normal(vocab, rank) / 20,
          normal(num_tokens, width), normal(vocab, width) / 20,
          jnp.asarray(rng.integers(0, vocab, num_tokens), jnp.int32), jnp.ones(num_tokens))
  differentiate = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))

  def terms(hidden, bias_in, w2, target, head, labels, weights, *, implementation):
    return distillation_loss(hidden, target, head, bias_in, w2, labels,
                             implementation=implementation)[:2]

  def gradients(*args, implementation):
    def loss(hidden, bias_in, w2, target, head, labels, weights):
      return weighted_distillation_loss(hidden, target, head, bias_in, w2, labels, weights, weights,
                                        implementation=implementation)[0]
    return differentiate(loss)(*args)

  def naive_terms(hidden, bias_in, w2, target, head, labels, weights):
    """As usually written: every law of every token at once."""
    log_draft = jax.nn.log_softmax(hidden @ head.T + bias_in @ w2.T)
    tv = jnp.abs(jnp.exp(log_draft) - jax.nn.softmax(target @ head.T)).sum(axis=-1)
    ce = -jnp.take_along_axis(log_draft, labels[:, None], axis=1)[:, 0]
    return ce, tv

  naive_loss = lambda *args: jnp.sum(args[-1] * sum(naive_terms(*args)))
  if with_gradients:
    return args, {"naive": jax.jit(differentiate(naive_loss))} | make_forms(gradients)
  return args, {"naive": jax.jit(naive_terms)} | make_forms(terms)


def make_forms(call) -> dict[str, Callable]:
  """Returns the reference and the kernel of a function that takes `implementation`."""
  return {form: jax.jit(functools.partial(call, implementation=implementation))
          for form, implementation in (("reference", "reference"), ("kernel", "pallas"))}


BENCHES = {bench.name: bench for bench in (
    Bench("rejection_sampling", bench_rejection_sampling,
          {"cpu": dict(batch=16, vocab=49_152, num_drafts=7),
           "default": dict(batch=64, vocab=151_936, num_drafts=7)}),
    Bench("length_selection", bench_length_selection,
          {"cpu": dict(batch=32, num_drafts=7), "default": dict(batch=512, num_drafts=16)}),
    Bench("markov_sampling", bench_markov_sampling,
          {"cpu": dict(batch=4, vocab=49_152, num_drafts=7, rank=64),
           "default": dict(batch=64, vocab=151_936, num_drafts=7, rank=256)}),
    *(Bench(name, functools.partial(bench_distillation_loss, with_gradients=with_gradients),
            {"cpu": dict(num_tokens=896, vocab=49_152, width=576, rank=64),
             "default": dict(num_tokens=896, vocab=151_936, width=2560, rank=256)})
      for name, with_gradients in (("distillation_loss, terms", False),
                                   ("distillation_loss, gradients", True))),
)}
