"""Tables: aligned for a terminal, or as CSV."""

import csv
import pathlib
from typing import Any, Mapping, Sequence


def format_rows(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
  """Returns lines with aligned columns; those of `left` (negative = from the end) are flushed left.

  The first row is the header; all rows have as many cells.
  """
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  is_left = {i % len(widths) for i in left}
  return "\n".join("  ".join(cell.ljust(w) if i in is_left else cell.rjust(w)
                             for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
                   for row in rows)


def show(value: float | None, digits: int = 2) -> str:
  """Returns a number as text, - for None."""
  return "-" if value is None else f"{value:.{digits}f}"


def write_csv(path: str | pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> pathlib.Path:
  """Writes rows of equal fields; None becomes an empty cell."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("w", newline="") as stream:
    writer = csv.DictWriter(stream, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
  return path
