"""The memory that training steps use, to compare with the planned memory."""

from __future__ import annotations

import tracemalloc

from numpy.lib import tracemalloc_domain

from adtrain.core.backend import backend
from adtrain.training import Experiment, continuation


def held_bytes(experiment: Experiment, device: str) -> int | None:
    """Run steps and return the peak bytes of all arrays, data set included: on a GPU as this process has allocated them
    so far, on the CPU by tracing NumPy's allocations."""
    if device != "cpu":
        continuation(experiment, experiment.initial_state(device), device)(2)
        backend(device).synchronize()
        return backend(device).allocated()
    splits = [split for split in (experiment.train, experiment.validation, experiment.test) if split is not None]
    data = sum(split.images.nbytes + split.labels.nbytes for split in splits)
    tracemalloc.start()
    try:
        run_steps = continuation(experiment, experiment.initial_state(device), device)
        run_steps(1)
        arrays = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, tracemalloc_domain)])
        between = sum(trace.size for trace in arrays.traces)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        run_steps(2)
        return data + between + tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
