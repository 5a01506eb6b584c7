"""Attention forward and backward on a GPU: adtrain and PyTorch's kernels, with their errors.

    python benchmarks/attention.py [--shape BxHxNxW]... [--precision full|tf32|bfloat16]... [--causal] [--json PATH]

A shape is batch, heads, tokens and width of a head. FLOPs are those of the products: 4 B H N² W forward and 10 B H N² W
backward, half of it if causal. In adtrain arrays are float32 in every precision; in PyTorch they are float32, with tf32
off or on, or bfloat16. Times are medians of samples that alternate between the systems, by CUDA events. An error is the
norm of the difference from float64 over the norm, on one head: of the output, and the largest of the three gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from gpu_bandwidth import timed
from gpu_report import Report
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import adtrain as ad
from adtrain.bench.sampling import in_turns
from adtrain.core.backend import backend
from adtrain.core.precision import PRECISIONS
from adtrain.core.trace import bind
from adtrain.ops.attention import attention_grad_p, attention_p

ROUNDS = 5
SHAPES = {
    "full": ("4x16x2048x64", "128x8x256x64", "2x16x2048x128", "32x4x1024x64", "128x4x16x16"),
    "tf32": ("4x16x2048x64", "128x8x256x64"),
    "bfloat16": ("2x16x8192x128", "4x16x2048x64", "128x8x256x64", "128x4x16x16"),
}
IN_TORCH = {
    "PyTorch, efficient": SDPBackend.EFFICIENT_ATTENTION,
    "PyTorch, flash": SDPBackend.FLASH_ATTENTION,
    "PyTorch, cuDNN": SDPBackend.CUDNN_ATTENTION,
}
"""The last two take bfloat16 only."""


class System(NamedTuple):
    """One way to compute attention: the output of `forward`, and the gradients of q, k and v of `backward`."""

    name: str
    forward: Callable[[], Any]
    backward: Callable[[], Any]
    stream: Any


def in_adtrain(arrays: list[np.ndarray], causal: bool, precision: str) -> System:
    q, k, v, ct = (ad.array(x, device="gpu") for x in arrays)
    options: dict[str, Any] = {"causal": causal, "scale": arrays[0].shape[-1] ** -0.5, "precision": precision}
    options |= {"dropout": 0.0, "stream": 0}
    forward = ad.jit(lambda *x: bind(attention_p, *x, **options))
    backward = ad.jit(lambda *x: bind(attention_grad_p, *x, **options))
    kept = forward(q, k, v)
    gpu: Any = backend("gpu")
    stream = torch.cuda.ExternalStream(gpu.device.stream.handle)
    return System("adtrain", lambda: forward(q, k, v)[0], lambda: backward(q, k, v, *kept, ct), stream)


def in_torch(arrays: list[np.ndarray], causal: bool, precision: str) -> Iterator[System]:
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    for name, kind in IN_TORCH.items():
        if dtype == torch.float32 and kind != SDPBackend.EFFICIENT_ATTENTION:
            continue
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        q, k, v, ct = (torch.tensor(x, device="cuda", dtype=dtype, requires_grad=i < 3) for i, x in enumerate(arrays))

        def forward(q: Any = q, k: Any = k, v: Any = v, kind: Any = kind) -> Any:
            with sdpa_kernel(kind):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        try:
            out = forward()
        except RuntimeError as error:
            click.echo(f"{name}: {str(error).splitlines()[0][:80]}")
            continue
        given = (q, k, v)

        def backward(out: Any = out, given: Any = given, ct: Any = ct) -> Any:
            return torch.autograd.grad(out, given, ct, retain_graph=True)

        def alone(forward: Any = forward) -> Any:
            with torch.no_grad():
                return forward()

        yield System(name, alone, backward, torch.cuda.current_stream())


def exact(arrays: list[np.ndarray], causal: bool) -> list[np.ndarray]:
    """The output and the gradients of one head in float64."""
    q, k, v, ct = (torch.tensor(x[0, 0], device="cuda", dtype=torch.float64) for x in arrays)
    given = [x.requires_grad_() for x in (q, k, v)]
    scores = given[0] @ given[1].T / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(scores, -1) @ given[2]
    return [x.detach().cpu().numpy() for x in (out, *torch.autograd.grad(out, given, ct))]


def of_one_head(x: Any) -> np.ndarray:
    found = x.numpy() if isinstance(x, ad.Array) else x.detach().float().cpu().numpy()
    return np.asarray(found[0, 0], np.float64)


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@click.command()
@click.option("--shape", "shapes", multiple=True, help="Batch, heads, tokens and width, such as 4x16x2048x64.")
@click.option("--precision", "precisions", multiple=True, type=click.Choice(PRECISIONS))
@click.option("--causal", is_flag=True)
@click.option("--json", "path", type=Path, help="Write the results to a file.")
def main(shapes: tuple[str, ...], precisions: tuple[str, ...], causal: bool, path: Path | None) -> None:
    """Measure and print a table."""
    report = Report(path)
    click.echo(
        f"{'shape':14} {'precision':9} {'system':19} {'TFLOP/s fwd':>11} {'bwd':>7} {'error fwd':>10} {'bwd':>8}"
    )
    for precision in precisions or PRECISIONS:
        for shape in shapes or SHAPES[precision]:
            batch, heads, length, width = (int(x) for x in shape.split("x"))
            rng = np.random.default_rng(0)
            arrays = [rng.normal(size=(batch, heads, length, width)).astype(np.float32) for _ in range(4)]
            expected = exact(arrays, causal)
            flops = 2 * batch * heads * length**2 * width / (2 if causal else 1)  # of one product
            systems = [in_adtrain(arrays, causal, precision), *in_torch(arrays, causal, precision)]
            works = [(system, work) for system in systems for work in (system.forward, system.backward)]
            samples = {(system.name, work): partial(timed, work, system.stream) for system, work in works}
            seconds = in_turns(samples, ROUNDS)
            for system in systems:
                errors = [
                    error_of(of_one_head(x), y)
                    for x, y in zip((system.forward(), *system.backward()), expected, strict=True)
                ]
                times = [
                    median(chain.from_iterable(seconds[system.name, work]))
                    for work in (system.forward, system.backward)
                ]
                rates = 2 * flops / times[0] / 1e12, 5 * flops / times[1] / 1e12
                report.add(
                    {
                        "shape": shape, "precision": precision, "causal": causal, "system": system.name,
                        "forward_ms": times[0] * 1e3, "backward_ms": times[1] * 1e3,
                        "forward_tflops": rates[0], "backward_tflops": rates[1],
                        "forward_error": errors[0], "backward_error": max(errors[1:]),
                    }
                )  # fmt: skip
                click.echo(
                    f"{shape:14} {precision:9} {system.name:19} {rates[0]:11.1f} {rates[1]:7.1f} {errors[0]:10.1e}"
                    f" {max(errors[1:]):8.1e}"
                )
    click.echo(report.line())


if __name__ == "__main__":
    main()
