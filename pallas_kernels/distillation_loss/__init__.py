"""CE + TV + acceptance straight from hidden states and LM head."""

from pallas_kernels.distillation_loss.api import distillation_loss
from pallas_kernels.distillation_loss.api import target_lse
from pallas_kernels.distillation_loss.api import weighted_distillation_loss

__all__ = ["distillation_loss", "target_lse", "weighted_distillation_loss"]
