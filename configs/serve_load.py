"""Load: many users on one engine, by method and concurrency; the paper's figures 7 and 8.

  python -m experiments.serve_load --config=configs/serve_load.py \
      --config.prompts=DIRECTORY_OF_JSONL --config.out=runs/serve_load

Expected: a table of tokens/s (of all users, and of each), latency to the first token and between
tokens (p50/p95/p99), tau and verify budget, methods taking turns at every number of users; the same
as `serve_load.json`; `throughput_by_speed.png` (figure 7), `by_concurrency.png` (figure 8). With
`rates`, or a `trace` of arrivals, also the open loop.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.draft_model = "auto"
  config.dtype = "float32"
  # JSONL file or directory with `turns` or `messages` (first turn); "" = built-in held-out prompts.
  config.prompts = ""
  config.num_prompts = 16  # of each file or domain, spread evenly; 0 = all
  config.seed = 0  # of the built-in prompts, answer lengths and arrivals
  config.max_new_tokens = 64  # answers have half of it to all of it, or end by themselves
  config.max_len = 256  # longest prompt + answer
  config.prompt_buckets = (64, 128)  # lengths that prompts are padded to; longer ones are left out
  config.temperature = 0.0
  # Methods. Plain decoding is always one.
  config.max_draft_lens = (1, 3, 5, 7)
  config.thresholds = (0.4,)
  config.adaptive = True  # early_stop and lagged; they measure a step curve for every `users`
  config.step_curves = ""  # directory of measured step curves; "" = the user's cache
  # Closed loop.
  config.users = (1, 2, 4, 8, 16, 32)  # also the engine's slots
  config.min_measured = 8  # requests measured: this, or `users` where that is more
  config.repeats = 1
  config.turn_s = 1.0  # seconds that a method serves before the next one does, in turns
  # Open loop, on `open_slots` slots: Poisson arrivals per second, and a trace (JSONL).
  config.rates = ()
  config.trace = ""
  config.open_slots = 8
  config.num_arrivals = 32
  config.speeds = (5.0, 10.0)  # promises of figure 7, tokens per second and user
  config.overhead_slots = 8  # engine against bare step, with every draft verified; 0 = leave out
  config.overhead_rounds = 8
  config.overhead_repeats = 5
  config.compilation_cache = ""  # directory of JAX's persistent cache
  config.out = "runs/serve_load"
  return config
