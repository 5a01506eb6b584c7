"""The Gaussian kernel norm of N points and its gradients by points and momenta, on a GPU: adtrain, PyTorch and JAX.

    python benchmarks/map_reduce.py [--points N]... [--json PATH]

float32, three dimensions. Times are medians of samples that alternate between the systems: by CUDA events, for JAX by
the host's clock. Errors of the gradient by the momenta are relative to its largest element in float64, on 64 rows.
A system that runs out of memory is left out.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gpu_bandwidth import timed
from gpu_report import Report

import adtrain as ad
from adtrain.core.backend import backend

EXAMPLE = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "kernel_norm.py"))
WIDTH = EXAMPLE["WIDTH"]
ROUNDS = 5


def in_torch(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    d = ((q[:, None] - q[None]) ** 2).sum(2)
    return 0.5 * (p * (torch.exp(-d / (2 * WIDTH * WIDTH)) @ p)).sum()


def in_jax(q: Any, p: Any) -> Any:
    d = ((q[:, None] - q[None]) ** 2).sum(2)
    return 0.5 * (p * jnp.matmul(jnp.exp(-d / (2 * WIDTH * WIDTH)), p, precision="highest")).sum()


def systems(q: np.ndarray, p: np.ndarray) -> dict[str, tuple[Callable[[], Any], Callable[[Any], np.ndarray]]]:
    """For each system a function that computes the value and the gradients, and one that gets the last gradient."""
    arrays = [ad.array(x, device="gpu") for x in (q, p, np.float32(WIDTH))]
    step = ad.jit(ad.value_and_grad(EXAMPLE["norm"], argnums=(0, 1)))
    tensors = [torch.tensor(x, device="cuda", requires_grad=True) for x in (q, p)]
    on_device = jax.device_put(q), jax.device_put(p)
    in_one = jax.jit(jax.value_and_grad(in_jax, argnums=(0, 1)))
    compiled = torch.compile(in_torch)

    def with_torch(f: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(f(*tensors), tensors)

    return {
        "adtrain": (lambda: step(*arrays), lambda found: found[1][1].numpy()),
        "PyTorch": (with_torch(in_torch), lambda found: found[1].cpu().numpy()),
        "PyTorch, compiled": (with_torch(compiled), lambda found: found[1].cpu().numpy()),
        "JAX": (lambda: jax.block_until_ready(in_one(*on_device)), lambda found: np.asarray(found[1][1])),
    }


def seconds_of(name: str, work: Callable[[], Any]) -> list[float]:
    if name == "JAX":
        start = perf_counter()
        work()
        return [perf_counter() - start]
    gpu: Any = backend("gpu")
    own = torch.cuda.ExternalStream(gpu.device.stream.handle)
    return timed(work, own if name == "adtrain" else torch.cuda.current_stream())


@click.command()
@click.option("--points", multiple=True, type=int, default=(1_000, 10_000, 40_000, 1_000_000))
@click.option("--json", "path", type=Path, help="Write the results to a file.")
def main(points: tuple[int, ...], path: Path | None) -> None:
    """Measure and print a table."""
    report = Report(path)
    click.echo(f"{'points':>9}  {'system':18} {'ms':>10} {'billion pairs/s':>16} {'error':>8}")
    for count in points:
        rng = np.random.default_rng(0)
        q, p = (rng.normal(size=(count, 3)).astype(np.float32) for _ in range(2))
        rows = rng.choice(count, 64, replace=False)
        _, exact = EXAMPLE["exact_gradients"](q, p, rows)
        found: dict[str, list[float]] = {}
        errors: dict[str, float] = {}
        running = systems(q, p)
        for name, (work, gradient) in list(running.items()):
            try:
                errors[name] = float(np.abs(gradient(work())[rows] - exact).max() / np.abs(exact).max())
            except (torch.OutOfMemoryError, jax.errors.JaxRuntimeError) as error:
                click.echo(f"{count:9,}  {name:18} out of memory ({type(error).__name__})")
                del running[name]
            torch.cuda.empty_cache()
        for _ in range(ROUNDS if count < 100_000 else 1):
            for name, (work, _) in running.items():
                found.setdefault(name, []).extend(seconds_of(name, work))
        for name, seconds in found.items():
            each = median(seconds)
            report.add({"points": count, "system": name, "ms": each * 1e3, "error": errors[name]})
            speed = count * count / each / 1e9
            click.echo(f"{count:9,}  {name:18} {each * 1e3:10.3f} {speed:16,.0f} {errors[name]:8.1e}")
    click.echo(report.line())


if __name__ == "__main__":
    main()
