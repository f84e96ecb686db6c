"""Speed of decoding, one request at a time, greedy: plain, DSpark by several policies.

  python -m experiments.bench_decode --config=configs/bench_decode.py \
      --config.prompts=DIRECTORY_OF_JSONL --config.out=runs/bench.json

Expected: a table of tokens/s, speed-up over plain decoding, tau, verify rate, milliseconds a round
and accept rate by position, for all prompts and for each file; compile and warm-up seconds; how
many answers are identical to plain decoding's. With PyTorch installed also transformers' `generate`
on the same weights (`--config.peer=""` leaves it out). With another dtype than float32 also plain
decoding in float32, which may be the faster.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.draft_model = "auto"  # a drafter of any kind, as for DSpark; "prompt-lookup"
  config.accept_rule = "token"  # or "block"
  config.dtype = "float32"
  # JSONL file or directory with `turns` or `messages` (first turn); "" = built-in held-out prompts.
  config.prompts = ""
  config.num_prompts = 8  # of each file or domain, spread evenly; 0 = all
  config.seed = 0  # of the built-in prompts
  config.max_new_tokens = 128
  config.repeats = 3
  config.max_draft_lens = (3, 5, 7)
  config.thresholds = (0.3, 0.5)
  config.adaptive = ("early_stop",)  # and "lagged": policies that go by the measured step curve
  config.peer = "tests.parity.transformers_peer"  # module; used where torch is installed
  config.compilation_cache = ""  # directory of JAX's persistent cache
  config.out = "runs/bench_decode.json"
  return config
