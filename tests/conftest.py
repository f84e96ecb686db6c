"""Test settings for the whole suite, and the fixture for the shared golden data."""

import gc
import importlib.metadata
import os
import pathlib
import sys

# Before jax is imported. setdefault: a developer may still ask for a GPU or a compilation cache.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

import jax
import pytest

# XLA's newer fusion emitters for CPUs took some 60% of compilation where that was looked at, and
# compilation is most of the suite's time. With another jax line, in processes that tests start, and
# in CI's notebook, programs are compiled as users compile them.
if importlib.metadata.version("jaxlib").startswith("0.10.") and "XLA_FLAGS" not in os.environ:
  os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"
  jax.devices()  # reads it, once a process
  del os.environ["XLA_FLAGS"]  # libtpu and other versions die of flags they do not know

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
  sys.path.insert(0, str(ROOT))

# Silent broadcasting of [V] against [B, V] hides shape mistakes; reused keys hide biased laws.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
  """Frees what a file compiled: a program keeps memory maps, and Linux allows 65,530 a process.

  The whole suite needs more, and beyond it XLA's compiler dies of a segmentation fault.
  """
  yield
  jax.clear_caches()
  gc.collect()


@pytest.fixture(scope="session")
def goldens():
  """Returns the folder of golden data: $DSPARK_GOLDENS, else ../shared/goldens; skips without."""
  folder = pathlib.Path(os.environ.get("DSPARK_GOLDENS", ROOT.parent / "shared" / "goldens"))
  if not folder.is_dir():
    pytest.skip(f"no golden data in {folder}")
  return folder
