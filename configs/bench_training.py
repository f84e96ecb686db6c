"""One training step: time and peak memory, ours against the same step in plain PyTorch.

  python -m experiments.bench_training --config=configs/bench_training.py

Expected: a table with one row a side (seconds a step, first step with compilation, peak memory
beyond weights, optimiser state and batch), the counted FLOPs of the step and the time that they
need at this machine's best matrix product. SmolLM2's shape with random weights, whole vocabulary; a
step's time does not depend on the weights. Without PyTorch the peer is left out.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.side = ""  # "" runs both, each in a process of its own; "ours" or "peer": this process
  config.peer = "tests.parity.training_peer"  # module; "" = none
  config.dtype = "float32"  # of products; with "bfloat16" PyTorch runs under its autocast
  config.repeats = 3  # processes a side, taking turns; medians are over them
  config.steps = 3  # timed in each, after one that compiles
  config.seed = 0
  config.out = "runs/bench_training.json"

  config.shape = shape = ml_collections.ConfigDict()
  shape.vocab_size = 49152
  shape.hidden_size = 576
  shape.intermediate_size = 1536
  shape.num_layers = 30
  shape.num_heads = 9
  shape.num_kv_heads = 3
  shape.head_dim = 64
  shape.rope_theta = 1e5
  shape.target_layer_ids = (1, 10, 19, 28)
  shape.draft_layers = 2
  shape.markov_rank = 64
  shape.proposal_len = 7
  shape.mask_token_id = 16
  shape.batch_size = 4
  shape.seq_len = 256
  shape.num_anchors = 32
  shape.num_prompt = 32
  return config
