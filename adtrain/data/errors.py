"""Errors of reading data."""

from __future__ import annotations

from adtrain.core.errors import AdtrainError


class DataError(AdtrainError):
    """A data set, file or image is missing, damaged or of the wrong kind; the message names it."""


class DataOptionError(DataError):
    """An option of `Options` does not fit the files; `option` is its name, `reason` says what is wrong."""

    def __init__(self, option: str, reason: str) -> None:
        self.option, self.reason = option, reason
        super().__init__(f"data.{option}: {reason}")
