"""Losses with derivatives: nested gradients, Taylor mode and JAX, in turns.

    python benchmarks/derivatives.py [burgers] [laplacian] [--device cpu|gpu] [--size KEY N] [--only PATTERN]

`burgers` is the loss of a physics-informed network for u_t + u u_x = nu u_xx (Raissi et al., 2019) with its gradient.
`laplacian` is the Laplacian of a network at each point of a batch in 100 dimensions. Each way to write it is a row. The
ways run in one process, in turns; a time is the median of the rounds. An error is relative to the largest element of
the first row's results, which are those of adtrain in the same precision.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import click
import numpy as np

import adtrain as ad
from adtrain import ops
from adtrain.bench.sampling import in_turns

SIZES: dict[str, dict[str, dict[str, int]]] = {
    "burgers": {
        "cpu": {"points": 10_000, "width": 20, "depth": 8},
        "gpu": {"points": 65_536, "width": 64, "depth": 4},
    },
    "laplacian": {
        "cpu": {"points": 256, "dimensions": 100, "width": 64, "depth": 3},
        "gpu": {"points": 4096, "dimensions": 100, "width": 256, "depth": 4},
    },
}
SAMPLE_SECONDS = 0.1

Step = Callable[[], Any]


def network(sizes: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(a, b)) * (2 / (a + b)) ** 0.5, rng.normal(size=b) * 0.1) for a, b in pairwise(sizes)]
    return [x.astype(np.float32) for pair in pairs for x in pair]


def values(o: Any, parameters: Any, h: Any) -> Any:
    """The outputs of a tanh network."""
    for i in range(0, len(parameters), 2):
        h = o.matmul(h, parameters[i]) + parameters[i + 1]
        if i < len(parameters) - 2:
            h = o.tanh(h)
    return h


def in_adtrain(function: Callable[..., Any], arguments: Any, device: str) -> Step:
    """The compiled function of arguments on the device."""
    step, arrays = ad.jit(function), ad.tree.map(lambda z: ad.array(z, device=device), arguments)
    return lambda: step(*arrays)


def in_jax(function: Callable[..., Any], arguments: Any) -> Step:
    """The function of arguments, compiled by JAX on its default device, with products in float32."""
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    step, arrays = jax.jit(function), jax.device_put(arguments)
    return lambda: step(*arrays)


def nested(grad: Callable[..., Any]) -> Callable[..., Any]:
    """The derivatives of a function u(t, x) by gradients of gradients."""

    def slope(f: Any) -> Any:
        return grad(lambda z: f(z).sum())

    def derivatives(u: Any, t: Any, x: Any) -> Any:
        by_x = slope(lambda x: u(t, x))
        return u(t, x), slope(lambda t: u(t, x))(t), by_x(x), slope(by_x)(x)

    return derivatives


def burgers(device: str, points: int, width: int, depth: int) -> dict[str, Callable[[], Step]]:
    parameters = network([2, *(width,) * depth, 1])
    rng = np.random.default_rng(1)
    t, x = (rng.uniform(-1, 1, (points, 1)).astype(np.float32) for _ in range(2))

    def residual(u: Any, u_t: Any, u_x: Any, u_xx: Any) -> Any:
        r = u_t + u * u_x - 0.01 / math.pi * u_xx
        return (r * r).mean()

    def loss(o: Any, derivatives: Callable[..., Any]) -> Callable[..., Any]:
        def found(parameters: Any, t: Any, x: Any) -> Any:
            u = lambda t, x: values(o, parameters, o.concatenate([t, x], 1))  # noqa: E731
            return residual(*derivatives(u, t, x))

        return found

    def with_adtrain(derivatives: Callable[..., Any]) -> Step:
        return in_adtrain(ad.value_and_grad(loss(ops, derivatives)), (parameters, t, x), device)

    def taylor(u: Any, t: Any, x: Any) -> Any:
        value, (u_x, u_xx) = ad.jet(lambda x: u(t, x), (x,), [(ops.ones_like(x),), None])
        return value, ad.jvp(lambda t: u(t, x), (t,), (ops.ones_like(t),))[1], u_x, u_xx

    def with_jax(derivatives: Callable[..., Any]) -> Step:
        import jax

        return in_jax(jax.value_and_grad(loss(jax.numpy, derivatives)), (parameters, t, x))

    def jax_reverse() -> Step:
        import jax

        return with_jax(nested(jax.grad))

    def jax_forward(u: Any, t: Any, x: Any) -> Any:
        import jax

        one = jax.numpy.ones_like(x)
        by_x = lambda x: jax.jvp(lambda x: u(t, x), (x,), (one,))  # noqa: E731
        (value, u_x), (_, u_xx) = jax.jvp(by_x, (x,), (one,))
        return value, jax.jvp(lambda t: u(t, x), (t,), (one,))[1], u_x, u_xx

    def jax_jet(u: Any, t: Any, x: Any) -> Any:
        import jax
        from jax.experimental.jet import jet

        one = jax.numpy.ones_like(x)
        value, (u_x, u_xx) = jet(lambda x: u(t, x), (x,), ((one, jax.numpy.zeros_like(x)),))
        return value, jax.jvp(lambda t: u(t, x), (t,), (one,))[1], u_x, u_xx

    def torch_reverse() -> Step:
        import torch

        on = "cuda" if device == "gpu" else "cpu"
        weights = [torch.tensor(p, device=on, requires_grad=True) for p in parameters]
        a, b = (torch.tensor(z, device=on, requires_grad=True) for z in (t, x))

        def step() -> Any:
            u = values(torch, weights, torch.cat([a, b], 1))
            u_t, u_x = torch.autograd.grad(u.sum(), (a, b), create_graph=True)
            (u_xx,) = torch.autograd.grad(u_x.sum(), b, create_graph=True)
            loss = residual(u, u_t, u_x, u_xx)
            return loss, torch.autograd.grad(loss, weights)

        return step

    return {
        "adtrain jet": lambda: with_adtrain(taylor),
        "adtrain nested grad": lambda: with_adtrain(nested(ad.grad)),
        "jax nested grad": jax_reverse,
        "jax nested jvp": lambda: with_jax(jax_forward),
        "jax jet": lambda: with_jax(jax_jet),
        "torch nested grad": torch_reverse,
    }


def laplacian(device: str, points: int, dimensions: int, width: int, depth: int) -> dict[str, Callable[[], Step]]:
    parameters = network([dimensions, *(width,) * depth, 1])
    x = np.random.default_rng(1).uniform(-1, 1, (points, dimensions)).astype(np.float32)

    def of_network(o: Any, at_point: Callable[..., Any]) -> Callable[..., Any]:
        return lambda parameters, x: at_point(lambda x: values(o, parameters, x)[0], x)

    def with_adtrain(at_point: Callable[..., Any]) -> Step:
        return in_adtrain(ad.vmap(of_network(ops, at_point), (None, 0)), (parameters, x), device)

    def with_jax(at_point: Callable[..., Any]) -> Step:
        import jax

        return in_jax(jax.vmap(of_network(jax.numpy, at_point), (None, 0)), (parameters, x))

    def jax_hessian(u: Any, x: Any) -> Any:
        import jax

        return jax.numpy.trace(jax.hessian(u)(x))

    def jax_products(u: Any, x: Any) -> Any:
        import jax

        basis = jax.numpy.eye(dimensions)
        return jax.vmap(lambda v: jax.numpy.vdot(v, jax.jvp(jax.grad(u), (x,), (v,))[1]))(basis).sum()

    def jax_jet(u: Any, x: Any) -> Any:
        import jax
        from jax.experimental.jet import jet

        basis = jax.numpy.eye(dimensions)
        return jax.vmap(lambda v: jet(u, (x,), ((v, jax.numpy.zeros_like(x)),))[1][1])(basis).sum()

    def jax_by_hand() -> Step:
        """The collapsed rules, written out for this network."""
        import jax
        import jax.numpy as jnp

        def at_point(parameters: Any, x: Any) -> Any:
            h, first, second = x, jnp.eye(dimensions), jnp.zeros(dimensions)
            for i in range(0, len(parameters), 2):
                h, first, second = (
                    h @ parameters[i] + parameters[i + 1],
                    first @ parameters[i],
                    second @ parameters[i],
                )
                if i < len(parameters) - 2:
                    h = jnp.tanh(h)
                    slope = 1 - h * h
                    second = slope * second - 2 * h * slope * (first * first).sum(0)
                    first = slope * first
            return second[0]

        return in_jax(jax.vmap(at_point, (None, 0)), (parameters, x))

    return {
        "adtrain laplacian": lambda: with_adtrain(lambda u, x: ad.laplacian(u, x)[1]),
        "adtrain trace of hessian": lambda: with_adtrain(lambda u, x: ops.trace(ad.hessian(u)(x))),
        "jax trace of hessian": lambda: with_jax(jax_hessian),
        "jax jvp of grad": lambda: with_jax(jax_products),
        "jax jet": lambda: with_jax(jax_jet),
        "jax collapsed by hand": jax_by_hand,
    }


PROGRAMS: dict[str, Callable[..., dict[str, Callable[[], Step]]]] = {"burgers": burgers, "laplacian": laplacian}


def leaves(found: Any) -> list[np.ndarray]:
    if isinstance(found, (tuple, list)):
        return [x for part in found for x in leaves(part)]
    if hasattr(found, "detach"):
        found = found.detach().cpu()
    return [np.asarray(found.numpy() if hasattr(found, "numpy") else found)]


def error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))


def waited(step: Step, calls: int) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        found = step()
    leaves(found)
    return (time.perf_counter() - start) / calls


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PROGRAMS)))
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
@click.option("--size", "lengths", type=(str, int), multiple=True, help="A length in place of the default: width 20.")
@click.option("--rounds", type=int, default=9, show_default=True)
@click.option("--only", default="", help="Only the ways whose names match this regular expression.")
def command(names: tuple[str, ...], device: str, lengths: tuple[tuple[str, int], ...], rounds: int, only: str) -> None:
    """Measure and print a table."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    for name in names or PROGRAMS:
        sizes = SIZES[name][device] | dict(lengths)
        click.echo(f"{name}, {device}: {', '.join(f'{key} {n}' for key, n in sizes.items())}")
        ways = {way: make for way, make in PROGRAMS[name](device, **sizes).items() if re.search(only, way)}
        steps: dict[str, Step] = {}
        calls: dict[str, int] = {}
        errors: dict[str, float] = {}
        expected: list[np.ndarray] = []
        for way, make in ways.items():
            start = time.perf_counter()
            steps[way] = make()
            found = leaves(steps[way]())
            expected = expected or found
            errors[way] = error(found, expected)
            waited(steps[way], 1)
            calls[way] = max(1, round(SAMPLE_SECONDS / waited(steps[way], 3)))
            click.echo(f"  {way}: ready after {time.perf_counter() - start:.1f} s", err=True)
        seconds = in_turns({way: partial(waited, steps[way], calls[way]) for way in ways}, rounds)
        for way in ways:
            click.echo(f"  {way:26} {median(seconds[way]) * 1e3:9.3f} ms   error {errors[way]:.0e}")


if __name__ == "__main__":
    command()
