"""Matrix products and convolutions on one GPU, here and by cuBLAS and cuDNN through PyTorch: alternating rounds.

    python benchmarks/gpu_ops.py [--only matmul-4096-tf32,...] [--seconds S] [--json FILE]

Each call repeats an operation so often, in one Program here and in one CUDA graph there, that starting it takes no
time. float32 inputs lie in memory here; PyTorch's bfloat16 rows have theirs in bfloat16 already. The error is the norm
of the difference from float64 over the norm of the result, in a few rows or one image of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import click
import numpy as np
from gpu_peers import names
from gpu_report import Report
from sides import Side, serve

from adtrain import ops
from adtrain.core.array import array
from adtrain.core.autodiff import vjp
from adtrain.core.backend import backend
from adtrain.core.staging import stage

PRECISIONS = {"float32": "full", "tf32": "tf32", "bfloat16": "bfloat16"}
SIDES = ("ours", "torch")
ROUNDS = 5
CALL_FLOPS = 1e11  # of one call: about 2 ms in float32
CHECKED_ROWS = 16


class Operation(NamedTuple):
    """What is computed, of which sizes: `kind` is matmul, forward or gradients (both of a convolution)."""

    kind: str
    sizes: tuple[int, ...]  # N; or images, channels, length of a side, output channels, padding, all with 3x3 kernels
    precision: str

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Of the inputs: two matrices; image and kernel, and the cotangent where gradients are taken."""
        if self.kind == "matmul":
            return [self.sizes * 2] * 2
        n, c, length, o, padding = self.sizes
        out = length + 2 * padding - 2
        return [(n, c, length, length), (o, c, 3, 3), (n, o, out, out)][: 3 if self.kind == "gradients" else 2]

    @property
    def flops(self) -> int:
        if self.kind == "matmul":
            return 2 * self.sizes[0] ** 3
        n, c, length, o, padding = self.sizes
        return 2 * n * o * (length + 2 * padding - 2) ** 2 * c * 9 * (2 if self.kind == "gradients" else 1)

    @property
    def repeats(self) -> int:
        return min(max(1, round(CALL_FLOPS / self.flops)), 50)

    def inputs(self) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        return [rng.standard_normal(shape, np.float32) for shape in self.shapes]


CONVOLUTIONS = {
    "256x32x26": (256, 32, 26, 64, 0),
    "256x64x56": (256, 64, 56, 64, 1),
    "64x256x28": (64, 256, 28, 256, 1),
}
ROWS = {
    **{f"matmul-{n}-{p}": Operation("matmul", (n,), p) for n in (1024, 2048, 4096, 4095, 8192) for p in PRECISIONS},
    **{
        f"{kind}-{name}-{p}": Operation(kind, sizes, p)
        for name, sizes in CONVOLUTIONS.items()
        for kind in ("forward", "gradients")
        for p in PRECISIONS
    },
}


class Work(NamedTuple):
    """`take` makes so many calls of an operation and waits for them; `result` is what it computes."""

    take: Callable[[int], object]
    result: Callable[[], np.ndarray]


def applied(operation: Operation, *args: Any) -> Any:
    """The operation of the library; of gradients that of the image, once both are there."""
    if operation.kind == "matmul":
        return ops.matmul(*args)
    convolved = partial(ops.conv2d, padding=operation.sizes[-1])
    if operation.kind == "forward":
        return convolved(*args)
    return vjp(convolved, *args[:2])[1](args[2])


def ours(operation: Operation) -> Work:
    args = [array(x, device="gpu") for x in operation.inputs()]

    def repeated(*args: Any) -> Any:
        with ops.matmul_precision(PRECISIONS[operation.precision]):
            found = [applied(operation, *args) for _ in range(operation.repeats)][-1]
        return [x[(slice(0, 1),) * x.ndim] for x in (found if isinstance(found, tuple) else (found,))]

    def once(*args: Any) -> Any:
        with ops.matmul_precision(PRECISIONS[operation.precision]):
            found = applied(operation, *args)
        return found[0] if isinstance(found, tuple) else found

    staged = stage(repeated, [without_unused_forward])

    def take(calls: int) -> None:
        for _ in range(calls):
            staged(*args)
        backend("gpu").synchronize()

    return Work(take, lambda: once(*args)[: checked(operation)].numpy())


def without_unused_forward(program: Any) -> Any:
    """The Program without the convolutions that only their gradients were taken of."""
    used = {v for e in program.equations for v in e.inputs} | set(program.outputs)
    gradients = any(e.primitive.name == "conv2d_weight_grad" for e in program.equations)
    kept = [
        e for e in program.equations if not (gradients and e.primitive.name == "conv2d" and e.outputs[0] not in used)
    ]
    return replace(program, equations=tuple(kept))


def by_torch(operation: Operation) -> Work:
    import torch

    tf32, kind = operation.precision == "tf32", torch.bfloat16 if operation.precision == "bfloat16" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    args = [torch.from_numpy(x).cuda().to(kind) for x in operation.inputs()]

    def once() -> Any:
        if operation.kind == "matmul":
            return torch.matmul(*args)
        p = [operation.sizes[-1]] * 2
        if operation.kind == "forward":
            return torch.nn.functional.conv2d(*args, padding=p)
        x, w, ct = args
        backward = torch.ops.aten.convolution_backward
        return backward(ct, x, w, None, [1, 1], p, [1, 1], False, [0, 0], 1, [True, True, False])

    def result() -> np.ndarray:
        found = once()
        first = found[0] if isinstance(found, tuple) else found
        return np.array(first[: checked(operation)].float().cpu().numpy())

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(operation.repeats):
            once()

    def take(calls: int) -> None:
        for _ in range(calls):
            graph.replay()
        torch.cuda.synchronize()

    return Work(take, result)


def checked(operation: Operation) -> int:
    """How many rows or images of the result are compared."""
    return CHECKED_ROWS if operation.kind == "matmul" else 1


def error(operation: Operation, found: np.ndarray) -> float:
    first, second, *ct = (x.astype(np.float64) for x in operation.inputs())
    few = checked(operation)
    if ct:  # of one image and its cotangent
        exact = applied(operation, first[:few], second, ct[0][:few])[0].numpy()
    else:
        exact = applied(operation, first[:few], second).numpy()
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def work(side: str) -> None:
    """A side's process: asked for "ROW error" it says the error, for "ROW SECONDS" the milliseconds of an operation."""
    made = cache(lambda row: {"ours": ours, "torch": by_torch}[side](ROWS[row]))

    def answer(question: str) -> float | str:
        row, what = question.split()
        try:
            if what == "error":
                made.cache_clear()
                return error(ROWS[row], made(row).result())
            return milliseconds(made(row), ROWS[row].repeats, float(what))
        except Exception as reason:
            return f"{type(reason).__name__}: {reason}".splitlines()[0]

    serve(answer)


def milliseconds(found: Work, repeats: int, seconds: float) -> float:
    found.take(2)
    start = perf_counter()
    found.take(1)
    calls = max(1, round(seconds / (perf_counter() - start)))
    start = perf_counter()
    found.take(calls)
    return (perf_counter() - start) / (calls * repeats) * 1e3


@click.command()
@click.option("--only", callback=names(list(ROWS)), metavar="ROW,...", help="Rows; by default all.")
@click.option("--seconds", default=0.5, show_default=True, help="Measuring time of each side of a row.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the numbers to a file.")
@click.option("--side", type=click.Choice(SIDES), hidden=True)
def main(only: Sequence[str], seconds: float, path: Path | None, side: str | None) -> None:
    """Compare the operations of the rows."""
    if side is not None:
        work(side)
        return
    sides = {name: Side([__file__, "--side", name], {}) for name in SIDES}
    report = Report(path)
    click.echo(f"{'':26}{'ours ms':>10}{'torch ms':>10}{'TFLOP/s':>9}{'torch':>7}{'ratio':>7}   error, ours and torch")
    try:
        for row in only:
            errors = {name: each.ask(f"{row} error") for name, each in sides.items()}
            if said := [f"{name}: {x}" for name, x in errors.items() if isinstance(x, str)]:
                click.echo(f"{row:26}{'; '.join(said)}")
                continue
            rounds = [
                {name: each.ask(f"{row} {seconds / ROUNDS}") for name, each in sides.items()} for _ in range(ROUNDS)
            ]
            ms = {name: median(found[name] for found in rounds) for name in SIDES}
            rates = {name: ROWS[row].flops / ms[name] * 1e-9 for name in SIDES}
            report.add({"row": row, "ms": ms, "tflops_per_s": rates, "error": errors})
            click.echo(
                f"{row:26}{ms['ours']:10.4f}{ms['torch']:10.4f}{rates['ours']:9.1f}{rates['torch']:7.1f}"
                f"{ms['torch'] / ms['ours']:7.2f}   {errors['ours']:.1e} {errors['torch']:.1e}"
            )
    finally:
        for each in sides.values():
            each.close()
    click.echo(report.line())


if __name__ == "__main__":
    main()
