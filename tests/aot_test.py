"""Every kernel, and a round of a Qwen3-4B-shaped pair, compiled by the TPUs' own compiler.

Interpret mode accepts what TPUs refuse, so only this shows that the kernels exist there. No TPU is
needed, only the PyPI package libtpu. CI compiles the cases' `ci_targets`; the step of all 36 layers
and every target are `experiments/compile_report.py`'s.
"""

import os

import pytest

from experiments import _compile
from experiments._compile_cases import CASES, TARGETS

PAIRS = [(case.name, target) for case in CASES.values() for target in case.ci_targets]


@pytest.fixture(scope="module")
def compiler():
  """Skips without libtpu, except in CI, where a skip would hide that nothing was proven."""
  if not _compile.has_compiler():
    assert "DSPARK_REQUIRE_AOT" not in os.environ, "libtpu is missing where AOT tests are required"
    pytest.skip("libtpu is not installed")


@pytest.mark.parametrize("name, target", PAIRS, ids=[f"{n}-{t}" for n, t in PAIRS])
def test_compiles_as_promised(name, target, compiler):
  case = CASES[name]
  found = _compile.compile_elsewhere(name, target)
  assert found["bytes_accessed"] > 0 and found["floor_bytes"] > 0
  if case.max_ratio is not None:
    assert 1.0 <= found["ratio"] <= case.max_ratio, found
  if case.max_temp_bytes is not None:
    assert found["temp_bytes"] <= case.max_temp_bytes, found
  if case.no_copies_of is not None:
    assert found["copies"] == [], found


def test_every_target_is_covered():
  assert {target for _, target in PAIRS} == set(TARGETS)


def test_what_the_compiler_refuses_fails(compiler, tmp_path, monkeypatch):
  with pytest.raises(RuntimeError, match="for v99:2x2"):
    _compile.compile_elsewhere("length_selection, budget", "v99:2x2")


HLO = """
ENTRY %main (a: bf16[8,2,64]) -> bf16[8,2,64] {
  %a = bf16[8,2,64]{2,1,0} parameter(0)
  %copy.1 = bf16[8,2,64]{2,1,0:T(8,128)(2,1)} copy(%a), metadata={}
  %copy-start.2 = (bf16[8,2,64]{2,1,0}, bf16[8,2,64]{2,1,0:S(1)}, u32[]) copy-start(%copy.1)
  %copy-start.5 = (bf16[8,2,64]{2,1,0}, bf16[8,2,64]{2,1,0}, u32[]) copy-start(%copy.1)
  %transpose.3 = bf16[8,2,64]{1,2,0} transpose(%copy.1), dimensions={0,2,1}
  %copy_fusion = bf16[8,2,64]{2,1,0} fusion(%a), kind=kLoop
  %copy.4 = bf16[8,2,32]{2,1,0} copy(%b)
}
"""


def test_copies_are_counted():
  # A fusion's copy is found inside the fusion's own text; copy-start.2 only moves to VMEM.
  names = lambda *array: [line.split(" = ")[0] for line in _compile.find_copies(HLO, *array)]
  assert names("bf16", (8, 2, 64)) == ["%copy.1", "%copy-start.5", "%transpose.3"]
  assert names("bf16", (8, 2, 32)) == ["%copy.4"]
  with pytest.raises(ValueError, match="found no f32"):
    _compile.find_copies(HLO, "f32", (8, 2, 64))
