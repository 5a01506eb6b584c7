"""Concatenation in one launch, and copies through tiles: `index/copy.cu`, compiled for the CPU, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from program_samples import for_gpu

from adtrain import ops
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import HORIZONTAL, Equation, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.ops.shape import concatenate_p
from adtrain.passes import SIMPLIFY

__all__ = ["host"]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool"])
def test_parts_of_any_length_and_alignment_are_joined(dtype: str, host: Host) -> None:
    """Parts of several chunks, and parts that begin inside of a vector."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 2, (n, 3)).astype(dtype) for n in (20, 7000, 1, 11000, 3)]
    inputs = tuple(Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    expected = np.concatenate(arrays)
    output = Variable(ArrayType(expected.shape, expected.dtype), "gpu")
    equation = Equation(concatenate_p, inputs, {"axis": 0}, (output,))
    assert len(host.lowering.launches(equation)) == 1
    (found,) = host.computed(equation, None, arrays)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((130, 67), (1, 0)), ((3, 9, 513), (0, 2, 1)), ((200, 72, 3, 3), (0, 2, 3, 1)), ((8, 8), (1, 0))],
)
def test_tiles_that_axes_do_not_fill_are_copied(
    shape: tuple[int, ...], axes: tuple[int, ...], dtype: str, host: Host
) -> None:
    x = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    expected = x.transpose(axes)
    output = Variable(ArrayType(expected.shape, expected.dtype), "gpu")
    equation = Equation(
        PRIMITIVES["transpose"], (Variable(ArrayType(shape, x.dtype), "gpu"),), {"axes": axes}, (output,)
    )
    assert [plan.name for plan in host.lowering.launches(equation) if isinstance(plan, LaunchPlan)] == ["copy_tiles"]
    (found,) = host.computed(equation, None, [x])
    np.testing.assert_array_equal(found, expected)


def test_transposes_of_several_weights_share_a_launch(host: Host) -> None:
    """Such as filters in the order of convolutions in tf32. Their axes do not fill the tiles."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in ((72, 40, 3, 3), (130, 72, 3, 3), (24, 200, 1, 1))]

    def transposed(*filters: Any) -> Any:
        return [ops.transpose(x, axes) for x in filters for axes in ((0, 2, 3, 1), (1, 2, 3, 0))]

    program = for_gpu(stage(transposed, SIMPLIFY).program(*arrays), H200)
    (e,) = [x for x in program.equations if x.form == HORIZONTAL]
    named = dict(zip(program.inputs, arrays, strict=True))
    results = dict(zip(e.outputs, host.computed(e, None, [named[v] for v in e.inputs]), strict=True))
    expected = NumpyProgram(program).run(arrays)[0]
    for v, x in zip(program.outputs, expected, strict=True):
        np.testing.assert_array_equal(results[v], x)
