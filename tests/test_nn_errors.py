"""Errors of invalid options and of inputs that do not fit: the layer and option, what was found and expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import nn
from adtrain.core.errors import AdtrainError, OptionError, ShapeError

unchecked: Any = nn  # without types, because many of the calls below have arguments of the wrong type


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (nn.Linear(3, in_features=5), (4,), "linear: in_features is 5, expected 4 for the input (4,)"),
        (nn.Linear(3), (), "linear: expected an input of shape (..., features), found ()"),
        (
            nn.Conv2d(8, kernel_size=3, in_channels=3),
            (1, 28, 28),
            "conv2d: in_channels is 3, expected 1 for the input (1, 28, 28)",
        ),
        (
            nn.Conv2d(8, kernel_size=3),
            (784,),
            "conv2d: expected an input of shape (channels, height, width), found (784,)",
        ),
        (
            nn.Conv2d(8, kernel_size=5),
            (1, 2, 2),
            "conv2d: kernel 5x5 is larger than the padded input 2x2",
        ),
        (
            nn.Conv2d(8, kernel_size=(1, 3), padding=1, dilation=2),
            (1, 8, 2),
            "conv2d: kernel 1x3 (dilated 1x5) is larger than the padded input 10x4",
        ),
        (
            nn.Conv2d(4, kernel_size=1, groups=2),
            (3, 4, 4),
            "conv2d: the input's 3 channels are not a multiple of groups 2: (3, 4, 4)",
        ),
        (
            nn.ConvTranspose2d(4, kernel_size=2, padding=2),
            (3, 2, 3),
            "conv_transpose2d: padding 2x2 makes the output empty: -1x0 for the input 2x3",
        ),
        (nn.MaxPool2d(3), (4, 2, 9), "max_pool2d: kernel 3x3 is larger than the padded input 2x9"),
        (nn.AvgPool2d(2), (4,), "avg_pool2d: expected an input of shape (channels, height, width), found (4,)"),
        (nn.BatchNorm2d(8), (4, 2, 2), "batch_norm2d: num_features is 8, expected 4 for the input (4, 2, 2)"),
        (
            nn.BatchNorm1d(),
            (4, 2, 2),
            "batch_norm1d: expected an input of shape (channels,) or (channels, length), found (4, 2, 2)",
        ),
        (nn.LayerNorm(5), (3, 4), "layer_norm: normalized_shape (5,) is not the end of the input's shape (3, 4)"),
        (nn.GroupNorm(2), (3,), "group_norm: the input's 3 channels are not a multiple of num_groups 2: (3,)"),
        (nn.GroupNorm(2, num_channels=4), (6,), "group_norm: num_channels is 4, expected 6 for the input (6,)"),
        (nn.Softmax(2), (3,), "softmax: dim is 2, the input has 2 axes with the batch axis: (3,)"),
        (
            nn.LSTM(3),
            (1, 28, 28),
            "lstm: expected an input of shape (length, features), found (1, 28, 28); write reshape: [28, 28] before it",
        ),
        (nn.GRU(3), (784,), "gru: expected an input of shape (length, features), found (784,)"),
        (nn.RNN(3, input_size=4), (5, 3), "rnn: input_size is 4, expected 3 for the input (5, 3)"),
        (nn.Reshape((2, 3)), (7,), "reshape: shape (2, 3) has 6 elements, the input 7: (7,)"),
        (
            nn.Residual(nn.Linear(3)),
            (4,),
            "residual: the body gives (3,), its input is (4,): add a shortcut that gives (3,)",
        ),
        (
            nn.Residual(nn.Linear(3), shortcut=nn.Linear(5)),
            (4,),
            "residual: the body gives (3,), the shortcut (5,)",
        ),
        (
            nn.Add(nn.Linear(3), nn.Linear(5)),
            (4,),
            "add: the branches must agree, branch 0 gives (3,), branch 1 (5,)",
        ),
        (
            nn.Concat(nn.Conv2d(2, kernel_size=1), nn.Conv2d(2, kernel_size=2)),
            (1, 4, 4),
            "concat: the branches must agree after the first axis, branch 0 gives (2, 4, 4), branch 1 (2, 3, 3)",
        ),
        (
            nn.Sequential(nn.ReLU(), nn.Residual(nn.Sequential(nn.Conv2d(2, kernel_size=9)))),
            (2, 4, 4),
            "layer 1.body.0: conv2d: kernel 9x9 is larger than the padded input 4x4",
        ),
        (
            nn.Sequential(nn.Residual(nn.Linear(3))),
            (4,),
            "layer 0: residual: the body gives (3,), its input is (4,): add a shortcut that gives (3,)",
        ),
    ],
    ids=lambda x: x.kind() if isinstance(x, nn.Module) else "",
)
def test_the_error_of_an_input_shape_that_does_not_fit(layer: nn.Module, shape: nn.Shape, message: str) -> None:
    with pytest.raises(ShapeError) as found:
        layer.output_shape(shape)
    assert str(found.value) == message
    with pytest.raises(ShapeError) as found_by_init:
        layer.init(shape, np.random.default_rng(0), np.dtype(np.float32))
    assert str(found_by_init.value) == message


def test_an_error_inside_containers_has_the_path_and_the_reason() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Concat(nn.ReLU(), nn.Sequential(nn.Linear(3, in_features=5))))
    with pytest.raises(nn.LayerError) as caught:
        nn.describe(model, (4,))
    assert caught.value.path == ("1", "1", "0")
    assert caught.value.reason == "linear: in_features is 5, expected 4 for the input (4,)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: unchecked.Linear(0), "linear: out_features is 0, expected an integer in [1, 2^31)"),
        (lambda: unchecked.Linear(2.5), "linear: out_features is 2.5, expected an integer in [1, 2^31)"),
        (lambda: unchecked.Linear(True), "linear: out_features is True, expected an integer in [1, 2^31)"),
        (lambda: unchecked.Linear(3, in_features=-1), "linear: in_features is -1, expected an integer in [1, 2^31)"),
        (
            lambda: unchecked.Linear(3, weight_init="kaiming"),
            "linear: weight_init is 'kaiming', expected one of kaiming_uniform, kaiming_normal, xavier_uniform, "
            "xavier_normal, orthogonal, trunc_normal, normal",
        ),
        (lambda: unchecked.Conv2d(-4, kernel_size=3), "conv2d: out_channels is -4, expected an integer in [1, 2^31)"),
        (
            lambda: unchecked.Conv2d(4, kernel_size=0),
            "conv2d: kernel_size is 0, expected an integer in [1, 2^31) or a tuple of 2 of them",
        ),
        (
            lambda: unchecked.Conv2d(4, kernel_size=(3, 3, 3)),
            "conv2d: kernel_size is (3, 3, 3), expected an integer in [1, 2^31) or a tuple of 2 of them",
        ),
        (
            lambda: unchecked.Conv2d(4, kernel_size=3, stride=(1, 0)),
            "conv2d: stride is (1, 0), expected an integer in [1, 2^31) or a tuple of 2 of them",
        ),
        (
            lambda: unchecked.Conv2d(4, kernel_size=3, stride=1, padding=-1),
            "conv2d: padding is -1, expected an integer in [0, 2^31) or a tuple of 2 of them or 'same'",
        ),
        (
            lambda: unchecked.Conv2d(4, kernel_size=3, stride=2, padding="same"),
            "conv2d: padding 'same' needs stride 1, found stride 2",
        ),
        (lambda: unchecked.Conv2d(4, kernel_size=3, groups=3), "conv2d: out_channels 4 is not a multiple of groups 3"),
        (
            lambda: unchecked.ConvTranspose2d(4, kernel_size=3, stride=2, output_padding=2),
            "conv_transpose2d: output_padding is (2, 2), expected less than the stride (2, 2) or the dilation (1, 1)",
        ),
        (lambda: unchecked.MaxPool2d(2, padding=2), "max_pool2d: padding 2 is more than half of kernel_size 2"),
        (
            lambda: unchecked.MaxPool2d(2, stride=0),
            "max_pool2d: stride is 0, expected an integer in [1, 2^31) or a tuple of 2 of them",
        ),
        (
            lambda: unchecked.BatchNorm2d(momentum=2.0),
            "batch_norm2d: momentum is 2.0, expected a number in [0, 1)",
        ),
        (lambda: unchecked.BatchNorm1d(eps=-1.0), "batch_norm1d: eps is -1.0, expected a number in [0, 3.4e38]"),
        (
            lambda: unchecked.LayerNorm(()),
            "layer_norm: normalized_shape is (), expected an integer in",
        ),
        (
            lambda: unchecked.LSTM(8, dropout=0.5),
            "lstm: dropout is 0.5 between layers, and num_layers is 1; write a dropout layer after this one",
        ),
        (lambda: unchecked.RNN(8, nonlinearity="relu6"), "rnn: nonlinearity is 'relu6', expected one of tanh, relu"),
        (lambda: unchecked.GRU(8, num_layers=1001), "gru: num_layers is 1001, expected an integer in [1, 1000]"),
        (lambda: unchecked.GRU(8, output="first"), "gru: output is 'first', expected one of last, all"),
        (lambda: unchecked.GroupNorm(0), "group_norm: num_groups is 0, expected an integer in [1, 2^31)"),
        (
            lambda: unchecked.Embedding(10, embedding_dim=0),
            "embedding: embedding_dim is 0, expected an integer in [1, 2^31)",
        ),
        (lambda: unchecked.Dropout(1.0), "dropout: p is 1.0, expected a number in [0, 1)"),
        (lambda: unchecked.Dropout(float("nan")), "dropout: p is nan, expected a number in [0, 1)"),
        (
            lambda: unchecked.LeakyReLU(float("inf")),
            "leaky_relu: negative_slope is inf, expected a number in [-",
        ),
        (lambda: unchecked.GELU("erf"), "gelu: approximate is 'erf', expected one of none, tanh"),
        (
            lambda: unchecked.Softmax(0),
            "softmax: dim is 0, expected the number of an axis in [-64, 64], other than 0",
        ),
        (
            lambda: unchecked.Reshape((-1, -1)),
            "reshape: shape is (-1, -1), expected a tuple of positive integers, of which one may be -1",
        ),
        (
            lambda: unchecked.Sequential(unchecked.ReLU),
            "sequential: layers holds <class 'adtrain.nn.activation.ReLU'>, expected modules; write ReLU()",
        ),
        (
            lambda: unchecked.Sequential([unchecked.ReLU()]),
            "sequential: layers holds [ReLU()], expected modules; write nn.Sequential(*layers)",
        ),
        (
            lambda: unchecked.Concat((unchecked.ReLU(),)),
            "concat: branches holds (ReLU(),), expected modules; write nn.Concat(*branches)",
        ),
        (lambda: unchecked.Concat(), "concat: branches is empty, expected at least one module"),
        (lambda: unchecked.Add(1), "add: branches holds 1, expected modules"),
        (lambda: unchecked.Residual([unchecked.ReLU()]), "residual: body is [ReLU()], expected a Module"),
    ],
)
def test_the_error_of_an_invalid_option(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(), nn.Sequential(nn.ReLU(), nn.Dropout(0.1))])
def test_a_model_that_differs_in_training_needs_forward(layer: nn.Module) -> None:
    params, _ = layer.init(3)
    with pytest.raises(AdtrainError, match=r"write model\.forward\(params, state, x, nn\.Mode\(training=False\)\)$"):
        layer(params, ad.array(np.ones((2, 3), np.float32)))
    with pytest.raises(AdtrainError, match="is not in the state"):
        nn.BatchNorm1d().forward(params, {}, ad.array([[1.0]]), nn.Mode(training=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": "784"}, "linear: shape is '784', expected the sizes of one sample, as (784,)"),
        ({"shape": (4.0,)}, "linear: shape is (4.0,), expected the sizes of one sample, as (784,)"),
        ({"shape": -1}, "linear: shape is -1, expected the sizes of one sample, as (784,)"),
        ({"shape": 4, "rng": "0"}, "linear: rng is '0', expected a seed or a numpy.random.Generator"),
        ({"shape": 4, "rng": -1}, "linear: rng is -1, expected a seed or a numpy.random.Generator"),
        ({"shape": 4, "dtype": "int64"}, "linear: dtype is int64, expected float32 or float64"),
    ],
)
def test_the_error_of_an_invalid_argument_of_init(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AdtrainError) as caught:
        nn.Linear(3).init(**options)
    assert str(caught.value) == message


def test_dropout_in_training_needs_a_random_state() -> None:
    with pytest.raises(
        AdtrainError, match=r"^dropout: found no rng in training, expected Mode\(training=True, rng=\.\.\.\)$"
    ):
        nn.Dropout().forward({}, {}, ad.array([1.0]), nn.Mode(training=True))
