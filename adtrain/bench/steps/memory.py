"""The memory that training steps really take, beside what was planned for them."""

from __future__ import annotations

import tracemalloc

from numpy.lib import tracemalloc_domain

from adtrain.core.backend import backend
from adtrain.training import Experiment, continuation


def held_bytes(experiment: Experiment, device: str) -> int | None:
    """The most bytes that all arrays take while steps are taken, which this does: on a GPU what the process has taken
    from it so far; on the CPU by tracing NumPy's allocations, the data set counted in."""
    if device != "cpu":
        continuation(experiment, experiment.initial_state(device), device)(2)
        backend(device).synchronize()
        return backend(device).held()
    splits = [split for split in (experiment.train, experiment.validation, experiment.test) if split is not None]
    data = sum(split.images.nbytes + split.labels.nbytes for split in splits)
    tracemalloc.start()
    try:
        take_steps = continuation(experiment, experiment.initial_state(device), device)
        take_steps(1)
        arrays = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, tracemalloc_domain)])
        between = sum(trace.size for trace in arrays.traces)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        take_steps(2)
        return data + between + tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
