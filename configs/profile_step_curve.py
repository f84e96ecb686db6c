"""The step curve of this machine, as a table to read and to edit, and as plots.

  python -m experiments.profile_step_curve --config=configs/profile_step_curve.py

Expected: for each batch size milliseconds of drafting and of each verify bucket; the table in
`out`, one plot a batch size beside it. Decoding measures what it needs by itself; this shows it.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.draft_model = "auto"
  config.dtype = "float32"
  config.batch_sizes = (1, 4, 16)
  config.max_draft_len = 0  # 0 = all that the drafter proposes
  config.context_tokens = 128  # of every request
  config.num_slots = 0  # cache size; 0 = just enough
  config.temperature = 0.0
  config.repeats = 5
  config.compilation_cache = ""  # directory of JAX's persistent cache
  config.out = "runs/step_curve.txt"
  return config
