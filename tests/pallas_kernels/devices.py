"""Tracing for a device that is not there, as Pallas asks for it when it lowers."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def pretend(device_kind: str, platform: str, *, num_cores: int | None = None):
  """Returns a context in which programs are traced for one device of that kind."""
  device = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform=platform)
  return jax.sharding.use_abstract_mesh(
      AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device))


def lower_for_cuda(f, *args) -> str:
  """Returns the text of a program lowered for an H100, without one."""
  with pretend("NVIDIA H100 80GB HBM3", "gpu"):  # from jax 0.11 on Triton asks what it is
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
