"""Times one GPU kernel at many launch shapes, and all candidates for one matrix product."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain import ops
from adtrain.bench.timing.sampling import Timing
from adtrain.core.array import Array, array
from adtrain.core.backend import backend
from adtrain.core.errors import DeviceError
from adtrain.core.staging import stage

ELEMENTS = 2**24
THREADS, BLOCKS = (32, 64, 128, 256, 512, 1024), (1, 2, 4, 8, 16, 32)
"""Threads a block, and blocks a multiprocessor."""

PRODUCT = 1024
"""Rows and columns of the square matrices whose product is computed by each candidate."""

SAMPLES, LAUNCHES = 9, 20
"""Interleaved samples of each launch shape, and launches in a sample, which are one CUDA graph."""


def launch_shapes() -> dict[str, Any]:
    """Times of adding two arrays of ELEMENTS at each launch shape, by CUDA events, as JSON values. "rule" marks the
    shape that adtrain uses."""
    from adtrain.backends.cuda.launch_plan import LaunchPlan
    from adtrain.backends.cuda.runtime.graph import Graphs
    from adtrain.backends.cuda.runtime.launch import Launch
    from adtrain.backends.cuda.runtime.loaded_kernel import Shape, ShapedLaunch

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
    rule = launch.alone.shape
    grid = {
        Shape((blocks * device.multiprocessors, 1, 1), (threads, 1, 1), 0): None
        for threads in THREADS
        for blocks in BLOCKS
        if threads <= launch.kernel.max_threads
    }
    graphs, ms = Graphs(device), {shape: list[float]() for shape in (rule, *grid)}

    def milliseconds(shape: Shape) -> float:
        launch.alone = ShapedLaunch(launch.kernel, shape)

        def record() -> None:
            for _ in range(LAUNCHES):
                launch.enqueue(addresses, 0, 0)  # without overlap of consecutive launches

        graphs.run(shape, record)  # keeps the device busy while the timed launches are enqueued
        before = device.event()
        graphs.run(shape, record)
        after = device.event()
        after.synchronize()
        return float(after.time_since(before)) / LAUNCHES

    for _ in range(SAMPLES):
        for shape, found in ms.items():
            found.append(milliseconds(shape))
    expected = args[0].numpy() + args[1].numpy()
    if not np.array_equal(Array(out, *equation.outputs[0].type, "gpu").numpy(), expected):
        raise DeviceError("add: the result depends on the launch shape")
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
    """Microseconds of each candidate for a matrix product, the fastest first, as JSON values. "taken" marks the
    tuner's choice, "rule" the choice without measurements."""
    from adtrain.backends.cuda.tuner.measure import distinct
    from adtrain.bench.candidates import of_equations

    args = [array(np.zeros((PRODUCT, PRODUCT), np.float32), device="gpu")] * 2
    (problem,) = of_equations(stage(ops.matmul).program(*args).equations)
    labels = [each["kernel"] for each in problem["candidates"]]
    rows = [
        {"kernel": name, "label": label, "us": each["us"], "taken": each["chosen"], "rule": each["rule"]}
        for name, label, each in zip(distinct(labels), labels, problem["candidates"], strict=True)
    ]
    return {"problem": f"matmul {PRODUCT}x{PRODUCT}x{PRODUCT}, float32", "rows": rows}
