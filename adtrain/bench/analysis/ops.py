"""Times operations over sizes: by a naive loop, on the CPU, and on the GPU with and without copies from and to it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from adtrain import ops
from adtrain.backends.cpu import naive
from adtrain.bench.analysis.crossover import Crossover, crossover
from adtrain.bench.timing.sampling import Timing, Workload, alternate, ratio, repeatedly
from adtrain.core.array import Value, array
from adtrain.core.backend import backend
from adtrain.core.staging import Staged, stage
from adtrain.passes import ALL
from adtrain.samplers import Sampler, normal

NAIVE_FLOPS = 3e8
"""Above this many FLOPs, or elements, the naive loop is skipped, because it would take too long."""

COPIES = "+copies"
"""Suffix of the label of times that include copying the arguments to the device, and the result back."""


class LabelledDevice(NamedTuple):
    """A device, and the label of its times. The first of several is the baseline."""

    label: str
    device: str


@dataclass(frozen=True)
class SizedOp:
    """A public operation over sizes n.

    Attributes:
        what: the problem in words, in terms of n.
        inputs: from n to functions that draw the inputs, which become float32.
        naive: from the inputs to the output, by a naive loop.
        work: from n to the number of FLOPs, or of elements if the operation only moves them.
        sizes: the sizes, ascending.
        options: keyword arguments of the operation.
    """

    op: str
    what: str
    inputs: Callable[[int], Sequence[Sampler]]
    naive: Callable[..., np.ndarray]
    work: Callable[[int], float]
    sizes: Sequence[int]
    options: Mapping[str, Any] = field(default_factory=dict)

    def arrays(self, n: int) -> list[np.ndarray]:
        """The inputs; the same at every call."""
        rng = np.random.default_rng(zlib.crc32(f"{self.op}/{n}".encode()))
        return [make(rng).astype(np.float32) for make in self.inputs(n)]

    def __call__(self, *args: Value) -> Value:
        found: Value = getattr(ops, self.op)(*args, **self.options)
        return found


def _convolution(image: np.ndarray, weight: np.ndarray) -> np.ndarray:
    sizes = naive.conv_sizes(image.shape, weight.shape, (1, 1), (0, 0))
    return naive.call("conv2d", (sizes[0], sizes[4], sizes[7], sizes[8]), image, weight, *sizes)


def _elements(name: str) -> Callable[..., np.ndarray]:
    return lambda *xs: naive.call(name, xs[0].shape, *xs, xs[0].size)


def _pool(x: np.ndarray) -> np.ndarray:
    n, c, height, width = x.shape
    return naive.call("max_pool2d", (n, c, height // 2, width // 2), x, n * c, height // 2, width // 2)


VECTORS = tuple(2**k for k in range(8, 26, 3))
SQUARES = tuple(2**k for k in range(4, 12))
SIZED_OPS = (
    SizedOp("matmul", "n x n by n x n", lambda n: [normal(n, n)] * 2, naive.matmul, lambda n: 2 * n**3, SQUARES),
    SizedOp(
        "conv2d", "n images 32x26x26 to 64, 3x3", lambda n: [normal(n, 32, 26, 26), normal(64, 32, 3, 3)],
        _convolution, lambda n: 2 * n * 64 * 24 * 24 * 32 * 9, (1, 2, 4, 8, 16, 32, 64, 128),
    ),
    SizedOp("add", "n elements", lambda n: [normal(n)] * 2, _elements("add"), float, VECTORS),
    SizedOp("exp", "n elements", lambda n: [normal(n)], _elements("exp"), float, VECTORS),
    SizedOp("sum", "n elements", lambda n: [normal(n)], lambda x: naive.call("sum", (), x, x.size), float, VECTORS),
    SizedOp(
        "softmax", "n rows of 128", lambda n: [normal(n, 128)], lambda x: naive.call("softmax", x.shape, x, *x.shape),
        lambda n: 128 * n, tuple(4**k for k in range(2, 9)),
    ),
    SizedOp(
        "transpose", "n x n", lambda n: [normal(n, n)],
        lambda x: naive.call("transpose", x.shape[::-1], x, *x.shape), lambda n: n * n, SQUARES,
    ),
    SizedOp(
        "max_pool2d", "n images 64x24x24, 2x2", lambda n: [normal(n, 64, 24, 24)], _pool,
        lambda n: n * 64 * 24 * 24, (1, 4, 16, 64, 256), {"kernel_size": 2},
    ),
)  # fmt: skip


def measured(op: SizedOp, devices: Sequence[LabelledDevice]) -> dict[str, Any]:
    """JSON values: times at each size, speed-ups over the first device, and where they cross 1."""
    rows = [row(op, n, devices) for n in op.sizes]
    return {"op": op.op, "what": op.what, "rows": rows, "crossover": crossovers(rows, "n")}


def row(op: SizedOp, n: int, devices: Sequence[LabelledDevice]) -> dict[str, Any]:
    """The times at one size, in interleaved samples: of a call from the host until the device has finished."""
    inputs = op.arrays(n)
    workloads: dict[str, Workload] = {}
    if op.work(n) <= NAIVE_FLOPS:
        workloads[naive.LABEL] = repeatedly(lambda: op.naive(*inputs))
    for label, device in devices:
        workloads[label] = _on(device, stage(op, ALL), inputs)
        if label != devices[0].label:
            workloads[label + COPIES] = _with_copies(device, stage(op, ALL), inputs)
    return {"n": n, **compared(alternate(workloads), devices[0].label)}


def _on(device: str, staged: Staged, inputs: Sequence[np.ndarray]) -> Workload:
    args = [array(x, device=device) for x in inputs]
    return repeatedly(lambda: staged(*args), backend(device).synchronize)


def _with_copies(device: str, staged: Staged, inputs: Sequence[np.ndarray]) -> Workload:
    return repeatedly(lambda: staged(*(array(x, device=device) for x in inputs)).numpy())


def compared(times: Mapping[str, Timing], first: str) -> dict[str, Any]:
    """JSON values: the times, and the speed-up of each over `first` with its 95% interval."""
    speedups = {}
    for label, timing in times.items():
        if label != first:
            found = ratio(times[first], timing)
            low, high = found.interval_ms
            speedups[label] = {"median": found.median_ms, "low": low, "high": high}
    return {"times": {label: timing.record() for label, timing in times.items()}, "speedups": speedups}


def crossovers(rows: Sequence[Mapping[str, Any]], size: str) -> dict[str, Any]:
    """The crossover of each label's speed-ups, in numbers and in words ("says"); `size` is the key of a row's size."""
    labels = dict.fromkeys(label for each in rows for label in each["speedups"] if label != naive.LABEL)
    found: dict[str, Crossover] = {}
    for label in labels:
        speedups = [each["speedups"][label]["median"] for each in rows]
        found[label] = crossover([each[size] for each in rows], speedups)
    return {label: {**where._asdict(), "says": str(where)} for label, where in found.items()}
