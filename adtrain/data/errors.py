"""The error of everything that reads data."""

from __future__ import annotations

from adtrain.core.errors import AdtrainError


class DataError(AdtrainError):
    """A data set, file or image that is missing, damaged or of the wrong kind; the message names it."""
