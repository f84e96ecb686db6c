"""Exact acceptance of drafts and the draw of the token after them."""

from pallas_kernels.rejection_sampling.api import rejection_sampling

__all__ = ["rejection_sampling"]
