"""Building blocks shared by target and drafter: linear maps, RMSNorm, RoPE, attention, SwiGLU.

Weights are stored [out, in], the layout of the checkpoints. Measured on CPU (all matmuls of
SmolLM2's layers, float32): `W @ x.T` takes 17.5, 19.8 and 23.1 ms for 1, 4 and 8 tokens, nearly
the time to read the weights once, where `x @ W.T` takes 20, 32 and 36 ms; [in, out] weights lie
between. From about 64 tokens on all are equal. In bfloat16 (with AVX512-BF16; LM head included)
`x @ W.T` takes 24, 25, 25, 31 and 45 ms for 1, 4, 8, 16 and 32 tokens, `W @ x.T` in float32 24, 29,
34, 43 and 67.
"""

import dataclasses
import functools
import math
from typing import Any, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

FEW_TOKENS = 32  # up to here the weights, not the activations, are the traffic


def linear(x_xI: jax.Array, w_OxI: jax.Array, bias_O: jax.Array | None = None, *,
           dtype: Any = None) -> jax.Array:
  """Applies [out, in] weights to the last axis: [..., I] -> [..., O], in `dtype` (None = x's)."""
  dtype = jnp.dtype(dtype or x_xI.dtype)
  lead = x_xI.shape[:-1]
  num_tokens = math.prod(lead)
  x_NxI = x_xI.reshape(num_tokens, x_xI.shape[-1])
  apply = functools.partial(_linear, dtype=dtype)
  if x_xI.dtype == jnp.bfloat16:
    on_cpu = lambda x_NxI, w_OxI: _linear_bfloat16_on_cpu(x_NxI, w_OxI, dtype)
    y_NxO = jax.lax.platform_dependent(x_NxI, w_OxI, cpu=on_cpu, default=apply)
  elif num_tokens <= FEW_TOKENS:
    on_cpu = functools.partial(_linear_few_on_cpu, dtype=dtype)
    y_NxO = jax.lax.platform_dependent(x_NxI, w_OxI, cpu=on_cpu, default=apply)
  else:
    y_NxO = apply(x_NxI, w_OxI)
  if bias_O is not None:
    y_NxO = y_NxO + bias_O[None, :]
  return y_NxO.reshape(*lead, w_OxI.shape[0])


def _linear(x_NxI: jax.Array, w_OxI: jax.Array, *, dtype) -> jax.Array:
  return jax.lax.dot_general(x_NxI, w_OxI, (((1,), (1,)), ((), ())),
                             preferred_element_type=dtype)


def _linear_few_on_cpu(x_NxI: jax.Array, w_OxI: jax.Array, *, dtype) -> jax.Array:
  # Without the barrier XLA folds both transposes back into `x @ W.T`, its slow form. Its kernel
  # works on 1, 2, 4 or multiples of 8 columns; 5 cost more than 8.
  num_tokens = x_NxI.shape[0]
  padded = num_tokens if num_tokens <= 4 else -(-num_tokens // 8) * 8
  x_NxI = jnp.pad(x_NxI, ((0, padded - num_tokens), (0, 0)))
  y_OxN = jax.lax.dot_general(w_OxI, x_NxI.T, (((1,), (0,)), ((), ())),
                              preferred_element_type=dtype)
  return jax.lax.optimization_barrier(y_OxN).T[:num_tokens]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _linear_bfloat16_on_cpu(x_NxI: jax.Array, w_OxI: jax.Array, dtype) -> jax.Array:
  # XLA's bfloat16 kernel gives float32 and takes 8 rows in the time of one. Asked for bfloat16, or
  # for a single row, XLA instead widens all the weights to float32 first.
  num_tokens = x_NxI.shape[0]
  x_NxI = jnp.pad(x_NxI, ((0, max(8 - num_tokens, 0)), (0, 0)))
  return _linear(x_NxI, w_OxI, dtype=jnp.float32)[:num_tokens].astype(dtype)


def _linear_bfloat16_on_cpu_forward(x_NxI, w_OxI, dtype):
  return _linear_bfloat16_on_cpu(x_NxI, w_OxI, dtype), (x_NxI, w_OxI)


def _linear_bfloat16_on_cpu_backward(dtype, saved, d_y_NxO):
  # The same kernel for both gradients: bfloat16 on both sides, and the one that is to be transposed
  # laid out anew, which XLA leaves undone and then multiplies in float32, at half the speed.
  x_NxI, w_OxI = saved
  d_y_NxO = d_y_NxO.astype(jnp.bfloat16)
  d_y_OxN = with_layout_constraint(d_y_NxO.T, Layout((0, 1)))
  return (jnp.dot(d_y_NxO, w_OxI, preferred_element_type=jnp.float32).astype(x_NxI.dtype),
          jnp.dot(d_y_OxN, x_NxI, preferred_element_type=jnp.float32).astype(w_OxI.dtype))


_linear_bfloat16_on_cpu.defvjp(_linear_bfloat16_on_cpu_forward, _linear_bfloat16_on_cpu_backward)


def embed(table_VxD: jax.Array, ids_x: jax.Array) -> jax.Array:
  """Returns rows of a table: [...] -> [..., D]."""
  if table_VxD.dtype != jnp.bfloat16:
    return table_VxD[ids_x]
  return jax.lax.platform_dependent(table_VxD, ids_x, cpu=_embed_bfloat16_on_cpu,
                                    default=lambda table_VxD, ids_x: table_VxD[ids_x])


def _embed_bfloat16_on_cpu(table_VxD: jax.Array, ids_x: jax.Array) -> jax.Array:
  # XLA reads bfloat16 rows as float32, and where the table does not change in a loop, as here, it
  # converts all of it before the loop. The barrier ties it to the ids, which change.
  table_VxD, ids_x = jax.lax.optimization_barrier((table_VxD, ids_x))
  return table_VxD[ids_x]


class Linear(nn.Module):
  """Linear map with an [out, in] `weight` and, on request, a `bias` [out]."""
  features: int
  use_bias: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_xI: jax.Array) -> jax.Array:
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
    w_OxI = self.param("weight", init, (self.features, x_xI.shape[-1]), jnp.float32)
    bias_O = None
    if self.use_bias:
      bias_O = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
      bias_O = bias_O.astype(self.dtype)
    return linear(x_xI.astype(self.dtype), w_OxI.astype(self.dtype), bias_O)


class RMSNorm(nn.Module):
  """y = x / sqrt(mean(x^2) + eps) * weight, computed in float32 and returned in x's dtype."""
  eps: float = 1e-6

  @nn.compact
  def __call__(self, x_xD: jax.Array) -> jax.Array:
    weight_D = self.param("weight", nn.initializers.ones, (x_xD.shape[-1],), jnp.float32)
    x32_xD = x_xD.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32_xD * x32_xD, axis=-1, keepdims=True) + self.eps)
    weight = weight_D.astype(jnp.float32).reshape((1,) * (x_xD.ndim - 1) + (-1,))
    return (x32_xD * scale * weight).astype(x_xD.dtype)


class MLP(nn.Module):
  """SwiGLU: down(silu(gate(x)) * up(x))."""
  width: int
  use_bias: bool = False
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_xD: jax.Array) -> jax.Array:
    gate_xF = Linear(self.width, self.use_bias, self.dtype, name="gate_proj")(x_xD)
    up_xF = Linear(self.width, self.use_bias, self.dtype, name="up_proj")(x_xD)
    return Linear(x_xD.shape[-1], self.use_bias, self.dtype, name="down_proj")(
        nn.silu(gate_xF) * up_xF)


# --- rotary position embedding ---------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """Which rotary embedding; field names are those of HF's `rope_parameters`."""
  rope_type: str = "default"
  rope_theta: float = 10000.0
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position_embeddings: int = 0
  attention_factor: float | None = None
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True


ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_config_from_hf(config: Mapping[str, Any]) -> RopeConfig:
  """Reads RoPE from an HF config, from either place that configs keep it in.

  Older files: top-level `rope_theta` and `rope_scaling` (key `type` or `rope_type`).
  Newer files: `rope_parameters`. Both may be there if they agree.

  Raises:
    ValueError: naming the field, for an unknown type, a missing number, contradicting places, or
      a rotation of part of the head or by layer type.
  """
  raw = _join_rope(config)
  rope_type = raw.pop("rope_type", None) or "default"
  if rope_type not in ROPE_TYPES:
    raise ValueError(f"rope_type: found {rope_type!r}, expected one of {ROPE_TYPES}")
  raw.setdefault("rope_theta", config.get("rope_theta", 10000.0))
  if not raw.get("original_max_position_embeddings"):
    raw["original_max_position_embeddings"] = config.get(
        "original_max_position_embeddings") or config.get("max_position_embeddings", 0)
  needed = {"linear": ("factor",), "llama3": ("factor", "original_max_position_embeddings"),
            "yarn": ("factor", "original_max_position_embeddings")}
  for name in needed.get(rope_type, ()):
    if not raw.get(name):
      raise ValueError(f"rope_parameters.{name}: missing, expected a number for type {rope_type!r}")
  known = {f.name for f in dataclasses.fields(RopeConfig)}
  return RopeConfig(rope_type=rope_type,
                    **{k: v for k, v in raw.items() if k in known and v is not None})


def _join_rope(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns `rope_parameters` and `rope_scaling` as one, with the type under `rope_type`."""
  joined: dict[str, Any] = {}
  # People add `rope_scaling` to a file that has `rope_parameters`: neither may be dropped silently.
  for place in ("rope_parameters", "rope_scaling"):
    raw = dict(config.get(place) or {})
    rope_type = raw.pop("type", None)
    raw["rope_type"] = raw.get("rope_type") or rope_type
    for name, value in raw.items():
      if isinstance(value, Mapping):
        raise ValueError(f"{place}.{name}: found parameters by layer type, expected one set for "
                         "all layers")
      if value is not None and joined.setdefault(name, value) != value:
        raise ValueError(f"{place}.{name}: found {value!r}, expected {joined[name]!r} as in "
                         "rope_parameters")
  partial = joined.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
  if partial not in (None, 1.0):
    raise ValueError(f"partial_rotary_factor: found {partial!r}, expected 1 (whole heads rotate)")
  return joined


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
  """Returns (inverse frequencies [head_dim / 2] float32, scale of cos and sin)."""
  pairs = np.arange(0, head_dim, 2, dtype=np.float64)
  inv = 1.0 / rope.rope_theta ** (pairs / head_dim)
  if rope.rope_type == "default":
    return inv.astype(np.float32), 1.0
  if rope.rope_type == "linear":
    return (inv / rope.factor).astype(np.float32), 1.0
  if rope.rope_type == "llama3":
    return _llama3_frequencies(rope, inv).astype(np.float32), 1.0
  if rope.rope_type == "yarn":
    return _yarn_frequencies(rope, inv, head_dim)
  raise ValueError(f"rope_type: found {rope.rope_type!r}, expected one of {ROPE_TYPES}")


def _llama3_frequencies(rope: RopeConfig, inv: np.ndarray) -> np.ndarray:
  """Long waves divided by `factor`, short ones kept, a linear blend between (Llama 3.1)."""
  context = rope.original_max_position_embeddings
  wavelength = 2 * np.pi / inv
  blend = (context / wavelength - rope.low_freq_factor) / (
      rope.high_freq_factor - rope.low_freq_factor)
  blend = np.clip(blend, 0.0, 1.0)
  return (1 - blend) * inv / rope.factor + blend * inv


def _yarn_frequencies(rope: RopeConfig, inv: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
  """YaRN (arXiv 2309.00071): ramp between interpolation and extrapolation, scaled attention."""
  context = rope.original_max_position_embeddings

  def dim_of(rotations: float) -> float:
    return head_dim * math.log(context / (rotations * 2 * math.pi)) / (
        2 * math.log(rope.rope_theta))

  low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
  if rope.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  high = high + 0.001 if low == high else high
  ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)

  def mscale(weight: float) -> float:
    return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

  scale = rope.attention_factor
  if scale is None:
    if rope.mscale and rope.mscale_all_dim:
      scale = mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    else:
      scale = mscale(1.0)
  return (inv / rope.factor * ramp + inv * (1 - ramp)).astype(np.float32), float(scale)


def rope_tables(rope: RopeConfig, head_dim: int, positions_BxT: jax.Array):
  """Returns (cos, sin), each float32 [B, T, H / 2], for integer positions."""
  inv, scale = rope_frequencies(rope, head_dim)
  angle_BxTxh = positions_BxT.astype(jnp.float32)[..., None] * jnp.asarray(inv)[None, None, :]
  # Without the barrier XLA's CPU compiler computes both again in every layer and for every head.
  return jax.lax.optimization_barrier((jnp.cos(angle_BxTxh) * scale, jnp.sin(angle_BxTxh) * scale))


def apply_rope(x_BxTxNxH: jax.Array, tables) -> jax.Array:
  """Rotates the pairs (i, i + H/2) of every head."""
  cos, sin = (t[:, :, None, :] for t in tables)
  x1, x2 = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
  out = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
  return out.astype(x_BxTxNxH.dtype)


# --- attention -------------------------------------------------------------------------------

def attend(q_BxTxNxH: jax.Array, keys, values, masks, *, scale: float) -> jax.Array:
  """Grouped-query attention over several stretches of keys and values.

  Args:
    q_BxTxNxH: queries.
    keys, values: lists of [B, K, S_i, H]; stretches stay apart so that a cache is never copied.
    masks: list of bool [B or 1, T, S_i]; True = visible. Unseen rows of keys may hold anything,
      unseen rows of values anything finite (they are multiplied by an exact 0; clearing them
      here would copy the whole cache, which doubled the time of this function on CPU).
    scale: multiplies the scores.
  Returns:
    [B, T, N, H]. Scores and softmax are float32.
  """
  B, T, N, H = q_BxTxNxH.shape
  K = keys[0].shape[1]
  q = q_BxTxNxH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
  scores = []
  for k_BxKxSxH, mask_BxTxS in zip(keys, masks):
    s = _score(q, k_BxKxSxH) * scale
    s = s.reshape(B, K, N // K, T, -1)
    scores.append(jnp.where(mask_BxTxS[:, None, None], s, -jnp.inf))
  top = scores[0].max(-1, keepdims=True)
  for s in scores[1:]:
    top = jnp.maximum(top, s.max(-1, keepdims=True))
  top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))
  weights = [jnp.exp(s - top) for s in scores]
  total = sum(w.sum(-1, keepdims=True) for w in weights)
  out = 0.0
  dtype = jnp.result_type(*values)  # one for all: a token may move from one stretch to another
  for w, v_BxKxSxH in zip(weights, values):
    w, v_BxKxSxH = w.reshape(B, K, -1, w.shape[-1]).astype(dtype), v_BxKxSxH.astype(dtype)
    out = out + jnp.einsum("bkqs,bksh->bkqh", w, v_BxKxSxH, preferred_element_type=jnp.float32)
  out = out / jnp.maximum(total, 1e-30).reshape(B, K, -1, 1)
  out = out.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
  return out.astype(q_BxTxNxH.dtype)


# A stretch of float32 keys from this size on (bytes) is better read as it lies.
_KEYS_READ_IN_PLACE = 256 << 10


def _score(q_BxKxQxH: jax.Array, k_BxKxSxH: jax.Array) -> jax.Array:
  """Returns float32 [B, K, Q, S], queries times keys."""
  if k_BxKxSxH.dtype == jnp.float32 and 4 * k_BxKxSxH.size >= _KEYS_READ_IN_PLACE:
    return jax.lax.platform_dependent(q_BxKxQxH, k_BxKxSxH, cpu=_score_many_on_cpu,
                                      default=_score_default)
  return _score_default(q_BxKxQxH, k_BxKxSxH)


def _score_default(q_BxKxQxH, k_BxKxSxH):
  return jnp.einsum("bkqh,bksh->bkqs", q_BxKxQxH, k_BxKxSxH, preferred_element_type=jnp.float32)


def _score_many_on_cpu(q_BxKxQxH, k_BxKxSxH):
  """The same with keys first: in the order above XLA's CPU compiler transposes all keys.

  30 layers of 288 float32 slots take 7.9, 8.7 and 13.4 ms for 8 requests of 1, 2 and 8 rows, and
  7.0, 5.0 and 9.1 ms so; one request is the same. The barrier keeps the compiler from swapping them
  back.
  """
  s_BxKxSxQ = jnp.einsum("bksh,bkqh->bksq", k_BxKxSxH, q_BxKxQxH,
                         preferred_element_type=jnp.float32)
  return jax.lax.optimization_barrier(s_BxKxSxQ).swapaxes(-1, -2)
