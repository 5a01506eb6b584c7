"""Narrow values: which values are bfloat16, kernels against the reference, and errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from hypothesis import strategies as st
from program_samples import ON_GPU, all_layers, everywhere
from sweeps import check_examples, examples
from test_passes_random import assert_consistent, name_of

import adtrain as ad
from adtrain import nn, ops
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.lower import Lowering
from adtrain.core import tree
from adtrain.core.program import Equation, Program, Variable, single_equations
from adtrain.core.staging import stage
from adtrain.core.types import BITS
from adtrain.ops.channels_last import from_bfloat16_p

__all__ = ["host"]

pytestmark = pytest.mark.usefixtures("small_arrays_as_large_ones")

EXAMPLES, CLASSES = 32, 16
UNIT = 2.0**-8
"""The largest relative error of a rounding to bfloat16."""
MIN_SIZE = 512
"""Minimum elements of narrow values in these tests."""


@pytest.fixture
def small_arrays_as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are rounded, and small values are narrow values."""
    for name in ("channels_last", "product_precision", "forms.horizontal"):
        monkeypatch.setattr(import_module(f"adtrain.backends.cuda.{name}"), "MAX_FLOPS", 0)
    monkeypatch.setattr(import_module("adtrain.backends.cuda.channels_last"), "_fastest", all_layers)
    monkeypatch.setattr(import_module("adtrain.backends.cuda.product_precision"), "LAUNCH_CYCLES", -(10**9))
    monkeypatch.setattr(import_module("adtrain.backends.cuda.forms.one_block"), "MAX_STEPS", 64)
    monkeypatch.setattr(import_module("adtrain.backends.cuda.forms.column_sum"), "MIN_ELEMENTS", 4096)
    monkeypatch.setattr(import_module("adtrain.backends.cuda.narrow_values"), "MIN_SIZE", MIN_SIZE)


def convolution(channels: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d()]


def transformer(layers: int) -> nn.Module:
    options: Any = {"dim_feedforward": 128, "dropout": 0.0, "activation": "gelu", "norm_first": True, "causal": True}
    blocks = [nn.TransformerEncoderLayer(2, **options) for _ in range(layers)]
    return nn.Sequential(nn.Linear(64), nn.PositionalEmbedding(), *blocks, nn.LayerNorm(), nn.Linear(CLASSES))


def residual_network() -> nn.Module:
    bodies = (nn.Sequential(*convolution(16), nn.ReLU(), *convolution(16)) for _ in range(2))
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CLASSES)
    return nn.Sequential(*convolution(16), nn.ReLU(), *map(nn.Residual, bodies), nn.ReLU(), *head)


def pooled_network() -> nn.Module:
    layers = *convolution(16), nn.GELU(), *convolution(16), nn.MaxPool2d(2), nn.GELU(), nn.Flatten(), nn.Linear(CLASSES)
    return nn.Sequential(*layers)


NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "transformer": (transformer(1), (16, 24)),
    "residual": (residual_network(), (4, 8, 8)),
    "pooled": (pooled_network(), (4, 8, 8)),
}
"""Networks and the shapes of their inputs."""


class Sample:
    """A network with weights and a batch. Its outputs are scores of classes, one or several for each example."""

    def __init__(self, model: nn.Module, shape: Sequence[int]) -> None:
        rng = np.random.default_rng(0)
        self.model = model
        self.params, self.statistics = model.init(tuple(shape), rng, np.dtype(np.float32))
        scores = model.output_shape(tuple(shape))[:-1]
        self.x = ad.array(rng.standard_normal((EXAMPLES, *shape), np.float32))
        self.labels = ad.array(rng.integers(0, CLASSES, (EXAMPLES, *scores)))

    def gradients(self, params: Any, statistics: Any, x: Any, labels: Any) -> Any:
        """The loss and its gradients by all weights."""

        def loss(params: Any) -> Any:
            out, _ = self.model.forward(params, statistics, x, nn.Mode(training=True))
            return ops.cross_entropy(ops.reshape(out, (-1, CLASSES)), ops.reshape(labels, (-1,)))

        return ad.value_and_grad(loss)(params)

    def arguments(self, dtype: str) -> tuple[Any, ...]:
        def cast(value: Any) -> Any:
            x = value.numpy()
            return ad.array(x.astype(dtype) if x.dtype.kind == "f" else x)

        return tuple(tree.map(cast, x) for x in (self.params, self.statistics, self.x, self.labels))

    def program(self, improve: Sequence[Any] = ON_GPU) -> Program:
        with ops.matmul_precision("bfloat16"):
            return stage(self.gradients, improve).program(*self.arguments("float32"))

    def given(self) -> list[np.ndarray]:
        """The arguments of the Program."""
        return [x.numpy() for x in tree.leaves(self.arguments("float32"))]

    def exact(self) -> list[np.ndarray]:
        """Loss and gradients in float64."""
        return [x.numpy() for x in tree.leaves(stage(self.gradients)(*self.arguments("float64")))]

    def in_pytorch(self) -> list[np.ndarray]:
        """Loss and gradients by PyTorch's autocast."""
        import torch

        from adtrain.bench.peers import torch_network

        arrays = {path: torch.tensor(x.numpy()) for path, x in _named(self.params) + _named(self.statistics)}
        weights = [arrays[path].requires_grad_() for path, _ in _named(self.params)]
        with torch.autocast("cpu", torch.bfloat16):
            out = torch_network.model(self.model)(arrays, torch.tensor(self.x.numpy()))
            loss = torch.nn.functional.cross_entropy(out.flatten(0, -2), torch.tensor(self.labels.numpy()).flatten())
        loss.backward()
        return [loss.detach().numpy(), *(w.grad.numpy() for w in weights)]


def _named(arrays: Any) -> list[tuple[str, Any]]:
    return [*zip(tree.paths(arrays), tree.leaves(arrays), strict=True)]


@cache
def sample(name: str) -> Sample:
    return Sample(*NETWORKS[name])


def error(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """The norm of the error of all gradients, relative to that of the gradients."""
    pairs = [(x.astype(float), y) for x, y in zip(found[1:], exact[1:], strict=True)]
    of_error, of_gradients = sum(np.sum((x - y) ** 2) for x, y in pairs), sum(np.sum(y**2) for _, y in pairs)
    return float(np.sqrt(of_error / of_gradients))


def between_kernels(program: Program, dtype: Any) -> list[Variable]:
    """The values between kernels that have an element type and at least MIN_SIZE elements."""
    ends = {*program.inputs, *program.constants, *program.outputs}
    made = [v for e in program.equations if not e.is_view for v in e.outputs if v not in ends]
    return [v for v in made if v.size >= MIN_SIZE and v.type.dtype == dtype]


@pytest.mark.parametrize("name", NETWORKS)
def test_only_values_that_may_not_be_rounded_are_float32_between_kernels(name: str) -> None:
    """These are sums over the layers of a transformer, and the gradients of the loss and of a mean over an image."""
    program = sample(name).program()
    producer = {v: e.primitive.name for x in program.equations for e in single_equations(x) for v in e.outputs}
    kept = [v for v in between_kernels(program, np.float32) if v.size >= EXAMPLES * 16 * CLASSES]
    assert {producer[v] for v in kept} <= ({"add", "sub"} if name == "transformer" else {"where"})
    assert len(between_kernels(program, BITS)) > len(kept)


@pytest.mark.parametrize("name", NETWORKS)
def test_programs_are_consistent_and_a_second_run_changes_nothing(name: str) -> None:
    *first, narrow = ON_GPU[: [name_of(p) for p in ON_GPU].index("narrow_values") + 1]
    before = sample(name).program(first)
    after = narrow(before)
    assert str(after) != str(before)
    assert_consistent(after, before)
    assert str(narrow(after)) == str(after)


def test_full_precision_and_outputs_of_a_program_are_not_rounded() -> None:
    def f(x: Any, w: Any) -> Any:
        y = ops.matmul(x, w)
        return y, ops.sum(ops.softmax(ops.sin(y)) * y, 0)

    x, w = (ad.array(np.ones((256, 256), np.float32)) for _ in range(2))
    assert not between_kernels(stage(f, ON_GPU).program(x, w), BITS)
    with ops.matmul_precision("bfloat16"):
        program = stage(f, ON_GPU).program(x, w)
    assert [v.type.dtype for v in program.outputs] == [np.float32] * 2
    assert "matmul_bfloat16" in {e.name for e in everywhere(program)}


def uses_bfloat16(e: Equation) -> bool:
    return any(v.type.dtype == BITS for v in (*e.inputs, *e.outputs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_that_convert_agree_with_the_reference(name: str, host: Host) -> None:
    assert_kernels_agree(sample(name).program(), sample(name).given(), host)


def test_softmax_and_argmax_of_long_rows_read_bfloat16(host: Host) -> None:
    def f(x: Any, w: Any) -> Any:
        scores = ops.matmul(x, w)
        return ops.log_softmax(scores), ops.argmax(scores, 1)

    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape, np.float32) for shape in ((3, 8), (8, 20_000))]
    with ops.matmul_precision("bfloat16"):
        program = stage(f, ON_GPU).program(*given)
    assert not [v for v in between_kernels(program, np.float32) if v not in program.outputs]
    assert_kernels_agree(program, given, host)


def assert_kernels_agree(program: Program, given: Sequence[np.ndarray], host: Host) -> None:
    """Check each kernel that reads or writes bfloat16, except those of attention. Equal kernels are checked once."""
    known = dict(zip(program.inputs, given, strict=True))
    known |= {v: x.numpy() for v, x in program.constants.items()}
    checked: set[Source] = set()
    for e in program.equations:
        given = [known[v] for v in e.inputs]
        found = e.primitive.reference(*given, **e.params)
        arrays = (np.asarray(x, order="C") for x in (found if isinstance(found, tuple) else (found,)))
        known |= dict(zip(e.outputs, arrays, strict=True))
        sources = [launch.source for launch in host.lowering.launches(e) if hasattr(launch, "source")]
        if not uses_bfloat16(e) or checked.issuperset(sources) or "attention" in e.name:
            continue
        checked |= {*sources}
        for x, v in zip(host.computed(e, None, given), e.outputs, strict=True):
            a, b = (from_bfloat16_p.reference(y) if y.dtype == BITS else y.astype(float) for y in (x, known[v]))
            assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b) + 1e-6, (e.name, v.type)
    assert checked


BETWEEN: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: ops.sin(x) * x + 1.0,
    "softmax": ops.softmax,
    "log_softmax": ops.log_softmax,
    "layer_norm": lambda x: ops.layer_norm(x, (64,)),
    "largest": lambda x: x - ops.max(x, 1, keepdims=True),
    "mean of columns": lambda x: x - ops.mean(x, 0),
    "transpose": lambda x: ops.transpose(x, (1, 0)),
    "slice": lambda x: ops.concatenate([x[:, 8:], x[:, :8]], 1),
    "pad": lambda x: ops.pad(x[:, 8:], ((0, 0), (8, 0))),
    "cumsum": lambda x: ops.cumsum(x, 1) / 8.0,
    "sort": lambda x: ops.sort(x, 1),
    "gather": lambda x: ops.take(x, np.arange(64)[::-1].copy(), 0),
    "max_pool2d": lambda x: ops.reshape(ops.max_pool2d(ops.reshape(x, (1, 64, 8, 8)), 3, 1, 1), (64, 64)),
    "avg_pool2d": lambda x: ops.reshape(ops.avg_pool2d(ops.reshape(x, (1, 64, 8, 8)), 3, 1, 1), (64, 64)),
    "erf and where": lambda x: ops.where(x > 0.0, ops.erf(x), x),
}
"""Operations on a matrix of 64 x 64."""


@pytest.mark.parametrize("name", BETWEEN)
def test_an_operation_between_two_products_may_be_given_rounded_values(name: str) -> None:
    """Each equation has kernels, and the error of gradients is that of a few roundings to bfloat16."""
    f, rng = BETWEEN[name], np.random.default_rng(0)
    arrays = [rng.standard_normal((64, 64)) / 8 for _ in range(3)]

    def gradients(x: Any, w: Any, v: Any) -> Any:
        def loss(w: Any, v: Any) -> Any:
            return ops.sum(ops.sin(ops.matmul(f(ops.matmul(x, w) * 8.0), v)))

        return ad.value_and_grad(loss, (0, 1))(w, v)

    with ops.matmul_precision("bfloat16"):
        program = stage(gradients, ON_GPU).program(*(x.astype(np.float32) for x in arrays))
    lowering = Lowering(H200)
    assert all(lowering.launches(e) for e in program.equations if not e.is_view)
    found = NumpyProgram(program).run([x.astype(np.float32) for x in arrays])[0]
    exact = [x.numpy() for x in tree.leaves(stage(gradients)(*arrays))]
    assert error(found, exact) <= 16 * UNIT


@examples(5, 15)
def test_errors_of_random_networks_are_those_of_a_few_roundings_for_each_layer(examples: int) -> None:
    layer = st.sampled_from([nn.GELU(), nn.Tanh(), nn.LayerNorm(), nn.Linear(64), nn.Residual(nn.Linear(64))])

    def check(layers: list[nn.Module]) -> None:
        network = Sample(nn.Sequential(nn.Linear(64), *layers, nn.Linear(CLASSES)), (24,))
        found = NumpyProgram(network.program()).run(network.given())[0]
        assert error(found, network.exact()) <= 2 * UNIT * (len(layers) + 2)

    check_examples(examples, check, st.lists(layer, min_size=1, max_size=6))


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", NETWORKS)
def test_errors_of_gradients_are_about_those_of_pytorchs_autocast_or_smaller(name: str) -> None:
    chosen = sample(name)
    found, exact = NumpyProgram(chosen.program()).run(chosen.given())[0], chosen.exact()
    assert error(found, exact) <= 1.1 * error(chosen.in_pytorch(), exact)
    assert abs(found[0] - exact[0]) <= 2e-3 * exact[0]
