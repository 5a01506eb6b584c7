"""Chains of rows: which equations become one kernel, and these kernels on the CPU against NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, assert_same_in_another_order, check_kernels, host
from cuda_samples import Shaped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_samples import for_gpu, names

import adtrain as ad
from adtrain import config, ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.codegen import row_chain_layout, row_chain_plan
from adtrain.backends.cuda.codegen.row_chain_layout import FLOATS, TERMS, Layout, Way, layout_of
from adtrain.backends.cuda.forms import row_chain
from adtrain.backends.cuda.forms.row_chain import ROW_CHAIN
from adtrain.core.kernel import Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Program, single_equations
from adtrain.core.staging import stage
from adtrain.core.types import Shape
from adtrain.training.preparation import outline

__all__ = ["host"]

TARGET: Target = H200._replace(multiprocessors=2)
"""A block computes several tiles."""
TOLERANCE = 3e-6
"""Maximum norm of the error over the norm of the result."""


def network(weights: Sequence[Any], x: Any, activation: Callable[[Any], Any] = ops.tanh) -> Any:
    *hidden, last = weights
    for w, b in hidden:
        x = activation(x @ w + b)
    return x @ last[0] + last[1]


def layers(*widths: int) -> list[tuple[Shape, Shape]]:
    return [((a, b), (b,)) for a, b in pairwise(widths)]


def burgers(weights: Any, t: Any, x: Any) -> Any:
    """The loss of a physics-informed network with its gradient."""

    def loss(weights: Any) -> Any:
        def u(t: Any, x: Any) -> Any:
            return network(weights, ops.concatenate([t, x], 1))

        value, (by_x, by_xx) = ad.jet(lambda x: u(t, x), (x,), [(ops.ones_like(x),), None])
        by_t = ad.jvp(lambda t: u(t, x), (t,), (ops.ones_like(t),))[1]
        return ops.mean(ops.square(by_t + value * by_x - 0.01 * by_xx))

    return ad.value_and_grad(loss)(weights)


def regression(weights: Any, x: Any, y: Any) -> Any:
    """A network with residual additions, with the gradients of its weights and inputs."""

    def loss(weights: Any, x: Any) -> Any:
        first, *inner, last = weights
        h = ops.relu(x @ first[0] + first[1])
        for w, b in inner:
            h = h + ops.sin(h @ w + b)
        return ops.mean(ops.square(h @ last[0] + last[1] - y))

    return ad.value_and_grad(loss, (0, 1))(weights, x)


def prediction(weights: Any, x: Any) -> Any:
    return network(weights, x, ops.gelu)


def features(weights: Any, x: Any, y: Any) -> Any:
    """A training step on Fourier features, with weights as PyTorch has them; a wide layer; two losses."""
    frequencies, *rest = weights

    def loss(weights: Any) -> Any:
        z = x @ frequencies
        h = ops.concatenate([ops.sin(z), ops.cos(z), x[:, 1:4:2]], 1)
        for w, b in weights[:-1]:
            h = ops.gelu(ops.matmul(h, w, transpose_b=True) + b)
        w, b = weights[-1]
        out = ops.matmul(h, w, transpose_b=True) + b
        return ops.mean(ops.square(out[:, 0] - y)) + ops.mean(ops.abs(out[:, 1]))

    value, gradients = ad.value_and_grad(loss)(rest)
    return value, ad.tree.map(lambda w, g: w - 0.1 * g, rest, gradients)


def nested(weights: Any, x: Any) -> Any:
    """Second derivatives by nested reverse mode in the loss."""

    def loss(weights: Any) -> Any:
        def slope(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return ad.grad(lambda x: ops.sum(f(x)))

        first = slope(lambda x: network(weights, x))
        return ops.mean(ops.square(slope(lambda x: first(x)[:, :1])(x)[:, :1] + ops.sin(first(x)[:, 1:])))

    return ad.value_and_grad(loss)(weights)


def autoencoder(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        return ops.mean(ops.square(network(weights, x, ops.sigmoid) - x))

    return ad.value_and_grad(loss)(weights)


def conditions(weights: Any, x: Any, index: Any, mask: Any, table: Any) -> Any:
    """The loss where an input takes two values in turns, with measurements in float64 and a mask of rows."""

    def loss(weights: Any) -> Any:
        side = ops.where(ops.equal(ops.remainder(index, 2), 1), 1.0, x[:, 1])
        value = network(weights, ops.concatenate([x[:, :1], ops.reshape(side, (-1, 1))], 1))
        slope = ad.jvp(lambda x: network(weights, x), (x,), (ops.ones_like(x),))[1]
        measured = ops.astype(table[:, 1:3] - np.array([0.5, 0.25]), np.float32)
        return ops.mean(ops.square(value - measured)) + ops.mean(ops.square(ops.where(mask, slope, 0.0)))

    return ad.value_and_grad(loss)(weights)


Sample = tuple[Callable[..., Any], Callable[[int], Any]]
SAMPLES: dict[str, Sample] = {
    "burgers": (burgers, lambda n: (layers(2, 20, 20, 1), (n, 1), (n, 1))),
    "regression": (regression, lambda n: (layers(9, 24, 24, 24, 3), (n, 9), (n, 3))),
    "prediction": (prediction, lambda n: (layers(7, 64, 33, 5), (n, 7))),
    "features": (
        features,
        lambda n: ([(5, 6), ((96, 14), (96,)), ((17, 96), (17,)), ((2, 17), (2,))], (n, 5), (n,)),
    ),
    "nested": (nested, lambda n: (layers(2, 12, 20, 1), (n, 2))),
    "autoencoder": (autoencoder, lambda n: (layers(30, 16, 3, 16, 30), (n, 30))),
    "conditions": (
        conditions,
        lambda n: (layers(2, 20, 20, 2), (n, 2), np.arange(n), np.arange(n)[:, np.newaxis] % 3 > 0, np.eye(n, 4)),
    ),
}
COUNTS = {
    "burgers": 70,
    "regression": 90,
    "prediction": 50,
    "features": 61,
    "nested": 75,
    "autoencoder": 97,
    "conditions": 70,
}
"""The rows of the samples. The last tile is not whole."""


def arrays_of(shapes: Any, rng: np.random.Generator) -> Any:
    """Normal numbers in place of each shape of a tree."""
    if isinstance(shapes, np.ndarray):
        return shapes
    if all(isinstance(n, int) for n in shapes):
        return rng.standard_normal(shapes, np.float32) / 2
    return type(shapes)(arrays_of(each, rng) for each in shapes)


def fused(name: str, arrays: Any, target: Target = TARGET) -> Program:
    f, _ = SAMPLES[name]
    return for_gpu(stage(f).program(*arrays), target)


def layout_in(program: Program, count: int, target: Target = H200) -> Layout:
    """The layout of the chain in a program."""
    (chain,) = [e for e in program.equations if e.form == ROW_CHAIN]
    plan = row_chain_plan.plan_chain(chain.params["body"], count)
    assert plan is not None
    layout = layout_of(plan, target)
    assert layout is not None
    return layout


def shown(x: object) -> str:
    """A parameter in the name of a test."""
    return "terms" if x is TERMS else "floats" if x is FLOATS else str(x)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of few rows, which are emulated in a short time."""
    monkeypatch.setattr(row_chain, "MIN_ROWS", 40)
    monkeypatch.setattr(row_chain, "LAUNCH_CYCLES", math.inf)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *((TERMS, name) for name in SAMPLES),
        (FLOATS, "features"),
        *(pytest.param(FLOATS, name, marks=pytest.mark.exhaustive) for name in SAMPLES if name != "features"),
    ],
    ids=shown,
)
def test_chains_match_numpy(way: Way, name: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether factors are stored as terms or as floats."""
    monkeypatch.setattr(row_chain_layout, "WAYS", (way,))
    arrays = arrays_of(SAMPLES[name][1](COUNTS[name]), np.random.default_rng(0))
    program = fused(name, arrays)
    assert check_kernels(program, ad.tree.leaves(arrays), host, ROW_CHAIN, TOLERANCE) == 1


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(
    ("way", "rows", "warps"),
    [
        (TERMS, 80, 4),
        pytest.param(TERMS, 48, 12, marks=pytest.mark.exhaustive),
        pytest.param(TERMS, 16, 4, marks=pytest.mark.exhaustive),
        pytest.param(TERMS, 80, 8, marks=pytest.mark.exhaustive),
        pytest.param(FLOATS, 80, 4, marks=pytest.mark.exhaustive),
        pytest.param(FLOATS, 16, 8, marks=pytest.mark.exhaustive),
    ],
    ids=shown,
)
def test_any_division_of_the_work_matches_numpy(
    way: Way, rows: int, warps: int, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether warps compute one tile of a step, or several."""
    monkeypatch.setattr(row_chain_layout, "WAYS", (way,))
    monkeypatch.setattr(row_chain_layout, "ROWS", (rows,))
    monkeypatch.setattr(row_chain_layout, "WARPS", (warps,))
    arrays = arrays_of(SAMPLES["burgers"][1](170), np.random.default_rng(0))
    program = fused("burgers", arrays)
    layout = layout_in(program, 170, TARGET)
    assert (layout.way, layout.rows, layout.warps) == (way, rows, warps)
    assert check_kernels(program, ad.tree.leaves(arrays), host, ROW_CHAIN, TOLERANCE) == 1


@pytest.mark.exhaustive
@pytest.mark.usefixtures("few_rows")
@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chains_of_any_network_match_numpy(host: Host, data: st.DataObject) -> None:
    """Layers of any width with any activations, residual additions where widths are equal, and derivatives."""
    widths = data.draw(st.lists(st.integers(1, 128), min_size=3, max_size=5))
    activations = data.draw(st.lists(st.sampled_from(ACTIVATIONS), min_size=len(widths), max_size=len(widths)))
    count, by_input = data.draw(st.integers(40, 150)), data.draw(st.booleans())

    def f(weights: Any, x: Any) -> Any:
        def u(weights: Any, x: Any) -> Any:
            for (w, b), activation in zip(weights, activations, strict=False):
                y = activation(x @ w + b)
                x = x + y if y.shape == x.shape else y
            return x

        def loss(weights: Any, x: Any) -> Any:
            value, slope = ad.jvp(lambda x: u(weights, x), (x,), (x,))
            return ops.mean(ops.square(value)) + ops.mean(ops.square(slope) if by_input else value)

        return ad.value_and_grad(loss, (0, 1))(weights, x)

    arrays = arrays_of((layers(*widths), (count, widths[0])), np.random.default_rng(count))
    program = for_gpu(stage(f).program(*arrays), TARGET)
    for chain in (e for e in program.equations if e.form == ROW_CHAIN):
        own = [np.random.default_rng(count).uniform(-0.3, 0.3, v.type.shape).astype(np.float32) for v in chain.inputs]
        exact, rounded = (
            chain.primitive.reference(*(x.astype(dtype) for x in own), **chain.params)
            for dtype in ("float64", "float32")
        )
        for found, x, y in zip(host.computed(chain, None, own), exact, rounded, strict=True):
            assert np.linalg.norm(found - x) <= 4 * np.linalg.norm(y - x) + 1e-6 * np.linalg.norm(x)


ACTIVATIONS = (ops.tanh, ops.sin, ops.relu, ops.gelu, ops.sigmoid, ops.exp, ops.square)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("name", ["burgers", "features"])
def test_results_do_not_depend_on_the_order_of_threads(name: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of(SAMPLES[name][1](COUNTS[name]), np.random.default_rng(0))
    program = fused(name, arrays)
    (chain,) = [e for e in program.equations if e.form == ROW_CHAIN]
    rng = np.random.default_rng(1)
    own = [rng.standard_normal(v.type.shape, np.float32) for v in chain.inputs]
    assert_same_in_another_order(host, lambda: host.computed(chain, None, own), monkeypatch)


@pytest.mark.parametrize(("points", "width", "depth"), [(10_000, 20, 8), (65_536, 64, 4)])
def test_a_physics_informed_network_is_one_chain(points: int, width: int, depth: int) -> None:
    """No other launch has a row for each point."""
    widths = (2, *(width,) * depth, 1)
    shapes = ([(Shaped(*w), Shaped(*b)) for w, b in layers(*widths)], Shaped(points, 1), Shaped(points, 1))
    program = for_gpu(stage(burgers).program(*shapes))
    large = [e for e in program.equations if any(v.size >= points for v in (*e.inputs, *e.outputs))]
    assert [e.form for e in large] == [ROW_CHAIN]


@pytest.mark.parametrize(("width", "way"), [(64, TERMS), (96, FLOATS)], ids=shown)
def test_factors_are_terms_where_these_fit(width: int, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chain, "LAUNCH_CYCLES", math.inf)
    shapes = ([(Shaped(*w), Shaped(*b)) for w, b in layers(2, *(width,) * 4, 1)], *(Shaped(65_536, 1),) * 2)
    assert layout_in(for_gpu(stage(burgers).program(*shapes)), 65_536).way == way


@pytest.mark.parametrize("points", [8192, 16_384])
def test_conditions_with_all_points_of_a_step_are_in_the_chain(points: int) -> None:
    """Also one that takes several values in turns, by a mask or by the number of the point."""
    settings = [f"data.batch_size={points}", "loss.1.points=null", "loss.2.points=null", "optimizer=adam"]
    program = outline(config.load("burgers", settings)).step_program(passes=())
    multiply = [e for e in for_gpu(program).equations if any(x.has(Trait.MATMUL) for x in single_equations(e))]
    assert [e.form for e in multiply] == [ROW_CHAIN]


def test_networks_whose_weights_do_not_fit_on_chip_have_other_kernels() -> None:
    shapes = ([(Shaped(*w), Shaped(*b)) for w, b in layers(9, *(128,) * 5, 3)], Shaped(50_000, 9), Shaped(50_000, 3))
    assert ROW_CHAIN not in names(for_gpu(stage(regression).program(*shapes)))


def test_a_batch_norm_between_layers_divides_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean is a sum over rows, which the rows wait for."""
    monkeypatch.setattr(row_chain, "LAUNCH_CYCLES", math.inf)

    def f(weights: Any, x: Any) -> Any:
        y = network(weights, x)
        return network(weights, (y - ops.mean(y, 0)) * 2.0)

    weights = [(Shaped(*w), Shaped(*b)) for w, b in layers(9, 32, 80, 80, 9)]
    program = for_gpu(stage(f).program(weights, Shaped(50_000, 9)))
    assert names(program).count(ROW_CHAIN) == 2
