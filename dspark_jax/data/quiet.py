"""Importing transformers without its advice to install torch, which this project does not need."""

import os


def import_transformers():
  """The transformers package; only its tokenizers are used, so no word about missing PyTorch."""
  name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
  before = os.environ.get(name)
  os.environ[name] = "1"
  try:
    import transformers
    _ = transformers.PreTrainedTokenizerFast  # loaded lazily: the advice comes with a first name
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before
  return transformers
