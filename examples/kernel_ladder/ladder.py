"""Kernels from the simplest to the fastest, one idea a step: times, share of the device's best rate, and error.

    python examples/kernel_ladder/ladder.py [matmul|conv|softmax]... [--device cpu|gpu]

Without --device, the steps run on the CPU, and on the GPU if there is one. A step is a file: `matmul/gpu_3_....cu`. Its
first lines say its idea and what it should gain. The third line of a GPU step is its launch.
"""

from __future__ import annotations

import ctypes
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from adtrain.backends.cpu.compiler import find_compiler
from adtrain.backends.cuda import compiler
from adtrain.bench import machine
from adtrain.bench.sampling import measure
from adtrain.cache import open_cache
from adtrain.core.backend import backend
from adtrain.core.errors import DeviceError

FOLDER = Path(__file__).resolve().parent
LAUNCH = re.compile(r"// launch: grid \(([^)]*)\), block \((\d+), (\d+)\), (\d+) bytes of shared memory")


class Step(NamedTuple):
    """A compiled step with its arguments.

    Attributes:
        start: starts the computation.
        wait: waits until it has ended.
        result: copies the result from the device, after `wait`.
    """

    start: Callable[[], object]
    wait: Callable[[], object]
    result: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Problem:
    """What all steps of a ladder compute.

    Attributes:
        sizes: of the axes by name, which are the integer arguments of a step, for each device.
        arguments: random arrays in float32.
        expected: the first rows or images of the result, in float64.
        shape: of the result.
        work: FLOPs, and bytes that have to be read and written.
    """

    sizes: Mapping[str, Mapping[str, int]]
    arguments: Callable[..., list[np.ndarray]]
    expected: Callable[[list[np.ndarray]], np.ndarray]
    shape: Callable[..., tuple[int, ...]]
    work: Callable[..., tuple[int, int]]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def padded(x: np.ndarray) -> np.ndarray:
    """`x` with zeros around its last two axes."""
    return np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])


def double(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def matmul(arguments: list[np.ndarray]) -> np.ndarray:
    """The first 64 rows."""
    return double(arguments[0][:64]) @ double(arguments[1])


def conv(arguments: list[np.ndarray]) -> np.ndarray:
    """The first image."""
    x, w = double(arguments[0][:1]), double(arguments[1])
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    return np.einsum("ncyxij,ocij->noyx", windows, w, optimize=True)


def softmax(arguments: list[np.ndarray]) -> np.ndarray:
    """The first 64 rows."""
    x = double(arguments[0][:64])
    powers = np.exp(x - x.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def square(n: int) -> dict[str, int]:
    return {"m": n, "n": n, "k": n}


def image(images: int, channels: int) -> dict[str, int]:
    return {"images": images, "in": channels, "out": channels, "height": 64, "width": 64}


PROBLEMS = {
    "matmul": Problem(
        {"cpu": square(768), "gpu": square(4096)},
        lambda m, n, k: [normal(m, k), normal(k, n)],
        matmul,
        lambda m, n, k: (m, n),
        lambda m, n, k: (2 * m * n * k, 4 * (m * k + k * n + m * n)),
    ),
    "conv": Problem(
        {"cpu": image(1, 64), "gpu": image(64, 64)},
        lambda n, i, o, h, w: [padded(normal(n, i, h, w)), normal(o, i, 3, 3)],
        conv,
        lambda n, i, o, h, w: (n, o, h, w),
        lambda n, i, o, h, w: (2 * n * o * h * w * i * 9, 4 * (n * h * w * (i + o) + o * i * 9)),
    ),
    "softmax": Problem(
        {"cpu": {"rows": 8192, "columns": 4096}, "gpu": {"rows": 32768, "columns": 4096}},
        lambda rows, columns: [normal(rows, columns)],
        softmax,
        lambda rows, columns: (rows, columns),
        lambda rows, columns: (0, 8 * rows * columns),
    ),
}


def files(name: str, device: str) -> list[Path]:
    """The steps of a ladder, first the simplest."""
    return sorted((FOLDER / name).glob(f"{device}_*"))


def cpu_step(path: Path, sizes: Mapping[str, int], arguments: Sequence[np.ndarray], out: np.ndarray) -> Step:
    """The step of a C file."""
    with tempfile.TemporaryDirectory() as folder:
        find_compiler(open_cache("cpu")).run(["-shared", str(path), "-o", "step.so", "-lm"], folder)
        function = ctypes.CDLL(str(Path(folder, "step.so"))).step
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arguments, out)]
    start = partial(function, *pointers, *map(ctypes.c_int, sizes.values()))
    return Step(start, lambda: None, lambda: out)


def source(path: Path) -> compiler.Source:
    return compiler.Source(str(path), path.read_text())


def launch(path: Path, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, int, int], int]:
    """Blocks, threads of a block and bytes of shared memory, from the third line of a CUDA file."""
    found = LAUNCH.fullmatch(path.read_text().splitlines()[2])
    if found is None:
        raise click.ClickException(f"{path}:3: found no launch, expected {LAUNCH.pattern}")
    blocks = []
    for axis in found[1].split(", "):
        names, _, tile = axis.partition("/")
        elements = math.prod(sizes[name] for name in names.split("*"))
        if elements % int(tile):
            raise click.ClickException(f"{path.name}: {names} is {elements}, expected a multiple of {tile}")
        blocks.append(elements // int(tile))
    return (*blocks, 1, 1)[:3], (int(found[2]), int(found[3]), 1), int(found[4])


def gpu_step(path: Path, sizes: Mapping[str, int], arguments: Sequence[np.ndarray], out: np.ndarray) -> Step:
    """The step of a CUDA file, on the first GPU."""
    import pycuda.driver as cuda

    backend("gpu")  # makes its context the current one
    target = compiler.architecture(cuda.Context.get_device().compute_capability())
    module = cuda.module_from_buffer(compiler.compile_source(source(path), target).cubin)
    function = module.get_function("step")
    grid, block, shared = launch(path, sizes)
    function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    inputs, output = [cuda.to_device(array) for array in arguments], cuda.to_device(out)
    numbers = map(np.int32, sizes.values())
    start = partial(function, *inputs, output, *numbers, grid=grid, block=block, shared=shared)
    return Step(start, cuda.Context.synchronize, lambda: cuda.from_device_like(output, out))


def error(step: Step, expected: np.ndarray) -> float:
    """Run the step; returns the root mean square of its error over that of the result."""
    step.start()
    step.wait()
    difference = step.result()[: len(expected)] - expected
    return float(np.sqrt(np.mean(difference**2) / np.mean(expected**2)))


def steps(name: str, device: str, sizes: Mapping[str, int]) -> Iterator[tuple[Path, Step, Callable[[], float]]]:
    """The file of each step, the compiled step, and a function that runs it once and returns its error."""
    problem, make = PROBLEMS[name], {"cpu": cpu_step, "gpu": gpu_step}[device]
    arguments = problem.arguments(*sizes.values())
    expected = problem.expected(arguments)
    for path in files(name, device):
        out = np.full(problem.shape(*sizes.values()), np.nan, np.float32)
        step = make(path, sizes, arguments, out)
        yield path, step, partial(error, step, expected)


def table(name: str, device: str, peak: machine.Roofline) -> Iterator[str]:
    """A line for each step."""
    sizes = PROBLEMS[name].sizes[device]
    flops, moved = PROBLEMS[name].work(*sizes.values())
    rate = "GFLOP/s" if flops else "GB/s"
    yield f"{name} on the {device}: " + ", ".join(f"{axis} {size:,}" for axis, size in sizes.items())
    yield f"  {'step':24} {'ms':>9} {rate:>9} {'share':>7} {'error':>8}"
    for path, step, checked in steps(name, device, sizes):
        wrong, ms = checked(), measure(step.start, step.wait).median_ms
        per_second, share = (flops or moved) / ms * 1e-6, peak.share(flops, 0 if flops else moved, ms)
        title = path.stem.partition("_")[2].replace("_", " ")
        yield f"  {title:24} {ms:9.3f} {per_second:9,.1f} {share:7.1%} {wrong:8.1e}"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PROBLEMS)))
@click.option("--device", type=click.Choice(["cpu", "gpu"]))
def main(names: tuple[str, ...], device: str | None) -> None:
    """Measure the ladders, by default all, and print a table of each. The share is of the rates that adtrain reaches.

    These are a product of large matrices in float32, and a copy.
    """
    devices = [device] if device else ["cpu"]
    if device is None:
        try:
            backend("gpu")
            devices.append("gpu")
        except DeviceError as missing:
            click.echo(f"{missing}: only the steps for the CPU run")
    try:
        peaks = {found: machine.known_or_measured(found, click.echo) for found in devices}
    except DeviceError as missing:
        raise click.UsageError(str(missing)) from None
    for found, peak in peaks.items():
        rates = f"{peak.gflops_per_s['float32']:,.0f} GFLOP/s in float32, {peak.gbytes_per_s:,.0f} GB/s"
        click.echo(f"the best rates of the {found}: {rates}")
    for name in names or PROBLEMS:
        for found, peak in peaks.items():
            for line in table(name, found, peak):
                click.echo(line)


if __name__ == "__main__":
    main()
