"""Acceptance of drafts: accepted length (tau), accept rate by position, verify rate."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Acceptance:
  """How far drafts carried, over any number of rounds.

  Attributes:
    num_rounds: rounds of drafting and verifying.
    accepted_len: tokens committed a round (tau); 0 without a round.
    verify_len: drafts verified a round; 0 without a round.
    accept_rate: for each draft position, accepted among verified drafts; None where none was
      verified. A draft counts as accepted only together with all before it.
    verify_rate: accepted among verified drafts of all positions; None without any.
  """
  num_rounds: int
  accepted_len: float
  verify_len: float
  accept_rate: list[float | None]
  verify_rate: float | None


def measure_acceptance(num_rounds_x, num_committed_x, *, num_verified_xG,
                       num_accepted_xG) -> Acceptance:
  """Pools counts over all leading dimensions, requests or runs: ratios of sums, not their mean.

  Args:
    num_rounds_x, num_committed_x: integers, rounds and the tokens committed by them.
    num_verified_xG, num_accepted_xG: integers, by draft position; G may be 0.
  """
  rounds, committed = int(np.sum(num_rounds_x)), int(np.sum(num_committed_x))
  verified_G, accepted_G = (
      np.sum(x, axis=tuple(range(np.ndim(x) - 1))) for x in (num_verified_xG, num_accepted_xG))
  if (accepted_G > verified_G).any():
    raise ValueError(f"num_accepted: found {accepted_G.tolist()}, expected at most num_verified = "
                     f"{verified_G.tolist()}")
  verified, accepted = int(verified_G.sum()), int(accepted_G.sum())
  return Acceptance(
      num_rounds=rounds, accepted_len=committed / max(rounds, 1),
      verify_len=verified / max(rounds, 1),
      accept_rate=[int(a) / int(v) if v else None for a, v in zip(accepted_G, verified_G)],
      verify_rate=accepted / verified if verified else None)
