"""A training step's generated kernels, compiled for the CPU, launch by launch against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from cuda_on_host import Host, host
from program_samples import ON_GPU, Step, fused_of

from adtrain import config, ops, training
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.batch_prefetch import prefetch_batch
from adtrain.backends.cuda.forms.one_block import ONE_BLOCK
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.core.array import Value, array
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import HORIZONTAL, Equation, Program, Variable, body_of
from adtrain.core.staging import evaluate, stage
from adtrain.core.types import ArrayType, Shape

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

CONFIG = Path(__file__).parent.parent / "configs" / "mlp.yaml"
SMALL = ("model.layers=[{linear: 96}, relu, {linear: 64}, relu, {linear: 10}]", "data.batch_size=32")
OPTIMIZERS = (
    pytest.param("{sgd: {lr: 0.1, momentum: 0.9}}", marks=pytest.mark.exhaustive),
    "{adam: {lr: 0.001}}",
)
TOLERANCE = 1e-6
"""Of the norm of the difference over the norm."""


def drawn(v: Variable, rng: np.random.Generator) -> np.ndarray:
    """Elements for an input of a step; none is negative, as averages of squares are not, and labels are below 10."""
    if v.type.dtype.kind == "f":
        return np.asarray(rng.uniform(0, 0.1, v.stored.shape), v.type.dtype)
    return np.asarray(rng.integers(0, 10, v.stored.shape, np.int8), v.type.dtype)


def computed(equation: Equation, arrays: list[np.ndarray]) -> list[np.ndarray]:
    if equation.form or equation.members:
        body, known = body_of(equation), dict(zip(equation.inputs, arrays, strict=True))
        return [x.numpy() for x in evaluate(body, [array(known[v]) for v in body.inputs])]
    found = equation.primitive.reference(*arrays, **equation.params)
    return list(found) if isinstance(found, (list, tuple)) else [found]


def check(program: Program, host: Host, rng: np.random.Generator, more: Sequence[Equation] = ()) -> None:
    """Compare the launches of the Program, and of more equations, with the reference."""
    known = {v: x.numpy() for v, x in program.constants.items()} | {v: drawn(v, rng) for v in program.inputs}
    for e in dict.fromkeys((*program.equations, *more)):
        arrays = [known[v] for v in e.inputs]
        expected = computed(e, arrays)
        known |= {v: np.asarray(x).reshape(v.type.shape) for v, x in zip(e.outputs, expected, strict=True)}
        if not host.lowering.launches(e):
            continue
        for v, found in zip(e.outputs, host.computed(e, None, arrays), strict=True):
            error = np.linalg.norm(np.subtract(found, known[v], dtype=np.float64))
            assert error <= TOLERANCE * np.linalg.norm(known[v].astype(np.float64)), f"{e.name} {v.type}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_launch_of_a_step_matches_the_reference(optimizer: str, host: Host) -> None:
    """Including the launches of a step that prefetches the next batch."""
    experiment = training.outline(config.load(CONFIG, [*SMALL, f"optimizer={optimizer}"]))
    program = experiment.step_program(passes=ON_GPU)
    steady = prefetch_batch(program, H200).steady
    assert steady is not None
    check(program, host, np.random.default_rng(0), steady.equations)


def affine(*xs: Value) -> list[Value]:
    return [x * 2 + 1 for x in xs]


def products(*xs: Value) -> list[Value]:
    return affine(*(ops.matmul(a, b, transpose_a=True) for a, b in zip(xs[::2], xs[1::2], strict=True)))


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (affine, [(2401,), (7,), (70_000,)]),
        (affine, [(8, 3), (1, 3)]),
        (products, [(32, 64), (32, 96), (32, 128), (32, 72)]),  # 72 columns are no whole tiles
    ],
)
def test_parts_of_different_lengths_match_the_reference(
    f: Callable[..., list[Value]], shapes: list[Shape], host: Host
) -> None:
    program = stage(f, ON_GPU).program(*(np.ones(shape, "float32") for shape in shapes))
    (equation,) = [e for e in program.equations if e.form == HORIZONTAL]
    (launch,) = host.lowering.launches(equation)
    assert isinstance(launch, LaunchPlan)
    assert "const int n0 = member == 0" in launch.source.text
    check(program, host, np.random.default_rng(0))


def test_a_kernel_writes_results_that_are_reshapes_of_values_and_of_arguments(host: Host) -> None:
    double, matrix = np.dtype(np.float64), (2, 3)
    reshape, exp, total = (PRIMITIVES[name] for name in ("reshape", "exp", "sum"))
    steps: list[Step] = [
        (exp, [0], {}),
        (reshape, [1], {"shape": (6,)}),  # of a value that is no result
        (total, [2], {"axes": (0,)}),
        (exp, [2], {}),
        (reshape, [4], {"shape": matrix}),  # of another result
        (reshape, [0], {"shape": (3, 2)}),
    ]
    equation = fused_of(ONE_BLOCK, [ArrayType(matrix, double)], steps, [2, 3, 4, 5, 6])
    x = np.random.default_rng(0).normal(size=matrix)
    for found, expected in zip(host.computed(equation, None, [x]), computed(equation, [x]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-14)
