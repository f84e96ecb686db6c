"""The main job: SmolLM2 decoded with and without its drafter, then a small drafter trained.

  python -m experiments.quickstart

Expected, in under 10 minutes on 2 CPU cores: a table of tokens/s, speed-up, tau, verify rate and
accept rate by position for plain decoding, DSpark with a fixed length and with a confidence
threshold, all greedy answers identical; two plots; then a training run whose tau_prob rises from
1. Everything it writes is in `workdir`.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.draft_model = "auto"  # "auto" = the one shipped for the target, or a directory
  config.workdir = "runs/quickstart"
  config.compilation_cache = ""  # directory of JAX's persistent cache: a second run starts faster
  config.seed = 0

  config.num_prompts = 4  # held-out ones, of each of code, arithmetic and chat
  config.max_prompt_tokens = 128  # longer ones are left out, so that few shapes are compiled
  config.max_new_tokens = 96
  config.repeats = 1
  config.max_draft_len = 3  # of 7 that it can: with so small a target more rows cost too much
  config.confidence_threshold = 0.3

  # The small drafter: text to learn from, and the run.
  config.is_training = True
  config.num_train_prompts = 160
  config.answers = answers = ml_collections.ConfigDict()
  answers.batch_size = 32
  answers.max_new_tokens = 64
  answers.max_len = 128
  config.training = training = ml_collections.ConfigDict()
  training.max_len = 128
  training.num_eval_rows = 16

  training.drafter = drafter = ml_collections.ConfigDict()
  drafter.num_layers = 1
  drafter.proposal_len = 5
  drafter.markov_rank = 32
  drafter.draft_vocab_size = 2048
  drafter.copy_ngram = 4
  drafter.target_layer_ids = (1, 15, 28)
  drafter.mask_token_id = 16  # <empty_output>, in no chat
  drafter.qk_norm = False

  training.warm_start = warm_start = ml_collections.ConfigDict()
  warm_start.layer_ids = (29,)
  warm_start.use_bigrams = True
  warm_start.bigram_prefix = (1, 520, 9531, 198)  # <|im_start|>assistant\n
  warm_start.output_scale = 0.2

  training.train = train = ml_collections.ConfigDict()
  train.batch_size = 4
  train.num_anchors = 64
  train.max_minutes = 3.0
  train.log_every = 5
  train.eval_every = 15
  train.checkpoint_every = 0

  train.optimizer = optimizer = ml_collections.ConfigDict()
  optimizer.learning_rate = 1e-3
  optimizer.max_steps = 90

  train.loss = loss = ml_collections.ConfigDict()
  loss.kl_weight = 0.5
  loss.ce_weight = 0.0
  loss.tv_weight = 0.5
  return config
