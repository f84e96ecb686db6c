"""A soak run of the engine: 1,000 different requests at 16 slots, each accounted for.

  python -m experiments.soak --config=configs/soak.py

Expected: "none lost, none mixed, memory flat" after some minutes on two cores; else a non-zero exit
and what went wrong.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.draft_model = "auto"
  config.dtype = "float32"
  config.max_draft_len = 3  # a fixed length: sampled answers are comparable to their runs alone
  config.num_prompts = 24  # built-in ones, of each domain; requests are their beginnings
  config.slots = 16
  config.max_len = 128
  config.max_queue = 24
  config.num_requests = 1000
  config.max_new_tokens = 24
  config.num_checked = 48  # requests decoded again alone
  config.seed = 0
  config.compilation_cache = ""  # directory of JAX's persistent cache
  config.out = "runs/soak.json"
  return config
