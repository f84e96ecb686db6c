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
    _check_length(self.length)


@dataclasses.dataclass(frozen=True)
class ConfidenceThreshold:
  """Verifies drafts up to the first whose confidence is below `threshold` (0 = all of them).

  `length` bounds the drafts verified, None = the whole proposal.
  """
  threshold: float
  length: int | None = None

  def __post_init__(self):
    if self.length is not None:
      _check_length(self.length)
    if not 0.0 <= self.threshold <= 1.0:
      raise ValueError(
          f"confidence_threshold: found {self.threshold}, expected a number in [0, 1]")


Policy = FixedLength | ConfidenceThreshold


def max_verify_len(policy: Policy | None, proposal_len: int) -> int:
  """Returns the most drafts a policy can ever verify: the static width of the verify pass."""
  _check_policy(policy)
  if policy is None or policy.length is None:
    return proposal_len
  return min(policy.length, proposal_len)


def choose_verify_lens(policy: Policy | None, confidence_BxG: jax.Array) -> jax.Array:
  """Returns int32 [B] verify lengths in 0..G; no policy verifies every draft."""
  batch, proposal_len = confidence_BxG.shape
  length = max_verify_len(policy, proposal_len)
  if isinstance(policy, ConfidenceThreshold):
    is_kept_BxG = jnp.cumprod((confidence_BxG >= policy.threshold).astype(jnp.int32), axis=1)
    return is_kept_BxG[:, :length].sum(axis=1, dtype=jnp.int32)
  return jnp.full((batch,), length, jnp.int32)


def _check_length(length) -> None:
  if not isinstance(length, int) or length < 0:
    raise ValueError(f"length: found {length!r}, expected an integer >= 0")


def _check_policy(policy) -> None:
  if policy is not None and not isinstance(policy, Policy):
    raise TypeError(f"policy: found {policy!r}, expected FixedLength, ConfidenceThreshold or None")
