"""Channels last: Programs compute the same, images are transposed at borders only, and batch norm is accurate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from cuda_samples import Shaped
from hypothesis import given
from hypothesis import strategies as st
from program_samples import all_layers, everywhere, for_gpu
from sweeps import check_examples, examples
from test_passes_random import assert_consistent

import adtrain as ad
from adtrain import config, nn, ops, passes
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.channels_last import channels_last
from adtrain.backends.cuda.write_channels_last import OF_TERMS
from adtrain.core import tree
from adtrain.core.precision import TERMS
from adtrain.core.program import Program, single_equations
from adtrain.core.staging import stage
from adtrain.core.trace import phase
from adtrain.core.types import BITS, NCHW, NHWC, permuted
from adtrain.lowering.cuda.gemm.bfloat16 import BYTES_PER_CYCLE
from adtrain.training.preparation import outline

__all__ = ["host"]

EXAMPLES, CLASSES = 5, 8
CONVOLUTIONS_FIRST = "conv2d", "conv2d_input_grad", "conv2d_weight_grad"
CONVOLUTIONS = tuple(f"{name}_bfloat16" for name in CONVOLUTIONS_FIRST)


@pytest.fixture(autouse=True)
def small_convolutions_as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("adtrain.backends.cuda.channels_last")
    monkeypatch.setattr(module, "MAX_FLOPS", 0)
    monkeypatch.setattr(module, "_fastest", all_layers)


def with_channels_last(program: Program) -> Program:
    return channels_last(program, H200)


def simplified(f: Callable[..., Any], *arguments: Any, precision: str = "bfloat16") -> Program:
    with ops.matmul_precision(precision):
        return stage(f, passes.SIMPLIFY).program(*arguments)


def training(
    layers: Sequence[nn.Module], shape: tuple[int, ...], precision: str = "bfloat16"
) -> tuple[Program, list[np.ndarray]]:
    """The loss of a network with its gradients and new statistics, and arguments."""
    model, rng = nn.Sequential(*layers), np.random.default_rng(0)
    params, statistics = model.init(shape, rng, np.dtype(np.float32))
    x = ad.array(rng.standard_normal((EXAMPLES, *shape), np.float32))
    labels = ad.array(rng.integers(0, CLASSES, EXAMPLES))

    def step(params: Any, statistics: Any, x: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            out, new = model.forward(params, statistics, x, nn.Mode(training=True))
            return ops.cross_entropy(ops.mean(out, (2, 3)), labels), new

        return ad.value_and_grad(loss, has_aux=True)(params)

    arguments = params, statistics, x, labels
    return simplified(step, *arguments, precision=precision), [v.numpy() for v in tree.leaves(arguments)]


def transposed_images(program: Program) -> list[tuple[int, ...]]:
    """The shapes of the images that are transposed."""
    shapes = [e.inputs[0].type.shape for e in everywhere(program) if e.primitive.name == "transpose"]
    return [shape for shape in shapes if shape[0] == EXAMPLES]


def assert_same_results(program: Program, arguments: list[np.ndarray], tolerance: float) -> Program:
    after = with_channels_last(program)
    assert str(after) != str(program)
    assert_consistent(after, program)
    pairs = zip(NumpyProgram(after).run(arguments)[0], NumpyProgram(program).run(arguments)[0], strict=True)
    for found, expected in pairs:
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected) + 1e-5
    return after


def convolution(channels: int = 8, stride: int = 1) -> nn.Module:
    return nn.Conv2d(channels, kernel_size=3, padding=1, stride=stride)


def residual(*body: nn.Module) -> nn.Module:
    return nn.Residual(nn.Sequential(*body))


def residual_network() -> list[nn.Module]:
    shortcut = nn.Sequential(nn.Conv2d(16, kernel_size=1, stride=2), nn.BatchNorm2d())
    body = nn.Sequential(convolution(16, 2), nn.BatchNorm2d(), nn.ReLU(), convolution(16), nn.BatchNorm2d())
    head = nn.ReLU(), convolution(CLASSES)
    return [convolution(), nn.BatchNorm2d(), nn.ReLU(), nn.Residual(body, shortcut=shortcut), *head]


def inverted_residual_network() -> list[nn.Module]:
    def block(kernel: int, channels: int, stride: int) -> list[nn.Module]:
        wide = nn.Conv2d(channels, kernel_size=1), nn.BatchNorm2d(), nn.ReLU()
        depth = nn.Conv2d(channels, kernel_size=kernel, padding=kernel // 2, stride=stride, groups=channels)
        return [*wide, depth, nn.BatchNorm2d(), nn.ReLU(), nn.Conv2d(8, kernel_size=1)]

    return [*block(3, 24, 2), residual(*block(5, 20, 1))]


def grouped_network() -> list[nn.Module]:
    def block(channels: int, groups: int, stride: int) -> list[nn.Module]:
        wide = nn.Conv2d(16, kernel_size=1), nn.BatchNorm2d(), nn.ReLU()
        own = nn.Conv2d(channels, kernel_size=3, padding=1, stride=stride, groups=groups, bias=False)
        return [*wide, own, nn.BatchNorm2d(), nn.ReLU()]

    return [*block(32, 4, 2), residual(*block(32, 8, 1)), nn.Conv2d(CLASSES, kernel_size=1)]


@pytest.mark.parametrize("precision", ["bfloat16", "full"])
def test_convolutions_of_several_groups_become_those_of_one(precision: str) -> None:
    program, arguments = training(grouped_network(), (8, 12, 12), precision)
    after = with_channels_last(program)
    if precision == "full":
        assert_same_results(program, arguments, 1e-5)
    assert not [e for e in after.equations if e.name in CONVOLUTIONS_FIRST]
    assert all(e.params["window"].groups == 1 for e in after.equations if e.name in OF_TERMS)
    assert transposed_images(after) == [(EXAMPLES, 8, 12, 12)]


def test_gradients_of_filters_of_several_groups_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("adtrain.backends.cuda.narrow_values"), "MIN_SIZE", 0)

    def step(x: Any, w: Any) -> Any:
        grad = ad.grad(lambda w: ops.sum(ops.sin(ops.conv2d(x, w, padding=1, groups=4))))(w)
        with phase("update"):
            return w - 0.5 * grad

    x, w = np.zeros((EXAMPLES, 64, 16, 16), np.float32), np.zeros((64, 16, 3, 3), np.float32)
    program = for_gpu(simplified(step, x, w))
    gradients = [e for e in program.equations if CONVOLUTIONS[2] in [x.primitive.name for x in single_equations(e)]]
    assert [[v.type.dtype for v in e.outputs] for e in gradients] == [[np.float32]]


def test_products_with_the_channels_of_other_groups_are_not_added() -> None:
    """They may be infinite."""
    x, w = np.ones((EXAMPLES, 16, 6, 6), np.float32), np.ones((16, 8, 3, 3), np.float32)
    x[:, :8] = 3e38

    def gradient(x: Any, w: Any) -> Any:
        return ad.grad(lambda w: ops.sum(ops.conv2d(x, w, padding=1, groups=2)[:, 8:]))(w)

    program = with_channels_last(simplified(gradient, x, w))
    (found,) = NumpyProgram(program).run([x, w])[0]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, NumpyProgram(simplified(gradient, x, w)).run([x, w])[0][0], rtol=1e-2)


@pytest.mark.parametrize("precision", ["tf32", "full"])
def test_operands_of_depthwise_convolutions_are_not_rounded(precision: str) -> None:
    program, arguments = training(inverted_residual_network(), (8, 12, 12), precision)
    after = with_channels_last(program)
    if precision == "full":
        assert_same_results(program, arguments, 1e-5)
    found = [e for e in after.equations if e.name in OF_TERMS and e.params["window"].groups > 1]
    assert len(found) == 6
    assert {(e.params["precision"], v.type.dtype.name) for e in found for v in e.inputs} == {("float32", "float32")}


def pooled_network() -> list[nn.Module]:
    block = convolution(), nn.MaxPool2d(2), nn.BatchNorm2d(), nn.GELU(), nn.AvgPool2d(3, stride=1, padding=1)
    return [*block, *block]


LAYERS = st.sampled_from(
    [
        convolution(),
        nn.Conv2d(8, kernel_size=1, bias=False),
        nn.Conv2d(8, kernel_size=3, padding=1, groups=8),
        nn.Conv2d(8, kernel_size=1, groups=4),
        nn.ReLU(),
        nn.GELU(),
        nn.BatchNorm2d(),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.AvgPool2d(3, stride=1, padding=1),
        nn.GroupNorm(2),
        residual(convolution(), nn.BatchNorm2d(), nn.ReLU()),
        residual(nn.BatchNorm2d(), nn.ReLU(), convolution()),
    ]
)


@examples(20, 80)
def test_random_networks_compute_the_same(examples: int) -> None:
    def check(layers: list[nn.Module]) -> None:
        program, arguments = training([convolution(), *layers, convolution()], (8, 7, 6))
        assert_same_results(program, arguments, 0.02)

    check_examples(examples, check, st.lists(LAYERS, min_size=1, max_size=4))


@pytest.mark.parametrize(
    ("network", "channels"), [(residual_network, 3), (pooled_network, 8), (inverted_residual_network, 3)]
)
def test_only_the_input_of_a_network_is_transposed(network: Callable[[], list[nn.Module]], channels: int) -> None:
    program, arguments = training(network(), (channels, 12, 12))
    after = assert_same_results(program, arguments, 0.03)
    assert transposed_images(after) == transposed_images(for_gpu(program)) == [(EXAMPLES, channels, 12, 12)]
    assert not {e.primitive.name for e in after.equations} & {"conv2d", "max_pool2d", "avg_pool2d", "standardize"}


@pytest.mark.parametrize("network", [residual_network, pooled_network])
@pytest.mark.parametrize(
    ("precision", "terms", "tolerance"), [("tf32", {"tf32", "bf16x2"}, 3e-3), ("full", {"bf16x3"}, 1e-5)]
)
def test_operands_have_the_precision_that_is_asked_for(
    network: Callable[[], list[nn.Module]], precision: str, terms: set[str], tolerance: float
) -> None:
    program, arguments = training(network(), (8, 12, 12), precision)
    after = assert_same_results(program, arguments, tolerance)
    convolutions = [e for e in program.equations if e.name in CONVOLUTIONS_FIRST]
    found = [e for e in after.equations if e.name in OF_TERMS]
    assert len(found) == len(convolutions)
    assert {e.params["precision"] for e in found} == terms
    assert all(len(e.inputs) == 2 * TERMS[e.params["precision"]] for e in found)


def test_one_kernel_stores_all_terms_of_a_value() -> None:
    program, _ = training(residual_network(), (8, 12, 12), "full")
    for e in for_gpu(program).equations:
        names = [x.primitive.name for x in single_equations(e)]
        assert 2 * names.count("to_bfloat16") == 3 * names.count("bfloat16_rest")


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "pad and slice": lambda x: ops.pad(x[:, 1:7, ::2, 1:], ((0, 0), (1, 1), (2, 0), (0, 1)), 0.5),
    "flip": lambda x: ops.flip(x, (1, 3)),
    "concatenate": lambda x: ops.concatenate([x, x[:, :, :2]], 2),
    "comparison and select": lambda x: ops.where(x > 0.1, x, 2.0 * x),
    "sums of some axes": lambda x: x * ops.sum(x, 3, keepdims=True) + ops.sum(x, (0, 2), keepdims=True),
    "maximum of channels": lambda x: x - ops.max(x, 1, keepdims=True),
    "sum of images": lambda x: x * ops.sum(x),
    "global average": lambda x: x * ops.mean(x, (2, 3), keepdims=True),
    "row of pixels": lambda x: x * ops.broadcast_to(np.arange(6, dtype=np.float32), x.shape),
    "image of constants": lambda x: x * np.arange(42, dtype=np.float32).reshape(7, 6),
    "other axes": lambda x: ops.transpose(ops.transpose(x, (1, 0, 3, 2)), (1, 0, 3, 2)),
    "flat images": lambda x: ops.reshape(ops.reshape(x, (EXAMPLES, -1)) * 2.0, x.shape),
    "positions of maxima": lambda x: x * ops.sum(ops.max_pool2d(x, 2, return_indices=True)[1]),
    "gradient of a gradient": lambda x: ad.grad(lambda y: ops.sum(ops.max_pool2d(ops.square(y), 2)))(x),
}
"""Operations on images of 8 channels and 7 x 6 pixels."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_between_convolutions_compute_the_same(name: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) / 4 for shape in ((EXAMPLES, 8, 7, 6), (8, 8, 3, 3), (8, 8, 1, 1))]

    def gradients(x: Any, v: Any, w: Any) -> Any:
        def loss(x: Any, v: Any, w: Any) -> Any:
            image = ops.conv2d(x, v, padding=1)
            return ops.sum(ops.sin(ops.conv2d(OPERATIONS[name](image), w))), image

        return ad.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, v, w)

    assert_same_results(simplified(gradients, *arrays), arrays, 0.03)


@given(
    channels=st.sampled_from([8, 12, 64]),
    shift=st.floats(-100, 100),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_batch_norm_is_as_accurate_as_the_kernel_it_replaces(
    channels: int, shift: float, scale: float, seed: int
) -> None:
    """The mean is up to 100 deviations from 0."""
    x = ((shift + np.random.default_rng(seed).normal(size=(4, channels, 5, 5))) * scale).astype(np.float32)
    filters = np.ones((channels, channels, 1, 1), np.float32)

    def norm(x: Any, filters: Any) -> Any:
        image = ops.conv2d(x, filters) * 0.0 + x
        zeros = np.zeros(channels, np.float32)
        return ops.batch_norm(image, zeros, zeros, momentum=1.0, eps=0.0)

    program = with_channels_last(simplified(norm, x, filters))
    assert "standardize" not in {e.primitive.name for e in program.equations}
    y, mean, variance = (found.astype(float) for found in NumpyProgram(program).run([x, filters])[0])
    wide, eps, axes = x.astype(float), float(np.finfo(np.float32).eps), (0, 2, 3)
    expected = wide.var(axes, ddof=1)
    far = np.abs(wide[0, :, 0, 0] - wide.mean(axes)) / np.sqrt(expected)  # of the first pixel
    assert np.abs(mean - wide.mean(axes)).max() <= 4 * eps * (abs(shift) + 1) * scale
    assert (np.abs(variance / expected - 1) <= 8 * eps * (1 + far**2)).all()
    centred = wide - wide.mean(axes, keepdims=True)
    assert np.abs(y - centred / centred.std(axes, keepdims=True)).max() <= 40 * eps * (1 + abs(shift))


def test_the_variance_of_equal_numbers_is_zero() -> None:
    def norm(x: Any, filters: Any) -> Any:
        zeros = np.zeros(8, np.float32)
        return ops.batch_norm(ops.conv2d(x, filters) * 0.0 + x, zeros, zeros, momentum=1.0)

    arrays = [np.full((4, 8, 5, 5), 100000.1, np.float32), np.ones((8, 8, 1, 1), np.float32)]
    program = with_channels_last(simplified(norm, *arrays))
    y, mean, variance = NumpyProgram(program).run(arrays)[0]
    assert not y.any()
    assert not variance.any()
    assert (mean == np.float32(100000.1)).all()


def test_a_batch_norm_reads_its_images_for_no_sums_and_stores_none() -> None:
    """Convolutions compute the sums: the first one those of its results, and one gradient those of its derivative, for
    which it reads the images. All images in memory are bfloat16."""

    def gradients(x: Any, v: Any, w: Any, scale: Any) -> Any:
        def loss(v: Any, w: Any, scale: Any) -> Any:
            zeros = np.zeros(8, np.float32)
            y, mean, _ = ops.batch_norm(ops.conv2d(x, v), zeros, zeros, scale)
            return ops.sum(ops.sin(ops.conv2d(ops.gelu(y), w)) * 0.1), mean

        return ad.value_and_grad(loss, (0, 1, 2), has_aux=True)(v, w, scale)

    shapes = (80, 8, 18, 18), (8, 8, 3, 3), (8, 8, 1, 1), (8,)
    program = for_gpu(simplified(gradients, *(np.zeros(shape, np.float32) for shape in shapes)))
    sums = [e for e in program.equations if e.form == "product_sums"]
    assert [[x.primitive.name for x in single_equations(e)].count("sum") for e in sums] == [2, 2]
    assert not [e for e in program.equations if e.form == "column_sum"]
    pixels = 80 * 16 * 16 * 8
    assert [sum(v.size == pixels for v in e.inputs[2:]) for e in sums] == [0, 2]
    made = [v for e in program.equations if not e.is_view for v in e.outputs if v.size == pixels]
    assert all(v.type.dtype == BITS for v in made)
    # The first convolution, gelu and its derivative; the terms of the loss; gradients by all three results.
    assert len(made) == 7


def test_gradients_that_an_update_reads_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("adtrain.backends.cuda.narrow_values"), "MIN_SIZE", 0)

    def step(x: Any, w: Any) -> Any:
        grad = ad.grad(lambda w: ops.sum(ops.sin(ops.conv2d(x, w, padding=1))))(w)
        with phase("update"):
            return w - 0.5 * grad

    x, w = np.zeros((EXAMPLES, 64, 16, 16), np.float32), np.zeros((64, 64, 3, 3), np.float32)
    program = for_gpu(simplified(step, x, w))
    gradients = [e for e in everywhere(program) if e.primitive.name == "conv2d_weight_grad_bfloat16"]
    assert gradients
    update = program.equations[-1]
    assert all(v.type.dtype == np.float32 for v in update.inputs)
    assert all(v.type.dtype == np.float32 for e in gradients for v in e.outputs)


@pytest.mark.parametrize("shape", [(64, 65, 3, 3), (32, 256, 2, 3)])
def test_loops_read_filters_in_place_of_their_transposes(host: Host, shape: tuple[int, ...]) -> None:
    def update(w: Any, g: Any) -> Any:
        return w - 0.5 * ops.transpose(g, NCHW), ops.sin(ops.transpose(w, NHWC))

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s, np.float32) for s in (shape, permuted(shape, NHWC))]
    program = for_gpu(stage(update, ()).program(*arrays))
    assert {e.name for e in program.equations} <= {"gather", "horizontal"}
    known = dict(zip(program.inputs, arrays, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    for e in program.equations:
        known |= dict(zip(e.outputs, host.computed(e, None, [known[v] for v in e.inputs]), strict=True))
    for v, expected in zip(program.outputs, NumpyProgram(program).run(arrays)[0], strict=True):
        np.testing.assert_allclose(known[v], expected, rtol=1e-6, atol=1e-6)


def test_few_channels_with_biases_and_pooling_are_not_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of weight gradients also compute those of biases, so their sums cost nothing."""
    monkeypatch.undo()
    settings = "data.batch_size=1024", "training.precision=bfloat16"
    program = for_gpu(outline(config.load("cnn", settings)).step_program(passes=()))
    assert not {e.primitive.name for e in everywhere(program)} & OF_TERMS


CHOICES = {
    "wide": (64, BYTES_PER_CYCLE, True),
    "few channels": (3, BYTES_PER_CYCLE, False),
    "slow memory": (64, 1, False),
}
"""Channels of a layer's input, the bytes that memory moves in a cycle, and whether the layer becomes channels last."""


@pytest.mark.parametrize("name", CHOICES)
def test_layers_become_channels_last_where_that_takes_fewer_cycles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    channels, speed, chosen = CHOICES[name]
    monkeypatch.setattr(import_module("adtrain.backends.cuda.channels_last"), "BYTES_PER_CYCLE", speed)

    def network(x: Any, first: Any, second: Any) -> Any:
        y = ops.max_pool2d(ops.conv2d(x, first, padding=1), 2)
        return ops.conv2d(ops.relu(y), second, padding=1)

    shapes = (1024, channels, 31, 31), (64, channels, 3, 3), (128, 64, 3, 3), (1024, 128, 15, 15)
    gradients = simplified(lambda *x: ad.vjp(network, *x[:-1])[1](x[-1]), *(Shaped(*shape) for shape in shapes))
    found = [e for e in with_channels_last(gradients).equations if e.name == "conv2d_weight_grad_bfloat16"]
    assert ((64, 3 * 3 * channels) in {e.outputs[0].type.shape for e in found}) == chosen
