"""NVIDIA's libraries as candidates on a GPU: results are right, and have the same bits in graphs and alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu, poisoned
from test_gpu_products import CONVOLUTIONS, FLAGS, SHAPES, distance, exact, operands

from adtrain import ops
from adtrain.backends.cuda.lower import Lowering, problem
from adtrain.backends.cuda.vendor import LESS_EXACT, LibraryCall, NotOffered, calls
from adtrain.core.array import Array, array
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.ops.conv import Window, conv2d_p, input_grad_p, weight_grad_p
from adtrain.ops.matmul import matmul_p

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parent

TOLERANCE = {"full": 1e-6, "tf32": 1e-3, "bfloat16": 8e-3, "float64": 1e-14}
"""Norm of the error over the norm of the result. The libraries do not say whether they round or truncate operands."""


@pytest.fixture(autouse=True)
def fresh(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is measured."""
    monkeypatch.setattr(gpu, "known", {})
    gpu.lowering.measured.clear()
    yield
    gpu.lowering.measured.clear()


def need(gpu: Any, library: str) -> None:
    """Skip the test unless the library is a source of candidates."""
    if not any(found.name.startswith(library) for found in gpu.lowering.libraries):
        pytest.skip(f"{library} or its Python package is not installed")


def equation_of(primitive: Primitive, arrays: Sequence[np.ndarray], **params: Any) -> Equation:
    types = [ArrayType(x.shape, x.dtype) for x in arrays]
    inputs = tuple(Variable(t, "gpu") for t in types)
    return Equation(primitive, inputs, params, (Variable(primitive.shape(*types, **params), "gpu"),))


def computed(gpu: Any, call: LibraryCall, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The call's result. Launched alone and recorded in a graph, which runs twice, it has the same bits."""
    from adtrain.backends.cuda.runtime.launch import Graphs, Runnable

    work = Runnable(gpu.device, gpu.lowering, call.equation, call)
    inputs = [gpu.from_numpy(x) for x in arrays]
    memory = gpu.device.allocate(work.scratch)
    graphs = Graphs(gpu.device)
    found = []
    for started in ("alone", "recorded", "recorded"):
        out = gpu.empty(call.equation.outputs[0].type)
        given = [b.address for b in (*inputs, out)], int(memory), 0
        if started == "alone":
            work.enqueue(*given)
        else:
            graphs.run(out.address, partial(work.enqueue, *given))
        found.append(gpu.to_numpy(out))
    assert len({x.tobytes() for x in found}) == 1
    return found[0]


def check(gpu: Any, equation: Equation, arrays: Sequence[np.ndarray], expected: np.ndarray, tolerance: float) -> int:
    """Every choice that a library offers is right. Returns how many there are."""
    count = 0
    for call in calls(equation, gpu.lowering.libraries):
        try:
            found = computed(gpu, call, arrays)
        except NotOffered:
            continue
        assert distance(found, expected) < tolerance, call.label
        count += 1
    return count


@pytest.mark.parametrize(("ta", "tb"), FLAGS)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 1, 515, 200), (1, 512, 256, 784)])
@pytest.mark.parametrize("precision", ["full", "tf32", "bfloat16", "float64"])
def test_cublas_computes_matrix_products(gpu: Any, precision: str, shape: tuple[int, ...], ta: bool, tb: bool) -> None:
    need(gpu, "cublasLt")
    arrays = operands(shape, ta, tb, "float64" if precision == "float64" else "float32")
    params = {"transpose_a": ta, "transpose_b": tb, "precision": "full" if precision == "float64" else precision}
    equation = equation_of(matmul_p, arrays, **params)
    assert check(gpu, equation, arrays, exact(*arrays, ta, tb), TOLERANCE[precision])


@pytest.mark.parametrize("precision", ["full", "tf32"])
@pytest.mark.parametrize(
    ("image", "weight", "window"),
    [
        *CONVOLUTIONS,
        ((8, 32, 14, 14), (64, 32, 3, 3), Window((1, 1), (1, 1), (1, 1), 1)),
        ((4, 1, 28, 28), (6, 1, 5, 5), Window((1, 1), (2, 2), (1, 1), 1)),
        ((2, 8, 12, 11), (8, 4, 5, 3), Window((2, 2), (1, 1), (1, 1), 2)),
    ],
)
def test_cudnn_computes_convolutions_and_their_gradients(
    gpu: Any, image: tuple[int, ...], weight: tuple[int, ...], window: Window, precision: str
) -> None:
    need(gpu, "cudnn")
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (image, weight))
    g = rng.standard_normal(conv2d_p.shape(x, w, window=window).shape).astype(np.float32)
    cases: list[tuple[Primitive, Sequence[np.ndarray], dict[str, Any]]] = [
        (conv2d_p, (x, w), {}),
        (input_grad_p, (g, w), {"size": image[2:]}),
        (weight_grad_p, (x, g), {"size": weight[2:]}),
    ]
    for primitive, arrays, size in cases:
        expected = primitive.reference(*(v.astype(float) for v in arrays), window=window, **size, precision="full")
        equation = equation_of(primitive, arrays, window=window, **size, precision=precision)
        found = check(gpu, equation, arrays, expected, TOLERANCE[precision])
        assert bool(found) == (precision != "full" or primitive.name not in LESS_EXACT), primitive.name


def measured_as_fastest(lowering: Lowering, equation: Equation, library: str) -> None:
    """Measured times by which the library's first choice is the fastest candidate."""
    names = [candidate.label for candidate in lowering.candidates(equation)]
    lowering.measured[problem(equation)] = {name: 1.0 if name.startswith(library) else 2.0 for name in names}


def test_the_fastest_library_call_gives_the_same_bits_alone_and_in_programs(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(gpu, "cublasLt")
    ran: list[LibraryCall] = []
    enqueue = LibraryCall.enqueue

    def noted(call: LibraryCall, addresses: Sequence[int], scratch: int, stream: int) -> None:
        ran.append(call)
        enqueue(call, addresses, scratch, stream)

    monkeypatch.setattr(LibraryCall, "enqueue", noted)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 70, 70)).astype(np.float32) for _ in range(2))
    product = equation_of(matmul_p, (a, b), transpose_a=False, transpose_b=False, precision="full")
    measured_as_fastest(gpu.lowering, product, "cublasLt")
    x, y = (array(each, device="gpu") for each in (a, b))
    alone = ops.matmul(x, y)
    (recorded,) = stage(lambda x, y: (ops.matmul(x, y),))(x, y)
    assert isinstance(alone, Array)
    assert recorded.numpy().tobytes() == alone.numpy().tobytes()
    assert [call.label for call in ran] == [ran[0].label] * 2
    np.testing.assert_allclose(alone.numpy(), exact(a, b, False, False), rtol=1e-4, atol=1e-4)


RECORDED_FIRST = """
import numpy as np
from test_gpu_vendor import equation_of, measured_as_fastest
from adtrain import ops
from adtrain.core.array import array
from adtrain.core.backend import backend
from adtrain.core.staging import stage
from adtrain.ops.conv import Window, conv2d_p
lowering = backend("gpu").lowering
rng = np.random.default_rng(0)
x, w = (rng.standard_normal(s).astype(np.float32) for s in ((64, 32, 26, 26), (64, 32, 3, 3)))
window = Window((1, 1), (0, 0), (1, 1), 1)
measured_as_fastest(lowering, equation_of(conv2d_p, (x, w), window=window, precision="full"), "cudnn")
x, w = (array(each, device="gpu") for each in (x, w))
(recorded,) = stage(lambda x, w: (ops.conv2d(x, w),))(x, w)
assert recorded.numpy().tobytes() == ops.conv2d(x, w).numpy().tobytes()
"""


def test_a_library_call_may_be_recorded_before_it_ran_alone(gpu: Any) -> None:
    need(gpu, "cudnn")
    done = subprocess.run([sys.executable, "-c", RECORDED_FIRST], capture_output=True, text=True, cwd=TESTS)
    assert done.returncode == 0, done.stderr
