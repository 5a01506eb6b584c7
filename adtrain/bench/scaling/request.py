"""What one measurement of several ranks is asked for, and what it returns, as JSON between processes."""

from __future__ import annotations

import json
from typing import NamedTuple

from adtrain.bench.peers.systems import ADTRAIN

PEERS = {"torch-ddp": ("cpu", "gpu"), "torch-graph": ("gpu",)}
"""The other systems, and the devices that they run on. torch-ddp: PyTorch's DistributedDataParallel, eager.
torch-graph: PyTorch, with the whole step and an all-reduce of the gradients in one CUDA graph."""


class Request(NamedTuple):
    """Steps of a config, or with `exchange_bytes` the sum of a vector of that size over all ranks.

    Attributes:
        config: a path or a name.
        batch_size: of all ranks together.
        system: "adtrain", or a name in `PEERS`, which take steps only.
    """

    config: str
    overrides: tuple[str, ...]
    device: str
    batch_size: int
    exchange_bytes: int = 0
    system: str = ADTRAIN

    @classmethod
    def from_text(cls, text: str) -> Request:
        values = json.loads(text)
        return cls(**{**values, "overrides": tuple(values["overrides"])})


class Measured(NamedTuple):
    """Microseconds of a step, or of the sum of a vector over all ranks, in each sample; the bytes of the gradients."""

    ranks: int
    batch_size: int
    microseconds: tuple[float, ...]
    gradient_bytes: int
    device: str
