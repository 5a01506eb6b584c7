"""Programs for which adtrain has no pass or kernel of their own: loss and gradients in adtrain, JAX and PyTorch.

    python benchmarks/general_programs.py [PROGRAM...] [--device cpu|gpu] [--threads N] [--json PATH]

Each program is written once, for the functions that the three systems have in common. Its arguments are float32. The
systems run in processes of their own, in turns; a process is stopped while another one works. A time is the median of
the samples. An error is the largest of the loss and the gradients, relative to the largest element, against PyTorch in
float64. "ahead" is the best time of the others over adtrain's. The worst program is printed first.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
from gpu_report import Report

from adtrain.bench.peers.systems import WorkerFailed, WorkerProcess, started
from adtrain.bench.peers.worker import Worker, main
from adtrain.bench.sampling import in_turns

ROUNDS, SAMPLE_SECONDS = 9, 0.1
SYSTEMS = ("adtrain", "jax", "torch", "torch-compile")
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "burgers": {
        "cpu": {"points": 10_000, "width": 20, "depth": 8},
        "gpu": {"points": 100_000, "width": 20, "depth": 8},
    },
    "swiglu": {
        "cpu": {"batch": 8, "length": 128, "width": 256, "hidden": 704},
        "gpu": {"batch": 16, "length": 1024, "width": 1024, "hidden": 2816},
    },
    "squeeze_excitation": {
        "cpu": {"images": 32, "channels": 64, "size": 28, "squeezed": 16},
        "gpu": {"images": 256, "channels": 256, "size": 28, "squeezed": 16},
    },
    "attention": {
        "cpu": {"batch": 8, "heads": 4, "length": 128, "width": 64},
        "gpu": {"batch": 8, "heads": 16, "length": 1024, "width": 64},
    },
    "kalman": {"cpu": {"tracks": 4096, "steps": 8}, "gpu": {"tracks": 262_144, "steps": 8}},
    "gaussian_mixture": {
        "cpu": {"points": 20_000, "features": 16, "components": 32},
        "gpu": {"points": 200_000, "features": 16, "components": 32},
    },
    "k_means": {
        "cpu": {"points": 20_000, "features": 16, "clusters": 64},
        "gpu": {"points": 1_000_000, "features": 16, "clusters": 64},
    },
    "spectral_norm": {"cpu": {"size": 512, "steps": 10}, "gpu": {"size": 4096, "steps": 10}},
}
"""The lengths of each program."""

Program = tuple[Callable[..., Any], Sequence[np.ndarray], int]
"""Loss of (functions, *arguments), the arguments, and how many of them, from the first on, are differentiated."""


class Draw:
    """Normal numbers, always the same ones."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * scale).astype(np.float32)


def burgers(draw: Draw, points: int, width: int, depth: int) -> Program:
    """A physics-informed network for u_t + u u_x = nu u_xx (Raissi et al., 2019)."""
    sizes = [2, *(width,) * depth, 1]
    layers = [p for a, b in pairwise(sizes) for p in (draw(a, b, scale=(2 / (a + b)) ** 0.5), np.zeros(b, np.float32))]

    def loss(o: Any, *args: Any) -> Any:
        *parameters, t, x = args

        def u(t: Any, x: Any) -> Any:
            h = o.concatenate([t, x], 1)
            for i in range(0, len(parameters), 2):
                h = h @ parameters[i] + parameters[i + 1]
                if i < len(parameters) - 2:
                    h = o.tanh(h)
            return h

        def by_x(x: Any) -> Any:
            return o.slope(lambda x: u(t, x), x)

        residual = o.slope(lambda t: u(t, x), t) + u(t, x) * by_x(x) - 0.01 / math.pi * o.slope(by_x, x)
        return o.mean(residual * residual)

    return loss, [*layers, draw(points, 1), draw(points, 1)], len(layers)


def swiglu(draw: Draw, batch: int, length: int, width: int, hidden: int) -> Program:
    """A feed-forward block: RMS norm, SwiGLU, residual."""

    def loss(o: Any, gain: Any, gate: Any, up: Any, down: Any, x: Any) -> Any:
        h = x / o.sqrt(o.mean(x * x, -1, True) + 1e-6) * gain
        gated = h @ gate
        y = x + (gated * o.sigmoid(gated) * (h @ up)) @ down
        return o.mean(y * y)

    into, out = width**-0.5, hidden**-0.5
    weights = [draw(width, hidden, scale=into), draw(width, hidden, scale=into), draw(hidden, width, scale=out)]
    return loss, [draw(width), *weights, draw(batch, length, width)], 5


def squeeze_excitation(draw: Draw, images: int, channels: int, size: int, squeezed: int) -> Program:
    def loss(o: Any, squeeze: Any, excite: Any, x: Any) -> Any:
        weights = o.sigmoid(o.relu(o.mean(x, (2, 3)) @ squeeze) @ excite)
        y = x * weights[:, :, None, None]
        return o.mean(y * y)

    weights = [draw(channels, squeezed, scale=channels**-0.5), draw(squeezed, channels, scale=squeezed**-0.5)]
    return loss, [*weights, draw(images, channels, size, size)], 3


def attention(draw: Draw, batch: int, heads: int, length: int, width: int) -> Program:
    def loss(o: Any, q: Any, k: Any, v: Any) -> Any:
        y = o.softmax(q @ o.swapped(k) * width**-0.5) @ v
        return o.mean(y * y)

    return loss, [draw(batch, heads, length, width) for _ in range(3)], 3


def kalman(draw: Draw, tracks: int, steps: int) -> Program:
    """Filters of position and velocity in a plane, from positions: the log-likelihood by the model's matrices."""

    def inverse(o: Any, s: Any) -> tuple[Any, Any]:
        a, b, c, d = s[:, 0, 0], s[:, 0, 1], s[:, 1, 0], s[:, 1, 1]
        determinant = a * d - b * c
        adjugate = o.stack([d, -b, -c, a], 1)
        return o.reshape(adjugate, (-1, 2, 2)) / determinant[:, None, None], determinant

    def loss(o: Any, model: Any, noise: Any, sensor: Any, x: Any, p: Any, seen: Any) -> Any:
        total = 0.0
        for i in range(steps):
            x, p = model @ x, model @ p @ o.swapped(model) + noise @ o.swapped(noise)
            innovation = seen[i] - x[:, :2]
            s = p[:, :2, :2] + sensor @ o.swapped(sensor)
            inverted, determinant = inverse(o, s)
            gain = p[:, :, :2] @ inverted
            fit = o.sum(innovation * (inverted @ innovation), (1, 2))
            total = total + o.mean(fit + o.log(determinant))
            x, p = x + gain @ innovation, p - gain @ p[:, :2, :]
        return total / steps

    model = (np.eye(4) + 0.1 * np.eye(4, k=2)).astype(np.float32)
    noise, sensor, start = np.eye(4, dtype=np.float32) * 0.1, np.eye(2, dtype=np.float32), np.eye(4, dtype=np.float32)
    matrices = [np.tile(start, (tracks, 1, 1))]
    return loss, [model, noise, sensor, draw(tracks, 4, 1), *matrices, draw(steps, tracks, 2, 1)], 3


def gaussian_mixture(draw: Draw, points: int, features: int, components: int) -> Program:
    """The log-likelihood of points, with diagonal covariances."""

    def loss(o: Any, means: Any, log_scales: Any, logits: Any, x: Any) -> Any:
        z = (x[:, None, :] - means) / o.exp(log_scales)
        each = -0.5 * o.sum(z * z, 2) - o.sum(log_scales, 1) + logits - o.logsumexp(logits, 0)
        return -o.mean(o.logsumexp(each, 1))

    parameters = [draw(components, features), draw(components, features, scale=0.1), draw(components)]
    return loss, [*parameters, draw(points, features)], 3


def k_means(draw: Draw, points: int, features: int, clusters: int) -> Program:
    """The mean squared distance of points from the nearest centre."""

    def loss(o: Any, centres: Any, x: Any) -> Any:
        squares = o.sum(x * x, 1)[:, None] - 2.0 * (x @ o.swapped(centres)) + o.sum(centres * centres, 1)
        return o.mean(o.smallest(squares, 1))

    return loss, [draw(clusters, features), draw(points, features)], 1


def spectral_norm(draw: Draw, size: int, steps: int) -> Program:
    """The largest singular value by power iteration."""

    def loss(o: Any, w: Any, u: Any) -> Any:
        for _ in range(steps):
            v = o.swapped(w) @ u
            v = v / o.sqrt(o.sum(v * v))
            u = w @ v
            u = u / o.sqrt(o.sum(u * u))
        return o.sum(u * (w @ v))

    return loss, [draw(size, size, scale=size**-0.5), draw(size, 1)], 1


PROGRAMS = (burgers, swiglu, squeeze_excitation, attention, kalman, gaussian_mixture, k_means, spectral_norm)


def program(name: str, device: str) -> Program:
    (made,) = (p for p in PROGRAMS if p.__name__ == name)
    return made(Draw(), **SIZES[name][device])


def with_adtrain(loss: Callable[..., Any], arguments: Sequence[np.ndarray], count: int, device: str) -> Any:
    import adtrain as ad
    from adtrain import ops

    o = SimpleNamespace(**{name: getattr(ops, name) for name in ops.__all__})
    o.slope = lambda f, x: ad.grad(lambda x: ops.sum(f(x)))(x)
    o.swapped = lambda x: ops.transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))
    o.smallest, o.softmax = ops.min, lambda x: ops.softmax(x, -1)
    step = ad.jit(ad.value_and_grad(lambda *args: loss(o, *args), argnums=tuple(range(count))))
    arrays = [ad.array(x, device=device) for x in arguments]
    return lambda: step(*arrays)


def with_jax(loss: Callable[..., Any], arguments: Sequence[np.ndarray], count: int) -> Any:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_default_matmul_precision", "highest")
    o = SimpleNamespace(**{name: getattr(jnp, name) for name in dir(jnp)})
    o.slope = lambda f, x: jax.grad(lambda x: jnp.sum(f(x)))(x)
    o.sigmoid, o.relu, o.logsumexp = jax.nn.sigmoid, jax.nn.relu, jax.nn.logsumexp
    o.swapped, o.smallest, o.softmax = (lambda x: jnp.swapaxes(x, -1, -2)), jnp.min, jax.nn.softmax
    o.mean = lambda x, axis=None, keepdims=False: jnp.mean(x, axis, keepdims=keepdims)
    step = jax.jit(jax.value_and_grad(lambda *args: loss(o, *args), argnums=tuple(range(count))))
    arrays = list(map(jax.device_put, arguments))
    return lambda: step(*arrays)


def with_torch(
    loss: Callable[..., Any], arguments: Sequence[np.ndarray], count: int, device: str, compiled: bool = False
) -> Any:
    import torch

    def reduced(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, axis=None, keepdims=False: f(x) if axis is None else f(x, dim=axis, keepdim=keepdims)

    o = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    o.slope = lambda f, x: torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]
    o.sum, o.mean, o.logsumexp, o.smallest = map(reduced, (torch.sum, torch.mean, torch.logsumexp, torch.amin))
    o.swapped, o.softmax = (lambda x: x.transpose(-1, -2)), lambda x: torch.softmax(x, -1)
    tensors = [torch.tensor(x, device="cuda" if device == "gpu" else device) for x in arguments]
    for x in tensors:
        x.requires_grad_()
    run = torch.compile(lambda *args: loss(o, *args)) if compiled else lambda *args: loss(o, *args)

    def step() -> Any:
        value = run(*tensors)
        return value, torch.autograd.grad(value, tensors[:count])

    return step


def exact(name: str, device: str) -> Sequence[np.ndarray]:
    """The loss and the gradients in float64."""
    loss, arguments, count = program(name, device)
    value, gradients = with_torch(loss, [x.astype(np.float64) for x in arguments], count, "cpu")()
    return [x.detach().numpy() for x in (value, *gradients)]


class GeneralWorker(Worker):
    """A worker that runs the programs of this file."""

    def program(self, name: str, results: str) -> dict[str, Any]:
        """Set up a program, and write its loss and gradients to the file ``results``."""
        loss, arguments, count = program(name, self.device)
        if self.name == "adtrain":
            step = with_adtrain(loss, arguments, count, self.device)
        elif self.name == "jax":
            step = with_jax(loss, arguments, count)
        else:
            step = with_torch(loss, arguments, count, self.device, self.name == "torch-compile")
        value, gradients = step()
        np.savez(results, *map(_as_numpy, (value, *gradients)))

        def call(times: int) -> float:
            for _ in range(times):
                value, _gradients = step()
            return float(_as_numpy(value))

        self.call = call
        return {}


def _as_numpy(x: Any) -> np.ndarray:
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x.numpy() if hasattr(x, "numpy") else x)


def error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))


def measured(name: str, device: str, workers: dict[str, WorkerProcess], folder: Path) -> dict[str, Any]:
    """Milliseconds and errors of a program by system, and the reasons of those that did not run it."""
    errors, calls, failed = dict[str, float](), dict[str, int](), dict[str, str]()
    expected = exact(name, device)
    for system, worker in workers.items():
        file = folder / f"{system}.npz"
        try:
            worker.ask("program", name=name, results=str(file))
            with np.load(file) as results:
                errors[system] = error(list(results.values()), expected)
            calls[system] = max(1, round(SAMPLE_SECONDS / worker.ask("time", calls=4)["seconds"] * 4))
        except WorkerFailed as reason:
            failed[system] = str(reason)
    answers = in_turns({system: partial(workers[system].ask, "time", calls=calls[system]) for system in calls}, ROUNDS)
    ms = {system: median(each["seconds"] for each in answers[system]) / calls[system] * 1e3 for system in calls}
    ahead = min(t for system, t in ms.items() if system != "adtrain") / ms["adtrain"]
    return {"program": name, "sizes": SIZES[name][device], "ms": ms, "errors": errors, "failed": failed, "ahead": ahead}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(SIZES)))
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--threads", type=int, default=2, show_default=True, help="Threads of each system.")
@click.option("--json", "path", type=Path, help="Write the results to a file.")
def command(names: tuple[str, ...], device: str, threads: int, path: Path | None) -> None:
    """Measure and print a table."""
    report = Report(path)
    with (
        tempfile.TemporaryDirectory() as folder,
        started(SYSTEMS, device, threads, script=Path(__file__).resolve()) as workers,
    ):
        for name in names or SIZES:
            report.add(measured(name, device, workers, Path(folder)))
            click.echo(f"{name}: {report.rows[-1]['ms']}", err=True)
    click.echo(f"{'program':20} {'ahead':>6}  " + "  ".join(f"{system:>22}" for system in SYSTEMS))
    for row in sorted(report.rows, key=lambda row: row["ahead"]):
        cells = [f"{row['ms'][s]:9.3f} ms, {row['errors'][s]:.1e}" if s in row["ms"] else "failed" for s in SYSTEMS]
        click.echo(f"{row['program']:20} {row['ahead']:6.2f}  " + "  ".join(f"{cell:>22}" for cell in cells))
        for system, reason in row["failed"].items():
            click.echo(f"    {system}: {reason[:100]}")
    click.echo(report.line())


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SYSTEMS:
        main(*sys.argv[1:5], kind=GeneralWorker)
    else:
        command()
