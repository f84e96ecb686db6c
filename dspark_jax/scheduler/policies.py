"""Policies: how many drafts of each request to verify this round.

A policy is a frozen dataclass; `choose_verify_lens` is pure and runs inside the jitted step. The
decision on draft k may use confidences up to k only, never the drafted token k itself or anything
after it: that is what keeps the output law exact (paper section 3.2.2, appendix A).
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class FixedLength:
  """Verifies the first `length` drafts of every request; 0 is plain decoding."""
  length: int

  def __post_init__(self):
    if self.length < 0:
      raise ValueError(f"length: found {self.length}, expected an integer >= 0")


@dataclasses.dataclass(frozen=True)
class ConfidenceThreshold:
  """Verifies drafts up to the first whose confidence is below `threshold` (0 = all of them)."""
  threshold: float

  def __post_init__(self):
    if not 0.0 <= self.threshold <= 1.0:
      raise ValueError(
          f"confidence_threshold: found {self.threshold}, expected a number in [0, 1]")


def choose_verify_lens(policy: FixedLength | ConfidenceThreshold,
                       confidence_BxG: jax.Array) -> jax.Array:
  """Returns int32 [B] verify lengths in 0..G."""
  batch, proposal_len = confidence_BxG.shape
  if isinstance(policy, FixedLength):
    return jnp.full((batch,), min(policy.length, proposal_len), jnp.int32)
  if isinstance(policy, ConfidenceThreshold):
    is_kept_BxG = jnp.cumprod((confidence_BxG >= policy.threshold).astype(jnp.int32), axis=1)
    return is_kept_BxG.sum(axis=1, dtype=jnp.int32)
  raise TypeError(f"policy: found {type(policy).__name__}, expected FixedLength or "
                  "ConfidenceThreshold")
