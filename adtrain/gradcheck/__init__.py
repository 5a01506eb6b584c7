"""Checks of derivatives against central differences, of forward against reverse mode, and of a user's kernels against
their NumPy references."""

from __future__ import annotations

from adtrain.gradcheck.custom_ops import check_own_ops
from adtrain.gradcheck.derivatives import Row, check_cases, check_config

__all__ = ["Row", "check_cases", "check_config", "check_own_ops"]
