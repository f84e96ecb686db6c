"""DSpark drafter for SmolLM2-135M-Instruct, sized for a 2-core CPU.

  python -m experiments.train_drafter --config=configs/smollm2_dspark.py \
      --config.data=data.jsonl --config.workdir=runs/smollm2
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.data = "data.jsonl"  # or a directory of *.jsonl, as experiments/regenerate.py writes
  config.workdir = "runs/smollm2"  # checkpoints, logs, curves, the drafter
  config.start_drafter = ""  # directory of a drafter to train further
  config.max_len = 256  # tokens a sequence
  config.num_eval_rows = 16
  config.export_dtype = "bfloat16"

  config.drafter = drafter = ml_collections.ConfigDict()
  drafter.num_layers = 2
  drafter.proposal_len = 7
  drafter.markov_rank = 64
  drafter.draft_vocab_size = 8192
  drafter.copy_ngram = 4
  drafter.target_layer_ids = (1, 10, 19, 28)
  drafter.mask_token_id = 16  # <empty_output>, in no chat
  drafter.qk_norm = False  # the target has none, and a warm start copies its attention

  config.warm_start = warm_start = ml_collections.ConfigDict()
  warm_start.layer_ids = (28, 29)
  warm_start.use_bigrams = True
  warm_start.bigram_prefix = (1, 520, 9531, 198)  # <|im_start|>assistant\n
  warm_start.output_scale = 0.2

  config.train = train = ml_collections.ConfigDict()
  train.seed = 0
  train.batch_size = 4
  train.accumulation = 1
  train.num_anchors = 128
  train.dtype = "float32"  # of the drafter's products; see README on bfloat16
  train.target_dtype = "float32"
  train.max_minutes = 0.0
  train.log_every = 10
  train.checkpoint_every = 200
  train.eval_every = 200

  train.optimizer = optimizer = ml_collections.ConfigDict()
  optimizer.learning_rate = 1e-3
  optimizer.warmup_fraction = 0.04
  optimizer.max_steps = 3000

  train.loss = loss = ml_collections.ConfigDict()
  loss.kl_weight = 0.0
  loss.ce_weight = 0.1
  loss.tv_weight = 0.9
  loss.confidence_weight = 1.0
  loss.loss_decay = 7.0
  loss.lk_weight = 0.0  # acceptance itself (LK)
  loss.lk_form = "lambda"  # or "alpha"
  loss.lk_eta = 3.0
  loss.weighting = "decay"  # or "dpace": weights from the drafter's own probabilities
  loss.dpace_smoothing = 0.5
  return config
