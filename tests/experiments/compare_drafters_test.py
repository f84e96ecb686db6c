import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

from dspark_jax.decode.profile import RoundTime
from dspark_jax.decode.state import Frame
from dspark_jax.drafter.dspark import DSparkProposer
from dspark_jax.metrics.evaluation import Counts
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


def test_one_drafter_for_real(target, tmp_path, capsys):
  """Trains, decodes and times; the timing also without the sequential head."""
  config = make_config(target, tmp_path, laws=("recommended",), untrained=(),
                       figures=("table", "head_share"))
  compare_drafters.main(config)
  out, work = capsys.readouterr().out, tmp_path / "work"
  assert "recommended: temperature 0.7, top_p 0.9" in out and "sequential head" in out
  table = read_csv(work / "table.csv")
  assert [(r["drafter"], r["domain"]) for r in table] == [
      (d, p) for d in ("plain", "dspark") for p in ("code", "maths", "macro")]
  for row in table:
    assert (float(row["tau"]) == 1.0) if row["drafter"] == "plain" else (
        1.0 <= float(row["low"]) <= float(row["high"]) <= 3.0)
    assert float(row["tokens_per_s"]) > 0 and float(row["verify_ms"]) > 0
  assert int(table[-1]["parameters"]) > 1000
  [share] = read_csv(work / "head_share.csv")
  assert share["drafter"] == "dspark" and float(share["backbone_ms"]) > 0
  assert (work / "drafters" / "dspark" / "drafter" / "config.json").is_file()


TAU = {"plain": 1, "dspark": 4, "dflash": 3, "prompt-lookup": 2}


@pytest.fixture
def fake(monkeypatch):
  """Training, decoding and timing of known outcome; `kill_after` decodings the process dies.

  Every answer has ten rounds; milliseconds are 5 of drafting, 1 less without a head, and 15.
  """
  log = dict(trained=[], decoded=[], kill_after=np.inf)

  def train(run, *args, **kwargs):
    log["trained"].append(run.drafter.markov_rank)
    return SimpleNamespace(params={"w": np.zeros(7)}, train=SimpleNamespace(
        is_finished=True, num_steps=2, metrics=dict(eval_tau_prob=1.5)))

  def open_model(comparison, name):
    drafter = None
    if name in comparison.runs:
      drafter = DSparkProposer(comparison.runs[name].drafter)
    model = SimpleNamespace(frame=Frame(tiny.CONFIG, drafter), params={}, threshold=0.0)
    model.with_policy = lambda confidence_threshold: SimpleNamespace(
        **{**vars(model), "threshold": confidence_threshold})
    return model

  def decode(model, prompts, *, law, desc, **options):
    if len(log["decoded"]) >= log["kill_after"]:
      raise KeyboardInterrupt
    log["decoded"].append((desc, model.threshold))
    tau = TAU[desc.split(",")[0]] - (model.threshold > 0) - (law["temperature"] > 0) / 2
    return _evaluation.Decoded([Counts(
        num_tokens=10, num_rounds=10, num_committed=int(10 * tau), verified_G=[10, 10],
        reached_G=[10, 5], accepted_G=[5, 4])] * len(prompts), None, seconds=2.0, num_decoded=30)

  def compare_rounds(frames, batch, **options):
    assert batch == 1 and options["context_tokens"] == 8
    return {name: RoundTime(5.0 - name.endswith("head"), 15.0) for name in frames}

  monkeypatch.setattr(_training, "train", train)
  monkeypatch.setattr(_evaluation, "decode", decode)
  monkeypatch.setattr(_comparison, "compare_rounds", compare_rounds)
  monkeypatch.setattr(_comparison.Comparison, "open", open_model)
  return log


def test_all_figures_by_hand_killed_and_started_again(target, tmp_path, capsys, fake):
  config, work = make_config(target, tmp_path), tmp_path / "work"
  fake["kill_after"] = 3
  with pytest.raises(KeyboardInterrupt):
    compare_drafters.main(config)
  assert fake["trained"] == [4, 0] and not (work / "table.csv").exists()
  fake["kill_after"] = np.inf
  compare_drafters.main(config)
  assert fake["trained"] == [4, 0]  # nothing trained twice
  # Three drafters, two laws, two domains; DFlash and a threshold under the studied law alone.
  assert len(fake["decoded"]) == len(set(fake["decoded"])) == 3 * 2 * 2 + 2 + 2
  assert "time is up" not in capsys.readouterr().out

  table = read_csv(work / "table.csv")
  assert [(r["law"], r["drafter"], r["tau"]) for r in table if r["domain"] == "macro"] == [
      ("greedy", "plain", "1.0"), ("greedy", "dspark", "4.0"), ("greedy", "prompt-lookup", "2.0"),
      ("recommended", "plain", "0.5"), ("recommended", "dspark", "3.5"),
      ("recommended", "prompt-lookup", "1.5")]
  assert len(table) == 2 * 3 * 3 and {r["tokens_per_s"] for r in table} == {"15.0"}
  assert [r["parameters"] for r in table[2:7]] == ["", "7", "7", "7", ""]
  assert {(r["draft_ms"], r["verify_ms"]) for r in table} == {("5.0", "15.0")}
  assert [(r["law"], r["over"], float(r["lead"])) for r in read_csv(work / "table_leads.csv")] == [
      ("greedy", "prompt-lookup", 1.0), ("recommended", "prompt-lookup", pytest.approx(4 / 3))]
  for name in ("depth", "length"):
    assert [(r["drafter"], r["tau"]) for r in read_csv(work / f"{name}.csv")] == [
        ("dspark", "4.0"), ("dflash", "3.0")]
    [lead] = read_csv(work / f"{name}_leads.csv")
    assert (lead["drafter"], lead["over"]) == ("dspark", "dflash")
    assert float(lead["lead"]) == pytest.approx(1 / 3)
  assert {r["round_ms"] for r in read_csv(work / "length.csv")} == {"20.0"}
  positions = read_csv(work / "positions.csv")
  assert [(r["drafter"], r["domain"], r["position"], r["rate"], r["rounds"])
          for r in positions[:2]] == [("dspark", "code", "1", "0.5", "20"),
                                      ("dspark", "code", "2", "0.8", "10")]
  assert {(r["drafter"], r["domain"]) for r in positions} == {
      (d, p) for d in ("dspark", "prompt-lookup") for p in ("maths", "code")}
  assert [(r["threshold"], r["tau"]) for r in read_csv(work / "thresholds.csv")] == (
      [("0.0", "4.0")] * 2 + [("0.6", "3.0")] * 2)
  [share] = read_csv(work / "head_share.csv")  # DFlash has no head
  assert (share["drafter"], share["head_ms"], share["share"]) == ("dspark", "1.0", "0.05")
  for name in ("positions", "depth", "length", "thresholds", "head_share"):
    assert (work / f"{name}.png").stat().st_size > 5000

  # Once more: everything is there, and the report is the same to the last digit.
  before = {p.name: p.read_bytes() for p in work.glob("*.csv")}
  compare_drafters.main(config)
  assert fake["trained"] == [4, 0] and len(fake["decoded"]) == 16
  assert {p.name: p.read_bytes() for p in work.glob("*.csv")} == before

  # Another comparison does not go on in the same place.
  with pytest.raises(SystemExit) as error:
    _cli.guard(compare_drafters.main, make_config(target, tmp_path, max_new_tokens=5))
  assert "max_new_tokens = 6, expected 5: another comparison's" in error.value.code
  assert "\n" not in error.value.code


def test_stops_when_time_is_up(target, tmp_path, capsys, fake):
  compare_drafters.main(make_config(target, tmp_path, max_minutes=1e-9))
  assert "time is up, start again" in capsys.readouterr().out
  assert fake["trained"] == fake["decoded"] == [] and not list((tmp_path / "work").glob("*.csv"))


def test_an_unfinished_training_is_no_cell(target, tmp_path, fake, monkeypatch):
  train = _training.train

  def pause(*args, **kwargs):
    result = train(*args, **kwargs)
    result.train.is_finished = False
    return result

  monkeypatch.setattr(_training, "train", pause)
  config = make_config(target, tmp_path, figures=("table",))
  compare_drafters.main(config)
  assert {r["drafter"] for r in read_csv(tmp_path / "work" / "table.csv")} == {
      "plain", "prompt-lookup"}
  monkeypatch.setattr(_training, "train", train)
  compare_drafters.main(config)
  table = read_csv(tmp_path / "work" / "table.csv")
  assert {r["drafter"] for r in table} == {"plain", "dspark", "prompt-lookup"}
  assert all(r["verify_ms"] == "15.0" for r in table)  # timed again, side by side


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
