import json

import pytest

from dspark_jax.scheduler.policies import EarlyStop
from experiments import _timing


class Model:
  """Stands for a DSpark: remembers what was asked of it."""

  proposer = None

  def __init__(self, name="model"):
    self.name, self.calls = name, []

  def with_policy(self, policy=None, **options):
    return Model(options if policy is None else policy)

  def warm_up(self, prompt, **options):
    self.calls.append((prompt, options))
    return 2.0


def test_methods():
  methods = _timing.make_methods(Model(), max_draft_lens=(3, 5), thresholds=(0.25,),
                                 adaptive=("early_stop",))
  assert list(methods) == ["plain", "fixed 3", "fixed 5", "threshold 0.25", "early_stop"]
  assert methods["plain"][1] == {"is_speculative": False} and methods["fixed 3"][1] == {}
  assert methods["fixed 5"][0].name == dict(max_draft_len=5)
  assert methods["threshold 0.25"][0].name == dict(
      confidence_threshold=0.25, max_draft_len=5)
  assert methods["early_stop"][0].name == EarlyStop()
  with pytest.raises(ValueError, match="adaptive: found 'sooner'"):
    _timing.make_methods(Model(), max_draft_lens=(), thresholds=(), adaptive=("sooner",))


def test_warm_up_covers_every_method_and_prompt():
  methods = _timing.make_methods(Model(), max_draft_lens=(3,), thresholds=())
  _timing.warm_up(methods, ["a", "b"], max_new_tokens=7)
  assert methods["plain"][0].calls == [
      (p, dict(is_speculative=False, max_new_tokens=7)) for p in "ab"]
  assert methods["fixed 3"][0].calls == [(p, dict(max_new_tokens=7)) for p in "ab"]


def test_second_warm_up_needs_a_cache(monkeypatch, tmp_path):
  methods = _timing.make_methods(Model(), max_draft_lens=(), thresholds=())
  assert _timing.measure_warm_up(methods, "a") == {"plain": [2.0]}
  config = type("Config", (), dict(jax_compilation_cache_dir=str(tmp_path),
                                   jax_enable_compilation_cache=True))
  monkeypatch.setattr(_timing, "jax", type("jax", (), dict(config=config,
                                                           clear_caches=staticmethod(list))))
  assert _timing.measure_warm_up(methods, "a") == {"plain": [2.0, 2.0]}


def test_prompts_are_spread_over_each_file(tmp_path):
  for name, num in (("a", 9), ("b", 2)):
    (tmp_path / f"{name}.jsonl").write_text("".join(
        json.dumps({"turns": [f"{name}{i}"]}) + "\n" for i in range(num)))
  domains = _timing.choose_prompts(str(tmp_path), 3, seed=0)
  texts = {k: [p["messages"][0]["content"] for p in v] for k, v in domains.items()}
  assert texts == {"a": ["a0", "a4", "a8"], "b": ["b0", "b1"]}
  assert len(_timing.choose_prompts(str(tmp_path), 0, seed=0)["a"]) == 9


def test_built_in_prompts():
  domains = _timing.choose_prompts("", 2, seed=1)
  assert {k: len(v) for k, v in domains.items()} == {"code": 2, "arithmetic": 2, "chat": 2}
  for num in (0, -1):
    with pytest.raises(ValueError, match=f"num_prompts: found {num}"):
      _timing.choose_prompts("", num, seed=1)


def test_directory_that_cannot_be_made(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError):
    _timing.prepare_directory(tmp_path / "file" / "x")
  assert _timing.prepare_directory(tmp_path / "a" / "b").is_dir()
