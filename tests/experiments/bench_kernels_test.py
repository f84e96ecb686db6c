"""bench_kernels: the naive forms compute what the references do, and the table is written."""

import dataclasses
import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest

from experiments import bench_kernels
from experiments._bench_cases import BENCHES

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = {"rejection_sampling": dict(batch=4, vocab=60, num_drafts=3),
         "length_selection": dict(batch=5, num_drafts=4),
         "markov_sampling": dict(batch=4, vocab=60, num_drafts=3, rank=4),
         "distillation_loss, terms": dict(num_tokens=6, vocab=60, width=8, rank=4),
         "distillation_loss, gradients": dict(num_tokens=6, vocab=60, width=8, rank=4)}


@pytest.mark.parametrize("name", BENCHES)
def test_the_naive_form_computes_the_same(name):
  args, forms = BENCHES[name].build(**SMALL[name])
  assert set(forms) == {"naive", "reference", "kernel"}
  found, expected = (jax.tree.leaves(forms[form](*args)) for form in ("reference", "naive"))
  assert len(found) >= len(expected) > 0
  for a, b in zip(found, expected):  # float32 sums of up to 60 terms of O(1)
    assert a.shape == b.shape
    if np.issubdtype(b.dtype, np.integer):
      np.testing.assert_array_equal(a, b)
    else:
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_table(tmp_path, monkeypatch, capsys):
  name = "distillation_loss, gradients"
  monkeypatch.setitem(BENCHES, name, dataclasses.replace(
      BENCHES[name], sizes={"default": SMALL[name]}))
  spec = importlib.util.spec_from_file_location("config", ROOT / "configs/bench_kernels.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  config.update(family=name, repeats=2, copy_bytes=1 << 16, out=str(tmp_path / "out.json"))
  rows = bench_kernels.bench(config)
  assert json.loads((tmp_path / "out.json").read_text()) == rows
  assert [row["form"] for row in rows] == ["naive", "reference"]  # CPU has no kernel
  # Arguments and gradients alone: hidden, target, bias_in, W2, LM head; d hidden, bias_in, W2.
  least = 4 * (2 * 6 * 8 + 6 * 4 + 60 * (4 + 8) + 6 * 8 + 6 * 4 + 60 * 4)
  for row in rows:
    assert 0 < row["best_ms"] <= row["ms"] and row["peak_bytes"] >= least + row["temp_bytes"]
  assert capsys.readouterr().out.count(f"| {name} |") == 3
  config.family = "none of them"
  with pytest.raises(ValueError, match="^family, repeats: found 'none of them'"):
    bench_kernels.bench(config)
