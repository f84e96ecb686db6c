"""Chooses a kernel family's implementation: by name, then by platform when lowering."""

from jax import lax

IMPLEMENTATIONS = ("auto", "reference", "pallas")


def dispatch(implementation, *args, reference, kernels=None, on_request=None):
  """Calls one implementation of a kernel family on the arrays `args` and returns its result.

  `implementation` is "auto" (a kernel where the platform has one, else the reference), "reference"
  (the definition, plain jnp) or "pallas" (a kernel, or an error where the platform has none).
  `kernels` maps platform names ("tpu", "cuda") to functions with the reference's signature;
  `on_request` does too, for kernels that "auto" leaves alone because nobody has shown that they
  beat the reference as XLA compiles it. The platform is resolved at lowering, so it is right when
  cross-compiling too. Interpret mode is never chosen here: tests call a kernel with it by hand.
  Raises ValueError for an unknown name, and for "pallas" where the family has no kernel.
  """
  kernels = dict(kernels or {})
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f"implementation: found {implementation!r}, expected one of {IMPLEMENTATIONS}")
  if implementation == "pallas":
    kernels |= on_request or {}
    if not kernels:
      raise ValueError("implementation: found 'pallas', expected 'auto' or 'reference' (no kernel)")
    return lax.platform_dependent(*args, **kernels)
  if implementation == "reference" or not kernels:
    return reference(*args)
  return lax.platform_dependent(*args, default=reference, **kernels)
