"""Layers with PyTorch's weights have PyTorch's outputs, gradients and parameter names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch_fields import torch_field
from torch_recurrent import torch_recurrent
from torch_tokens import torch_tokens

import adtrain as ad
from adtrain import nn, ops
from adtrain.core import tree

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs_torch

FLOAT64 = np.dtype(np.float64)
IMAGE = (4, 9, 8)


class Selected(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self, indices: list[int]) -> None:
        super().__init__()
        self.indices = indices

    def forward(self, x: Any) -> Any:
        return x[:, self.indices]


class Scaled(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Any) -> Any:
        return self.factor * x


class OnlyOne(torch.nn.BatchNorm2d):  # type: ignore[name-defined]
    """Batch norm whose weight is 1, or whose bias is 0: PyTorch has no option for it."""

    def __init__(self, kept: str) -> None:
        super().__init__(4)
        setattr(self, "bias" if kept == "weight" else "weight", None)


TOKENS = (5, 6)
WIDE_TOKENS = (5, 16)
ON_TOKENS: list[tuple[nn.Module, nn.Shape]] = [
    (nn.MultiheadAttention(3), TOKENS),
    (nn.MultiheadAttention(1, bias=False, causal=True), TOKENS),
    (nn.MultiheadAttention(2), (1, 6)),
    (nn.TransformerEncoderLayer(2, dim_feedforward=7, dropout=0.0), TOKENS),
    (
        nn.TransformerEncoderLayer(3, dim_feedforward=4, dropout=0.0, activation="gelu", norm_first=True, causal=True),
        TOKENS,
    ),
    (nn.MultiheadAttention(4, num_key_value_heads=2, bias=False), WIDE_TOKENS),
    (nn.MultiheadAttention(4, num_key_value_heads=1, rotary_base=100.0, causal=True), WIDE_TOKENS),
    (nn.MultiheadAttention(2, rotary_base=10.0, qk_norm=True, window=3, soft_cap=1.5), WIDE_TOKENS),
    (nn.MultiheadAttention(2, qk_norm=True, window=2, causal=True), TOKENS),
    (nn.DecoderLayer(3), TOKENS),
    (nn.DecoderLayer(2, activation="gelu_tanh", window=9, causal=False), TOKENS),
    (nn.DecoderLayer(2, activation="squared_relu", soft_cap=2.0, norm_eps=1e-2, dim_feedforward=5), TOKENS),
    (
        nn.DecoderLayer(
            4, activation="swiglu", norm="rms_norm", bias=False, num_key_value_heads=2, rotary_base=100.0, qk_norm=True
        ),
        WIDE_TOKENS,
    ),
    (nn.DecoderLayer(1, activation="silu", norm="rms_norm"), TOKENS),
    (nn.DecoderLayer(6, activation="relu"), TOKENS),
    (nn.ClassToken(), TOKENS),
    (nn.PositionalEmbedding(), TOKENS),
    (nn.PositionalEmbedding("sinusoidal"), (5, 7)),
    (nn.Patches((3, 2)), IMAGE),
    (nn.Mean(), TOKENS),
    (nn.Mean(-2), IMAGE),
]
ON_POINTS: list[tuple[nn.Module, nn.Shape]] = [
    (nn.Sine(5), (6,)),
    (nn.Sine(5, first=True, omega=3.0), (3, 6)),
    (nn.FourierFeatures(4), (3,)),
    (nn.HashGrid(2, features=3, log2_table_size=4, base_resolution=2, finest_resolution=7), (2,)),
]

LAYERS: list[tuple[nn.Module, Any, nn.Shape]] = [
    (nn.Linear(5), lambda: torch.nn.Linear(6, 5), (6,)),
    (nn.Linear(5, bias=False), lambda: torch.nn.Linear(6, 5, bias=False), (3, 6)),
    (
        nn.Conv1d(6, kernel_size=3, stride=2, padding=2, dilation=2, groups=2),
        lambda: torch.nn.Conv1d(4, 6, 3, 2, 2, 2, 2),
        (4, 9),
    ),
    (
        nn.Conv1d(3, kernel_size=4, padding="same", bias=False),
        lambda: torch.nn.Conv1d(4, 3, 4, padding="same", bias=False),
        (4, 9),
    ),
    (nn.Conv2d(6, kernel_size=3), lambda: torch.nn.Conv2d(4, 6, 3), IMAGE),
    (
        nn.Conv2d(6, kernel_size=(3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, bias=False),
        lambda: torch.nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2, bias=False),
        IMAGE,
    ),
    (nn.Conv2d(3, kernel_size=(4, 3), padding="same"), lambda: torch.nn.Conv2d(4, 3, (4, 3), padding="same"), IMAGE),
    (
        nn.Conv2d(3, kernel_size=2, padding="same", dilation=3),
        lambda: torch.nn.Conv2d(4, 3, 2, padding="same", dilation=3),
        IMAGE,
    ),
    (nn.ConvTranspose2d(6, kernel_size=3), lambda: torch.nn.ConvTranspose2d(4, 6, 3), IMAGE),
    (
        nn.ConvTranspose2d(
            6,
            kernel_size=(3, 2),
            stride=(2, 3),
            padding=(1, 0),
            output_padding=(1, 2),
            groups=2,
            bias=False,
            dilation=(2, 1),
        ),
        lambda: torch.nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), 2, False, (2, 1)),
        IMAGE,
    ),
    (nn.MaxPool2d(2), lambda: torch.nn.MaxPool2d(2), IMAGE),
    (nn.MaxPool2d((3, 2), stride=(2, 1), padding=(1, 0)), lambda: torch.nn.MaxPool2d((3, 2), (2, 1), (1, 0)), IMAGE),
    (nn.AvgPool2d(3, stride=2, padding=1), lambda: torch.nn.AvgPool2d(3, 2, 1), IMAGE),
    (nn.AdaptiveAvgPool2d((3, 5)), lambda: torch.nn.AdaptiveAvgPool2d((3, 5)), IMAGE),
    (nn.AdaptiveAvgPool2d(1), lambda: torch.nn.AdaptiveAvgPool2d(1), IMAGE),
    (nn.AdaptiveMaxPool2d(1), lambda: torch.nn.AdaptiveMaxPool2d(1), IMAGE),
    (nn.AdaptiveMaxPool2d((3, 4)), lambda: torch.nn.AdaptiveMaxPool2d((3, 4)), IMAGE),
    (nn.Upsample(2), lambda: torch.nn.Upsample(scale_factor=2), IMAGE),
    (
        nn.Upsample((3, 2), mode="bilinear"),
        lambda: torch.nn.Upsample(scale_factor=(3, 2), mode="bilinear"),
        IMAGE,
    ),
    (nn.BatchNorm1d(), lambda: torch.nn.BatchNorm1d(6), (6,)),
    (nn.BatchNorm1d(affine=False), lambda: torch.nn.BatchNorm1d(6, affine=False), (6, 5)),
    (nn.BatchNorm2d(eps=1e-2, momentum=0.3), lambda: torch.nn.BatchNorm2d(4, 1e-2, 0.3), IMAGE),
    (nn.LayerNorm(), lambda: torch.nn.LayerNorm(8), IMAGE),
    (nn.LayerNorm((9, 8), eps=1e-3, elementwise_affine=False), lambda: torch.nn.LayerNorm((9, 8), 1e-3, False), IMAGE),
    (nn.LayerNorm(6), lambda: torch.nn.LayerNorm(6), (6,)),
    (nn.BatchNorm2d(affine="bias"), lambda: OnlyOne("bias"), IMAGE),
    (nn.BatchNorm2d(affine="weight"), lambda: OnlyOne("weight"), IMAGE),
    (nn.RMSNorm(), lambda: torch.nn.RMSNorm(8), IMAGE),
    (nn.RMSNorm((9, 8), eps=1e-3, elementwise_affine=False), lambda: torch.nn.RMSNorm((9, 8), 1e-3, False), IMAGE),
    (nn.InstanceNorm2d(), lambda: torch.nn.InstanceNorm2d(4), IMAGE),
    (nn.InstanceNorm2d(eps=1e-2, affine=True), lambda: torch.nn.InstanceNorm2d(4, 1e-2, affine=True), IMAGE),
    (nn.GroupNorm(2), lambda: torch.nn.GroupNorm(2, 4), IMAGE),
    (nn.GroupNorm(3, affine=False, eps=1e-2), lambda: torch.nn.GroupNorm(3, 6, 1e-2, False), (6,)),
    (
        nn.RNN(3, nonlinearity="relu"),
        lambda: torch_recurrent("RNN", input_size=2, hidden_size=3, nonlinearity="relu"),
        (5, 2),
    ),
    (
        nn.RNN(1, bias=False, output="all"),
        lambda: torch_recurrent("RNN", "all", input_size=2, hidden_size=1, bias=False),
        (1, 2),
    ),
    *(
        (
            getattr(nn, kind)(3, num_layers=2, bidirectional=True, output=output),
            lambda kind=kind, output=output: torch_recurrent(
                kind, output, input_size=4, hidden_size=3, num_layers=2, bidirectional=True
            ),
            (5, 4),
        )
        for kind in ("RNN", "LSTM", "GRU")
        for output in ("last", "all")
    ),
    (nn.Dropout(0.0), lambda: torch.nn.Dropout(0.0), (6,)),
    (nn.Dropout2d(0.0), lambda: torch.nn.Dropout2d(0.0), IMAGE),
    (nn.Scale(-1.5), lambda: Scaled(-1.5), (6,)),
    (nn.Scale(1.0), lambda: torch.nn.Identity(), (6,)),
    (nn.Flatten(), lambda: torch.nn.Flatten(), IMAGE),
    (nn.Reshape((9, -1)), lambda: torch.nn.Unflatten(1, (9, -1)), (18,)),
    (nn.Select((2, 0, 2)), lambda: Selected([2, 0, 2]), IMAGE),
    (nn.ReLU(), lambda: torch.nn.ReLU(), (6,)),
    (nn.SquaredReLU(), lambda: torch_tokens(nn.SquaredReLU(), (6,)), (6,)),
    (nn.SoftCap(0.7), lambda: torch_tokens(nn.SoftCap(0.7), (6,)), (6,)),
    (nn.LeakyReLU(0.2), lambda: torch.nn.LeakyReLU(0.2), (6,)),
    (nn.PReLU(), lambda: torch.nn.PReLU(), (6,)),
    (nn.PReLU(4), lambda: torch.nn.PReLU(4), IMAGE),
    (nn.Hardswish(), lambda: torch.nn.Hardswish(), IMAGE),
    (nn.ELU(0.7), lambda: torch.nn.ELU(0.7), (6,)),
    (nn.GELU(), lambda: torch.nn.GELU(), (6,)),
    (nn.GELU("tanh"), lambda: torch.nn.GELU("tanh"), (6,)),
    (nn.SiLU(), lambda: torch.nn.SiLU(), (6,)),
    (nn.Tanh(), lambda: torch.nn.Tanh(), (6,)),
    (nn.Sigmoid(), lambda: torch.nn.Sigmoid(), (6,)),
    (nn.Softplus(), lambda: torch.nn.Softplus(), (6,)),
    (nn.Softmax(), lambda: torch.nn.Softmax(-1), (6,)),
    (nn.LogSoftmax(1), lambda: torch.nn.LogSoftmax(1), IMAGE),
    *((layer, lambda layer=layer, shape=shape: torch_tokens(layer, shape), shape) for layer, shape in ON_TOKENS),
    *((layer, lambda layer=layer, shape=shape: torch_field(layer, shape), shape) for layer, shape in ON_POINTS),
]


def named(arrays: nn.Params) -> dict[str, Any]:
    return dict(zip(tree.paths(arrays), tree.leaves(arrays), strict=True))


def arrays_of(module: Any, like: nn.Params) -> Any:
    """The module's arrays in a tree with the names of `like`."""
    arrays = module.state_dict()
    return tree.unflatten(tree.flatten(like)[1], [ad.array(arrays[name].numpy()) for name in named(like)])


def check(ours: nn.Module, theirs: Any, shape: nn.Shape, training: bool) -> None:
    """Give `ours` the arrays of `theirs` and compare output, running statistics and every gradient."""
    rng = np.random.default_rng(0)
    params, state = ours.init(shape, rng, FLOAT64)
    names = set(theirs.state_dict()) - {"num_batches_tracked"}
    assert {*named(params), *named(state)} == names
    for name, x in (named(params) | named(state)).items():
        assert x.shape == tuple(theirs.state_dict()[name].shape)
    with torch.no_grad():
        for x in theirs.state_dict().values():
            if x.is_floating_point():
                x.copy_(torch.tensor(rng.uniform(0.5, 1.5, tuple(x.shape))))
    params, state = arrays_of(theirs, params), arrays_of(theirs, state)
    theirs.train(training)

    x = rng.normal(size=(3, *shape))
    x_torch = torch.tensor(x, requires_grad=True)
    y_torch = theirs(x_torch)
    assert tuple(y_torch.shape) == (3, *ours.output_shape(shape))
    weights = rng.normal(size=tuple(y_torch.shape))
    (y_torch * torch.tensor(weights)).sum().backward()

    def loss(params: nn.Params, x: ad.Value) -> tuple[ad.Value, Any]:
        y, new = ours.forward(params, state, x, nn.Mode(training=training))
        return (y * weights).sum(), (y, new)

    (_, (y, new)), (by_params, by_x) = ad.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, ad.array(x))
    np.testing.assert_allclose(y, y_torch.detach().numpy(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(by_x, x_torch.grad.numpy(), rtol=1e-9, atol=1e-11)
    for name, parameter in theirs.named_parameters():
        np.testing.assert_allclose(named(by_params)[name], parameter.grad.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)
    for name, x in named(new).items():
        np.testing.assert_allclose(x, theirs.state_dict()[name].numpy(), rtol=1e-12, err_msg=name)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch warns about its speed
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("ours", "theirs", "shape"), LAYERS, ids=lambda x: repr(x) if isinstance(x, nn.Module) else "")
def test_layer_equals_pytorch(ours: nn.Module, theirs: Any, shape: nn.Shape, training: bool) -> None:
    check(ours, theirs().double(), shape, training)


def test_every_layer_is_compared_with_pytorch() -> None:
    assert {ours.kind() for ours, _, _ in LAYERS} | {"embedding"} == set(nn.LAYERS)


def test_embedding_equals_pytorch() -> None:
    indices = np.array([[1, 0, 6], [6, 6, 2]])
    ours, theirs = nn.Embedding(7, embedding_dim=4), torch.nn.Embedding(7, 4).double()
    assert ours.output_shape((3,)) == (3, 4)
    y_torch = theirs(torch.tensor(indices))
    torch.sin(y_torch).sum().backward()
    initial, _ = ours.init((3,), np.random.default_rng(0), FLOAT64)
    assert initial["weight"].shape == (7, 4)
    params = arrays_of(theirs, initial)

    def loss(params: nn.Params) -> tuple[ad.Value, ad.Value]:
        y, _ = ours.forward(params, {}, ad.array(indices), nn.Mode(training=True))
        return ops.sin(y).sum(), y

    (_, y), grads = ad.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_array_equal(y, y_torch.detach().numpy())
    np.testing.assert_allclose(grads["weight"], theirs.weight.grad.numpy(), rtol=1e-12)


def test_sequential_has_pytorchs_names_shapes_and_order() -> None:
    ours = nn.Sequential(
        nn.Conv2d(4, kernel_size=3), nn.BatchNorm2d(), nn.ReLU(), nn.Sequential(nn.Flatten(), nn.Linear(5, bias=False))
    )
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 5, bias=False)),
    )  # fmt: skip
    params, state = ours.init((1, 8, 8), np.random.default_rng(0), FLOAT64)

    def shapes(arrays: nn.Params) -> list[tuple[str, nn.Shape]]:
        return list(zip(tree.paths(arrays), (x.shape for x in tree.leaves(arrays)), strict=True))

    assert shapes(params) == [(name, tuple(x.shape)) for name, x in theirs.named_parameters()]
    assert shapes(state) == [(name, tuple(x.shape)) for name, x in theirs.named_buffers() if x.ndim]


@pytest.mark.parametrize("name", sorted(nn.LOSSES))
def test_loss_equals_pytorch(name: str) -> None:
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(6, 5))
    classes, floats = rng.integers(0, 5, 6), rng.uniform(size=(6, 5))
    functional = torch.nn.functional
    theirs, targets = {
        "cross_entropy": (functional.cross_entropy, classes),
        "nll": (functional.nll_loss, classes),
        "mse": (functional.mse_loss, floats),
        "l1": (functional.l1_loss, floats),
        "huber": (functional.huber_loss, floats),
        "binary_cross_entropy_with_logits": (functional.binary_cross_entropy_with_logits, floats),
    }[name]
    expected = theirs(torch.tensor(outputs), torch.tensor(targets)).item()
    assert nn.LOSSES[name](ad.array(outputs), ad.array(targets)).item() == pytest.approx(expected, rel=1e-12)
