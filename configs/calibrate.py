"""Calibration of a drafter's confidence head: temperatures by draft position (STS).

  python -m experiments.calibrate --config=configs/calibrate.py

Expected: two tables by draft position, of the rounds that were fitted and of held-out rounds of
another domain mix: ECE and AUROC before and after; `sts.json` beside the drafter (in `out`, where
that is given) and a reliability diagram. `DSpark.with_policy` reads the file.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.draft_model = "auto"
  config.dtype = "float32"
  config.out = ""  # "" = the drafter's own directory
  # JSONL file or directory with `turns` or `messages`; "" = built-in held-out prompts.
  config.prompts = ""
  config.test_prompts = ""
  # Prompts of each domain, to fit on and to test on.
  config.mix = "code=16,arithmetic=16,chat=16"
  config.test_mix = "code=6,arithmetic=4,chat=22"
  config.temperature = 0.0  # of the answers; 0 = greedy
  config.max_new_tokens = 128
  config.batch_size = 8
  config.seed = 0
  return config
