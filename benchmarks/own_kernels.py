"""Trilinear interpolation on a GPU: own kernels, the same composed of operations, and PyTorch.

    python benchmarks/own_kernels.py [--json-file PATH]

feats (65536, 8, 256) and points (65536, 3), float32; the gradient is by feats. Each backward pass is timed by itself:
its argument is the cotangent. Times are medians by CUDA events of samples that alternate between the systems. PyTorch
composes the corners one by one, as `examples/trilinear` does, or multiplies all weights at once ("einsum").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from gpu_bandwidth import timed
from gpu_bandwidth_cases import array_of, tensor_of
from gpu_report import Report

from adtrain import plugins
from adtrain.bench.sampling import in_turns
from adtrain.core.autodiff import vjp
from adtrain.core.backend import backend
from adtrain.core.staging import stage
from adtrain.passes import ALL

EXAMPLE = Path(__file__).parent.parent / "examples" / "trilinear" / "trilinear.py"

POINTS, FEATURES = 65536, 256
ROUNDS = 5
BYTES = 4 * POINTS * (9 * FEATURES + 3)
"""Bytes that either pass must move."""


def torch_weights(points: torch.Tensor) -> torch.Tensor:
    """(N, 8)"""
    end = (points + 1) / 2
    x, y, z = (torch.stack([1 - end[:, i], end[:, i]], 1) for i in range(3))
    return (x[:, :, None, None] * y[:, None, :, None] * z[:, None, None, :]).reshape(-1, 8)


def torch_corners(feats: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    weights = torch_weights(points)
    return sum((weights[:, c, None] * feats[:, c] for c in range(1, 8)), weights[:, :1] * feats[:, 0])


def torch_einsum(feats: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    return (torch_weights(points)[:, :, None] * feats).sum(1)


def torch_passes(f: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> tuple[Any, Any]:
    feats, points, ct = tensors
    leaf = feats.clone().requires_grad_()
    out = f(leaf, points)
    return (
        lambda: f(feats, points),
        lambda: torch.autograd.grad(out, leaf, ct, retain_graph=True)[0],
    )


@click.command()
@click.option("--json-file", "path", type=Path, help="Write the results to a file.")
def main(path: Path | None) -> None:
    """Measure and print a table."""
    example = plugins.find(str(EXAMPLE)).run()
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (POINTS, 8, FEATURES), (POINTS, 3), (POINTS, FEATURES)
    tensors = [torch.rand(shape, device="cuda", generator=generator) * 2 - 1 for shape in shapes]
    feats, points, ct = map(array_of, tensors)
    gpu: Any = backend("gpu")
    own, default = torch.cuda.ExternalStream(gpu.device.stream.handle), torch.cuda.current_stream()

    def pulled(feats: Any, points: Any, ct: Any) -> Any:
        return vjp(lambda x: example.composed(x, points), feats)[1](ct)[0]

    forward, by_passes = stage(example.trilinear, ALL), stage(example.composed, ALL)
    backward, pulled_by_passes = stage(example.trilinear_grad, ALL), stage(pulled, ALL)
    systems: dict[str, tuple[Any, Any, Any]] = {
        "adtrain, own kernels": (lambda: forward(feats, points), lambda: backward(ct, points), own),
        "adtrain, composed": (lambda: by_passes(feats, points), lambda: pulled_by_passes(feats, points, ct), own),
    }
    for name, f in (("corners", torch_corners), ("einsum", torch_einsum)):
        systems[f"PyTorch, {name}"] = (*torch_passes(f, tensors), default)
        systems[f"PyTorch, {name}, compiled"] = (*torch_passes(torch.compile(f), tensors), default)
    first = [work() for work in systems["PyTorch, corners"][:2]]
    report = Report(path)
    for name, (*passes, _) in systems.items():
        for work, expected in zip(passes, first, strict=True):
            found = work()
            error = float(((found if isinstance(found, torch.Tensor) else tensor_of(found)) - expected).abs().max())
            assert error < 1e-5, f"{name}: differs from PyTorch by {error}"
    works = {(name, i): (each[i], each[2]) for name, each in systems.items() for i in (0, 1)}
    times = in_turns({key: partial(timed, *each) for key, each in works.items()}, ROUNDS + 1)
    click.echo(f"{'milliseconds':28} {'forward':>8} {'backward':>8} {'GB/s backward':>14}")
    for name in systems:
        both = [1e3 * median(chain.from_iterable(times[name, i][1:])) for i in (0, 1)]  # the first round warms up
        report.add({"system": name, "forward_ms": both[0], "backward_ms": both[1]})
        click.echo(f"{name:28} {both[0]:8.3f} {both[1]:8.3f} {BYTES / both[1] / 1e6:14.0f}")
    click.echo(report.line())


if __name__ == "__main__":
    main()
