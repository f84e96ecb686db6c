"""Which estimator of draft survival to schedule by: a study by replay, on the real model.

  python -m experiments.study_estimators --config=configs/study_estimators.py

Expected: for each number of concurrent requests one row an estimator (trained head, with STS, with
online STS, online logistic on the draft margin, on both): throughput lost against an oracle that
knows the outcome, AUROC and ECE over the whole stream and over each workload of it; JSON in `out`.
STS is fitted on the first workload alone, so the change of workload shows who adapts.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.draft_model = "auto"
  config.dtype = "float32"
  config.prompts = ""  # as in configs/calibrate.py
  config.fit_mix = "code=16"  # for offline STS
  config.stream_mix = "code=24,chat=24"  # replayed in this order
  config.num_requests = (1, 8)  # side by side
  config.half_life = 512.0  # records, of the online estimators
  config.temperature = 0.0
  config.max_new_tokens = 128
  config.batch_size = 8
  config.seed = 0
  config.out = "runs/study_estimators.json"
  return config
