"""The step curve as a text file: written by the profiler, read and edited by people.

  # dspark_jax step curve 3
  # device: cpu (2 cores)
  # model: smollm2-135m-instruct 1f0c9a..
  ..
  batch  step    tokens  rows  ms
  4      draft   -       4     11.2
  4      verify  4       1     55.0

For each batch size one `verify` line a bucket, and one `draft` line for each number of rows above 1
that the buckets have: the time to draft one less. A round takes the sum of the two. Anything after
a # inside the table is a remark.
"""

import dataclasses
import pathlib
from typing import Mapping

from dspark_jax.ladder import Ladder, draft_lens
from dspark_jax.scheduler.step_curve import Timings

TITLE = "dspark_jax step curve 3"
IDENTITY = ("device", "model", "dtype", "versions")  # what a curve is a property of
COLUMNS = ("batch", "step", "tokens", "rows", "ms")


@dataclasses.dataclass(frozen=True)
class StepTable:
  """Timings by batch size, and where they hold.

  Attributes:
    about: `IDENTITY` and remarks of any other name.
    timings: batch size -> Timings.
  """
  about: Mapping[str, str]
  timings: Mapping[int, Timings]


def write_table(path: str | pathlib.Path, table: StepTable) -> pathlib.Path:
  """Writes a table, replacing the file in one step; makes the directory."""
  lines = [f"# {TITLE}"] + [f"# {name}: {value}" for name, value in table.about.items()]
  lines.append(_format(COLUMNS))
  for batch, timings in sorted(table.timings.items()):
    lines += [_format((batch, "draft", "-", num_drafts + 1, f"{ms:.4f}"))
              for num_drafts, ms in zip(draft_lens(timings.ladder), timings.draft_ms)]
    lines += [_format((batch, "verify", tokens, rows, f"{ms:.4f}"))
              for (tokens, rows), ms in zip(timings.ladder, timings.verify_ms)]
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_suffix(path.suffix + ".new")
  draft.write_text("\n".join(lines) + "\n")
  return draft.replace(path)


def read_table(path: str | pathlib.Path) -> StepTable:
  """Reads a table; FileNotFoundError, or ValueError naming the line that is not understood."""
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"{path}: not found; experiments/profile_step_curve.py writes it")
  about, draft_ms, buckets = {}, {}, {}
  lines = path.read_text().splitlines()
  if not lines or lines[0].lstrip("# ").strip() != TITLE:
    raise ValueError(f"{path}: line 1: found {lines[:1]}, expected '# {TITLE}'")
  for number, line in enumerate(lines[1:], start=2):
    if line.startswith("#"):
      name, _, value = line[1:].partition(":")
      about[name.strip()] = value.strip()
      continue
    cells = line.split("#")[0].split()
    if not cells or tuple(cells) == COLUMNS:
      continue
    try:
      batch, step, tokens, rows, ms = cells
      if step == "draft" and int(rows) - 1 not in draft_ms.get(int(batch), {}):
        draft_ms.setdefault(int(batch), {})[int(rows) - 1] = float(ms)
      elif step == "verify":
        buckets.setdefault(int(batch), []).append(((int(tokens), int(rows)), float(ms)))
      else:
        raise ValueError
    except ValueError:
      raise ValueError(f"{path}: line {number}: found {line.strip()!r}, expected "
                       f"{' '.join(COLUMNS)}, one draft line for each number of rows") from None
  timings = {}
  for batch, found in buckets.items():
    ladder, verify_ms = zip(*found)
    lens, drafting = draft_lens(ladder), draft_ms.get(batch, {})
    if set(drafting) != set(lens):
      raise ValueError(f"{path}: batch {batch}: found draft lines of "
                       f"{[n + 1 for n in sorted(drafting)]} rows, expected of "
                       f"{[n + 1 for n in lens]}")
    try:
      timings[batch] = Timings(ladder, verify_ms, tuple(drafting[n] for n in lens))
    except ValueError as e:
      raise ValueError(f"{path}: batch {batch}: {e}") from None
  return StepTable(about, timings)


def choose_timings(table: StepTable, *, about: Mapping[str, str], batch: int,
                   ladder: Ladder) -> Timings:
  """Returns the timings of a batch size.

  Raises ValueError naming the field where the table was measured for something else.
  """
  for name in IDENTITY:
    if table.about.get(name) != about[name]:
      raise ValueError(f"step curve: {name}: found {table.about.get(name)!r}, expected "
                       f"{about[name]!r}; measure anew with experiments/profile_step_curve.py")
  if batch not in table.timings:
    raise ValueError(f"step curve: batch: found {sorted(table.timings)}, expected {batch}")
  timings = table.timings[batch]
  if timings.ladder != tuple(ladder):
    raise ValueError(f"step curve: ladder of batch {batch}: found {timings.ladder}, expected "
                     f"{tuple(ladder)}")
  return timings


def _format(cells) -> str:
  return "  ".join(str(cell).ljust(width) for cell, width in zip(cells, (5, 6, 6, 4, 10))).rstrip()
