import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training import draft_vocabulary
from dspark_jax.training import warm_start
from tests.training import cases

KEY = 3


def init(config, **fields):
  return warm_start.init_drafter(
      config, jax.random.key(KEY), target_config=cases.TARGET,
      target_params=cases.make_target_params(), warm_start=warm_start.WarmStartConfig(**fields))


def test_copies_layers_and_norm():
  config = cases.make_drafter_config(num_layers=2, qk_norm=False)
  params, target = init(config, layer_ids=(1, 2)), cases.make_target_params()
  for i, layer_id in enumerate((1, 2)):
    found, source = params["backbone"][f"layers_{i}"], target[f"layers_{layer_id}"]
    assert jax.tree.structure(found) == jax.tree.structure(source)
    jax.tree.map(np.testing.assert_array_equal, found, source)
  np.testing.assert_array_equal(params["backbone"]["norm"]["weight"], target["norm"]["weight"])


def test_fc_passes_the_last_tap_through():
  config = cases.make_drafter_config(qk_norm=False)
  weight = init(config, layer_ids=(2,), other_taps_scale=0.0)["backbone"]["fc"]["weight"]
  features = jax.random.normal(jax.random.key(0), (32,))
  np.testing.assert_allclose(weight @ features, features[16:], rtol=1e-5, atol=1e-6)


def test_context_rows_are_those_of_the_target_layer():
  # One tap on layer 1, draft layer = target layer 2: its keys and values of the context are what
  # layer 2 itself computed from layer 1's output.
  from dspark_jax.drafter.dspark import DSparkDrafter
  from dspark_jax.target.transformer import Transformer
  config = cases.make_drafter_config(target_layer_ids=(1,), qk_norm=False)
  params, ids = init(config, layer_ids=(2,)), cases.make_batch()["input_ids"]
  with jax.default_matmul_precision("highest"):
    out = Transformer(cases.TARGET).apply({"params": cases.make_target_params()}, ids,
                                          tap_layer_ids=(1,))
    drafter = DSparkDrafter(config)
    context = drafter.apply({"params": params}, out.features_BxTxMD, method="encode_context")
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    rows = drafter.apply({"params": params}, context, positions, method="context_rows")
  np.testing.assert_allclose(rows.keys[0], out.rows.keys[2], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(rows.values[0], out.rows.values[2], rtol=1e-4, atol=1e-5)


def test_qk_norms_the_target_lacks_start_at_one():
  config = cases.make_drafter_config(qk_norm=True)
  attention = init(config, layer_ids=(0,))["backbone"]["layers_0"]["self_attn"]
  assert (attention["q_norm"]["weight"] == 1).all()


def test_errors_name_the_field():
  config = cases.make_drafter_config(num_layers=2)
  with pytest.raises(ValueError, match="layer_ids: found 1 ids"):
    init(config, layer_ids=(1,))
  with pytest.raises(ValueError, match="layer_ids"):
    init(config, layer_ids=(1, 3))
  with pytest.raises(ValueError, match="intermediate_size: found 8"):
    init(cases.make_drafter_config(intermediate_size=8), layer_ids=(1,))


def test_draft_vocabulary():
  rows = [{"input_ids": np.array([5, 5, 2, 7]), "loss_mask": np.array([0, 1, 1, 1])},
          {"input_ids": np.array([7, 9]), "loss_mask": np.array([1, 0])}]
  counts = draft_vocabulary.count_labels(rows, vocab_size=10)
  assert counts.tolist() == [0, 0, 1, 0, 0, 1, 0, 2, 0, 0]
  choose = lambda size, **k: draft_vocabulary.choose_draft_ids(counts, size=size, **k).tolist()
  assert choose(1) == [7]
  assert choose(3) == [2, 5, 7]
  assert choose(3, always=(9,)) == [2, 7, 9]  # a tie goes to the lower id
  assert choose(5) == [0, 1, 2, 5, 7]
  with pytest.raises(ValueError, match="draft_vocab_size: found 11"):
    choose(11)
