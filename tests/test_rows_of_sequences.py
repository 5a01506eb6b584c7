"""Equations on sequences (B, S, F) in kernels that work on their B x S rows: positions, and the mean over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from hypothesis import strategies as st
from program_samples import ON_GPU, everywhere, for_gpu
from sweeps import check_examples, examples

import adtrain as ad
from adtrain import ops, passes
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda.codegen.register_rows import register_rows
from adtrain.backends.cuda.forms.column_sum import VECTOR
from adtrain.core.program import Program, body_of
from adtrain.core.staging import stage

__all__ = ["host"]

TOLERANCE = 3e-6
"""Of the norm of the difference over the norm."""


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def on_rows(f: Any, x: Any) -> Any:
    """A function of a matrix, applied to the rows of sequences."""
    return ops.reshape(f(ops.reshape(x, (-1, x.shape[-1]))), x.shape)


def gradients(f: Any) -> Any:
    """The derivatives of a function's sum by all arguments."""
    return lambda *args: ad.grad(lambda *args: ops.sum(ops.square(f(*args))), tuple(range(len(args))))(*args)


def norm_of_positions(x: Any, positions: Any, scale: Any, shift: Any, w: Any) -> Any:
    """A norm of rows to which positions are added, and a mean over tokens."""
    x = on_rows(lambda x: ops.matmul(x, w), x) + positions
    return ops.mean(ops.layer_norm(x, x.shape[-1], scale, shift), axis=1)


def norm_arguments(count: int, length: int, width: int) -> list[np.ndarray]:
    return [drawn(count, length, width), drawn(length, width), drawn(width), drawn(width), drawn(width, width)]


def values(program: Program, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(x) for x in NumpyProgram(program).run(list(arrays))[0]]


def assert_close(found: np.ndarray, expected: np.ndarray, place: str) -> None:
    error = np.linalg.norm(np.subtract(found, expected, dtype=np.float64))
    assert error <= TOLERANCE * np.linalg.norm(expected.astype(np.float64)), place


def test_no_array_of_repeated_rows_is_stored() -> None:
    program = for_gpu(stage(gradients(norm_of_positions)).program(*norm_arguments(512, 16, 128)))
    launches = [e for e in program.equations if e.name != "reshape"]
    assert not {"loops", "broadcast_to", "add", "mul"} & {e.name for e in launches}
    inside = [{v.type.shape for v in e.inputs} for e in launches if e.name == "row_fused"]
    assert [(16, 128) in shapes for shapes in inside].count(True) == 1
    assert [(512, 1, 128) in shapes for shapes in inside].count(True) == 1
    sums = [e for e in everywhere(program) if e.name == "column_sum"]
    assert [(512, 1, 128) in {v.type.shape for v in e.inputs} for e in sums].count(True) == 2


@pytest.mark.parametrize(
    ("count", "length", "width"),
    [
        (48, 17, 100),
        pytest.param(3, 50, 67, marks=pytest.mark.exhaustive),
        pytest.param(1, 900, 76, marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_that_read_repeated_rows_match_the_reference(count: int, length: int, width: int, host: Host) -> None:
    arrays = norm_arguments(count, length, width)
    program = stage(gradients(norm_of_positions), passes.SIMPLIFY).program(*arrays)
    fused = for_gpu(program)
    known = dict(zip(fused.inputs, arrays, strict=True)) | {v: x.numpy() for v, x in fused.constants.items()}
    checked = []
    for outer in fused.equations:
        for e in (outer, *body_of(outer).equations):
            if e.name in ("row_fused", "column_sum"):
                own = [known[v] for v in e.inputs]
                expected = values(body_of(e), own)
                for v, x, y in zip(e.outputs, host.computed(e, None, own), expected, strict=True):
                    assert_close(x, y, f"{e.name} {v.type}")
                checked.append(e.name)
        one = Program(outer.inputs, {}, (outer,), outer.outputs)
        known |= dict(zip(outer.outputs, values(one, [known[v] for v in outer.inputs]), strict=True))
    assert checked.count("row_fused") >= 2
    assert checked.count("column_sum") >= 2 or width % VECTOR
    for v, y in zip(fused.outputs, values(program, arrays), strict=True):
        assert_close(known[v], y, str(v.type))


LAYERS: dict[str, Any] = {
    "positions": lambda x, w: x + w["positions"],
    "sequence": lambda x, w: x * w["sequence"],
    "token": lambda x, w: x * w["token"],
    "relu": lambda x, w: ops.relu(x),
    "mean": lambda x, w: x + ops.mean(x, axis=1, keepdims=True),
    "norm": lambda x, w: on_rows(lambda x: ops.layer_norm(x, x.shape[-1], w["scale"]), x),
    "softmax": lambda x, w: on_rows(ops.softmax, x),
    "largest": lambda x, w: on_rows(lambda x: x - ops.max(x, axis=1, keepdims=True), x),
    "narrow": lambda x, w: on_rows(lambda x: ops.matmul(ops.matmul(x, w["narrow"]), w["narrow"], transpose_b=True), x),
    "wide": lambda x, w: on_rows(lambda x: ops.matmul(x, w["wide"]), x),
}


@examples(6, 30)
def test_random_layers_on_sequences_compute_the_same_in_kernels_that_exist(examples: int) -> None:
    def check(shape: tuple[int, int, int], layers: Sequence[str], gather: bool) -> None:
        count, length, width = shape
        w = {"positions": drawn(length, width), "sequence": drawn(count, 1, width), "token": drawn(count, length, 1)}
        w |= {"scale": drawn(width), "narrow": drawn(width, 5), "wide": drawn(width, width) / np.float32(width)}

        def f(x: Any, w: Any) -> Any:
            x = ops.take(x, np.arange(count)[::-1], axis=0) if gather else x
            for name in layers:
                x = LAYERS[name](x, w)
            return x

        def step(x: Any, w: Any) -> Any:
            return ad.value_and_grad(lambda w: ops.sum(ops.sin(f(x, w))))(w), f(x, w)

        program = stage(step, passes.SIMPLIFY).program(drawn(*shape), w)
        arrays = [drawn(*shape), *w.values()]
        before = values(program, arrays)
        for improve in ON_GPU:
            program = improve(program)
        for found, expected in zip(values(program, arrays), before, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * abs(expected).max())
        for e in everywhere(program):
            if e.name == "row_fused" and register_rows(body_of(e)) is None:
                made = {v.type.shape[0] for each in body_of(e).equations for v in each.outputs}
                assert len(made) == 1, f"a block takes some indices of axis 0: {body_of(e)}"

    shapes = st.sampled_from([(8, 17, 64), (40, 5, 70), (3, 50, 96), (1, 200, 65), (10, 20, 64)])
    check_examples(
        examples, check, shapes, st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=6), st.booleans()
    )
