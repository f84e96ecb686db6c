import json

import pytest

from dspark_jax.api import DSpark
from configs import evaluate as configs_evaluate
from experiments import _cli, _evaluation, evaluate
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
  root = tmp_path_factory.mktemp("tiny")
  return tiny.save_target(root / "target"), tiny.save_drafter(root / "drafter")


def make_config(directories, tmp_path, **changes):
  config = configs_evaluate.get_config().unlock()
  (tmp_path / "sets").mkdir()
  for name, prompts in (("math", (["a?"], ["b?"], ["c?"])), ("code", (["d?", "e?"], ["f?"]))):
    (tmp_path / "sets" / f"{name}.jsonl").write_text(
        "".join(json.dumps({"turns": turns}) + "\n" for turns in prompts))
  config.update(target=str(directories[0]), draft_model=str(directories[1]),
                prompts=str(tmp_path / "sets"), num_prompts=2, max_new_tokens=10,
                out=str(tmp_path / "o" / "e.json"))
  config.update(changes)
  return config


def test_whole_evaluation(directories, tmp_path, capsys):
  evaluate.main(make_config(directories, tmp_path))
  out = capsys.readouterr().out
  found = json.loads((tmp_path / "o" / "e.json").read_text())
  results = found["results"]
  assert list(results) == ["code", "math", "all"] and found["law"]["temperature"] == 0.0
  pooled = results["all"]["evaluation"]
  assert pooled["num_answers"] == 4 == len(results["all"]["answers"])
  assert pooled["num_tokens"] == sum(a["num_tokens"] for a in results["all"]["answers"])
  assert 1.0 < pooled["accepted_len"]["value"] <= 5.0
  assert pooled["accepted_len"]["low"] <= pooled["accepted_len"]["value"]
  assert pooled["tokens_per_s"] > 0
  # Every draft of a counted round is verified, unless a stop token was accepted before it.
  assert 3.0 < pooled["acceptance"]["verify_len"] <= 4.0
  positions = results["math"]["confidence"]
  assert len(positions) == 4 and positions[0]["num"] >= positions[3]["num"] > 0
  assert all(0 <= p["ece"] <= 1 and 0 <= p["brier"] <= 1 for p in positions)
  assert "accept rate by position" in out and "confidence, all" in out and "AUROC" in out


def test_tokens_are_those_of_generate(directories):
  """Counted rounds run on past the limit; the answers must not show it. Sampled ones as well."""
  model = DSpark(*map(str, directories))
  prompts = [{"messages": [{"role": "user", "content": c}]} for c in "ab"]
  law = dict(temperature=0.7, top_p=0.9)
  found = _evaluation.decode(model, prompts, law=law, max_new_tokens=9, batch_size=2, seed=5)
  expected = model.generate([p["messages"] for p in prompts], max_new_tokens=9, seed=[5, 6], **law)
  assert [c.num_tokens for c in found.counts] == [len(e.tokens) for e in expected]
  # Tokens of the rounds, and the prefill's: as many as the answer has, or more by the last round.
  assert all(0 <= 1 + c.num_committed - c.num_tokens <= 5 for c in found.counts)
  assert found.num_decoded >= sum(c.num_tokens for c in found.counts)


def test_second_turn_and_plain_decoding(directories, tmp_path):
  config = make_config(directories, tmp_path, draft_model="none", num_turns=2, batch_size=2,
                       is_recommended=True, prompts=str(tmp_path / "sets" / "code.jsonl"))
  evaluate.main(config)
  found = json.loads((tmp_path / "o" / "e.json").read_text())
  assert found["law"] == {"temperature": 0.7, "top_p": 0.9}
  code = found["results"]["code"]
  assert len(code["answers"]) == 3 and "confidence" not in code  # one prompt has a second turn
  assert code["evaluation"]["accepted_len"]["value"] == 1.0
  assert code["evaluation"]["verify_rate"] == 1.0


@pytest.mark.parametrize("changes, message", [
    (dict(draft_model="auto"), "draft_model: found 'auto'"), (dict(prompts="nowhere"), "nowhere"),
    (dict(num_prompts=-1), "num_prompts: found -1"), (dict(out="FILE/b.json"), "FILE"),
    (dict(max_draft_len=9), "max_draft_len: found 9"), (dict(num_turns=3), "num_turns: found 3"),
    (dict(batch_size=0), "batch_size: found 0"), (dict(temperature=-1.0), "temperature: found -1"),
    (dict(max_new_tokens=0), "max_new_tokens: found")])
def test_bad_input_is_one_line(directories, tmp_path, changes, message):
  (tmp_path / "FILE").write_text("")
  if "out" in changes:
    changes = {"out": str(tmp_path / changes["out"])}
  config = make_config(directories, tmp_path, **changes)
  with pytest.raises(SystemExit) as error:
    _cli.guard(evaluate.main, config)
  text = error.value.code
  assert text.startswith("error: ") and message in text and "\n" not in text
