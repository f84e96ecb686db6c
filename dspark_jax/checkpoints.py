"""Training checkpoints by orbax: atomic, the last few kept, exact resume, checked at the door.

A checkpoint is one directory `<step>/`, which appears under its final name only when complete, so
a run killed at any moment leaves the previous one. It holds every array of the training state
(parameters, optimiser moments, step, key data), the data iterator's state, and the configuration
of the run, which a resuming run must share.
"""

import pathlib
from typing import Any, Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp


class Checkpointer:
  """Saves and restores one run's state in one directory."""

  def __init__(self, directory: str | pathlib.Path, *, config: Mapping[str, Any], keep: int = 2):
    """Opens or creates the directory.

    Args:
      directory: parent of the checkpoints.
      config: JSON-able; what a checkpoint must have been made with to be resumed.
      keep: number of checkpoints kept.
    Raises:
      ValueError: for a directory that cannot be created or written.
    """
    self._config = _flatten_config(config)
    path = pathlib.Path(directory).absolute()
    try:
      path.mkdir(parents=True, exist_ok=True)
      probe = path / ".writable"
      probe.touch()
      probe.unlink()
    except OSError as e:
      raise ValueError(f"workdir: cannot write {path} ({e.strerror})") from None
    self._manager = ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True))

  def latest_step(self) -> int | None:
    """Returns the step of the newest complete checkpoint, or None."""
    return self._manager.latest_step()

  def save(self, step: int, state: Any, *, data_state: Mapping[str, Any]) -> None:
    """Writes a checkpoint of `state` (any pytree of arrays and typed keys)."""
    arrays = _to_arrays(state)
    about = {"config": self._config, "data_state": dict(data_state),
             "leaves": {name: _describe(a) for name, a in arrays.items()}}
    self._manager.save(step, args=ocp.args.Composite(
        state=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about)))

  def restore(self, template: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns (state, data_state) of the newest checkpoint, in the structure of `template`.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: naming the config field or the array that differs; nothing was loaded.
    """
    step = self.latest_step()
    if step is None:
      raise FileNotFoundError(f"checkpoint: none in {self._manager.directory}")
    about = self._manager.restore(step, args=ocp.args.Composite(
        about=ocp.args.JsonRestore()))["about"]
    _check_config(about["config"], self._config)
    arrays = _to_arrays(template)
    _check_leaves(about["leaves"], {name: _describe(a) for name, a in arrays.items()})
    abstract = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", None))
                for name, a in arrays.items()}
    loaded = self._manager.restore(step, args=ocp.args.Composite(
        state=ocp.args.StandardRestore(abstract)))["state"]
    return _from_arrays(loaded, template), about["data_state"]

  def close(self) -> None:
    self._manager.close()


def _is_key(leaf: Any) -> bool:
  return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_arrays(tree: Any) -> dict[str, Any]:
  """Flattens to {path: array}; typed keys become their words."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  to_array = lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf
  return {jax.tree_util.keystr(path, simple=True, separator="/"): to_array(leaf)
          for path, leaf in leaves}


def _from_arrays(arrays: Mapping[str, Any], template: Any) -> Any:
  leaves, treedef = jax.tree_util.tree_flatten_with_path(template)
  values = []
  for path, leaf in leaves:
    value = arrays[jax.tree_util.keystr(path, simple=True, separator="/")]
    if _is_key(leaf):
      value = jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
    values.append(value)
  return jax.tree_util.tree_unflatten(treedef, values)


def _describe(array: Any) -> str:
  return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _check_leaves(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
  for name in sorted(set(found) | set(expected)):
    if found.get(name) != expected.get(name):
      raise ValueError(f"checkpoint: array {name}: found {found.get(name, 'none')}, expected "
                       f"{expected.get(name, 'none')}")


def _check_config(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
  for name in sorted(set(found) | set(expected)):
    if found.get(name) != expected.get(name):
      raise ValueError(f"checkpoint of another configuration: {name}: found "
                       f"{found.get(name)!r}, expected {expected.get(name)!r}")


def _flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"a": {"b": 1}} -> {"a.b": 1}; tuples become lists, as JSON has them."""
  flat = {}
  for name, value in config.items():
    if isinstance(value, Mapping):
      flat.update(_flatten_config(value, f"{prefix}{name}."))
    else:
      flat[prefix + name] = list(value) if isinstance(value, tuple) else value
  return flat
