"""How close measured work comes to the limits of its device."""

from __future__ import annotations

from typing import NamedTuple

from adtrain.bench.timing.roofline import Roofline
from adtrain.bench.timing.sampling import rate


class Limits(NamedTuple):
    """Two fields of a row of a result.

    Attributes:
        of_roofline: the share of the device's roofline; None if the time is 0.
        from_cache: whether the bytes came faster than the device's memory can deliver them, so from a cache. The share
            is then above 1, and says nothing about the kernel.
    """

    of_roofline: float | None
    from_cache: bool


def limits(flops: int, bytes: int, ms: float, peak: Roofline, precision: str = "float32") -> Limits:
    """The limits of work with these FLOPs and bytes that took `ms` milliseconds."""
    if ms <= 0:
        return Limits(None, False)
    return Limits(peak.share(flops, bytes, ms, precision), (rate(bytes, ms) or 0.0) > peak.gbytes_per_s)
