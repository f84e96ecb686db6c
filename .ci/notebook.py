"""Runs a notebook at a small setting: python .ci/notebook.py colab/quickstart.ipynb

The notebook says itself what small means. Its cell tagged `parameters` assigns the settings; the
same cell's metadata has `"small": {"setting": value}`, and those values replace the assigned ones.
Cells tagged `colab` (installation) are left out. Refused: stored outputs, and functions or classes
defined in a cell, for they belong into the library.
"""

import ast
import pathlib
import sys

import nbclient
import nbformat


def tags_of(cell) -> list[str]:
  return cell.metadata.get("tags", [])


def check(notebook) -> None:
  """Raises ValueError for what must not be committed."""
  for i, cell in enumerate(notebook.cells):
    if cell.cell_type != "code":
      continue
    if cell.outputs or cell.execution_count is not None:
      raise ValueError(f"cell {i}: found stored outputs, expected them stripped")
    if "colab" in tags_of(cell):
      continue
    for node in ast.walk(ast.parse(cell.source)):
      if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        raise ValueError(f"cell {i}: found a definition of {node.name}, expected calls only")


def make_small(notebook) -> None:
  """Leaves out installation; puts the small settings after the cell of parameters."""
  notebook.cells = [cell for cell in notebook.cells if "colab" not in tags_of(cell)]
  places = [i for i, cell in enumerate(notebook.cells) if "parameters" in tags_of(cell)]
  if len(places) != 1:
    raise ValueError(f"found {len(places)} cells tagged 'parameters', expected 1")
  cell = notebook.cells[places[0]]
  assigned = {target.id for node in ast.parse(cell.source).body if isinstance(node, ast.Assign)
              for target in node.targets if isinstance(target, ast.Name)}
  small = cell.metadata.get("small", {})
  if not small or set(small) - assigned:
    raise ValueError(f"metadata 'small': found {sorted(small)}, "
                     f"expected some of {sorted(assigned)}")
  lines = [f"{name} = {value!r}" for name, value in small.items()]
  notebook.cells.insert(places[0] + 1, nbformat.v4.new_code_cell("\n".join(lines)))


def main(path: pathlib.Path) -> None:
  notebook = nbformat.read(path, as_version=4)
  check(notebook)
  make_small(notebook)
  nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
  ran = sum(cell.cell_type == "code" for cell in notebook.cells)
  print(f"{path}: {ran} cells ran")


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
