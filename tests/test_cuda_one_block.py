"""The source text of one-block megakernels: asynchronous copies, barriers and shared memory. No GPU is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from program_samples import ON_GPU

from adtrain import ops
from adtrain.backends.cuda.forms.one_block import ONE_BLOCK, SHARED, one_block
from adtrain.core.program import Program
from adtrain.core.staging import stage

THREADS = 256


def lines_of(program: Program) -> list[str]:
    """The statements of its one-block equation."""
    (equation,) = [e for e in program.equations if e.form == ONE_BLOCK]
    return [line.strip() for line in one_block(equation, THREADS).lines]


def update(length: int) -> Program:
    """A bias, its momentum, and the rows whose sum is its gradient."""

    def f(bias: Any, momentum: Any, rows: Any) -> Any:
        momentum = momentum * 0.5 + ops.sum(rows, axis=0)
        return bias - momentum, momentum

    return stage(f, ON_GPU).program(np.ones(length), np.ones(length), np.ones((8, length)))


def test_small_inputs_read_after_a_barrier_are_copied_before_it() -> None:
    lines = lines_of(update(40))
    first = lines.index("__syncthreads();")
    copies = [i for i, line in enumerate(lines) if line.startswith("cp_async<")]
    assert len(copies) >= 2  # the bias and its momentum
    assert max(copies) < lines.index("cp_async_wait_group<0>();") < first


def test_each_thread_copies_one_element_at_most() -> None:
    assert not any(line.startswith("cp_async<") and "x0" in line for line in lines_of(update(THREADS + 1)))


def test_nothing_is_copied_where_shared_memory_is_full() -> None:
    count = SHARED // 8 // THREADS + 1

    def f(rows: Any, *others: Any) -> Any:
        total = ops.sum(rows, axis=0)
        return [total * x for x in others]

    given = np.ones((8, THREADS)), *(np.full(THREADS, float(i)) for i in range(count))
    assert not any(line.startswith("cp_async<") for line in lines_of(stage(f, ON_GPU).program(*given)))


def test_a_kernel_without_asynchronous_copies_does_not_wait_for_any() -> None:
    program = stage(lambda x: ops.softmax(ops.sum(x, axis=0), 0), ON_GPU).program(np.ones((9, 30)))
    assert "cp_async_wait_group<0>();" not in lines_of(program)


def test_a_result_that_later_equations_read_is_kept_in_shared_memory() -> None:
    def f(x: Any) -> Any:
        total = ops.sum(x, axis=0)
        return total, ops.softmax(total, 0), ops.softmax(ops.reshape(total, (5, 6)), 1)

    lines = lines_of(stage(f, ON_GPU).program(np.ones((9, 30))))
    assert any(line.startswith("double *const h0 = (double *)(shared_bytes") for line in lines)
    read, stored = lines.index("const double b0 = h0[i];"), lines.index("y0[i] = b0;")
    assert next(i for i, line in enumerate(lines) if "h0[o] = value" in line) < read < stored
    readers = [line for line in lines if "softmax" in line]
    assert len(readers) == 2
    assert all("(t, h0, " in line for line in readers)  # a reshape's memory is its argument's
