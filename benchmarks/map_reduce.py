"""The Gaussian kernel norm of N points and its gradients by points and momenta: adtrain, PyTorch and JAX.

    python benchmarks/map_reduce.py [--device cpu|gpu] [--points N]... [--json PATH]

float32, three dimensions. Times are medians of samples that alternate between the systems: on a GPU by CUDA events, for
JAX and on the CPU by the host's clock. Errors of the gradient by the momenta are relative to its largest element in
float64, on 64 rows. A system that is not installed or runs out of memory is left out.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np
import torch
from gpu_report import Report

import adtrain as ad
from adtrain.bench.sampling import in_turns
from adtrain.core.backend import backend

EXAMPLE = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "kernel_norm.py"))
WIDTH = EXAMPLE["WIDTH"]
ROUNDS = 5


def in_torch(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    d = ((q[:, None] - q[None]) ** 2).sum(2)
    return 0.5 * (p * (torch.exp(-d / (2 * WIDTH * WIDTH)) @ p)).sum()


def systems(q: np.ndarray, p: np.ndarray, device: str) -> dict[str, Callable[[], Any]]:
    """For each system a function that computes the value and both gradients; it returns the gradients."""
    arrays = [ad.array(x, device=device) for x in (q, p, np.float32(WIDTH))]
    step = ad.jit(ad.value_and_grad(EXAMPLE["norm"], argnums=(0, 1)))
    on = "cuda" if device == "gpu" else "cpu"
    tensors = [torch.tensor(x, device=on, requires_grad=True) for x in (q, p)]
    compiled = torch.compile(in_torch)
    found: dict[str, Callable[[], Any]] = {
        "adtrain": lambda: step(*arrays)[1],
        "PyTorch": lambda: torch.autograd.grad(in_torch(*tensors), tensors),
        "PyTorch, compiled": lambda: torch.autograd.grad(compiled(*tensors), tensors),
    }
    return found | ({"JAX": with_jax(q, p)} if find_spec("jax") else {})


def with_jax(q: np.ndarray, p: np.ndarray) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    def norm(q: Any, p: Any) -> Any:
        d = ((q[:, None] - q[None]) ** 2).sum(2)
        return 0.5 * (p * jnp.matmul(jnp.exp(-d / (2 * WIDTH * WIDTH)), p, precision="highest")).sum()

    step, arrays = jax.jit(jax.value_and_grad(norm, argnums=(0, 1))), (jax.device_put(q), jax.device_put(p))
    return lambda: jax.block_until_ready(step(*arrays))[1]


def as_numpy(x: Any) -> np.ndarray:
    """An array of any of the systems."""
    return x.cpu().numpy() if isinstance(x, torch.Tensor) else x.numpy() if isinstance(x, ad.Array) else np.asarray(x)


def seconds_of(name: str, work: Callable[[], Any], device: str) -> list[float]:
    if name == "JAX" or device == "cpu":
        start = perf_counter()
        work()
        return [perf_counter() - start]
    from gpu_bandwidth import timed

    gpu: Any = backend("gpu")
    own = torch.cuda.ExternalStream(gpu.device.stream.handle)
    return timed(work, own if name == "adtrain" else torch.cuda.current_stream())


@click.command()
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="gpu", show_default=True)
@click.option("--points", multiple=True, type=int, default=(1_000, 10_000, 40_000, 1_000_000), show_default=True)
@click.option("--json", "path", type=Path, help="Write the results to a file.")
def main(device: str, points: tuple[int, ...], path: Path | None) -> None:
    """Measure and print a table."""
    report = Report(path)
    report.about["device"] = report.about["device"] if device == "gpu" else backend("cpu").device_name()
    click.echo(f"{'points':>9}  {'system':18} {'ms':>10} {'billion pairs/s':>16} {'error':>8}")
    for count in points:
        rng = np.random.default_rng(0)
        q, p = (rng.normal(size=(count, 3)).astype(np.float32) for _ in range(2))
        rows = rng.choice(count, 64, replace=False)
        _, exact = EXAMPLE["exact_gradients"](q, p, rows)
        errors: dict[str, float] = {}
        running = systems(q, p, device)
        for name, work in list(running.items()):
            try:
                errors[name] = float(np.abs(as_numpy(work()[1])[rows] - exact).max() / np.abs(exact).max())
            except RuntimeError as error:  # also that of PyTorch and JAX without enough memory
                click.echo(f"{count:9,}  {name:18} {type(error).__name__}: {str(error).splitlines()[0][:60]}")
                del running[name]
        samples = {name: partial(seconds_of, name, work, device) for name, work in running.items()}
        for name, seconds in in_turns(samples, ROUNDS if count < 100_000 else 1).items():
            each = median(chain.from_iterable(seconds))
            report.add({"points": count, "system": name, "ms": each * 1e3, "error": errors[name]})
            click.echo(f"{count:9,}  {name:18} {each * 1e3:10.3f} {count**2 / each / 1e9:16,.2f} {errors[name]:8.1e}")
    click.echo(report.line())


if __name__ == "__main__":
    main()
