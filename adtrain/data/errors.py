"""The errors of everything that reads data."""

from __future__ import annotations

from adtrain.core.errors import AdtrainError


class DataError(AdtrainError):
    """A data set, file or image that is missing, damaged or of the wrong kind; the message names it."""


class DataOptionError(DataError):
    """An option of `Options` that does not go with what was read; `option` is its name, `reason` what is wrong."""

    def __init__(self, option: str, reason: str) -> None:
        self.option, self.reason = option, reason
        super().__init__(f"data.{option}: {reason}")
