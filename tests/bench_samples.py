"""Makes benchmarks quick in tests: the fewest and shortest samples, and a small roofline."""

from __future__ import annotations

import pytest

from adtrain.bench import devices, machine, ops, sampling, step
from adtrain.bench.peers import comparison


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Take MIN_SAMPLES samples of one run each, and do not observe the machine's load."""
    patch.setattr(sampling, "MIN_SAMPLE_MS", 0.0)
    patch.setattr(sampling, "MAX_SAMPLES", sampling.MIN_SAMPLES)
    patch.setattr(ops, "MIN_SAMPLE_MS", 0.0)
    patch.setattr(step, "SAMPLE_MS", 0.0)
    patch.setitem(step.PAUSE_S, "cpu", 0.0)
    patch.setattr(devices, "SAMPLE_MS", 0.0)
    patch.setattr(devices, "LAYER_STEPS", 2)
    patch.setattr(machine, "WINDOW_S", 0.0)
    for budget in ("STEPS", "OPERATIONS"):
        patch.setattr(comparison, budget, comparison.Budget(0.0, 0.0))


def small_roofline(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Measure the roofline with small arrays, store it under another name, and regard the machine as idle."""
    patch.setattr(machine, "ROOFLINE", kind)
    patch.setitem(machine.COPY_BYTES, "cpu", 1 << 16)
    patch.setitem(machine.MATRIX, "cpu", 16)
    patch.setattr(machine, "busy_cores", lambda: 0.0)
