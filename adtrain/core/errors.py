"""Errors that a user can act on. Each message is one line: what, where, found, expected, what to do."""

from __future__ import annotations


class AdtrainError(Exception):
    """Base of all errors caused by what was asked for; the command line prints it and exits with code 2."""


class ShapeError(AdtrainError, ValueError):
    """Shapes, axes or sizes that do not fit together."""


class DTypeError(AdtrainError, TypeError):
    """An element type, or a kind of argument, that the operation does not take."""


class DeviceError(AdtrainError):
    """A device that is absent, or arrays of one operation on different devices."""


class OutOfMemory(DeviceError):
    """A device has less memory free than is asked for."""


class DeviceFault(DeviceError):
    """A device has failed in the middle of its work, and can do nothing more for this process."""


class TraceError(AdtrainError):
    """A traced value used where only a concrete one can be, or after its trace has ended."""


class OptionError(AdtrainError, ValueError):
    """A layer's, optimizer's or schedule's option that makes no sense, whatever the input."""
