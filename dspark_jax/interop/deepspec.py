"""Drafters in the layout of the public reference, deepseek-ai/DeepSpec (an HF directory).

`config.json` is flat; safetensors hold PyTorch-style [out, in] tensors without a `model.` prefix.
Embedding and LM head may be stored (frozen copies of the target's) or absent; then they are to
be borrowed.

`architectures` says whose file it is. Under the reference's name `sample_from_anchor` may be
missing and then means True, by that layout's definition. A drafter that the reference could not
compute (no q/k norm, the other slot convention, a reduced vocabulary) is written under a name of
our own, so that nobody reads it wrongly; there every field must be stated.
"""

import dataclasses
import difflib
import functools
import json
import os
import pathlib
import tempfile
from typing import Any, Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from dspark_jax import layers
from dspark_jax.drafter.config import DrafterConfig
from dspark_jax.drafter.dspark import init_params
from dspark_jax.interop import hf

REFERENCE_NAME = "Qwen3DSparkModel"
OWN_NAME = "DSparkJaxModel"
STORED = {"embed_VxD": "embed_tokens.weight", "lm_head_VdxD": "lm_head.weight"}

# Our field -> the reference's, where they differ.
RENAMED = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
           "num_kv_heads": "num_key_value_heads"}
_COMMON = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
           "num_kv_heads", "head_dim", "target_layer_ids", "num_target_layers", "mask_token_id",
           "markov_rank", "enable_confidence_head", "rms_norm_eps")
_OWN = ("sample_from_anchor", "qk_norm", "confidence_stop_gradient", "target_hidden_size",
        "draft_vocab_size", "copy_ngram", "markov_candidates")
_OPTIONAL = ("num_anchors", "max_position_embeddings")
_CONDITIONAL = ("markov_head_type", "confidence_head_with_markov")
_READ_ELSEWHERE = ("architectures", "model_type", "block_size", "layer_types",
                   "tie_word_embeddings", "rope_parameters", "rope_scaling", "rope_theta",
                   "original_max_position_embeddings", "attention_bias", "mlp_bias", "hidden_act",
                   "use_sliding_window")
_ROPE_FIELDS = {
    "default": ("rope_type", "rope_theta"),
    "linear": ("rope_type", "rope_theta", "factor"),
    "llama3": ("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("rope_type", "rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow",
             "mscale", "mscale_all_dim", "truncate")}
# Fields that transformers writes into every config and that no drafter's computation reads.
IGNORED = frozenset("""
    add_cross_attention attention_dropout attn_implementation auto_map bad_words_ids
    begin_suppress_tokens bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder
    is_encoder_decoder label2id length_penalty max_length max_window_layers min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id sliding_window suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p use_bfloat16 use_cache""".split())


def load_drafter(path: str | os.PathLike, *, dtype=None, ignore_fields: tuple[str, ...] = ()):
  """Loads a drafter directory, one safetensors file or sharded; all of it is checked first.

  Args:
    path: the directory.
    dtype: of the returned arrays; None = as stored.
    ignore_fields: unknown fields of config.json that the caller knows to be harmless.
  Returns:
    (config, params, stored). `stored` holds what the file has of `embed_VxD`, `lm_head_VdxD` and
    `draft_ids`, None when it has none of them; what is missing must be borrowed from the target
    (`dspark.borrow`). With `tie_word_embeddings` true an absent head is the stored embedding.
  Raises:
    FileNotFoundError, ValueError: one line naming the file or field, found and expected.
  """
  path = pathlib.Path(path)
  config_path = path / "config.json"
  raw = hf.read_json(config_path)
  try:
    config = config_from_deepspec(raw, ignore_fields=ignore_fields)
  except ValueError as e:
    raise ValueError(f"{config_path}: {e}") from None
  params, stored = read_params(path, config, drafter_tensor_shapes(config), _param_path,
                               is_tied=bool(raw.get("tie_word_embeddings", False)), dtype=dtype)
  return config, params, stored


def read_params(path: pathlib.Path, config, shapes: Mapping[str, tuple[int, ...]],
                param_path: Callable[[str], list[str]], *, is_tied: bool, dtype=None):
  """Reads a drafter's tensors, all of them checked first; returns (params, stored or None).

  Args:
    shapes: tensor name -> shape, of all but the stored ones.
    param_path: tensor name -> keys in the parameter tree.
  """
  origin = str(path)
  tensors = hf.read_tensors(path)
  stored = take_stored(tensors, config, is_tied=is_tied, origin=origin)
  hf.check_tensors(tensors, shapes, origin=origin)
  for name, value in tensors.items():
    check_float(name, value, origin=origin)
  cast = lambda x: jnp.asarray(x if dtype is None else x.astype(dtype))
  params: dict[str, Any] = {}
  for name, value in tensors.items():
    *parents, leaf = param_path(name)
    node = params
    for key in parents:
      node = node.setdefault(key, {})
    node[leaf] = cast(value)
  stored = {k: jnp.asarray(v) if k == "draft_ids" else cast(v) for k, v in stored.items()}
  return params, stored or None


def save_drafter(path: str | os.PathLike, config: DrafterConfig, params: Mapping[str, Any], *,
                 embed_VxD=None, lm_head_VdxD=None, draft_ids=None, dtype=None,
                 extra: Mapping[str, Any] | None = None) -> None:
  """Writes a drafter directory; `load_drafter` returns the same bits.

  Files are written aside and moved in, `config.json` last and an old one removed first: whenever
  the process dies, the directory holds the old drafter, the new one, or none that loads.

  Args:
    path: directory, made if needed; other files in it are left alone.
    config: of the drafter.
    params: of `DSparkDrafter`; must be exactly the config's.
    embed_VxD, lm_head_VdxD: frozen copies of the target's, to be stored too.
    draft_ids: int [Vd], needed with `draft_vocab_size`.
    dtype: float32, bfloat16 or float16; None = as they are. A value that overflows is refused.
    extra: the target's config.json; fields such as `eos_token_id` are carried over from it.
  """
  path = pathlib.Path(path)
  tensors = {_tensor_name(keys): np.asarray(x) for keys, x in flatten(params)}
  hf.check_tensors(tensors, drafter_tensor_shapes(config), origin="params")
  for key, value in (("embed_VxD", embed_VxD), ("lm_head_VdxD", lm_head_VdxD)):
    if value is not None:
      tensors[STORED[key]] = np.asarray(value)
      check_shape(STORED[key], tensors[STORED[key]], stored_shape(config, key),
                  origin="arguments")
  tensors = {name: cast_tensor(name, x, dtype) for name, x in tensors.items()}
  tensors |= draft_id_tensors(config, draft_ids)
  raw = config_to_deepspec(config, extra=extra)
  raw["dtype"] = str(next(iter(tensors.values())).dtype)
  write_checkpoint(path, raw, tensors)


def config_from_deepspec(raw: Mapping[str, Any], *,
                         ignore_fields: tuple[str, ...] = ()) -> DrafterConfig:
  """Reads the reference's flat config; unknown, missing and unsupported fields are named."""
  architectures = raw.get("architectures") or [None]
  name = architectures[0]
  if name not in (REFERENCE_NAME, OWN_NAME) or len(architectures) != 1:
    raise ValueError(f"architectures: found {raw.get('architectures')!r}, expected "
                     f"['{REFERENCE_NAME}'] or ['{OWN_NAME}']")
  check_unknown(raw, _COMMON + _OWN + _OPTIONAL + _CONDITIONAL, ignore_fields)
  check_unsupported(raw)

  def require(field):
    if raw.get(field) is None:
      raise ValueError(f"{field}: missing, expected a value for architecture {name}")
    return raw[field]

  fields = {f: require(RENAMED.get(f, f)) for f in _COMMON}
  fields["proposal_len"] = require("block_size")
  if fields["markov_rank"]:
    fields["markov_head_type"] = require("markov_head_type")
  fields["confidence_head_with_markov"] = bool(raw.get("confidence_head_with_markov", False))
  if fields["enable_confidence_head"]:
    fields["confidence_head_with_markov"] = require("confidence_head_with_markov")
  if name == OWN_NAME:
    for field in ("sample_from_anchor", "qk_norm"):
      require(field)
  fields.setdefault("sample_from_anchor", True)
  fields |= {f: raw[f] for f in _OWN + _OPTIONAL if raw.get(f) is not None}
  if not fields["sample_from_anchor"]:
    fields["proposal_len"] -= 1  # `block_size` counts slots, the conditioning one included
  return DrafterConfig(rope=read_rope(raw), **fields)


def config_to_deepspec(config: DrafterConfig, *,
                       extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
  """Writes the flat config, with our own fields always stated."""
  is_reference = (config.sample_from_anchor and config.qk_norm and config.draft_vocab_size is None
                  and config.target_hidden_size == config.hidden_size and not config.copy_ngram)
  raw = {k: v for k, v in (extra or {}).items() if k in IGNORED}
  raw |= {RENAMED.get(f, f): getattr(config, f)
          for f in _COMMON + _OWN + _OPTIONAL + _CONDITIONAL}
  return raw | {
      "architectures": [REFERENCE_NAME if is_reference else OWN_NAME],
      "model_type": "qwen3" if is_reference else "dspark_jax",
      "target_layer_ids": list(config.target_layer_ids), "block_size": config.num_slots,
      "rope_parameters": write_rope(config.rope),
      "hidden_act": "silu", "attention_bias": False,
      "tie_word_embeddings": False, "use_sliding_window": False,
      "layer_types": ["full_attention"] * config.num_layers}


@functools.lru_cache
def drafter_tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
  """Names and shapes of every tensor of the drafter itself, from the module's own parameters."""
  tree = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
  return {_tensor_name(keys): tuple(x.shape) for keys, x in flatten(tree)}


def read_rope(raw: Mapping[str, Any]) -> layers.RopeConfig:
  rope = layers.rope_config_from_hf(raw)
  stated = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
  if rope.rope_type in ("default", "linear") and "original_max_position_embeddings" not in stated:
    rope = dataclasses.replace(rope, original_max_position_embeddings=0)  # not read by these types
  return rope


def write_rope(rope: layers.RopeConfig) -> dict[str, Any]:
  """The `rope_parameters` of a config.json; the inverse of `read_rope`."""
  fields = {f: getattr(rope, f) for f in _ROPE_FIELDS[rope.rope_type]}
  if rope.original_max_position_embeddings:
    fields["original_max_position_embeddings"] = rope.original_max_position_embeddings
  return {f: v for f, v in fields.items() if v is not None}


def check_unknown(raw: Mapping[str, Any], fields: tuple[str, ...],
                  ignore_fields: tuple[str, ...] = ()) -> None:
  """Refuses a field of config.json that is neither among `fields`, by our names, nor harmless."""
  read = {RENAMED.get(f, f) for f in fields} | set(_READ_ELSEWHERE)
  for field in raw:
    if field in read or field in IGNORED or field in ignore_fields or field.startswith("_"):
      continue
    near = difflib.get_close_matches(field, read, n=1)
    hint = f"{near[0]!r}" if near else "only fields of the DeepSpec layout"
    raise ValueError(f"{field}: found an unknown field, expected {hint}")


def check_unsupported(raw: Mapping[str, Any]) -> None:
  """Refuses what would change the computation and is not implemented."""
  for field, expected in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"),
                          ("use_sliding_window", False)):
    if raw.get(field, expected) != expected:
      raise ValueError(f"{field}: found {raw[field]!r}, expected {expected!r}")
  eos = raw.get("eos_token_id")
  if raw.get("mask_token_id") in (eos if isinstance(eos, list) else [eos]) and eos is not None:
    raise ValueError(f"mask_token_id: found {raw['mask_token_id']}, expected an id other than "
                     f"eos_token_id = {eos}")
  layer_types = raw.get("layer_types")
  if layer_types is not None and (any(t != "full_attention" for t in layer_types)
                                  or len(layer_types) != raw.get("num_hidden_layers")):
    raise ValueError(f"layer_types: found {layer_types}, expected 'full_attention' for each of the "
                     f"{raw.get('num_hidden_layers')} draft layers")


def take_stored(tensors: dict[str, np.ndarray], config: DrafterConfig, *, is_tied: bool,
                origin: str) -> dict[str, np.ndarray]:
  """Removes embedding, head and vocabulary maps from `tensors` and returns them, checked."""
  stored: dict[str, np.ndarray] = {}
  for key, name in STORED.items():
    if name in tensors:
      stored[key] = tensors.pop(name)
      check_shape(name, stored[key], stored_shape(config, key), origin=origin)
      check_float(name, stored[key], origin=origin)
  if config.draft_vocab_size is not None:
    stored["draft_ids"] = _draft_ids_from(tensors, config, origin)
  if is_tied and "embed_VxD" in stored:
    tied = stored["embed_VxD"]
    if "draft_ids" in stored:
      tied = tied[stored["draft_ids"]]
    if not np.array_equal(stored.setdefault("lm_head_VdxD", tied), tied):
      raise ValueError(f"{origin}: tensor lm_head.weight differs from the embedding, expected none "
                       "or a copy, since tie_word_embeddings is true")
  return stored


def stored_shape(config: DrafterConfig, key: str) -> tuple[int, int]:
  rows = config.vocab_size if key == "embed_VxD" else config.draft_vocab
  return rows, config.hidden_size


def _draft_ids_from(tensors: dict[str, np.ndarray], config: DrafterConfig,
                    origin: str) -> np.ndarray:
  """Takes `d2t` (target id - draft index) and `t2d` (membership); returns int32 ids [Vd]."""
  shapes = {"d2t": (config.draft_vocab,), "t2d": (config.vocab_size,)}
  maps = {name: tensors.pop(name) for name in shapes if name in tensors}
  hf.check_tensors(maps, shapes, origin=origin)
  if maps["d2t"].dtype.kind != "i" or maps["t2d"].dtype != np.bool_:
    raise ValueError(f"{origin}: tensors d2t, t2d: found {maps['d2t'].dtype}, {maps['t2d'].dtype}, "
                     "expected integers and bool")
  ids = maps["d2t"].astype(np.int64) + np.arange(config.draft_vocab)
  _check_draft_ids(ids, config, origin=f"{origin}: tensor d2t")
  if not np.array_equal(np.flatnonzero(maps["t2d"]), ids):
    raise ValueError(f"{origin}: tensors d2t, t2d: found different sets of ids, expected one set")
  return ids.astype(np.int32)


def draft_id_tensors(config: DrafterConfig, draft_ids) -> dict[str, np.ndarray]:
  if (draft_ids is None) != (config.draft_vocab_size is None):
    raise ValueError(f"draft_ids: found {'none' if draft_ids is None else 'some'} with "
                     f"draft_vocab_size {config.draft_vocab_size}, expected both or neither")
  if draft_ids is None:
    return {}
  ids = np.asarray(draft_ids).astype(np.int64)
  _check_draft_ids(ids, config, origin="draft_ids")
  is_drafted = np.zeros(config.vocab_size, bool)
  is_drafted[ids] = True
  return {"d2t": ids - np.arange(config.draft_vocab), "t2d": is_drafted}


def _check_draft_ids(ids: np.ndarray, config: DrafterConfig, *, origin: str) -> None:
  is_fit = ids.shape == (config.draft_vocab,) and (np.diff(ids) > 0).all()
  if not is_fit or ids[0] < 0 or ids[-1] >= config.vocab_size:
    raise ValueError(f"{origin}: found ids {ids[:4]}..., expected {config.draft_vocab} strictly "
                     f"increasing target ids in [0, {config.vocab_size})")


def check_shape(name: str, value: np.ndarray, shape: tuple[int, ...], *, origin: str) -> None:
  hf.check_tensors({name: value}, {name: shape}, origin=origin)


def check_float(name: str, value: np.ndarray, *, origin: str) -> None:
  if value.dtype not in (np.float32, jnp.bfloat16, np.float16):
    raise ValueError(f"{origin}: tensor {name} has dtype {value.dtype}, expected float32, bfloat16 "
                     "or float16")


def cast_tensor(name: str, value: np.ndarray, dtype) -> np.ndarray:
  check_float(name, value, origin="params")
  if dtype is None:
    return value
  with np.errstate(over="ignore"):
    cast = value.astype(dtype)
  check_float(name, cast, origin="dtype")
  is_finite = lambda x: np.isfinite(x.astype(np.float32))
  if not np.array_equal(is_finite(cast), is_finite(value)):
    raise ValueError(f"params: tensor {name} overflows, expected values within {cast.dtype}")
  return cast


def write_checkpoint(path: pathlib.Path, raw: Mapping[str, Any],
                     tensors: Mapping[str, np.ndarray]) -> None:
  """Writes both files aside, then moves them in; a directory without config.json never loads."""
  index = path / "model.safetensors.index.json"
  if index.exists():
    raise ValueError(f"{index}: found a sharded checkpoint, expected a directory without one")
  path.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as aside:
    aside = pathlib.Path(aside)
    safetensors.numpy.save_file({n: np.ascontiguousarray(x) for n, x in tensors.items()},
                                str(aside / "model.safetensors"), metadata={"format": "pt"})
    (aside / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    for file in aside.iterdir():
      with open(file, "rb") as f:
        os.fsync(f.fileno())
    (path / "config.json").unlink(missing_ok=True)
    os.replace(aside / "model.safetensors", path / "model.safetensors")
    os.replace(aside / "config.json", path / "config.json")


def _param_path(name: str) -> list[str]:
  """HF tensor name -> path in the parameter tree."""
  parts = name.split(".")
  if parts[0] == "layers":
    parts = [f"layers_{parts[1]}"] + parts[2:]
  if parts[0] == "markov_head" and parts[1] in ("markov_w1", "markov_w2"):
    parts = parts[:2]
  own_heads = ("markov_head", "confidence_head", "copy_head")
  return parts if parts[0] in own_heads else ["backbone"] + parts


def _tensor_name(keys: tuple[str, ...]) -> str:
  """Path in the parameter tree -> HF tensor name; the inverse of `_param_path`."""
  keys = keys[1:] if keys[0] == "backbone" else keys
  if keys[0].startswith("layers_"):
    keys = ("layers", keys[0].removeprefix("layers_")) + keys[1:]
  return ".".join(keys) + (".weight" if keys[-1] in ("markov_w1", "markov_w2") else "")


def flatten(tree: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
  return [(tuple(k.key for k in path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
