"""Evaluation of a drafter on sets of prompts, as the public reference reports it.

  python -m experiments.evaluate --config=configs/evaluate.py \
      --config.prompts=DIRECTORY_OF_JSONL --config.draft_model=DRAFTER

Expected: a table with one row a file: mean proposal length, tau (tokens a round) with its interval
over prompts, verify rate, tokens/s, and the accept rate by draft position; for each set ECE, AUROC
and Brier score of the confidence head by position; JSON in `out`. Lengths are the reference's round
by round: a round counts whole or not at all, whatever `max_new_tokens` cuts off its answer.
"""

import ml_collections
from ml_collections import config_dict


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.draft_model = "auto"  # a drafter of any kind, as for DSpark; "none" = plain decoding
  config.max_draft_len = config_dict.placeholder(int)  # None = all that the drafter proposes
  config.confidence_threshold = 0.0  # 0 = off, as calibration figures need
  config.accept_rule = "token"  # or "block"
  config.dtype = "float32"
  # Of a chat template with such a switch; None = its default. The reference has False for Qwen3.
  config.enable_thinking = config_dict.placeholder(bool)
  # JSONL file or directory with `turns` or `messages`; "" = built-in held-out prompts.
  config.prompts = ""
  config.num_prompts = 16  # of each file or domain, spread evenly; 0 = all
  config.num_turns = 1  # 1 asks the first turn, as the reference does; 2 also the second, if any
  config.max_new_tokens = 256
  config.batch_size = 1  # tokens/s are those of so many requests side by side
  config.temperature = 0.0
  config.top_k = 0
  config.top_p = 1.0
  config.min_p = 0.0
  config.is_recommended = False  # True = what the target's makers recommend, not the four above
  config.seed = 0  # of draws (prompt i: seed + i), built-in prompts and intervals
  config.compilation_cache = ""  # directory of JAX's persistent cache
  config.out = "runs/evaluate.json"
  return config
