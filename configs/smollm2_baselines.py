"""The drafters that DSpark is compared with, for SmolLM2-135M-Instruct: eagle3, mtp or medusa.

  python -m experiments.train_drafter --config=configs/smollm2_baselines.py:eagle3 \
      --config.data=data.jsonl --config.workdir=runs/smollm2_eagle3

Everything but the drafter and its loss is as in configs/smollm2_dspark.py. Losses are those of the
papers: EAGLE-3 a soft cross-entropy (the gradient of KL), 0.8^s at step s; Medusa a cross-entropy,
0.8^k for head k; MTP a cross-entropy.
"""

import ml_collections

from configs import smollm2_dspark

KINDS = ("eagle3", "mtp", "medusa")


def get_config(kind: str = "eagle3"):
  if kind not in KINDS:
    raise ValueError(f"kind: found {kind!r}, expected one of {KINDS}")
  config = smollm2_dspark.get_config()
  config.workdir = f"runs/smollm2_{kind}"
  del config.warm_start  # from the target's layers: DSpark's alone

  config.drafter = drafter = ml_collections.ConfigDict()
  drafter.kind = kind
  drafter.proposal_len = 7
  drafter.draft_vocab_size = 8192
  if kind == "eagle3":
    drafter.target_layer_ids = (1, 8, 15, 21, 28)
  if kind != "medusa":
    drafter.qk_norm = False  # as the target

  # num_anchors is Medusa's alone; the others train on all positions.
  loss = config.train.loss
  loss.kl_weight = 1.0 if kind == "eagle3" else 0.0
  loss.ce_weight = 0.0 if kind == "eagle3" else 1.0
  loss.tv_weight = 0.0
  loss.confidence_weight = 0.0
  loss.loss_decay = 4.481  # exp(-1 / 4.481) = 0.8
  return config
