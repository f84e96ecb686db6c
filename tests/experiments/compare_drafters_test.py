import csv
import json

import numpy as np
import pytest

from configs import compare_drafters as configs_compare_drafters
from experiments import _cli, _comparison, _evaluation, _figures, _training, compare_drafters
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return tiny.save_target(tmp_path_factory.mktemp("tiny") / "target")


def make_config(target, tmp_path, **changes):
  """DSpark and DFlash of one layer and two drafts; two steps on six rows, two domains."""
  rng = np.random.default_rng(0)
  rows = [dict(id=str(i), domain="x", input_ids=rng.integers(0, 250, 24).tolist(),
               loss_mask=[0] * 6 + [1] * 18) for i in range(6)]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
  for name, texts in (("maths", "abc"), ("code", "de")):
    (tmp_path / f"{name}.jsonl").write_text(
        "".join(json.dumps({"turns": [t]}) + "\n" for t in texts))
  config = configs_compare_drafters.get_config().unlock()
  config.update(
      target=str(target), data=str(tmp_path / "rows.jsonl"), workdir=str(tmp_path / "work"),
      num_prompts=2, max_new_tokens=6, drafters=("dspark",), untrained=("prompt-lookup",),
      depths=(1,), lengths=(2,), thresholds=(0.0, 0.6))
  config.prompts = {name: str(tmp_path / f"{name}.jsonl") for name in ("maths", "code")}
  config.timing.update(context_tokens=8, repeats=1)
  config.budget.update(max_steps=2, batch_size=1, max_len=24, num_eval_rows=1)
  for recipe in (config.recipes.dspark, config.recipes.dflash):
    recipe.drafter.update(num_layers=1, proposal_len=2, draft_vocab_size=100,
                          target_layer_ids=(0, 1), mask_token_id=tiny.MASK_ID)
    recipe.drafter.markov_rank = min(recipe.drafter.markov_rank, 4)
    recipe.warm_start.layer_ids = (2,)
    recipe.train.update(num_anchors=4, eval_every=0)
  config.update(changes)
  return config


def read_csv(path):
  with open(path, newline="") as stream:
    return list(csv.DictReader(stream))


@pytest.fixture
def log(monkeypatch):
  """What was trained and decoded, and a number of decodings after which the process is killed."""
  log = dict(trained=[], decoded=[], kill_after=np.inf)
  train, decode = _training.train, _evaluation.decode

  def train_logged(config, *args, **kwargs):
    log["trained"].append(config.drafter.markov_rank)
    return train(config, *args, **kwargs)

  def decode_logged(*args, desc, **kwargs):
    if len(log["decoded"]) >= log["kill_after"]:
      raise KeyboardInterrupt
    log["decoded"].append(desc)
    return decode(*args, desc=desc, **kwargs)

  monkeypatch.setattr(_training, "train", train_logged)
  monkeypatch.setattr(_evaluation, "decode", decode_logged)
  return log


def test_whole_comparison_killed_and_started_again(target, tmp_path, capsys, log):
  config, work = make_config(target, tmp_path), tmp_path / "work"
  log["kill_after"] = 3
  with pytest.raises(KeyboardInterrupt):
    compare_drafters.main(config)
  assert log["trained"] == [4, 0] and not (work / "table.csv").exists()
  log["kill_after"] = np.inf
  compare_drafters.main(config)
  assert log["trained"] == [4, 0]  # nothing trained twice
  # Three drafters, two laws, two domains; DFlash and a threshold under the studied law alone.
  assert len(log["decoded"]) == len(set(log["decoded"])) + 2 == 3 * 2 * 2 + 2 + 2
  out = capsys.readouterr().out
  assert "sequential head" in out and "macro tau of" in out and "time is up" not in out

  table = read_csv(work / "table.csv")
  assert [(r["law"], r["drafter"], r["domain"]) for r in table[:4]] == [
      ("greedy", "plain", "maths"), ("greedy", "plain", "code"), ("greedy", "plain", "macro"),
      ("greedy", "dspark", "maths")]
  assert len(table) == 2 * 3 * 3
  for row in table:
    is_plain = row["drafter"] == "plain"
    assert (float(row["tau"]) == 1.0) if is_plain else (1.0 <= float(row["tau"]) <= 8.0)
    assert float(row["tokens_per_s"]) > 0 and float(row["verify_ms"]) > 0
    assert bool(row["parameters"]) == (row["drafter"] == "dspark")
  tau = {r["drafter"]: float(r["tau"]) for r in table
         if r["law"] == "greedy" and r["domain"] == "macro"}
  [lead] = [r for r in read_csv(work / "table_leads.csv") if r["law"] == "greedy"]
  assert lead["over"] == "prompt-lookup"
  assert float(lead["lead"]) == pytest.approx(tau["dspark"] / tau["prompt-lookup"] - 1)
  [length_lead] = read_csv(work / "length_leads.csv")
  assert (length_lead["drafter"], length_lead["over"]) == ("dspark", "dflash")
  positions = read_csv(work / "positions.csv")
  assert {(r["drafter"], r["domain"]) for r in positions} == {
      (d, p) for d in ("dspark", "prompt-lookup") for p in ("maths", "code")}
  assert [r["threshold"] for r in read_csv(work / "thresholds.csv")] == ["0.0"] * 2 + ["0.6"] * 2
  [share] = read_csv(work / "head_share.csv")
  assert share["drafter"] == "dspark" and float(share["backbone_ms"]) > 0
  for name in ("positions", "depth", "length", "thresholds", "head_share"):
    assert (work / f"{name}.png").stat().st_size > 5000

  # Once more: everything is there, and the report is the same to the last digit.
  before = {p.name: p.read_bytes() for p in work.glob("*.csv")}
  num = len(log["decoded"])
  compare_drafters.main(config)
  assert log["trained"] == [4, 0] and len(log["decoded"]) == num
  assert {p.name: p.read_bytes() for p in work.glob("*.csv")} == before

  # Another comparison does not go on in the same place.
  with pytest.raises(SystemExit) as error:
    _cli.guard(compare_drafters.main, make_config(target, tmp_path, max_new_tokens=5))
  assert "max_new_tokens = 6, expected 5: another comparison's" in error.value.code
  assert "\n" not in error.value.code


def test_stops_when_time_is_up(target, tmp_path, capsys, log):
  compare_drafters.main(make_config(target, tmp_path, max_minutes=1e-9))
  assert "time is up, start again" in capsys.readouterr().out
  assert log["trained"] == log["decoded"] == [] and not list((tmp_path / "work").glob("*.csv"))


def test_budget_is_the_same_for_all(target, tmp_path):
  config = make_config(target, tmp_path, drafters=("dspark", "dflash", "eagle3"),
                       figures=("table",))
  config.recipes.eagle3.drafter.update(target_layer_ids=(0, 1), draft_vocab_size=100)
  recipes, *_ = _figures.plan_recipes(config)
  runs = [_comparison.make_run_config(config, recipe, tiny.CONFIG) for recipe in recipes.values()]
  budget = {(r.max_len, r.num_eval_rows, r.train.batch_size, r.train.accumulation, r.train.seed,
             r.train.optimizer.max_steps) for r in runs}
  assert budget == {(24, 1, 1, 1, 0, 2)}
  assert [r.train.loss.ce_weight for r in runs] == [0.1, 1.0, 0.0]  # each has its own loss
  assert runs[1].drafter.markov_rank == 0 and not runs[1].drafter.enable_confidence_head


def test_variants_of_a_recipe():
  recipe = configs_compare_drafters.get_config().recipes.dspark.to_dict()
  deeper = _figures.vary(recipe, depth=4)
  assert deeper["drafter"]["num_layers"] == 4
  assert deeper["warm_start"]["layer_ids"] == (26, 27, 28, 29)
  longer = _figures.vary(recipe, length=14)
  assert longer["drafter"]["proposal_len"] == 14 and longer["train"]["loss"]["loss_decay"] == 14.0
  assert _figures.vary(recipe, depth=2) == _figures.vary(recipe, length=7) == recipe


def test_shipped_plan_shares_what_it_can():
  recipes, depth, length = _figures.plan_recipes(configs_compare_drafters.get_config())
  assert len(recipes) == 5 + 2 * 3 + 2 * 3
  assert depth["dspark"][2] == length["dspark"][7] == "dspark"


@pytest.mark.parametrize("changes, message", [
    (dict(drafters=("dspork",)), "drafters: found 'dspork'"), (dict(data="nowhere"), "nowhere"),
    (dict(figures=("fig",)), "figures: found 'fig'"), (dict(laws=("t1",)), "laws: found 't1'"),
    (dict(studied=()), "studied: found none"), (dict(prompts={"maths": ""}), "prompts.maths"),
    (dict(prompts={}), "prompts: found no domain"), (dict(workdir="FILE/x"), "FILE"),
    (dict(num_prompts=-1), "num_prompts: found -1"), (dict(depths=(9,)), "depths: found 9")])
def test_bad_input_is_one_line(target, tmp_path, changes, message):
  (tmp_path / "FILE").write_text("")
  if "workdir" in changes:
    changes = {"workdir": str(tmp_path / changes["workdir"])}
  config = make_config(target, tmp_path)
  config.update({k: v for k, v in changes.items() if k != "prompts"})
  if "prompts" in changes:
    config.prompts = changes["prompts"]
  with pytest.raises(SystemExit) as error:
    _cli.guard(compare_drafters.main, config)
  text = error.value.code
  assert text.startswith("error: ") and message in text and "\n" not in text
