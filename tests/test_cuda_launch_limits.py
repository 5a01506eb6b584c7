"""Planned launches stay within the limits of each GPU: grid, threads and shared memory. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import prod

import numpy as np
import pytest
from cuda_samples import TARGETS, Shaped
from program_samples import for_gpu, names
from test_cpu_programs import values_and_gradients

from adtrain import ops, passes
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Candidate, Lowering
from adtrain.cases import CASES
from adtrain.core.errors import DeviceError
from adtrain.core.kernel import Target
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Equation, Program, Variable, renamed
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.ops.conv import Window
from adtrain.ops.pool import Windows

MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_THREADS = 1024
IN_TILES = tuple(
    f"gemm/{name}.cu"
    for name in ("gemm", "small_gemm", "gemm_bf16x3", "pack", "packed_gemm", "fp32_fallback", "bfloat16_gemm")
)
"""Kernels that count M, N and K in 32 bits."""
RANDOM = 40
"""Random equations of each primitive."""
MOST = 2**33
"""Elements of an array."""

by_target = pytest.mark.parametrize(
    "target",
    [pytest.param(each, marks=() if each is H200 else pytest.mark.exhaustive) for each in (TARGETS[0], H200)],
    ids=lambda target: "sm_{}{}".format(*target.capability),
)
"""The oldest GPU, and one for which the most kernels are written."""
"""Plain pytest takes one of Hopper, which has kernels of its own."""


def problems(plan: LaunchPlan, target: Target) -> list[str]:
    """The limits that a launch exceeds."""
    size = plan.size
    wrong = [f"grid {size.blocks}" for n, most in zip(size.blocks, MAX_GRID, strict=True) if n > most]
    if size.threads is not None and not 1 <= size.threads <= MAX_THREADS:
        wrong.append(f"{size.threads} threads")
    if plan.cooperative and prod(size.blocks) > target.multiprocessors:
        wrong.append(f"{prod(size.blocks)} blocks that wait for each other")
    if plan.source.name in IN_TILES and max(plan.numbers[1:4]) >= 2**31:
        wrong.append("a length of more than 32 bits")
    if size.shared > target.shared:
        wrong.append(f"{size.shared} bytes of shared memory")
    return [f"{plan.name} {plan.source.options} {plan.numbers}: {text}" for text in wrong]


def plans(lowering: Lowering, equation: Equation) -> Iterator[LaunchPlan]:
    """The launches of all candidates."""
    try:
        candidates: list[Candidate | None] = [*lowering.candidates(equation)]
        for kernel in candidates or [None]:
            yield from (plan for plan in lowering.launches(equation, kernel) if isinstance(plan, LaunchPlan))
    except (DeviceError, NotImplementedError):
        return  # refused in one line


@cache
def case_programs(dtype: str) -> list[Program]:
    """Each case of the table with its gradients."""
    return [
        stage(lambda *xs, case=case: tuple(values_and_gradients(case, xs)), ()).program(*case.sample(dtype))
        for case in CASES
    ]


@pytest.mark.exhaustive
@by_target
def test_launches_of_the_case_table_are_within_the_limits(target: Target) -> None:
    """Cases are in float32 on one GPU, in float64 on the other one."""
    lowering, found = Lowering(target), []
    for program in case_programs("float32" if target is H200 else "float64"):
        fused = program
        for improve in (*passes.SIMPLIFY, *gpu_fusions(target)):
            fused = improve(fused)
        for equation in (*program.equations, *fused.equations):
            found += [text for plan in plans(lowering, equation) for text in problems(plan, target)]
    assert not found, "\n".join(found[:5])


def lengths(rng: np.random.Generator, ndim: int, most: int = MOST) -> tuple[int, ...]:
    """Random lengths of up to ``most`` elements together: often 1, else any order of magnitude."""
    found: list[int] = []
    for _ in range(ndim):
        left = most // prod(found)
        found.append(1 if rng.random() < 0.2 else int(2 ** rng.uniform(0, np.log2(max(left, 2)))))
    return tuple(int(n) for n in rng.permutation(found))


def equation(name: str, *types: ArrayType, **params: object) -> Equation:
    primitive = PRIMITIVES[name]
    outputs = primitive.output_types(types, params)
    variables = [[Variable(t, "gpu") for t in each] for each in (types, outputs)]
    return Equation(primitive, tuple(variables[0]), params, tuple(variables[1]))


def random_equations(name: str) -> Iterator[Equation]:
    """Equations of a primitive on arrays of up to MOST elements."""
    rng = np.random.default_rng([ord(letter) for letter in name])
    for _ in range(RANDOM):
        dtype = np.dtype(rng.choice(["float32", "float64"]))
        shape = lengths(rng, int(rng.integers(1, 5)))
        x, axis = ArrayType(shape, dtype), int(rng.integers(len(shape)))
        axes = tuple(i for i in range(len(shape)) if rng.random() < 0.5 or i == axis)
        if name in ("sum", "max", "logsumexp"):
            yield equation(name, x, axes=axes)
        elif name in ("argmax", "softmax", "log_softmax"):
            yield equation(name, x, axis=axis)
        elif name == "cumsum":
            yield equation(name, x, axis=axis, reverse=False)
        elif name == "argsort":
            yield equation(name, x, count=shape[-1], descending=False)
        elif name == "standardize":
            yield equation(name, x, axes=axes, eps=1e-5)
        elif name == "transpose":
            yield equation(name, x, axes=tuple(int(i) for i in rng.permutation(len(shape))))
        elif name == "flip":
            yield equation(name, x, axes=axes)
        elif name == "take":
            yield equation(name, x, ArrayType(lengths(rng, 1, 2**20), np.dtype(np.int64)), axis=axis)
        elif name == "scatter_add":
            indices = ArrayType(shape[axis : axis + 1], np.dtype(np.int64))
            yield equation(name, x, indices, axis=axis, length=lengths(rng, 1, 2**20)[0])
        elif name.startswith("conv2d"):
            n, c, h, w = lengths(rng, 4, 2**26)
            o, kh, kw = (
                int(rng.integers(1, 200)),
                int(rng.integers(1, min(h, 5) + 1)),
                int(rng.integers(1, min(w, 5) + 1)),
            )
            window = Window((int(rng.integers(1, 3)),) * 2, (int(rng.integers(0, 2)),) * 2, (1, 1), 1)
            image, weight = ArrayType((n, c, h, w), dtype), ArrayType((o, c, kh, kw), dtype)
            (y,) = PRIMITIVES["conv2d"].output_types((image, weight), {"window": window, "precision": "full"})
            types, size = {
                "conv2d": ((image, weight), None),
                "conv2d_input_grad": ((y, weight), (h, w)),
                "conv2d_weight_grad": ((image, y), (kh, kw)),
            }[name]
            yield equation(name, *types, window=window, **({} if size is None else {"size": size}), precision="full")
        elif name == "max_pool2d":
            x = ArrayType(lengths(rng, 4), dtype)
            rows, columns = (min(int(rng.integers(1, 4)), n) for n in x.shape[2:])
            yield equation(name, x, windows=Windows((rows, columns), (rows, columns), (0, 0)))
        elif name == "matmul":
            *batch, m, n, k = lengths(rng, 4)
            given = ArrayType((*batch, m, k), dtype), ArrayType((*batch, k, n), dtype)
            yield equation(name, *given, transpose_a=False, transpose_b=False, precision="full")


@by_target
@pytest.mark.parametrize(
    "name",
    [
        "sum",
        "max",
        "logsumexp",
        "argmax",
        "softmax",
        "cumsum",
        "argsort",
        "standardize",
        "transpose",
        "flip",
        "take",
        "scatter_add",
        "matmul",
        "conv2d",
        "conv2d_input_grad",
        "conv2d_weight_grad",
        "max_pool2d",
    ],
)
def test_launches_of_random_shapes_are_within_the_limits(name: str, target: Target) -> None:
    lowering = Lowering(target)
    found = [
        text
        for equation in random_equations(name)
        for plan in plans(lowering, equation)
        for text in problems(plan, target)
    ]
    assert not found, "\n".join(found[:5])


LARGE = 2**31 + 8


@by_target
@pytest.mark.parametrize(
    "lengths",
    [(LARGE, 2, 2, 2), (1, LARGE, 8, 8), (1, 8, LARGE, 8), (1, 8, 8, LARGE), (1, LARGE, 1, 8), (1, 1, 1, LARGE)],
    ids=str,
)
@pytest.mark.parametrize("precision", ["full", "tf32", "bfloat16"])
def test_a_product_with_a_length_of_more_than_32_bits_has_kernels_that_count_so_far(
    lengths: tuple[int, int, int, int], precision: str, target: Target
) -> None:
    batch, m, n, k = lengths
    given = ArrayType((batch, m, k), np.dtype("float32")), ArrayType((batch, k, n), np.dtype("float32"))
    product = equation("matmul", *given, transpose_a=False, transpose_b=False, precision=precision)
    for plan in plans(Lowering(target), product):
        assert problems(plan, target) == []


@pytest.mark.parametrize(("m", "n"), [(LARGE, 4096), (64, LARGE)])
def test_a_product_of_more_rows_or_columns_than_32_bits_count_has_no_epilogue(m: int, n: int) -> None:
    program = stage(lambda x, w: ops.relu(x @ w), ()).program(Shaped(m, 8), Shaped(8, n))
    assert names(for_gpu(program)) == ["matmul", "relu"]


def test_a_launch_of_more_members_than_a_grid_has_rows_is_refused_in_one_line() -> None:
    step = stage(lambda x: ops.exp(x) * x, ()).program(Shaped(8))
    (one,) = for_gpu(step).equations
    many = renamed(one, {v: Variable(v.type, "gpu", 70_000) for v in (*one.inputs, *one.outputs)})
    with pytest.raises(DeviceError, match=r"^loops of .* has no kernel for the GPU; use --device cpu$"):
        Lowering(H200).launches(many)


def test_a_constant_among_floats_is_passed_as_a_float_however_it_was_written() -> None:
    """A kernel is loaded once, for arguments of the types of its first launch."""
    x = ArrayType((3, 5), np.dtype("float32"))
    for value in (0, 0.0):
        pad = equation("pad", x, low=(1, 0), high=(0, 2), gaps=(0, 1), value=value)
        (plan,) = plans(Lowering(H200), pad)
        assert [type(number) for number in plan.numbers[-2:]] == [int, float]
