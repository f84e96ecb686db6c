"""The target answers prompts in bulk: training text for a drafter.

  python -m experiments.regenerate --config=configs/regenerate.py \
      --config.out=runs/rows.jsonl --config.num_prompts=2000

Expected: a progress bar with tokens/s, then a line of counts; one JSON object a conversation in
`out`, {"id", "domain", "input_ids", "loss_mask"}. Started again, it answers what is missing.
"""

import ml_collections
from ml_collections import config_dict


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.dtype = "float32"  # of weights and activations
  # "builtin", "self" (the target writes users' turns, as varied as what it was tuned on), or a
  # JSONL file or directory: lines with `turns` (texts) or `messages`.
  config.prompts = "builtin"
  config.num_prompts = 2000  # to make; of a file the first so many, 0 = all
  config.max_prompt_tokens = 128  # of prompts that the target writes; longer ones are dropped
  config.out = "runs/rows.jsonl"
  config.seed = 0  # of prompts and answers

  config.batch_size = 32
  config.max_new_tokens = 256
  config.max_len = 512  # prompt + answer; a prompt that leaves less than min_new_tokens is skipped
  config.min_new_tokens = 16
  # Of a chat template with such a switch; None = its default. The reference has False for Qwen3.
  config.enable_thinking = config_dict.placeholder(bool)
  # None = what the target's makers recommend.
  config.temperature = config_dict.placeholder(float)  # 0 = greedy
  config.top_k = config_dict.placeholder(int)  # 0 = off
  config.top_p = config_dict.placeholder(float)  # 1 = off
  config.min_p = config_dict.placeholder(float)  # 0 = off
  return config
