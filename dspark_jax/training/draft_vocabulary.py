"""Choosing a reduced draft vocabulary from the text a drafter is trained on."""

from typing import Iterable, Mapping

import numpy as np


def count_labels(rows: Iterable[Mapping[str, np.ndarray]], *, vocab_size: int) -> np.ndarray:
  """Returns how often each id occurs where the loss mask is set, int64 [V]."""
  counts_V = np.zeros(vocab_size, np.int64)
  for row in rows:
    labels = np.asarray(row["input_ids"])[np.asarray(row["loss_mask"], bool)]
    counts_V += np.bincount(labels, minlength=vocab_size)
  return counts_V


def choose_draft_ids(counts_V: np.ndarray, *, size: int, always: Iterable[int] = ()) -> np.ndarray:
  """Returns the `size` most frequent target ids, `always` among them, sorted: int32 [Vd].

  Ties go to the lowest id: where counts are 0, that is the tokenizer's own order of frequency.

  Raises:
    ValueError: size outside 1..V, or fewer places than `always` has ids.
  """
  counts_V = np.asarray(counts_V).astype(np.float64)
  always = sorted(set(int(i) for i in always))
  if not max(len(always), 1) <= size <= len(counts_V):
    raise ValueError(f"draft_vocab_size: found {size}, expected {max(len(always), 1)}.."
                     f"{len(counts_V)}")
  counts_V[always] = np.inf
  order_V = np.argsort(-counts_V, kind="stable")
  return np.sort(order_V[:size]).astype(np.int32)
