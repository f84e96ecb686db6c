"""Policies on batches of requests that decode side by side, methods interleaved in one process.

  python -m experiments.bench_schedule --config=configs/bench_schedule.py

Expected: for each number of requests a table of tokens/s in all, speed-up over plain decoding, tau,
drafts verified a request and round, share of rounds that drafted, milliseconds a round, padding of
the packed rows, and how many answers are plain decoding's. Padding is 0 where nothing is packed.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.draft_model = "auto"
  config.dtype = "float32"
  config.prompts = ""  # JSONL file or directory; "" = built-in held-out prompts
  config.num_requests = (1, 4, 16)
  config.max_draft_lens = (1, 3, 7)
  config.thresholds = (0.4,)
  config.temperature = 0.0
  config.max_new_tokens = 64
  config.repeats = 3
  config.seed = 0
  config.compilation_cache = ""  # directory of JAX's persistent cache
  config.out = "runs/bench_schedule.json"
  return config
