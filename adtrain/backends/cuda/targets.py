"""A GPU of each architecture that kernels are compiled for, to choose kernels without a GPU."""

from __future__ import annotations

from adtrain.core.kernel import Target

H200 = Target((9, 0), 132, 227 << 10)

TARGETS = {
    "sm_75": Target((7, 5), 40, 64 << 10),  # T4
    "sm_80": Target((8, 0), 108, 163 << 10),  # A100
    "sm_86": Target((8, 6), 84, 99 << 10),  # A40
    "sm_89": Target((8, 9), 128, 99 << 10),  # RTX 4090
    "sm_90": H200,
    "sm_100": Target((10, 0), 148, 227 << 10),  # B200
    "sm_120": Target((12, 0), 170, 99 << 10),  # RTX 5090
}
"""Shared memory of a block is that of the CUDA C++ Programming Guide, table "Technical Specifications per Compute
Capability"."""


def target_of(architecture: str) -> Target:
    """The GPU of an architecture. The kernels are registered for which the passes of a GPU ask."""
    import adtrain.lowering.cuda  # noqa: F401

    return TARGETS[architecture]
