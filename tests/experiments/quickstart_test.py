import json

import pytest

from dspark_jax.interop.deepspec import load_drafter
from configs import quickstart as configs_quickstart
from experiments import _cli, quickstart
from tests import tiny
from tests.tiny import fast_compile  # noqa: F401


def make_config(tmp_path, **changes):
  # Built-in prompts have some hundred bytes, and a byte is a token of the tiny model.
  target = tiny.save_target(tmp_path / "target", max_position_embeddings=1024)
  config = configs_quickstart.get_config().unlock()
  config.update(target=str(target), draft_model=str(tiny.save_drafter(tmp_path / "drafter")),
                workdir=str(tmp_path / "work"), num_prompts=1, max_prompt_tokens=128,
                max_new_tokens=8, max_draft_len=2, confidence_threshold=0.4,
                num_train_prompts=3)
  config.answers.update(batch_size=4, max_new_tokens=8, max_len=256)
  config.training.update(max_len=256, num_eval_rows=1)
  config.training.drafter.update(proposal_len=2, markov_rank=4, draft_vocab_size=100,
                                 target_layer_ids=(0, 1), mask_token_id=tiny.MASK_ID)
  config.training.warm_start.layer_ids = (2,)
  config.training.train.update(batch_size=1, num_anchors=2, log_every=1)
  config.training.train.optimizer.max_steps = 2
  config.update(changes)
  return config


def test_whole_main_job(tmp_path, capsys):
  config = make_config(tmp_path)
  quickstart.main(config)
  out, work = capsys.readouterr().out, tmp_path / "work"
  assert out.count("greedy tokens identical to plain for 3 of 3") == 2
  assert "accept rate by position" in out and "fixed 2" in out and "threshold 0.4" in out
  assert "tau_prob on held-out rows: step 2: " in out and "time is up" not in out
  for name in ("accept_rate.png", "speed.png", "training/curves.png"):
    assert (work / name).stat().st_size > 5000
  config, _, stored = load_drafter(work / "training" / "drafter")
  assert config.proposal_len == 2 and len(stored["draft_ids"]) == 100
  steps = [json.loads(line)["step"] for line in
           (work / "training" / "metrics.jsonl").read_text().splitlines()]
  assert steps == [1, 2, 2]


@pytest.mark.parametrize("changes, message", [
    (dict(draft_model="auto"), "draft_model: found 'auto'"), (dict(workdir="FILE/x"), "FILE"),
    (dict(max_draft_len=9), "max_draft_len: found 9"),
    (dict(max_prompt_tokens=3), "max_prompt_tokens: found 3")])
def test_bad_input_is_one_line(tmp_path, changes, message):
  (tmp_path / "FILE").write_text("")
  if "workdir" in changes:
    changes = {"workdir": str(tmp_path / changes["workdir"])}
  config = make_config(tmp_path, **changes)
  with pytest.raises(SystemExit) as error:
    _cli.guard(quickstart.main, config)
  text = error.value.code
  assert text.startswith("error: ") and message in text and "\n" not in text
