"""The time of an exchange on more GPUs than were measured, by arithmetic: the alpha-beta model.

T = a0 + 2 n (g-1) / (g B1) + 2 (n/g) (k-1) / (k B2) + 2 ceil(log2 k) a2, for n bytes on k nodes of g GPUs (R. Thakur,
R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations in MPICH, 2005). a0 is fitted to a
measured point; B1, B2 and a2 are published figures.
"""

from __future__ import annotations

from math import ceil, log2

GPUS_PER_NODE = 8
NODE_BYTES_PER_US = 344e3
"""B1: of one GPU through NVLink, NCCL on H100."""
NETWORK_BYTES_PER_US = 47e3
"""B2: of one network card of 400 Gbit/s."""
HOP_US = 14.0
"""a2: the latency between two nodes; 8.5 to 14 were published."""
MOST_GPUS = 1024


def exchange_us(size: int, gpus: int, start_us: float = 0.0) -> float:
    """Microseconds to exchange gradients of `size` bytes; `start_us` is a0."""
    beside = min(gpus, GPUS_PER_NODE)
    nodes = ceil(gpus / GPUS_PER_NODE)
    inside = 2 * size * (beside - 1) / (beside * NODE_BYTES_PER_US)
    between = 2 * size / beside * (nodes - 1) / (nodes * NETWORK_BYTES_PER_US)
    return start_us + inside + between + 2 * ceil(log2(nodes)) * HOP_US


def fitted_start_us(size: int, gpus: int, measured_us: float) -> float:
    """a0, fitted to a measured time; 0 if the model without a0 is slower than the measurement."""
    return max(0.0, measured_us - exchange_us(size, gpus))


def weak_efficiency(step_us: float, size: int, gpus: int, start_us: float, hidden: float) -> float:
    """The time of a step on one GPU divided by that on `gpus`, if the fraction `hidden` of each exchange is hidden."""
    exposed = (1 - hidden) * exchange_us(size, gpus, start_us) if gpus > 1 else 0.0
    return step_us / (step_us + exposed)
