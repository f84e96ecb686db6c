"""The house rules about imports: they go down only, and some names stay in one place.

`FLOORS` is the whole map. A unit is a folder of `dspark_jax`, or one of its loose files. A file may
import units on lower floors and its own unit; the loose files of one floor count as one unit,
folders of one floor never import each other.
"""

import ast
import importlib
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

FLOORS = {
    "sampling": 1, "layers": 1, "kv_cache": 1, "types": 1, "ladder": 1, "host_memory": 1,
    "target": 2, "drafter": 2,
    "scheduler": 3, "verification": 3, "data": 3, "metrics": 3,
    "decode": 4, "training": 4,
    "serving": 5, "interop": 5, "checkpoints": 5,
    "api": 6, "infer": 6, "__init__": 6,
}
LOOSE_FILES = {"sampling", "layers", "kv_cache", "types", "ladder", "host_memory", "checkpoints",
               "api", "infer", "__init__"}
# Units that may not use all that lies below them: unit -> highest floor it may import.
CEILINGS = {"scheduler": 1}  # sees arrays only

OUTSIDE_THE_LIBRARY = ("ml_collections", "configs", "experiments", "tests", "absl.flags",
                       "absl.app")
# Tensor names of checkpoints that others wrote. Our own parameters are trees, without dotted names.
FOREIGN_TENSOR_NAME = re.compile(
    r"\bmodel\.layers\b|\bself_attn\.\w|\bmlp\.(gate|up|down)_proj|_proj\.(weight|bias)\b"
    r"|\bembed_tokens\.weight|\blm_head\.weight|layernorm\.weight|\b(hidden_)?norm\.weight"
    r"|\bblk\.|\btoken_embd\b|\battn_(q|k|v|output)\b|\bffn_(gate|up|down)\b"
    r"|\bmarkov_head\.|\bconfidence_head\.|\bfc\.weight")


def imported_names(tree: ast.AST, module: str, *, is_package: bool) -> list[str]:
  """Returns the dotted name of everything imported anywhere in a module, functions included."""
  names = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        parts = module.split(".")
        kept = parts[:len(parts) - node.level + is_package]
        base = ".".join(kept + ([node.module] if node.module else []))
      names += [f"{base}.{alias.name}" for alias in node.names]
    elif (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
          and isinstance(node.args[0].value, str)
          and getattr(node.func, "attr", getattr(node.func, "id", None))
          in ("import_module", "__import__", "importorskip")):
      names.append(node.args[0].value)
  return names


def is_under(name: str, package: str) -> bool:
  return name == package or name.startswith(package + ".")


def find_breaches(path: str, source: str) -> list[str]:
  """Returns the breaches of one file, each one line; `path` is relative to the checkout."""
  parts = path.removesuffix(".py").split("/")
  is_package = parts[-1] == "__init__" and len(parts) > 1
  module = ".".join(parts[:-1] if is_package else parts)
  tree = ast.parse(source, path)
  names = imported_names(tree, module, is_package=is_package)
  breaches = []
  if not path.startswith("tests/parity/"):
    breaches += [f"imports {n}: torch is for tests/parity alone" for n in names
                 if is_under(n, "torch")]
  if parts[0] == "pallas_kernels":
    breaches += [f"imports {n}: kernels use jax, numpy and themselves" for n in names
                 if n.split(".")[0] not in {"jax", "numpy", "pallas_kernels"}
                 | sys.stdlib_module_names]
  if parts[0] == "dspark_jax":
    breaches += _library_breaches(parts[1], names)
  if parts[0] != "tests" and parts[:2] != ["dspark_jax", "interop"]:
    breaches += [f"contains {text!r}: foreign tensor names are for dspark_jax/interop alone"
                 for text in _strings(tree) if FOREIGN_TENSOR_NAME.search(text)]
  if path == "tests/oracles.py":
    breaches += [f"imports {n}: an oracle uses nothing of ours" for n in names
                 if is_under(n, "dspark_jax") or is_under(n, "pallas_kernels")]
  return [f"{path} {breach}" for breach in breaches]


def _library_breaches(unit: str, names: list[str]) -> list[str]:
  if unit not in FLOORS:
    return [f"is in no floor: put {unit!r} into FLOORS of {pathlib.Path(__file__).name}"]
  breaches = []
  for name in names:
    if any(is_under(name, outside) for outside in OUTSIDE_THE_LIBRARY) or name == "absl":
      breaches.append(f"imports {name}: flags and configs stay outside the library")
    if not is_under(name, "dspark_jax"):
      continue
    other = (name.split(".") + ["__init__"])[1]
    other = other if other in FLOORS else "__init__"  # a name that the package itself exports
    limit = CEILINGS.get(unit, FLOORS[unit])
    is_home = other == unit or (FLOORS[other] == FLOORS[unit] and {unit, other} <= LOOSE_FILES)
    if not is_home and (FLOORS[other] > limit or FLOORS[other] == FLOORS[unit]):
      breaches.append(f"imports {name}: {unit} (floor {FLOORS[unit]}) must not see {other} "
                      f"(floor {FLOORS[other]})")
  return breaches


def _strings(tree: ast.AST) -> list[str]:
  """Returns the string constants of a module but its docstrings."""
  docstrings = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
      docstrings.add(id(node.value))
  return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)
          and isinstance(node.value, str) and id(node) not in docstrings]


def python_files() -> list[str]:
  files = [ROOT / "setup.py"]
  for folder in ("dspark_jax", "pallas_kernels", "experiments", "configs", "tests"):
    files += (ROOT / folder).rglob("*.py")
  return sorted(str(f.relative_to(ROOT)) for f in files if f.is_file())


def notebook_source(path: pathlib.Path) -> str:
  """Returns the code cells of a notebook as one module, without shell and magic lines."""
  cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
  lines = [line for cell in cells if cell["cell_type"] == "code"
           for line in "".join(cell["source"]).splitlines() + [""]]
  return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%")))


def test_every_file_keeps_the_rules():
  files = python_files()
  assert len(files) > 40  # the walk found the project
  breaches = [breach for path in files
              for breach in find_breaches(path, (ROOT / path).read_text(encoding="utf-8"))]
  assert not breaches, "\n" + "\n".join(breaches)


def test_notebooks_keep_the_rules():
  for path in sorted((ROOT / "colab").glob("*.ipynb")):
    breaches = find_breaches(f"colab/{path.stem}.py", notebook_source(path))
    assert not breaches, "\n" + "\n".join(breaches)


PLANTED = [
    ("pallas_kernels/x.py", "from dspark_jax import layers", "kernels use"),
    ("pallas_kernels/x.py", "import flax.linen as nn", "kernels use"),
    ("pallas_kernels/family/x.py", "from ...dspark_jax import layers", "kernels use"),
    ("dspark_jax/layers.py", "from dspark_jax.target.config import TransformerConfig", "floor 2"),
    ("dspark_jax/layers.py", "def f():\n  from dspark_jax import target", "floor 2"),
    ("dspark_jax/drafter/x.py", "from dspark_jax.target import config", "must not see target"),
    ("dspark_jax/drafter/x.py", "from ..target import config", "must not see target"),
    ("dspark_jax/drafter/x.py", "from .. import target", "must not see target"),
    ("dspark_jax/drafter/__init__.py", "from ..target import config", "must not see target"),
    ("dspark_jax/scheduler/x.py", "import dspark_jax.verification.accept", "verification"),
    ("dspark_jax/scheduler/x.py", "from dspark_jax.drafter.config import DrafterConfig", "drafter"),
    ("dspark_jax/training/x.py", "from dspark_jax.decode import loop", "must not see decode"),
    ("dspark_jax/serving/x.py", "from dspark_jax.interop.load import load_target", "interop"),
    ("dspark_jax/checkpoints.py", "from dspark_jax.interop import hf", "must not see interop"),
    ("dspark_jax/decode/x.py", "from dspark_jax import DSpark", "must not see __init__"),
    ("dspark_jax/decode/x.py", "import dspark_jax", "must not see __init__"),
    ("dspark_jax/decode/x.py", "import importlib\nimportlib.import_module('dspark_jax.api')",
     "must not see api"),
    ("dspark_jax/novelty/x.py", "", "in no floor"),
    ("dspark_jax/infer.py", "from absl import flags", "outside the library"),
    ("dspark_jax/infer.py", "import absl.app", "outside the library"),
    ("dspark_jax/api.py", "from ml_collections import ConfigDict", "outside the library"),
    ("dspark_jax/api.py", "from configs import default", "outside the library"),
    ("dspark_jax/api.py", "import experiments.quickstart", "outside the library"),
    ("dspark_jax/api.py", "import torch", "torch"),
    ("tests/target/x_test.py", "def f():\n  import torch.nn", "torch"),
    ("tests/x_test.py", "import pytest\ntorch = pytest.importorskip('torch')", "torch"),
    ("experiments/x.py", "from torch import nn", "torch"),
    ("dspark_jax/target/x.py", "name = 'self_attn.q_proj.weight'", "foreign tensor"),
    ("dspark_jax/target/x.py", "name = f'model.layers.{i}.x'", "foreign tensor"),
    ("dspark_jax/drafter/x.py", "name = 'markov_head.markov_w1.weight'", "foreign tensor"),
    ("experiments/x.py", "name = f'blk.{i}.attn_norm'", "foreign tensor"),
    ("tests/oracles.py", "from dspark_jax import sampling", "nothing of ours"),
]


@pytest.mark.parametrize("path, source, expected", PLANTED)
def test_catches_a_planted_breach(path, source, expected):
  breaches = find_breaches(path, source)
  assert len(breaches) == 1 and expected in breaches[0], breaches


ALLOWED = [
    ("pallas_kernels/family/api.py", "import functools\nfrom jax.experimental import pallas\n"
     "import numpy as np\nfrom pallas_kernels import dispatch\nfrom . import reference"),
    ("dspark_jax/kv_cache.py", "from dspark_jax import layers\n"
     "from dspark_jax.types import Verdict"),
    ("dspark_jax/drafter/x.py", "from dspark_jax.drafter.config import DrafterConfig\n"
     "from dspark_jax import layers, sampling\nfrom pallas_kernels import counter_rng"),
    ("dspark_jax/verification/x.py", "from dspark_jax.target.transformer import Transformer"),
    ("dspark_jax/api.py", "from dspark_jax.interop.load import load_target\n"
     "from absl import logging\nimport dspark_jax"),
    ("dspark_jax/interop/x.py", "name = f'model.layers.{i}.self_attn.q_proj.weight'"),
    ("dspark_jax/target/x.py", "'''Reads model.layers elsewhere.'''\nname = 'q_proj'"),
    ("tests/parity/x_test.py", "import torch\nfrom dspark_jax import api"),
    ("tests/x_test.py", "name = 'model.layers.0.self_attn.q_proj.weight'"),
    ("experiments/x.py", "from absl import app, flags\nfrom ml_collections import config_flags\n"
     "import torchless"),
]


@pytest.mark.parametrize("path, source", ALLOWED)
def test_allows_what_the_rules_allow(path, source):
  assert find_breaches(path, source) == []


def test_notebook_source_drops_shell_lines(tmp_path):
  cells = [dict(cell_type="markdown", source=["import torch"]),
           dict(cell_type="code", source=["!pip install torch\n", "%matplotlib inline\n"]),
           dict(cell_type="code", source=["import torch\n"])]
  path = tmp_path / "x.ipynb"
  path.write_text(json.dumps(dict(cells=cells)))
  assert len(find_breaches("colab/x.py", notebook_source(path))) == 1


# Import names that differ from the name a package is installed by.
_IMPORT_NAMES = {"absl_py": "absl", "orbax_checkpoint": "orbax"}


def declared_imports(*lists: str) -> set[str]:
  """Returns the import names of the requirement lists of setup.py with the given names."""
  tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
  found = {target.id: ast.literal_eval(node.value) for node in tree.body
           if isinstance(node, ast.Assign) for target in node.targets
           if isinstance(node.value, ast.List)}
  names = [re.match(r"[\w-]+", line).group().replace("-", "_") for key in lists
           for line in found[key]]
  return {_IMPORT_NAMES.get(name, name) for name in names}


def test_every_package_that_the_library_imports_is_declared():
  declared = declared_imports("_LIBRARY")
  known = declared | sys.stdlib_module_names | {"dspark_jax", "pallas_kernels", "experiments",
                                                "configs"}
  used = {}
  for path in python_files():
    if path.startswith("tests/") or path == "setup.py":
      continue
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    module = path.removesuffix(".py").replace("/", ".")
    for name in imported_names(tree, module, is_package=False):
      used.setdefault(name.split(".")[0], path)
  missing = {name: path for name, path in used.items() if name not in known}
  assert not missing, f"setup.py does not declare: {missing}"
  assert {"jax", "flax", "optax", "numpy"} <= set(used)


def test_import_is_light():
  code = ("import sys, dspark_jax, pallas_kernels; "
          "print([m for m in ('jax', 'flax', 'numpy', 'transformers') if m in sys.modules])")
  out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                       check=True)
  assert out.stdout.strip() == "[]"


@pytest.mark.smoke
def test_every_exported_name_exists():
  package = importlib.import_module("dspark_jax")
  assert {"DSpark", "load_target"} <= set(package.__all__)
  for name in package.__all__:
    assert callable(getattr(package, name)), name
    assert name in dir(package)
  with pytest.raises(AttributeError, match="has no attribute 'DSparc'"):
    package.DSparc  # noqa: B018
