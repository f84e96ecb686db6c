"""DSpark speculative decoding in JAX.

Data flow of one round (`decode/step.py` is the table of contents):

  tokens -> target -> features -> drafter.backbone -> sequential_head -> confidence_head ->
  scheduler.survival -> scheduler.policy -> verification.pack -> verify -> accept -> commit ->
  next anchor

Names below are loaded on first use, so that `import dspark_jax` costs nothing.
"""

import importlib

_HOMES = {
    "DSpark": "dspark_jax.api",
    "SamplingParams": "dspark_jax.sampling",
    "load_drafter": "dspark_jax.interop.drafters",
    "load_target": "dspark_jax.interop.load",
    "save_drafter": "dspark_jax.interop.drafters",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
  if name not in _HOMES:
    raise AttributeError(f"module 'dspark_jax' has no attribute {name!r}; found in it: {__all__}")
  value = getattr(importlib.import_module(_HOMES[name]), name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted(set(globals()) | set(__all__))
