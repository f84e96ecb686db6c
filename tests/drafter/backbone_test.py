import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache
from dspark_jax.drafter.dspark import embed_block
from tests.drafter.cases import apply, make_borrowed, make_config, make_features, make_params

# float32 rounding (6e-8) through two layers of sums of at most 60 products of O(1) values with
# gains of a few: about 1e-6; ten times that is far below any effect tested here.
TOL = 1e-5

CONFIGS = [make_config(), make_config(sample_from_anchor=False, num_kv_heads=1),
           make_config(qk_norm=False, num_layers=3)]


@pytest.fixture(autouse=True)
def _full_precision():
  with jax.default_matmul_precision("highest"):
    yield


def compute_block_by_hand(config, params, features_TxMD, anchor, block_JxD):
  """One block in float64 loops over heads: reference-semantics section 2, final norm included."""
  tree = jax.tree.map(lambda x: np.asarray(x, np.float64), params)["backbone"]
  H, N, K = config.head_dim, config.num_heads, config.num_kv_heads

  def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight["weight"]

  def rotate(x_TxH, positions):
    inv = config.rope.rope_theta ** (-np.arange(0, H, 2) / H)
    angle = positions[:, None] * inv[None, :]
    a, b = x_TxH[:, :H // 2], x_TxH[:, H // 2:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle),
                           b * np.cos(angle) + a * np.sin(angle)], axis=-1)

  x = np.asarray(block_JxD, np.float64)
  seen = np.asarray(features_TxMD, np.float64)[:anchor]  # strictly before the anchor
  context = norm(seen @ tree["fc"]["weight"].T, tree["hidden_norm"])
  positions = np.concatenate([np.arange(anchor), anchor + np.arange(len(x))])
  for i in range(config.num_layers):
    layer = tree[f"layers_{i}"]
    attention = {k: v["weight"] for k, v in layer["self_attn"].items()}
    h = norm(x, layer["input_layernorm"])
    keys_in = np.concatenate([context, h])
    q, k, v = h @ attention["q_proj"].T, keys_in @ attention["k_proj"].T, (
        keys_in @ attention["v_proj"].T)
    heads = []
    for n in range(N):
      g = n // (N // K)
      q_n, k_n, v_n = q[:, n * H:][:, :H], k[:, g * H:][:, :H], v[:, g * H:][:, :H]
      if config.qk_norm:
        q_n, k_n = norm(q_n, layer["self_attn"]["q_norm"]), norm(k_n, layer["self_attn"]["k_norm"])
      score = rotate(q_n, positions[anchor:]) @ rotate(k_n, positions).T / np.sqrt(H)
      weight = np.exp(score - score.max(-1, keepdims=True))
      heads.append(weight / weight.sum(-1, keepdims=True) @ v_n)
    x = x + np.concatenate(heads, axis=-1) @ attention["o_proj"].T
    h = norm(x, layer["post_attention_layernorm"])
    gate = h @ layer["mlp"]["gate_proj"]["weight"].T
    x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["mlp"]["up_proj"]["weight"].T)
             ) @ layer["mlp"]["down_proj"]["weight"].T
  first = 0 if config.sample_from_anchor else 1
  return norm(x, tree["norm"])[first:]


@functools.lru_cache
def jit_train(config):
  return jax.jit(functools.partial(apply, config, make_params(config), "train_hidden"))


@functools.lru_cache
def jit_serve(config):
  return jax.jit(functools.partial(apply, config, make_params(config), "draft_hidden"))


def make_inputs(config, *, length=12):
  features = make_features(config, 2, length)
  anchors = jnp.array([[2, 4, 0, length, 4], [11, 1, 7, 2, 3]], jnp.int32)
  tokens = jnp.array([[3, 5, 8, 13, 21], [34, 2, 9, 9, 0]], jnp.int32)
  block = embed_block(config, make_borrowed(make_config())["embed_VxD"], tokens)
  return features, anchors, block


@functools.lru_cache
def make_cache(config, *, length=12, num_slots=15):
  """A context cache with rubbish in the rows past the features; values must just be finite."""
  positions = jnp.broadcast_to(jnp.arange(length)[None], (2, length))

  @jax.jit
  def make_rows(params, features):
    context = apply(config, params, "encode_context", features)
    return apply(config, params, "context_rows", context, positions)

  rows = make_rows(make_params(config), make_features(config, 2, length))
  cache = kv_cache.init_cache(2, num_slots, num_layers=config.num_layers,
                              num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
  cache = kv_cache.KVCache(keys=tuple(x + jnp.nan for x in cache.keys),
                           values=tuple(x + 1e30 for x in cache.values))
  return kv_cache.write_rows(cache, rows, jnp.zeros(2, jnp.int32))


@pytest.mark.parametrize("config", CONFIGS)
def test_training_form_is_the_definition(config):
  features, anchors, block = make_inputs(config)
  hidden = jit_train(config)(features, anchors, block)
  assert hidden.shape == (2, 5, config.proposal_len, config.hidden_size)
  for b in range(2):
    for a in range(5):
      want = compute_block_by_hand(config, make_params(config), features[b], int(anchors[b, a]),
                                   block[b, a])
      np.testing.assert_allclose(hidden[b, a], want, atol=TOL, rtol=TOL)


@pytest.mark.parametrize("config", CONFIGS)
def test_serving_form_equals_training_form(config):
  """Fault B23: the block of anchor a sits at positions a, a + 1, ... over context 0..a-1."""
  features, anchors, block = make_inputs(config)
  hidden = jit_train(config)(features, anchors, block)
  slots = jnp.arange(config.num_slots)[None]
  for a in range(5):
    served = jit_serve(config)(block[:, a], anchors[:, a, None] + slots, make_cache(config),
                               anchors[:, a])
    np.testing.assert_allclose(served, hidden[:, a], atol=TOL, rtol=TOL)
  early = jit_serve(config)(block[:, 0], anchors[:, 0, None] - 1 + slots, make_cache(config),
                            anchors[:, 0])
  assert np.abs(early - hidden[:, 0]).max() > 100 * TOL  # seeded one position early


def test_slot_conventions_share_the_block_and_differ_in_what_is_read():
  """Fault B28: 5 drafts from slots 0..4, or 4 drafts from slots 1..4 of the same block."""
  on, off = make_config(proposal_len=5), make_config(proposal_len=4, sample_from_anchor=False)
  features, anchors, block = make_inputs(on)
  np.testing.assert_array_equal(embed_block(off, make_borrowed(off)["embed_VxD"], anchors),
                                embed_block(on, make_borrowed(on)["embed_VxD"], anchors))
  assert jax.tree.map(jnp.shape, make_params(on)) == jax.tree.map(jnp.shape, make_params(off))
  hidden_on = jit_train(on)(features, anchors, block)
  hidden_off = jit_train(off)(features, anchors, block)  # equal seeds, equal weights
  assert hidden_on.shape[2] == 5 and hidden_off.shape[2] == 4
  np.testing.assert_allclose(hidden_off, hidden_on[:, :, 1:], atol=TOL, rtol=TOL)


def test_shorter_block_is_refused():
  """Fault B30: three slots of a bidirectional block are not the first three of seven."""
  config = CONFIGS[0]
  features, anchors, block = make_inputs(config)
  with pytest.raises(ValueError, match="block_embeds: found 3 slots, expected 4"):
    apply(config, make_params(config), "train_hidden", features, anchors, block[:, :, :3])
  with pytest.raises(ValueError, match="block_embeds: found 3 slots, expected 4"):
    apply(config, make_params(config), "draft_hidden", block[:, 0, :3],
          jnp.zeros((2, 3), jnp.int32), make_cache(config), anchors[:, 0])
  short = make_config(proposal_len=3)
  cut = jit_train(short)(features, anchors, block[:, :, :3])  # equal seeds, equal weights
  assert np.abs(cut - jit_train(config)(features, anchors, block)[:, :, :3]).max() > 100 * TOL


def test_no_block_sees_the_future():
  """Fault B33: T = 12, G = 4, anchors [2, 4]; visibility goes by anchor, not by block index."""
  config = CONFIGS[0]
  features, _, block = make_inputs(config)
  features, block, anchors = features[:1], block[:1, :2], jnp.array([[2, 4]], jnp.int32)

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1))
  def sensitivity(features, block, b):
    hidden = apply(config, make_params(config), "train_hidden", features, anchors, block)
    return jnp.sum(jnp.sin(hidden[0, b, 0]))  # the first slot, to show that it looks ahead

  for b, anchor in enumerate((2, 4)):
    by_feature, by_slot = sensitivity(features, block, b)
    per_row = np.abs(by_feature[0]).max(-1)
    assert (per_row[:anchor] > 1e-6).all()
    np.testing.assert_array_equal(per_row[anchor:], 0.0)
    per_slot = np.abs(by_slot[0]).max(-1)
    assert (per_slot[b] > 1e-6).all()
    np.testing.assert_array_equal(per_slot[1 - b], 0.0)
  base = jit_train(config)(features, anchors, block)
  for row, is_seen in ((1, (True, True)), (2, (False, True)), (4, (False, False))):
    moved = jit_train(config)(features.at[0, row].add(1.0), anchors, block)
    assert tuple(np.abs(moved - base).max(axis=(0, 2, 3)) > 0) == is_seen


def test_dummy_anchors_have_finite_gradients():
  config = CONFIGS[0]
  features, _, block = make_inputs(config)
  anchors = jnp.zeros((2, 5), jnp.int32)  # nothing visible at all

  def total(params):
    return jnp.sum(apply(config, params, "train_hidden", features, anchors, block) ** 2)

  gradients = jax.jit(jax.grad(total))(make_params(config))
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_training_form_holds_no_dense_mask_or_scores():
  """Nothing of size (A * J)^2: scores are A*J by T plus A blocks of J by J."""
  config = make_config(num_layers=1)
  A, J, T = 32, config.num_slots, 8
  params = jax.eval_shape(lambda: make_params.__wrapped__(config))
  shapes = (jax.ShapeDtypeStruct((1, T, config.num_features), jnp.float32),
            jax.ShapeDtypeStruct((1, A), jnp.int32),
            jax.ShapeDtypeStruct((1, A, J, config.hidden_size), jnp.float32))
  jaxpr = jax.make_jaxpr(lambda p, *x: apply(config, p, "train_hidden", *x))(params, *shapes)
  largest = max(np.prod(v.aval.shape, dtype=int) for eqn in jaxpr.jaxpr.eqns for v in eqn.outvars)
  assert largest < config.num_kv_heads * (A * J) ** 2


def test_bfloat16_forms_agree():
  config = CONFIGS[0]
  params = make_params(config)
  features, anchors, block = make_inputs(config)
  exact = jit_train(config)(features, anchors, block)
  rough = jax.jit(functools.partial(apply, config, dtype=jnp.bfloat16), static_argnums=1)(
      params, "train_hidden", features, anchors, block)
  assert rough.dtype == jnp.bfloat16
  # 8 bits of mantissa over two layers with gains of a few: some percent of the O(1) values.
  assert np.sqrt(np.mean((rough.astype(jnp.float32) - exact) ** 2)) < 0.05
