"""How many drafts of each request to verify, chosen on the device."""

from pallas_kernels.length_selection.api import length_selection

__all__ = ["length_selection"]
