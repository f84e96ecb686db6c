"""The drafters that DSpark is compared with, for SmolLM2-135M-Instruct: eagle3, mtp or medusa.

  python -m experiments.train_drafter --config=configs/smollm2_baselines.py:eagle3 \
      --config.data=data.jsonl --config.workdir=runs/smollm2_eagle3

Everything but the drafter and its loss is as in configs/smollm2_dspark.py. Losses are those of the
papers: EAGLE-3 a soft cross-entropy (the gradient of KL), 0.8^s at step s; Medusa a cross-entropy,
0.8^k for head k; MTP a cross-entropy.
"""

import ml_collections

KINDS = ("eagle3", "mtp", "medusa")


def get_config(kind: str = "eagle3"):
  if kind not in KINDS:
    raise ValueError(f"kind: found {kind!r}, expected one of {KINDS}")
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.data = "data.jsonl"  # or a directory of *.jsonl, as experiments/regenerate.py writes
  config.workdir = f"runs/smollm2_{kind}"  # checkpoints, logs, curves, the drafter
  config.start_drafter = ""  # directory of a drafter to train further
  config.max_len = 256  # tokens a sequence
  config.num_eval_rows = 16
  config.export_dtype = "bfloat16"

  config.drafter = drafter = ml_collections.ConfigDict()
  drafter.kind = kind
  drafter.proposal_len = 7
  drafter.draft_vocab_size = 8192
  if kind == "eagle3":
    drafter.target_layer_ids = (1, 8, 15, 21, 28)
  if kind != "medusa":
    drafter.qk_norm = False  # as the target

  config.train = train = ml_collections.ConfigDict()
  train.seed = 0
  train.batch_size = 4
  train.accumulation = 1
  train.num_anchors = 128  # of medusa; the others train on all positions
  train.max_minutes = 0.0
  train.log_every = 10
  train.checkpoint_every = 200
  train.eval_every = 200

  train.optimizer = optimizer = ml_collections.ConfigDict()
  optimizer.learning_rate = 1e-3
  optimizer.warmup_fraction = 0.04
  optimizer.max_steps = 3000

  train.loss = loss = ml_collections.ConfigDict()
  loss.kl_weight = 1.0 if kind == "eagle3" else 0.0
  loss.ce_weight = 0.0 if kind == "eagle3" else 1.0
  loss.tv_weight = 0.0
  loss.confidence_weight = 0.0
  loss.loss_decay = 4.481  # exp(-1 / 4.481) = 0.8
  return config
