"""Kernels against their references and the naive forms, on the device that is here.

  python -m experiments.bench_kernels --config=configs/bench_kernels.py

On CPU there are no kernels: the reference is compared with the naive form, at smaller sizes. Takes
about a minute there.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.family = ""  # part of a family's name; "" = all
  config.repeats = 11
  config.copy_bytes = 1 << 28  # of the array whose copy is the yardstick
  config.out = "runs/bench_kernels.json"
  return config
