import dataclasses

import pytest

from dspark_jax.drafter.config import check_fits, config_for_target, spread_layer_ids
from dspark_jax.target.config import TransformerConfig
from tests.drafter.cases import make_config


def make_target(**overrides):
  fields = dict(model_type="llama", vocab_size=37, hidden_size=12, intermediate_size=20,
                num_layers=6, num_heads=4, num_kv_heads=2, head_dim=6)
  return TransformerConfig(**(fields | overrides))


@pytest.mark.parametrize("field, value", [
    ("target_layer_ids", (0, 5)),  # layer 5 of 6 is the last: the head reads it already
    ("target_layer_ids", (2, 2)), ("target_layer_ids", (3, 1)), ("target_layer_ids", ()),
    ("target_layer_ids", (-2, 1)),
    ("mask_token_id", 37), ("mask_token_id", -1), ("mask_token_id", None),  # fault B32
    ("sample_from_anchor", None), ("sample_from_anchor", 1),  # fault B28: stated or refused
    ("proposal_len", 0), ("num_kv_heads", 3), ("head_dim", 7), ("markov_rank", -1),
    ("markov_head_type", "markov"), ("draft_vocab_size", 38), ("draft_vocab_size", 0),
    ("markov_candidates", -1), ("markov_candidates", None),
    ("qk_norm", None), ("hidden_size", 12.0), ("rms_norm_eps", 0.0),
])
def test_bad_field_is_named(field, value):
  with pytest.raises(ValueError, match=f"^{field}: found .*expected") as error:
    make_config(**{field: value})
  assert "\n" not in str(error.value)


def test_slot_convention_must_be_stated():
  fields = dataclasses.asdict(make_config())
  del fields["sample_from_anchor"]
  with pytest.raises(TypeError, match="sample_from_anchor"):
    type(make_config())(**fields)


def test_confidence_cannot_read_a_head_that_is_not_there():
  with pytest.raises(ValueError, match="^confidence_head_with_markov: "):
    make_config(markov_rank=0)
  make_config(markov_rank=0, confidence_head_with_markov=False)
  make_config(markov_rank=0, enable_confidence_head=False)


def test_there_is_nothing_to_prune_without_a_sequential_head():
  with pytest.raises(ValueError, match="^markov_candidates: found 4, expected 0 with markov_rank"):
    make_config(markov_rank=0, enable_confidence_head=False, markov_candidates=4)


def test_config_is_hashable_and_counts_slots():
  assert hash(make_config(target_layer_ids=[0, 1])) == hash(make_config(target_layer_ids=(0, 1)))
  assert make_config(proposal_len=7).num_slots == 7
  assert make_config(proposal_len=7, sample_from_anchor=False).num_slots == 8
  assert make_config().num_features == 3 * 12
  assert make_config(draft_vocab_size=9).draft_vocab == 9


@pytest.mark.parametrize("drafter, target, wanted, name", [
    ({}, dict(vocab_size=40), {}, "vocab_size"),
    (dict(vocab_size=8, mask_token_id=7), dict(vocab_size=6), {}, "vocab_size"),  # fault B32
    ({}, dict(hidden_size=16), {}, "hidden_size"),
    (dict(target_hidden_size=10), {}, {}, "target_hidden_size"),
    ({}, dict(num_layers=5), {}, "target_layer_ids"),  # tap 4 is the last of 5
    ({}, dict(num_layers=7), {}, "num_target_layers"),
    ({}, {}, dict(sample_from_anchor=False), "sample_from_anchor"),
    ({}, {}, dict(max_draft_len=5), "max_draft_len"),
])
def test_misfit_is_named(drafter, target, wanted, name):
  config = make_config(**drafter)
  with pytest.raises(ValueError, match=f"^{name}: found .*expected"):
    check_fits(config, make_target(**target), **wanted)
  check_fits(make_config(), make_target(), sample_from_anchor=True, max_draft_len=4)


def test_config_for_target():
  config = config_for_target(make_target(), mask_token_id=36, markov_rank=0)
  assert (config.num_heads, config.qk_norm, config.sample_from_anchor) == (4, True, True)
  assert not config.confidence_head_with_markov
  with pytest.raises(ValueError, match="^mask_token_id: missing"):
    config_for_target(make_target())
  with pytest.raises(ValueError, match="^markov_rnak: found"):
    config_for_target(make_target(), mask_token_id=36, markov_rnak=5)
  with pytest.raises(ValueError, match="^hidden_size: found"):
    config_for_target(make_target(), mask_token_id=36, hidden_size=16)


def test_taps_are_those_of_the_published_drafters():
  assert spread_layer_ids(36) == (1, 9, 17, 25, 33)
  assert spread_layer_ids(40) == (1, 10, 19, 28, 37)


@pytest.mark.parametrize("num_layers", range(1, 13))
def test_taps_are_valid_for_every_depth(num_layers):
  make_config(num_target_layers=num_layers, target_layer_ids=spread_layer_ids(num_layers))
