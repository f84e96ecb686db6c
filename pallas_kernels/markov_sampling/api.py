"""Sequential drafting: the one public function of the family."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.markov_sampling import kernel_tpu
from pallas_kernels.markov_sampling.reference import KINDS, Draws, markov_sampling_reference


def markov_sampling(base_logits_GxBxV: jax.Array, w1_UxR: jax.Array, w2_VxR: jax.Array,
                    first_token_B: jax.Array, words_GxBx2: jax.Array, temperature_B: jax.Array, *,
                    kind: str = "vanilla", pre_GxBxE: jax.Array | None = None,
                    cell_ExI: jax.Array | None = None, ids_V: jax.Array | None = None,
                    with_logits: bool = False, implementation: str = "auto") -> Draws:
  """Draws G tokens a request, in order, each from base logits plus a bias from the one before.

  x_g ~ softmax((base_g + w2 @ bias_in_g) / temperature), where bias_in_g comes from w1[x_{g-1}] by
  the head's kind (`reference.advance`); temperature 0 takes the argmax, lowest id at ties.
  Source: DSpark, arXiv 2607.05147, eq. 4-6.

  Args:
    base_logits_GxBxV: float32, position first; -inf removes a token.
    w1_UxR: embedding of previous tokens, by target id.
    w2_VxR: [out, in], by column of the logits.
    first_token_B: int32 target ids, the previous tokens of slot 0.
    words_GxBx2: uint32 noise words of each draw.
    temperature_B: float32; not positive = greedy.
    kind: 'vanilla', 'gated' or 'rnn'.
    pre_GxBxE, cell_ExI: of gated (E = R, I = R) and rnn (E = 3R, I = 2R): the cell's map of the
      hidden states, bias included, and its weight on the rest.
    ids_V: int32 sorted target ids of the columns of a reduced vocabulary; None = 0..V-1.
    with_logits: whether to return the [G, B, V] logits; without them no step writes such a row.
    implementation: 'auto' (a kernel on TPU), 'reference', or 'pallas' (on GPU too); see
      `pallas_kernels.dispatch`.
  Raises:
    ValueError: naming the argument, for shapes that do not fit or an unknown name.
  """
  _check(base_logits_GxBxV, w1_UxR, w2_VxR, first_token_B, words_GxBx2, temperature_B, kind,
         pre_GxBxE, cell_ExI, ids_V)
  options = dict(kind=kind, with_logits=with_logits)
  return dispatch(
      implementation, base_logits_GxBxV, w1_UxR, w2_VxR, first_token_B, words_GxBx2, temperature_B,
      pre_GxBxE, cell_ExI, ids_V,
      reference=functools.partial(markov_sampling_reference, **options),
      kernels={"tpu": functools.partial(kernel_tpu.markov_sampling_tpu, **options)},
      on_request={"cuda": functools.partial(_run_gpu, **options)})


def _run_gpu(*args, **options):
  # Imported when asked for: Pallas will drop Triton one day, and nothing else may break then.
  from pallas_kernels.markov_sampling.kernel_gpu import markov_sampling_gpu

  return markov_sampling_gpu(*args, **options)


def _check(base_logits, w1, w2, first_token, words, temperature, kind, pre, cell, ids) -> None:
  if kind not in KINDS:
    raise ValueError(f"kind: found {kind!r}, expected one of {KINDS}")
  if base_logits.ndim != 3 or base_logits.dtype != jnp.float32:
    raise ValueError(f"base_logits_GxBxV: found {base_logits.dtype}{base_logits.shape}, expected "
                     "float32 of rank 3")
  (G, B, V), R = base_logits.shape, w1.shape[-1]
  expected = [("w1_UxR", w1, (w1.shape[0], R)), ("w2_VxR", w2, (V, R)),
              ("first_token_B", first_token, (B,)), ("words_GxBx2", words, (G, B, 2)),
              ("temperature_B", temperature, (B,))]
  if ids is not None:
    expected.append(("ids_V", ids, (V,)))
  if (pre is None) != (kind == "vanilla") or (cell is None) != (kind == "vanilla"):
    raise ValueError(f"pre_GxBxE, cell_ExI: expected both with kind 'gated' or 'rnn' and neither "
                     f"with 'vanilla', found kind {kind!r}")
  if kind != "vanilla":
    E, X = (R, R) if kind == "gated" else (3 * R, 2 * R)
    expected += [("pre_GxBxE", pre, (G, B, E)), ("cell_ExI", cell, (E, X))]
  for name, array, shape in expected:
    if array.shape != shape:
      raise ValueError(f"{name}: found shape {array.shape}, expected {shape}")
