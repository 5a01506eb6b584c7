"""Convolutions with a pooling epilogue: which are fused, and that maxima and positions are, bit for bit, those of the
convolution and the pooling apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from conv_samples import stride_one
from cuda_on_host import Host, host
from hypothesis import given
from hypothesis import strategies as st
from program_samples import ON_GPU, for_gpu, names

import adtrain as ad
from adtrain import config, ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.product import CONV_POOL
from adtrain.backends.cuda.lower import problem
from adtrain.backends.cuda.tuner.autotune import singles
from adtrain.core import kernel as registry
from adtrain.core.array import array
from adtrain.core.kernel import CudaKernel, Target, cuda_kernels
from adtrain.core.precision import PRECISIONS
from adtrain.core.program import Equation, Program, label
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.conv.problem import Direction, PaddedIndex
from adtrain.lowering.cuda.conv.rules import problem_of
from adtrain.lowering.cuda.conv.shifted import ShiftedConv
from adtrain.ops.conv import Window
from adtrain.ops.pool import Windows, max_pool2d_p
from adtrain.training.preparation import outline

__all__ = ["host"]

PAIRS = Windows((2, 2), (2, 2), (0, 0))
LARGE = ((128, 32, 26, 26), (64, 32, 3, 3), (64,))

Layer: TypeAlias = tuple[tuple[int, ...], int, int]
"""Images, filters and padding of a convolution of 3 x 3."""
LAYERS: Sequence[Layer] = (
    ((2, 20, 9, 8), 33, 1),  # tiles of an image each, more filters than a tile has
    ((2, 8, 26, 26), 40, 0),  # the row below is in the next of four lanes
    ((1, 9, 11, 27), 40, 0),  # two lanes on, odd rows and columns
    ((2, 8, 21, 22), 64, 0),  # three
    ((3, 5, 7, 9), 5, 1),  # of few filters, whose parts are stacked
    ((1, 8, 11, 27), 20, 0),
    ((2, 8, 18, 18), 20, 1),
)
REST = LAYERS[1:4]


def pooled_layer(x: Any, w: Any, bias: Any, padding: int = 0, windows: Windows = PAIRS) -> Any:
    """Maxima and their positions."""
    return bind(max_pool2d_p, ops.relu(ops.conv2d(x, w, bias, padding=padding)), windows=windows)


TARGET = H200._replace(multiprocessors=2)
"""With few multiprocessors a block takes several tiles."""


def alone(convolution: Equation, target: Target) -> CudaKernel:
    """The bf16x3 kernel without a pooling epilogue."""
    x, w = (v.type for v in convolution.inputs)
    problem = problem_of(Direction.FORWARD, x, w, convolution.params["window"], (), "full")
    return ShiftedConv(PaddedIndex(problem), target, False).kernels()[0]


def always(
    target: Target, x: ArrayType, w: ArrayType, window: Window, precision: str, windows: Windows
) -> Sequence[CudaKernel]:
    """In the place of the rule that says when to pool in the epilogue."""
    index = PaddedIndex(problem_of(Direction.FORWARD, x, w, window, (), precision))
    found = ShiftedConv(index, target, False, pooled=True).best()
    return [] if found is None else found.kernels()


@pytest.fixture
def pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can have a pooling epilogue has one."""
    monkeypatch.setitem(registry._CUDA_RULES, "conv_pool", always)


def arguments(layer: Layer) -> list[np.ndarray]:
    """Images, an infinity and a NaN among them, weights, and biases so low that whole windows are 0 behind relu."""
    image, filters, _ = layer
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in (image, (filters, image[1], 3, 3)))
    bias = rng.standard_normal(filters).astype(np.float32) - np.float32(1.5 * np.sqrt(image[1]))
    x[0, 0, 2, 3], x[-1, 1, 5, 5] = np.inf, np.nan
    return [x, w, bias]


def fused(layer: Layer, arrays: Sequence[np.ndarray]) -> Equation:
    def f(x: Any, w: Any, bias: Any) -> Any:
        return pooled_layer(x, w, bias, layer[2])

    (e,) = [e for e in stage(f, ON_GPU).program(*map(array, arrays)).equations if e.form == CONV_POOL]
    return e


def rectified(y: np.ndarray, bias: np.ndarray) -> np.ndarray:
    y = y + bias.reshape(-1, 1, 1)
    return np.where(np.isnan(y), y, np.maximum(y, np.float32(0)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layer", [LAYERS[4], *(pytest.param(x, marks=pytest.mark.exhaustive) for x in REST)])
def test_maxima_and_positions_are_those_of_the_two_launches(host: Host, pooling: None, layer: Layer) -> None:
    x, w, bias = arguments(layer)
    e = fused(layer, [x, w, bias])
    convolution, *_, pool = e.params["body"].equations
    (y,) = host.computed(convolution, alone(convolution, TARGET), [x, w])
    expected = host.computed(pool, None, [rectified(y, bias)])
    found = host.computed(e, None, [x, w, bias.reshape(-1, 1, 1)])
    assert [v.tobytes() for v in found] == [v.tobytes() for v in expected]
    assert np.isnan(found[0]).any()
    assert set(np.unique(found[1])) == {0, 1, 2, 3}


@pytest.mark.exhaustive
def test_nothing_is_needed_between_a_convolution_and_its_pooling(host: Host, pooling: None) -> None:
    x, w, _ = arguments(LAYERS[0])
    program = stage(lambda x, w: bind(max_pool2d_p, ops.conv2d(x, w), windows=PAIRS), ON_GPU).program(
        array(x), array(w)
    )
    (e,) = program.equations
    convolution, pool = e.params["body"].equations
    (y,) = host.computed(convolution, alone(convolution, TARGET), [x, w])
    expected = host.computed(pool, None, [y])
    assert [v.tobytes() for v in host.computed(e, None, [x, w])] == [v.tobytes() for v in expected]


@pytest.mark.exhaustive
def test_positions_that_nothing_reads_are_not_written(host: Host, pooling: None) -> None:
    x, w, bias = arguments(LAYERS[0])
    layer = stage(lambda x, w, bias: pooled_layer(x, w, bias, LAYERS[0][2])[0], ON_GPU)
    maxima = layer.program(*map(array, (x, w, bias)))
    (e,) = [e for e in maxima.equations if e.form == CONV_POOL]
    operands = [x, w, bias.reshape(-1, 1, 1)]
    (found,) = host.computed(e, None, operands)
    expected, _ = host.computed(fused(LAYERS[0], [x, w, bias]), None, operands)
    np.testing.assert_array_equal(found, expected, strict=True)


def program_of(f: Any, *shapes: tuple[int, ...]) -> Program:
    return stage(f, ON_GPU).program(*(array(np.ones(shape, np.float32)) for shape in shapes))


def pooled(program: Program) -> bool:
    return "conv_pool" in names(program)


@pytest.mark.parametrize("batch", [128, 1024])
def test_a_layer_of_a_step_is_one_launch_with_its_pooling(batch: int) -> None:
    step = outline(config.load("cnn", [f"data.batch_size={batch}"])).step_program(passes=ON_GPU)
    (e,) = [e for e in step.equations if e.form == CONV_POOL]
    assert label(e) == "conv2d+add+relu+max_pool2d"
    assert "max_pool2d" not in names(step)
    assert not any(v.type.shape == (batch, 64, 24, 24) for v in (*e.inputs, *e.outputs))


def test_outputs_that_others_read_are_written() -> None:
    def read(x: Any, w: Any, bias: Any) -> Any:
        y = ops.relu(ops.conv2d(x, w, bias))
        return ops.max_pool2d(y, 2), ops.sum(y, (0, 2, 3))

    def handed_out(x: Any, w: Any, bias: Any) -> Any:
        y = ops.relu(ops.conv2d(x, w, bias))
        return ops.max_pool2d(y, 2), y

    def gradient(x: Any, w: Any, bias: Any) -> Any:
        return ad.grad(lambda b: ops.sum(ops.max_pool2d(ops.tanh(ops.conv2d(x, w, b)), 2)))(bias)

    assert pooled(program_of(pooled_layer, *LARGE))
    assert not any(pooled(program_of(f, *LARGE)) for f in (read, handed_out, gradient))


@pytest.mark.parametrize("windows", [((3, 3), (2, 2), (0, 0)), ((2, 2), (1, 1), (0, 0)), ((2, 2), (2, 2), (1, 1))])
def test_other_windows_are_pooled_apart(windows: Any) -> None:
    def f(x: Any, w: Any, bias: Any) -> Any:
        return pooled_layer(x, w, bias, 0, Windows(*windows))

    assert not pooled(program_of(f, *LARGE))


def test_epilogues_with_other_images_are_pooled_apart() -> None:
    def f(x: Any, w: Any) -> Any:
        return ops.max_pool2d(ops.relu(ops.conv2d(x, w, padding=1) + x), 2)

    assert not pooled(program_of(f, (128, 64, 26, 26), (64, 64, 3, 3)))


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ((128, 1, 28, 28), (32, 1, 3, 3)),  # few channels are a direct convolution
        ((64, 256, 28, 28), (256, 256, 3, 3)),  # many are faster in fp16x2
        ((16, 32, 226, 226), (64, 32, 3, 3)),  # two rows are too long for a warpgroup
    ],
)
def test_convolutions_that_would_be_slower_are_pooled_apart(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    assert not pooled(program_of(pooled_layer, x, w, w[:1]))


def test_other_gpus_and_float64_pool_apart() -> None:
    wide = stage(pooled_layer, ON_GPU).program(*(array(np.ones(shape)) for shape in LARGE))
    assert not pooled(wide)
    traced = stage(pooled_layer).program(*(array(np.ones(shape, np.float32)) for shape in LARGE))
    assert not pooled(for_gpu(traced, H200._replace(capability=(10, 0))))


def computed(conv: ShiftedConv) -> np.ndarray:
    """How often each position of the outputs lies in a tile."""
    (count, _, rows, columns), tile = conv.index.problem.outputs, conv.tile
    image, each = conv.index.image_pitch, conv.image_tiles
    tiles = count * each if each else -(-count * image // tile)
    starts = [i // each * image + i % each * tile if each else i * tile for i in range(tiles)]
    taken = np.zeros(count * image + tile, int)
    for start in starts:
        taken[start : start + tile] += 1
    return taken[: count * image].reshape(count, -1, conv.index.pitch)[:, :rows, :columns]


@given(st.integers(1, 5), st.integers(1, 80), st.integers(3, 70), st.integers(3, 70), st.integers(0, 1))
def test_tiles_cover_each_output_once(count: int, filters: int, rows: int, columns: int, padding: int) -> None:
    out = rows + 2 * padding - 2, columns + 2 * padding - 2
    shapes = (count, 32, rows, columns), (count, filters, *out)
    index = PaddedIndex(stride_one(*shapes, (3, 3), (padding, padding)))
    for found in ShiftedConv(index, H200, False).choices():
        assert (computed(found) == 1).all()
    for found in ShiftedConv(index, H200, False, pooled=True).choices():
        own = found.columns // (2 if filters <= 32 else 1)
        assert own % (2 * found.index.pitch) == 0
        assert own % 8 == found.index.pitch % 2 == 0
        assert (computed(found)[:, : out[0] // 2 * 2] == 1).all()


def test_the_rule_pools_float32_in_all_precisions() -> None:
    x, w = (ArrayType(shape, np.dtype("float32")) for shape in LARGE[:2])
    window = Window((1, 1), (0, 0), (1, 1), 1)
    for precision in PRECISIONS:
        params: dict[str, Any] = {"window": window, "precision": precision}
        (kernel,) = cuda_kernels("conv_pool", H200, x, w, **params, windows=PAIRS)
        assert kernel.launches[0].file == cuda_kernels("conv2d", H200, x, w, **params)[0].launches[0].file
    x, w = (ArrayType(each.shape, np.dtype("float64")) for each in (x, w))
    assert not cuda_kernels("conv_pool", H200, x, w, window=window, precision="full", windows=PAIRS)


@pytest.mark.parametrize("returned", [0, 1], ids=["convolution", "sum with the bias"])
def test_a_convolution_whose_result_is_returned_is_not_fused_with_pooling(pooling: None, returned: int) -> None:
    def f(x: Any, w: Any, bias: Any) -> Any:
        y = ops.conv2d(x, w)
        z = y + bias.reshape(-1, 1, 1)
        return bind(max_pool2d_p, ops.relu(z), windows=PAIRS)[0], (y, z)[returned]

    program = stage(f, ON_GPU).program(*map(array, arguments(LAYERS[1])))
    assert not any(e.form == CONV_POOL for e in program.equations)


def test_measured_times_of_a_convolution_do_not_choose_the_kernel_of_one_with_pooling(pooling: None) -> None:
    """Nor do those of another epilogue: a convolution that pools is measured as a whole."""

    def program(activation: Any) -> Program:
        def f(x: Any, w: Any, bias: Any) -> Any:
            return bind(max_pool2d_p, activation(ops.conv2d(x, w, bias)), windows=PAIRS)

        return stage(f, ON_GPU).program(*map(array, arguments(LAYERS[1])))

    (relu,), (tanh,) = ([e for e in program(f).equations if e.form == CONV_POOL] for f in (ops.relu, ops.tanh))
    keys = {problem(e) for e in (relu, tanh, relu.params["body"].equations[0])}
    assert len(keys) == 3
    assert [e.name for e in singles([relu])] == [CONV_POOL]
