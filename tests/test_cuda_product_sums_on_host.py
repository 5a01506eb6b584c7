"""Sums of columns in the epilogues of products: which equations join, and their kernels, emulated on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from cuda_on_host import Host, assert_same_in_another_order, host
from program_samples import for_gpu
from test_narrow_values import small_arrays_as_large_ones

import adtrain as ad
from adtrain import ops, passes
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.product_sums import PRODUCT_SUMS
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.kernel import CudaKernel, Target
from adtrain.core.program import Equation, Program, Variable, single_equations
from adtrain.core.staging import stage
from adtrain.core.types import BITS
from adtrain.lowering.cuda.conv.bfloat16 import Bfloat16Conv
from adtrain.lowering.cuda.conv.problem import Direction
from adtrain.lowering.cuda.gemm.bfloat16 import TILES, with_column_sums
from adtrain.ops.conv import Window

__all__ = ["host", "small_arrays_as_large_ones"]

pytestmark = pytest.mark.usefixtures("small_arrays_as_large_ones")

TARGET: Target = H200._replace(multiprocessors=5)
"""A block computes several tiles."""
TOLERANCE = 2e-6
"""The largest norm of the difference from the reference, divided by the norm of the reference."""


def batch_norm(x: Any, weight: Any) -> Any:
    zeros = ad.array(np.zeros(x.shape[1], np.float32), device=x.device)
    return ops.batch_norm(x, zeros, zeros + 1.0, weight, momentum=1.0)


def of_batch_norm(x: Any, v: Any, w: Any, weight: Any, activation: Callable[[Any], Any] = ops.gelu) -> Any:
    """The statistics of a convolution, and the sums for its gradient, which a convolution of stride 2 computes."""

    def loss(x: Any, v: Any, w: Any, weight: Any) -> Any:
        y, *statistics = batch_norm(ops.conv2d(x, v, padding=1), weight)
        return ops.sum(ops.sin(ops.conv2d(activation(y), w, stride=2, padding=1))), statistics

    return ad.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, v, w, weight)


def of_relu(x: Any, v: Any, w: Any, weight: Any) -> Any:
    """The same with relu. The kernel that reads the image before the norm computes its mask."""
    return of_batch_norm(x, v, w, weight, ops.relu)


def of_bias(x: Any, v: Any, w: Any, bias: Any) -> Any:
    """The gradient of the bias between two convolutions."""

    def loss(v: Any, w: Any, bias: Any) -> Any:
        return ops.sum(ops.sin(ops.conv2d(ops.relu(ops.conv2d(x, v, padding=1) + bias[:, None, None]), w, stride=2)))

    return ad.grad(loss, (0, 1, 2))(v, w, bias)


def of_depthwise(x: Any, v: Any, w: Any, weight: Any) -> Any:
    """The same as `of_batch_norm` for a depthwise convolution before a norm, and one after it."""

    def loss(v: Any, w: Any, weight: Any) -> Any:
        y, *statistics = batch_norm(ops.conv2d(x, v, padding=1, groups=v.shape[0]), weight)
        return ops.sum(ops.sin(ops.conv2d(ops.gelu(y), w, padding=2, groups=w.shape[0]))), statistics

    return ad.value_and_grad(loss, (0, 1, 2), has_aux=True)(v, w, weight)


def of_layers(x: Any, v: Any, w: Any, bias: Any) -> Any:
    """The gradient of the bias between two linear layers."""

    def loss(v: Any, w: Any, bias: Any) -> Any:
        return ops.sum(ops.sin(ops.matmul(ops.gelu(ops.matmul(x, v) + bias), w)))

    return ad.grad(loss, (0, 1, 2))(v, w, bias)


SAMPLES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], list[int]]] = {
    "batch norm": (of_batch_norm, ((5, 16, 11, 13), (136, 16, 3, 3), (24, 136, 3, 3), (136,)), [2, 2]),
    "relu": (of_relu, ((5, 16, 11, 13), (144, 16, 3, 3), (24, 144, 3, 3), (144,)), [2, 2]),
    "depthwise": (of_depthwise, ((5, 72, 11, 13), (72, 1, 3, 3), (72, 1, 5, 5), (72,)), [2, 2]),
    "bias": (of_bias, ((5, 24, 11, 13), (136, 24, 3, 3), (40, 136, 3, 3), (136,)), [1]),
    "layers": (of_layers, ((715, 24), (24, 136), (136, 40), (136,)), [1]),
}
"""Functions, shapes of their arguments, and the numbers of sums that join each product. Neither rows nor columns
fill the tiles, and there are several columns of tiles."""


IN_TF32 = "batch norm", "relu", "bias"
"""Those of SAMPLES whose sums join convolutions in tf32 too."""
KINDS = [*((name, "bfloat16") for name in SAMPLES), *((name, "tf32") for name in IN_TF32)]


def sample(name: str, precision: str = "bfloat16") -> tuple[Program, list[np.ndarray], list[int]]:
    """The Program of one of SAMPLES, its arguments, and the numbers of sums. Parameters are donated, as in a training
    step. Values of all sizes are computed again."""
    f, shapes, sums = SAMPLES[name]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) / 4 for shape in shapes]
    with ops.matmul_precision(precision), patch("adtrain.passes.recompute.MIN_BYTES", 0):
        program = stage(f, passes.SIMPLIFY, donate=range(1, len(arrays))).program(*arrays)
        return for_gpu(program, TARGET), arrays, sums


def known_before(program: Program, arrays: Sequence[np.ndarray]) -> dict[Variable, np.ndarray]:
    """The values of a Program's inputs and constants."""
    return dict(zip(program.inputs, arrays, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}


def results_of(e: Equation, known: Mapping[Variable, np.ndarray]) -> dict[Variable, np.ndarray]:
    """The results of an equation by NumPy."""
    found = NumpyProgram(Program(e.inputs, {}, (e,), e.outputs)).run([known[v] for v in e.inputs])[0]
    return dict(zip(e.outputs, map(np.asarray, found), strict=True))


def joined(program: Program) -> list[Equation]:
    return [e for e in program.equations if e.form == PRODUCT_SUMS]


def kernels(e: Equation, first: bool) -> list[CudaKernel]:
    """The candidates for an equation, or only the first one."""
    found = [x for x in Lowering(TARGET).candidates(e) if isinstance(x, CudaKernel)]
    return found[:1] if first else found


@pytest.mark.parametrize(("name", "precision"), KINDS)
def test_sums_join_the_product_whose_results_they_read(name: str, precision: str) -> None:
    program, _, sums = sample(name, precision)
    assert [[x.primitive.name for x in single_equations(e)].count("sum") for e in joined(program)] == sums
    assert not [e for e in program.equations if e.form == "column_sum"]
    assert precision == "tf32" or all(e.outputs[0].type.dtype == BITS for e in joined(program))


def test_the_mask_of_relu_is_computed_again_from_the_image_before_the_norm() -> None:
    """So the kernel reads one image, and nothing stores the activation in float32."""
    program, *_ = sample("relu")
    _, gradient = joined(program)
    assert [v.type.dtype for v in gradient.inputs if v.type.shape == gradient.outputs[0].type.shape] == [BITS]
    assert "relu" in {x.primitive.name for x in single_equations(gradient)}
    relus = [e for e in program.equations if e is not gradient and "relu" in {x.name for x in single_equations(e)}]
    assert [[v.type.dtype for v in e.outputs] for e in relus] == [[BITS]]


@pytest.mark.parametrize(("count", "joining"), [(16, 2), (8, 1), (2, 0)])
def test_sums_do_not_join_a_convolution_that_is_faster_with_split_k(count: int, joining: int) -> None:
    """Few images have few tiles with a long K: for eight images other tiles take longer, for two all are split."""
    shapes = (count, 512, 16, 16), (512, 512, 3, 3), (512, 512, 3, 3), (512,)
    with ops.matmul_precision("bfloat16"):
        arguments = [np.zeros(shape, np.float32) for shape in shapes]
        program = for_gpu(stage(of_batch_norm, passes.SIMPLIFY).program(*arguments), H200)
    assert len(joined(program)) == joining


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("name", "precision"), KINDS)
def test_products_with_sums_are_right(
    name: str, precision: str, first: bool, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where results are rounded before they are summed, the reference sums those of the kernel."""
    program, arrays, _ = sample(name, precision)
    monkeypatch.setattr(host, "lowering", Lowering(TARGET))
    known = known_before(program, arrays)
    for e in program.equations:
        own = [known[v] for v in e.inputs]
        known |= results_of(e, known)
        if e.form != PRODUCT_SUMS:
            continue
        sums = e.params["body"].equations[-1]
        for kernel in kernels(e, first):
            found = dict(zip(e.outputs, host.computed(e, kernel, own), strict=True))
            stored, reference = found[e.outputs[0]], known[e.outputs[0]]
            if stored.dtype == BITS:
                assert np.mean(stored == reference) > 0.99
            else:
                assert np.linalg.norm(stored - reference) <= TOLERANCE * np.linalg.norm(reference)
            given = known | found
            expected = results_of(sums, given) if given.keys() >= {*sums.inputs} else known
            for v in sums.outputs:
                assert np.linalg.norm(found[v] - expected[v]) <= TOLERANCE * np.linalg.norm(expected[v]), v.type


def test_tiles_that_load_what_the_epilogue_reads_before_the_product_come_first() -> None:
    """Larger tiles have no registers for what the epilogue reads. If it reads nothing, they are faster."""
    window = Window((1, 1), (1, 1), (1, 1), 1)
    conv = Bfloat16Conv(Direction.INPUT_GRAD, (256, 16, 16, 128), (256, 16, 16, 128), (3, 3), window)
    alone = [conv.cuda_kernel(conv.product(H200, tile)) for tile in TILES]

    def first(read: int) -> tuple[int, int, int]:
        found = filter(None, (with_column_sums(x, columns=128, sums=2, read=read) for x in alone))
        definitions = min(found, key=lambda kernel: kernel.cycles or 0).launches[0].definitions
        return definitions["TILE_M"], definitions["TILE_N"], definitions["PINGPONG"]

    assert first(0) == (256, 128, 0)
    assert first(4) == (128, 128, 0)


def test_sums_do_not_depend_on_the_order_of_threads(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    program = sample("bias")[0]
    monkeypatch.setattr(host, "lowering", Lowering(TARGET))
    (e,) = joined(program)
    rng = np.random.default_rng(0)
    own = [
        rng.integers(0x3F00, 0x4000, v.type.shape, BITS)
        if v.type.dtype == BITS
        else np.ones(v.type.shape, v.type.dtype)
        for v in e.inputs
    ]
    assert_same_in_another_order(host, lambda: host.computed(e, None, own), monkeypatch)


def test_a_large_mean_costs_no_digits_of_the_variance(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are bfloat16 numbers between 256 and 264, in steps of 2. One channel has equal numbers."""
    channels = 8
    rng = np.random.default_rng(0)
    x = 256 + 2.0 * rng.integers(0, 5, (5, channels, 11, 13)).astype(np.float32)
    x[:, 0] = 260
    filters = np.eye(channels, dtype=np.float32).reshape(channels, channels, 1, 1)

    def norm(x: Any, filters: Any) -> Any:
        y, mean, variance = batch_norm(ops.conv2d(x, filters), None)
        return ops.sum(ops.sin(ops.conv2d(y, filters))), mean, variance

    with ops.matmul_precision("bfloat16"):
        program = for_gpu(stage(norm, passes.SIMPLIFY).program(x, filters), TARGET)
    monkeypatch.setattr(host, "lowering", Lowering(TARGET))
    (e,) = joined(program)
    known = known_before(program, (x, filters))
    for each in program.equations[: program.equations.index(e)]:
        known |= results_of(each, known)
    found = dict(zip(e.outputs, host.computed(e, None, [known[v] for v in e.inputs]), strict=True))
    mean, variance = (found[v] for v in program.outputs[1:])
    rows = x.astype(float).transpose(0, 2, 3, 1).reshape(-1, channels)
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, rows.var(0, ddof=1), rtol=1e-6)
    assert variance[0] == 0
