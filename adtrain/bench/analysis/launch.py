"""Blocks and threads on the GPU: a kernel at many launch shapes beside the one that the rule picks, and the candidates
for a matrix product beside the one that the tuner takes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from adtrain import ops
from adtrain.bench.timing.sampling import Timing
from adtrain.core.array import Array, array
from adtrain.core.backend import backend
from adtrain.core.errors import DeviceError
from adtrain.core.staging import stage

ELEMENTS = 2**24
THREADS, BLOCKS = (32, 64, 128, 256, 512, 1024), (1, 2, 4, 8, 16, 32)
"""Threads a block, and blocks for each multiprocessor."""

PRODUCT = 1024
"""Rows and columns of the matrices whose product has candidates."""

SAMPLES, LAUNCHES = 9, 20
"""Samples of each shape, in turns, and launches of a sample, which are one CUDA graph."""


def launch_shapes() -> dict[str, Any]:
    """Microseconds of adding two arrays of ELEMENTS at each shape, by the device's events; "rule" marks the shape that
    the library picks."""
    from adtrain.backends.cuda.lower import LaunchPlan
    from adtrain.backends.cuda.runtime.device import Shape
    from adtrain.backends.cuda.runtime.graph import Graphs
    from adtrain.backends.cuda.runtime.launch import Launch

    gpu: Any = backend("gpu")
    device = gpu.device
    rng = np.random.default_rng(0)
    args = [array(rng.standard_normal(ELEMENTS, np.float32), device="gpu") for _ in range(2)]
    (equation,) = stage(ops.add).program(*args).equations
    (task,) = gpu.lowering.launches(equation)
    assert isinstance(task, LaunchPlan)
    out = gpu.empty(equation.outputs[0].type)
    addresses = [*(x.buffer.address for x in args), out.address]
    launch = Launch(device, task)
    rule, most = launch.shape, device.kernel(task.source, task.name).most_threads
    grid = {
        Shape((blocks * device.multiprocessors, 1, 1), (threads, 1, 1), 0): None
        for threads in THREADS
        for blocks in BLOCKS
        if threads <= most
    }
    graphs, ms = Graphs(device.stream), {shape: list[float]() for shape in (rule, *grid)}
    launch.early = None  # with the launch before, which is of the same kernel: each is timed alone

    def microseconds(shape: Shape) -> float:
        launch.shape = shape

        def record() -> None:
            for _ in range(LAUNCHES):
                launch.record(addresses, 0, 0)

        graphs.run(shape, record)  # while it runs, what is timed gets to the device
        before = device.event()
        graphs.run(shape, record)
        after = device.event()
        after.synchronize()
        return float(after.time_since(before)) / LAUNCHES

    for _ in range(SAMPLES):
        for shape, found in ms.items():
            found.append(microseconds(shape))
    expected = args[0].numpy() + args[1].numpy()
    if not np.array_equal(Array(out, *equation.outputs[0].type, "gpu").numpy(), expected):
        raise DeviceError("add: a launch shape gives another result")
    rows = [
        {
            "threads": shape.block[0],
            "blocks": shape.grid[0],
            "time": Timing(found, LAUNCHES).record(),
            "gbytes_per_s": 3 * 4 * ELEMENTS / np.median(found) * 1e-6,
            "rule": shape == rule,
        }
        for shape, found in ms.items()
    ]
    return {"kernel": f"add of {ELEMENTS:,} float32", "rows": rows}


def candidates() -> dict[str, Any]:
    """Microseconds of each candidate for a matrix product, the fastest first, with the one that is taken."""
    from adtrain.backends.cuda.lower import fastest
    from adtrain.backends.cuda.tuner.autotune import tuning_problems
    from adtrain.backends.cuda.tuner.measure import distinct

    tuner = cast(Any, backend("gpu")).tuner
    args = [array(np.zeros((PRODUCT, PRODUCT), np.float32), device="gpu")] * 2
    problems = list(tuning_problems(tuner.lowering, stage(ops.matmul).program(*args).equations))
    ((contest, times),) = tuner.times(problems, measure=True)
    taken, ordered = fastest(contest.labels, times), sorted(times, key=times.__getitem__)
    rows = [
        {
            "kernel": name,
            "label": label,
            "us": times[label],
            "taken": label == taken,
            "rule": label == contest.labels[0],
        }
        for label, name in zip(ordered, distinct(ordered), strict=True)
    ]
    return {"problem": f"matmul {PRODUCT}x{PRODUCT}x{PRODUCT}, float32", "rows": rows}
