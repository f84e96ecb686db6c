"""Compiles kernels and the whole step for TPUs that are not here, and prints what it costs them.

  python -m experiments.compile_report --config=configs/compile_report.py

Each case is compiled in a process of its own; results are kept as they come, and a case that the
file has is not compiled again (`--config.is_fresh=True` does).
"""

import json
import pathlib

from experiments import _cli, _compile, _timing
from experiments._compile_cases import CASES, TARGETS

COLUMNS = ("target", "compile s", "temporaries MB", "accessed MB", "floor MB", "ratio", "GFLOP",
           "copies")


def format_row(row: dict) -> str:
  """One row of the table; MB are 10^6 bytes."""
  cells = (row["target"], f"{row['lower_s'] + row['compile_s']:.1f}",
           *(f"{row[key] / 1e6:.1f}" for key in ("temp_bytes", "bytes_accessed", "floor_bytes")),
           f"{row['ratio']:.3f}", f"{row['flops'] / 1e9:.2f}",
           "-" if row["copies"] is None else str(len(row["copies"])))
  return "| " + " | ".join(cells) + " |"


def report(config) -> list[dict]:
  """Compiles what the config names and the file lacks; prints one table a case."""
  names = [name for name in CASES if config.case in name]
  targets = [target for target in TARGETS if config.target in target]
  if not names or not targets:
    raise ValueError(f"case, target: found none with {config.case!r} and {config.target!r}, "
                     f"expected a part of {sorted(CASES)} and of {TARGETS}")
  if not _compile.has_compiler():
    raise FileNotFoundError("libtpu: not installed, expected `pip install libtpu`")
  path = _timing.prepare_directory(pathlib.Path(config.out).parent) / pathlib.Path(config.out).name
  rows = {} if config.is_fresh or not path.is_file() else {
      (row["case"], row["target"]): row for row in json.loads(path.read_text())}
  for name in names:
    print(f"\n{name}\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for target in (t for t in targets if t in CASES[name].targets):
      if (name, target) not in rows:
        rows[name, target] = _compile.compile_elsewhere(name, target)
        path.write_text(json.dumps(list(rows.values()), indent=1))
      print(format_row(rows[name, target]), flush=True)
  return list(rows.values())


if __name__ == "__main__":
  _cli.run(report, config="configs/compile_report.py")
