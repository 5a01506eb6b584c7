"""FLOPs and bytes of equations, against counts by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from program_samples import fused_of
from sparse_pool_samples import conv_problem, equation

from adtrain import ops
from adtrain.backends.cpu.fusions import BATCHWISE
from adtrain.core.array import Value, array
from adtrain.core.program import LOOPS, Program, costs, fuse
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.ops.elementwise import square_p

TABLE = array(np.zeros((1000, 6), np.float32))
INDICES = array(np.zeros(4, np.int64))
ROWS = array(np.zeros((4, 6), np.float32))


def program(f: Callable[..., Any], *args: Value) -> Program:
    return stage(f).program(*args)


@pytest.mark.parametrize(
    ("f", "args", "elements", "indices"),
    [
        (lambda x, i: ops.embedding(i, x), (TABLE, INDICES), 24 + 24, 4),  # four rows read, and written
        (lambda x, i: ops.index.pick(x, i[:, None], axis=1), (ROWS, INDICES), 4 + 4, 4),  # one element of each row
        (lambda x: x[2:4], (TABLE,), 12 + 12, 0),
    ],
    ids=["take", "take_along_axis", "slice"],
)
def test_a_gather_reads_the_elements_that_it_returns(
    f: Any, args: tuple[Value, ...], elements: int, indices: int
) -> None:
    (cost,) = (cost for cost in costs(program(f, *args).equations) if cost.bytes)
    assert cost == (0, 4 * elements + 8 * indices)


def test_a_scatter_writes_its_whole_result() -> None:
    scatter = ops.index.scatter_add_p.cost((ROWS, INDICES), {"axis": 0, "length": 1000})
    assert scatter == (24, 4 * (24 + 6000) + 8 * 4)


def test_a_broadcast_counts_as_one_row() -> None:
    row = array(np.zeros(6, np.float32))
    broadcast, added = costs(program(lambda x, b: x + b, ROWS, row).equations)
    assert broadcast == (0, 0)
    assert added == (24, 4 * (24 + 6 + 24))


def test_an_argument_used_twice_is_read_once() -> None:
    assert list(costs(program(lambda x: x * x, ROWS).equations)) == [(24, 4 * (24 + 24))]


def test_a_fused_equation_has_its_members_flops_and_the_bytes_of_its_inputs_and_outputs() -> None:
    def f(x: Value, i: Value, b: Value) -> Value:
        rows = ops.embedding(i, x)
        return ops.exp(rows + b) * rows

    whole = program(f, TABLE, INDICES, array(np.zeros(6, np.float32)))
    loops = fuse(LOOPS, whole.equations[1:], whole.outputs)
    items = fuse(BATCHWISE, [whole.equations[0], loops], whole.outputs)
    assert list(costs([items])) == [(3 * 24, 4 * (24 + 6 + 24) + 8 * 4)]


@pytest.mark.parametrize(
    "form", ["conv2d_input_grad_pooled", "conv2d_weight_grad_pooled", "conv2d_weight_grad_pooled_sum"]
)
def test_a_gradient_of_a_pooled_gradient_has_the_flops_of_elements_that_are_not_zero(form: str) -> None:
    """Of 7 x 6 outputs, windows of 2 x 2 keep 3 x 3 elements. Each is multiplied by 3 channels of 3 x 5 weights."""
    cost = equation(form, conv_problem((2, 3, 9, 10), 8, (3, 5), (0, 0))).cost
    pooled, spread = 2 * 8 * 3 * 3, 2 * 8 * 7 * 6
    assert cost.flops == 2 * pooled * 3 * 3 * 5 + (pooled if form.endswith("sum") else 0)
    assert cost.bytes < 4 * spread + 4 * 2 * 3 * 9 * 10  # it does not write or read the spread gradient


def test_a_form_of_a_user_counts_all_flops_whatever_its_name() -> None:
    x = ArrayType((4, 6), np.dtype(np.float32))
    assert fused_of("square_pooled", [x], [(square_p, (0,), {}), (square_p, (1,), {})], [2]).cost.flops == 2 * 24
