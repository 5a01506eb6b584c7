"""Arguments of layers and optimizers: PyTorch's spelling is refused in one line that says how to write it."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import nn, ops, optim
from adtrain.core.errors import OptionError

unchecked: Any = nn
optimizers: Any = optim
CHECKED = [*nn.LAYERS.values(), nn.Residual, *optim.OPTIMIZERS.values()]


@pytest.mark.parametrize("kind", CHECKED, ids=lambda kind: kind.__name__)
def test_options_after_the_first_are_keyword_only(kind: type) -> None:
    parameters = inspect.signature(kind).parameters.values()
    assert [p.name for p in parameters] == [field.name for field in fields(kind)]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters)[1:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: unchecked.Linear(4, 8),
            "Linear takes out_features only: in_features is inferred from the input. Write nn.Linear(8)",
        ),
        (
            lambda: unchecked.Linear(4, 8, False),
            "Linear takes out_features only: in_features is inferred from the input. Write nn.Linear(8, bias=False)",
        ),
        (
            lambda: unchecked.Linear(4, out_features=8),
            "Linear takes out_features only: in_features is inferred from the input. Write nn.Linear(8)",
        ),
        (
            lambda: unchecked.Linear(8, False),
            "Linear takes out_features only: other options have names. Write nn.Linear(8, bias=False)",
        ),
        (
            lambda: unchecked.Conv2d(1, 32, 3),
            "Conv2d takes out_channels only: in_channels is inferred from the input. "
            "Write nn.Conv2d(32, kernel_size=3)",
        ),
        (
            lambda: unchecked.Conv2d(1, 32, kernel_size=(3, 5), padding=1),
            "Conv2d takes out_channels only: in_channels is inferred from the input. "
            "Write nn.Conv2d(32, kernel_size=(3, 5), padding=1)",
        ),
        (
            lambda: unchecked.LSTM(28, 128),
            "LSTM takes hidden_size only: input_size is inferred from the input. Write nn.LSTM(128)",
        ),
        (
            lambda: unchecked.ConvTranspose2d(8, 4, 2, 2),
            "ConvTranspose2d takes out_channels only: in_channels is inferred from the input. "
            "Write nn.ConvTranspose2d(4, kernel_size=2, stride=2)",
        ),
        (
            lambda: unchecked.Conv2d(32, 3),
            "Conv2d takes out_channels only: other options have names. Write nn.Conv2d(32, kernel_size=3)",
        ),
        (lambda: unchecked.Conv2d(32), "Conv2d needs kernel_size. Write nn.Conv2d(32, kernel_size=KERNEL_SIZE)"),
        (lambda: unchecked.Linear(), "Linear needs out_features. Write nn.Linear(OUT_FEATURES)"),
        (
            lambda: unchecked.MaxPool2d(2, 2),
            "MaxPool2d takes kernel_size only: other options have names. Write nn.MaxPool2d(2, stride=2)",
        ),
        (
            lambda: unchecked.Embedding(10, 3),
            "Embedding takes num_embeddings only: other options have names. Write nn.Embedding(10, embedding_dim=3)",
        ),
        (
            lambda: unchecked.BatchNorm2d(8, 1e-3),
            "BatchNorm2d takes num_features only: other options have names. Write nn.BatchNorm2d(8, eps=0.001)",
        ),
        (lambda: unchecked.ReLU(True), "ReLU takes no arguments"),
        (lambda: unchecked.ReLU(inplace=True), "ReLU has no option inplace (known: none)"),
        (
            lambda: unchecked.Linear(8, bais=False),
            "Linear has no option bais; did you mean bias? (known: out_features, bias, in_features, weight_init, "
            "init_gain, tied)",
        ),
        (lambda: unchecked.Linear(8, bias=8), "linear: bias is 8, expected True or False"),
        (lambda: unchecked.GELU("erf"), "gelu: approximate is 'erf', expected one of none, tanh"),
        (lambda: unchecked.Reshape([2, 3]), "reshape: shape is [2, 3], expected "),
        (lambda: unchecked.Residual(nn.ReLU(), shortcut=1), "residual: shortcut is 1, expected a Module or None"),
        (
            lambda: optimizers.SGD({"w": np.ones(2)}, lr=0.1),
            "SGD takes lr only: the parameters are arguments of init and update. Write optim.SGD(0.1)",
        ),
        (
            lambda: optimizers.SGD(0.1, 0.9),
            "SGD takes lr only: other options have names. Write optim.SGD(0.1, momentum=0.9)",
        ),
        (lambda: optimizers.SGD({"w": np.ones(200)}), "sgd: lr is a dict, expected a number in (0, 3.4e38]"),
        (lambda: optimizers.SGD(0.1, nesterov=1), "sgd: nesterov is 1, expected True or False"),
        (lambda: optimizers.Adam(betas=0.9), "adam: betas is 0.9, expected "),
    ],
)
def test_wrong_arguments_are_refused_with_how_to_write_it(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Scale(nn.Module):
    """A layer outside the package."""

    factor: float
    _: KW_ONLY
    names: list[str] | None = None

    def output_shape(self, shape: nn.Shape) -> nn.Shape:
        return shape

    def forward(self, params: nn.Params, state: nn.State, x: ad.Value, mode: nn.Mode) -> tuple[ad.Value, nn.State]:
        return ops.mul(x, self.factor), state


def test_a_layer_of_ones_own_has_the_same_checks() -> None:
    make: Any = Scale
    assert Scale(2.0, names=["a"])({}, ad.array([1.0, 2.0])).numpy().tolist() == [2, 4]
    with pytest.raises(OptionError, match=r"^scale: factor is 'x', expected a number in \[-3\.4e38, 3\.4e38\]$"):
        make("x")
    with pytest.raises(OptionError, match=r"other options have names\. Write Scale\(2, names=\['a'\]\)$"):
        make(2, ["a"])


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(3), nn.ReLU()),
        nn.Conv2d(8, kernel_size=3),
        nn.Add(nn.Tanh(), nn.Tanh()),
        optim.Adam(0.1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_copies_and_texts_of_a_module_equal_it(module: Any) -> None:
    assert pickle.loads(pickle.dumps(module)) == module
    assert eval(repr(module), {**vars(nn), **vars(optim)}) == module
    if not isinstance(module, nn.Container):
        assert replace(module) == module


def test_names_of_layers_in_a_config_are_words_of_the_class_name() -> None:
    names = {"relu", "leaky_relu", "elu", "gelu", "silu", "log_softmax", "conv_transpose2d", "adaptive_avg_pool2d"}
    assert names < set(nn.LAYERS)


def test_init_has_a_seed_and_float32_by_default_and_a_model_without_state_is_called_with_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(4), nn.ReLU(), nn.Linear(2))
    params, state = model.init(3)
    same, _ = model.init((3,), np.random.default_rng(0), np.dtype(np.float32))
    assert state == {}
    assert params["0"]["weight"].numpy().tolist() == same["0"]["weight"].numpy().tolist()
    assert model.init(3, 1, "float64")[0]["0"]["weight"].dtype == np.float64
    x = ad.array(np.ones((5, 3), np.float32))
    expected, _ = model.forward(params, state, x, nn.Mode(training=False))
    assert model(params, x).numpy().tolist() == expected.numpy().tolist()
