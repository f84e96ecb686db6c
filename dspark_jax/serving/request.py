"""One request of the engine: what was asked, how far it has come, and when."""

import dataclasses
from typing import Any, Callable

FINISH_REASONS = ("stop", "length", "cancelled", "deadline", "error")


@dataclasses.dataclass(eq=False)
class Request:
  """Handle of a request; the engine fills it in while it runs.

  Attributes:
    id: number in order of submission.
    prompt: token ids.
    max_new_tokens: after the engine's `max_len` has been taken into account.
    sampling: SamplingParams of one row, NumPy arrays.
    stop_ids: ids that end the answer; the stop id itself is kept.
    arrival_s: when it came, by the engine's clock.
    deadline_s: by when it must be finished, by the engine's clock; None = no limit.
    on_tokens: called with (request, new token ids) as they come. The last call, and only that, has
      `request.is_done`; its tokens may be none.
    tokens: the answer so far.
    finish_reason: None while unfinished, else one of FINISH_REASONS.
    error: one line where that is "error".
    admitted_s, first_token_s, finished_s: by the engine's clock; None = not yet.
    num_rounds, num_verified, num_accepted: rounds, and drafts verified and accepted in them.
  """
  id: int
  prompt: tuple[int, ...]
  max_new_tokens: int
  sampling: Any
  stop_ids: tuple[int, ...]
  arrival_s: float
  deadline_s: float | None = None
  on_tokens: Callable[["Request", list[int]], None] | None = None
  tokens: list[int] = dataclasses.field(default_factory=list)
  finish_reason: str | None = None
  error: str | None = None
  admitted_s: float | None = None
  first_token_s: float | None = None
  finished_s: float | None = None
  num_rounds: int = 0
  num_verified: int = 0
  num_accepted: int = 0

  @property
  def is_done(self) -> bool:
    return self.finish_reason is not None
