"""The kernels of `rnn`, emulated on the CPU, against the NumPy reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cuda_on_host import Host, host
from program_samples import Step, fused_of

from adtrain.backends.cuda import H200
from adtrain.core.kernel import CudaKernel
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Equation
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.recurrent import Division, GridDivision, divisions, grid_kernel, kernel
from adtrain.lowering.shapes import recurrent_lengths
from adtrain.ops.common import reshape_p, sum_p
from adtrain.ops.matmul import matmul_p

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 4, "gru": 3}
STATES = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 2, "gru": 1}
MOST_FIBERS = 1024


def arguments(
    cell: str, rows: int, length: int, hidden: int, gradient: bool, reverse: bool, of_all: bool = True
) -> list[np.ndarray]:
    """Of a cell, or of its gradient, with the cotangent of all hidden states or without."""
    rng, n = np.random.default_rng(hidden), STATES[cell]
    sums = GATES[cell] * hidden
    biases = 2 if cell == "gru" else 1
    shapes = [(rows, length, sums), (sums, hidden), *[(sums,)] * biases, *[(rows, hidden)] * n]
    given = [rng.uniform(-1, 1, shape) for shape in shapes]
    given[1] *= hidden**-0.5
    if not gradient:
        return given
    outputs = PRIMITIVES[cell].reference(*given, reverse=reverse)
    last, *cts = (rng.uniform(-1, 1, y.shape) for y in outputs[: n + 1])
    kept = outputs[0], *outputs[n + 1 :]
    return [cts[0], given[1], *cts[1:], *given[-n:], *kept, *([last] if of_all else [])]


def chosen(given: list[np.ndarray], gradient: bool, resident: bool, cluster: int) -> Division:
    """The first of the fastest divisions of this kind that the emulation has threads for."""
    lengths = recurrent_lengths(*given)
    found = [
        division
        for division in divisions(H200, lengths, given[0].itemsize, gradient)
        if (division.resident, division.cluster) == (resident, cluster)
        and division.threads * division.cluster <= MOST_FIBERS
    ]
    return min(found, key=lambda division: division.cycles(H200))


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize(
    ("cell", "sizes", "resident", "cluster"),
    [
        pytest.param("lstm", (3, 3, 5), True, 1, marks=pytest.mark.exhaustive),
        ("lstm", (5, 3, 22), True, 4),
        ("lstm", (2, 2, 70), False, 1),
        ("gru", (5, 3, 22), True, 2),
        pytest.param("gru", (3, 3, 33), False, 2, marks=pytest.mark.exhaustive),
        ("rnn_tanh", (3, 3, 50), True, 8),
        ("rnn_relu", (9, 2, 7), True, 1),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.exhaustive)])
def test_recurrent_kernels_match_the_reference(
    host: Host, cell: str, sizes: tuple[int, int, int], resident: bool, cluster: int, gradient: bool, dtype: str
) -> None:
    reverse = resident
    given = [x.astype(dtype) for x in arguments(cell, *sizes, gradient, reverse, of_all=cluster > 1)]
    division = chosen(given, gradient, resident, cluster)
    name = f"{cell}_grad" if gradient else cell
    compare(host, name, given, reverse, kernel(cell, division, given, reverse))


def equation(name: str, given: list[np.ndarray], reverse: bool) -> Equation:
    """Of a primitive, or of the gradient with those of weight_hh and biases: "lstm_weight_grad"."""
    types = [ArrayType(x.shape, x.dtype) for x in given]
    cell, joined, _ = name.partition("_weight_grad")
    primitive = PRIMITIVES[f"{cell}_grad" if joined else name]
    outputs = primitive.output_types(types, {"reverse": reverse})
    first, end = len(types), len(types) + len(outputs)
    steps: list[Step] = [(primitive, range(first), {"reverse": reverse})]
    if not joined:
        return fused_of("", types, steps, range(first, end)).params["body"].equations[0]
    biases = 2 if cell == "gru" else 1
    rows = math.prod(outputs[0].shape[:2])
    params = {"transpose_a": True, "transpose_b": False, "precision": "full"}
    for i in (biases - 1, biases):
        steps.append((reshape_p, [first + i], {"shape": (rows, outputs[i].shape[2])}))
    steps.append((matmul_p, [end, end + 1], params))
    steps += [(sum_p, [first + i], {"axes": (0,)}) for i in range(biases + 1, 2 * biases + 1)]
    others = [i for i in range(len(outputs)) if not biases <= i <= 2 * biases]
    return fused_of(name, types, steps, [*(first + i for i in others), *range(end + 2, end + 3 + biases)])


def compare(
    host: Host, name: str, given: list[np.ndarray], reverse: bool, candidate: CudaKernel, single: float = 2e-6
) -> None:
    """With the reference in float64; `single` is the tolerance of results in float32."""
    e = equation(name, given, reverse)
    found = host.computed(e, candidate, given)
    expected = e.primitive.reference(*(x.astype(np.float64) for x in given), **e.params)
    for x, y in zip(found, expected, strict=True):
        tolerance = single if x.dtype == np.float32 else 1e-13
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(np.abs(y).max(), 1))


@pytest.mark.parametrize(("terms", "tolerance"), [(2, 2e-6), (1, 2**-10)])
@pytest.mark.parametrize(
    ("cell", "sizes", "kind"),
    [
        ("lstm", (131, 2, 128), ""),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("lstm", (131, 2, 128), "_grad"),
                ("lstm", (131, 2, 128), "_weight_grad"),
                ("gru", (5, 3, 128), "_weight_grad"),
                ("rnn_tanh", (5, 3, 256), "_weight_grad"),
            )
        ),
    ],
)
def test_grid_recurrent_kernels_match_the_reference(
    host: Host, cell: str, sizes: tuple[int, int, int], kind: str, terms: int, tolerance: float
) -> None:
    """One term of an operand has 11 bits."""
    reverse = gradient = kind != ""
    given = [x.astype(np.float32) for x in arguments(cell, *sizes, gradient, reverse, of_all=cell == "gru")]
    division = GridDivision(cell, recurrent_lengths(*given), gradient, terms, kind == "_weight_grad")
    target = H200._replace(multiprocessors=division.parts)  # one group of rows after another
    assert division.fits(target, given[0].dtype)
    compare(host, f"{cell}{kind}", given, reverse, grid_kernel(division, target, given, reverse), tolerance)
