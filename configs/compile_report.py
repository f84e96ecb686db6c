"""What four generations of TPU make of the kernels and of a whole round, by their own compiler.

  python -m experiments.compile_report --config=configs/compile_report.py
  python -m experiments.compile_report --config=configs/compile_report.py --config.case=rejection

Needs the PyPI package libtpu and no TPU. On 2 cores 1 to 30 s a kernel and target, half a minute
for the step of 36 layers. Bytes of a kernel are its own cost estimate, which follows from its
blocks; everything around it is the compiler's count.
"""

import ml_collections


def get_config():
  config = ml_collections.ConfigDict()
  config.case = ""  # part of a case's name; "" = all
  config.target = ""  # part of a target's name; "" = all
  config.out = "runs/compile_report.json"
  config.is_fresh = False  # compile again what the file has
  return config
