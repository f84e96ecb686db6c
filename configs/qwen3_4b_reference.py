"""The public reference's recipe for Qwen3-4B: DSpark, or DFlash with `:dflash`.

  python -m experiments.train_drafter --config=configs/qwen3_4b_reference.py \
      --config.data=data/ --config.workdir=runs/qwen3_4b

The data are the target's own answers without thoughts: experiments/regenerate.py with
--config.enable_thinking=False, temperature 0.7, top_p 0.8, top_k 20; evaluate.py takes the same
switch.

Needs accelerators: 512 sequences of 4,096 tokens a step (batch_size x accumulation). After 10
epochs the paper reports accepted lengths of 6.11 on GSM8K, 5.38 on HumanEval and 3.64 on MT-Bench
for DSpark, and 5.40, 4.74 and 3.07 for DFlash (temperature 1, 7 drafts; arXiv 2607.05147, table 1).
"""

import ml_collections

from configs import smollm2_dspark

VARIANTS = ("dspark", "dflash")


def get_config(variant: str = "dspark"):
  if variant not in VARIANTS:
    raise ValueError(f"variant: found {variant!r}, expected one of {VARIANTS}")
  config = ml_collections.ConfigDict()
  config.target = "Qwen/Qwen3-4B"
  config.data = "data"  # a directory of *.jsonl, as experiments/regenerate.py writes
  config.workdir = "runs/qwen3_4b"  # checkpoints, logs, curves, the drafter
  config.start_drafter = ""  # directory of a drafter to train further
  config.max_len = 4096  # tokens a sequence
  config.num_eval_rows = 64
  config.export_dtype = "bfloat16"

  config.drafter = drafter = ml_collections.ConfigDict()
  drafter.num_layers = 5
  drafter.proposal_len = 7
  drafter.markov_rank = 256 if variant == "dspark" else 0
  drafter.markov_head_type = "vanilla"
  drafter.enable_confidence_head = variant == "dspark"
  drafter.copy_ngram = 0  # longest match of the copy head, which the paper has not
  drafter.target_layer_ids = (1, 9, 17, 25, 33)
  drafter.mask_token_id = 151669  # beyond the tokenizer's ids, inside the padded embedding

  config.warm_start = warm_start = ml_collections.ConfigDict()
  warm_start.layer_ids = ()  # fresh parameters

  config.train = train = ml_collections.ConfigDict()
  train.seed = 0
  train.batch_size = 8
  train.accumulation = 64
  train.num_anchors = 512
  train.dtype = "bfloat16"
  train.target_dtype = "bfloat16"
  train.log_every = 10
  train.checkpoint_every = 500
  train.eval_every = 500

  train.optimizer = optimizer = ml_collections.ConfigDict()
  optimizer.learning_rate = 6e-4
  optimizer.warmup_fraction = 0.04
  optimizer.max_steps = 20000  # set to 10 epochs of your data
  optimizer.weight_decay = 0.0
  optimizer.clip_norm = 1.0

  train.loss = loss = smollm2_dspark.get_config().train.loss  # options beyond the reference's: off
  loss.ce_weight = 0.1 if variant == "dspark" else 1.0
  loss.tv_weight = 0.9 if variant == "dspark" else 0.0
  loss.confidence_weight = 1.0 if variant == "dspark" else 0.0
  loss.loss_decay = 4.0  # the paper says proposal_len, the reference's configs 4.0
  return config
