"""bench_training: the case, the count of its FLOPs, and both forms of the script."""

import importlib.util
import json
import pathlib

import jax
import pytest

from dspark_jax.drafter import dspark
from dspark_jax.target.transformer import Transformer
from experiments import _training_case as case
from experiments import _training_ours, bench_training

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = dict(vocab_size=50, hidden_size=8, intermediate_size=12, num_layers=3, num_heads=2,
            num_kv_heads=1, head_dim=4, target_layer_ids=(0, 1), draft_layers=1, markov_rank=3,
            proposal_len=2, mask_token_id=49, batch_size=2, seq_len=10, num_anchors=3)
FLAGS = [f"--config.shape.{name}={value}" for name, value in TINY.items()
         if name != "target_layer_ids"] + ["--config.shape.target_layer_ids=(0,1)"]


def get_config(**changes):
  spec = importlib.util.spec_from_file_location("config", ROOT / "configs/bench_training.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  config.update(changes)
  config.shape.update(TINY | {"num_prompt": 0})
  return config


def test_weights_are_those_of_the_library():
  shape = case.Shape(**TINY)
  objective, arrays = _training_ours.make_objective(shape), case.make_arrays(shape, seed=0)
  target = jax.eval_shape(lambda: Transformer(objective.target_config).init(
      jax.random.key(0), jax.numpy.zeros((1, 2), int)))["params"]
  drafter = jax.eval_shape(lambda: dspark.init_params(objective.drafter_config, jax.random.key(0)))
  shapes = lambda tree: jax.tree.map(lambda a: a.shape, tree)
  assert shapes(arrays["target"]) == shapes(dict(target))
  assert shapes(arrays["drafter"]) == shapes(dict(drafter))


def test_flops_by_hand():
  """D 8, N*H 8, K*H 4: a layer is 2*64 + 2*32 + 3*96 = 480 products; 20 tokens, 12 drafts."""
  assert case.count_flops(case.Shape(**TINY)) == {
      # 3 layers; attention 4 * 8 FLOPs a pair, 2 * 55 pairs.
      "target": 3 * (2 * 20 * 480 + 32 * 110),
      "target law": 2 * 12 * 50 * 8,
      # fc of 2 taps, forward and weight gradient; keys and values of 20 rows, three times.
      "context": 2 * 2 * 20 * 2 * 64 + 3 * 2 * 20 * 2 * 8 * 4,
      # 5 context rows on average and 2 slots are seen.
      "draft layers": 3 * (2 * 12 * 480 + 32 * 12 * 7),
      "draft law": 2 * 2 * 12 * 50 * 8 + 3 * 2 * 12 * 50 * 3}


def test_table_and_file(monkeypatch, capsys, tmp_path):
  """Three runs a side, the sides taking turns: medians, ratios, floor."""
  order = []

  def run_apart(side, argv):
    order.append(side)
    seconds = {"ours": [2.0, 4.0, 3.0], "peer": [9.0, 6.0, 1.0]}[side]
    return dict(side=side, seconds=seconds, first_s=1.0, is_reset=True, loaded_bytes=10**6,
                peak_bytes=10**7 * (1 + 3 * (side == "peer")) + len(order), losses=[1.0],
                matmul_flops_per_s=1e6)

  monkeypatch.setattr(bench_training, "run_apart", run_apart)
  monkeypatch.setattr(bench_training.importlib.util, "find_spec", lambda name: True)
  bench_training.main(get_config(out=str(tmp_path / "x" / "out.json")))
  text = capsys.readouterr().out
  assert order == ["ours", "peer"] * 3
  assert "| ours | 3.000 | 1.0 | 10 |" in text and "| peer | 6.000 | 1.0 | 40 |" in text
  assert "ours is 2.00 times as fast with 0.25 of the memory" in text
  total = sum(case.count_flops(case.Shape(**TINY)).values())
  assert f"at least {total / 1e6:.3f} s" in text
  assert len(json.loads((tmp_path / "x" / "out.json").read_text())["runs"]) == 6


def test_without_torch_one_clear_line(monkeypatch, capsys, tmp_path):
  monkeypatch.setattr(bench_training.importlib.util, "find_spec", lambda name: None)
  monkeypatch.setattr(bench_training, "run_apart", lambda side, argv: dict(
      side=side, seconds=[1.0], first_s=1.0, is_reset=False, loaded_bytes=0, peak_bytes=10**6,
      losses=[1.0], matmul_flops_per_s=1e9))
  bench_training.main(get_config(out=str(tmp_path / "out.json")))
  text = capsys.readouterr().out
  assert text.startswith("no peer: torch is not installed\n") and "times as fast" not in text
  assert "peaks include the first step's" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_process_of_its_own(monkeypatch, dtype):
  monkeypatch.chdir(ROOT)
  flags = [*FLAGS, "--config.steps=2", "--config.shape.num_prompt=2", f"--config.dtype={dtype}"]
  run = bench_training.run_apart("ours", flags)
  assert run["side"] == "ours" and len(run["seconds"]) == 2 and len(run["losses"]) == 3
  assert all(0 < loss < 10 for loss in run["losses"]) and run["losses"][0] != run["losses"][1]
  assert run["matmul_flops_per_s"] > 0 and run["loaded_bytes"] > 1e6
  assert run["first_peak_bytes"] > 0


@pytest.mark.parametrize("changes", [dict(side="theirs"), dict(steps=0), dict(repeats=0)])
def test_bad_options_are_named(changes):
  with pytest.raises(ValueError, match="^side, repeats, steps: found"):
    bench_training.main(get_config(**changes))


def test_an_unknown_dtype_is_named():
  with pytest.raises(ValueError, match="^dtype: found 'float8'"):
    bench_training.main(get_config(dtype="float8"))
