"""DSpark and its rivals: trained on the same rows and budget, compared on the same prompts.

  python -m experiments.compare_drafters --config=configs/compare_drafters.py \
      --config.data=data.jsonl --config.workdir=runs/compare

Expected, in `workdir`: table.csv (the paper's table 1: tau by domain with intervals over prompts,
tokens/s, milliseconds of a round, parameters; also printed), and for each of `figures` a CSV and a
PNG: acceptance by position (figure 2), depth (3), proposal length and latency (4), threshold (5),
share of the sequential head. The whole list trains 17 drafters; `--config.figures='("table",)'`
trains five, `--config.drafters` chooses among `recipes`. Stopped and started again, it goes on.

Recipes share rows, their order, sequences a step, steps and proposal length; losses are each
paper's own. DSpark and DFlash start from the same copied target layers; `dspark_plus` adds what is
ours, a bigram table and a copy head.
"""

import ml_collections

from configs import smollm2_baselines, smollm2_dspark

SECTIONS = ("drafter", "warm_start", "train")


def get_config():
  config = ml_collections.ConfigDict()
  config.target = "smollm2-135m-instruct"
  config.data = "data.jsonl"  # or a directory of *.jsonl, as experiments/regenerate.py writes
  config.workdir = "runs/compare_drafters"
  config.max_minutes = 0.0  # of this start; 0 = until it is finished
  config.compilation_cache = ""  # directory of JAX's persistent cache

  # Domain -> JSONL file or directory with `turns` or `messages`; "" = built-in held-out prompts.
  config.prompts = ml_collections.ConfigDict(dict(arithmetic="", code="", chat=""))
  config.num_prompts = 16  # of each domain (of each file, where a domain is a directory); 0 = all
  config.max_new_tokens = 128
  config.batch_size = 1
  config.dtype = "float32"  # of decoding
  config.seed = 0  # of draws, built-in prompts and intervals

  config.laws = ("greedy", "recommended")  # of the table: T = 0, and what the makers recommend
  config.drafters = ("dspark", "dflash", "eagle3", "mtp", "medusa")  # some of `recipes`
  config.untrained = ("prompt-lookup",)  # names or directories, as `draft_model` of DSpark
  config.lead_of = "dspark"  # whose lead over the others is reported
  config.figures = ("table", "positions", "depth", "length", "thresholds", "head_share")
  config.study_law = "greedy"  # of the figures
  config.studied = ("dspark", "dflash")  # recipes varied in depth and length; leads of the first
  config.depths = (1, 2, 3, 5)
  config.lengths = (4, 7, 10, 15)
  config.thresholds = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
  config.timing = ml_collections.ConfigDict(dict(context_tokens=128, repeats=20))

  config.budget = budget = ml_collections.ConfigDict()
  budget.max_steps = 1500
  budget.batch_size = 4  # sequences; x accumulation x max_len positions a step
  budget.accumulation = 1
  budget.max_len = 256
  budget.num_eval_rows = 16
  budget.checkpoint_every = 100
  budget.dtype = "float32"  # of products in training; bfloat16 takes 0.6 of the time on our CPU
  budget.seed = 0  # of parameters, and of the rows' order
  config.export_dtype = "float32"

  config.recipes = recipes = ml_collections.ConfigDict()
  recipes.dspark = dspark = make_dspark()
  recipes.dspark_plus = take_sections(smollm2_dspark.get_config())
  recipes.dflash = dflash = make_dspark()
  dflash.drafter.markov_rank = 0
  dflash.drafter.enable_confidence_head = False
  dflash.train.loss.update(ce_weight=1.0, tv_weight=0.0, confidence_weight=0.0)
  for kind in ("gated", "rnn"):
    recipes[f"dspark_{kind}"] = ml_collections.ConfigDict(dspark.to_dict())
    recipes[f"dspark_{kind}"].drafter.markov_head_type = kind
  for kind in smollm2_baselines.KINDS:
    recipes[kind] = take_sections(smollm2_baselines.get_config(kind))
  return config


def make_dspark():
  """The paper's DSpark, without this project's additions."""
  recipe = take_sections(smollm2_dspark.get_config())
  recipe.drafter.copy_ngram = 0
  recipe.drafter.markov_head_type = "vanilla"
  recipe.warm_start.use_bigrams = False
  return recipe


def take_sections(config):
  return ml_collections.ConfigDict({name: config[name].to_dict() for name in SECTIONS
                                    if name in config})
