"""What works with the arrays of NumPy, PyTorch, TensorFlow or JAX and not here says what to write instead."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.core import operators


def assign(x: Any) -> None:
    x[0] = 1


def add_to_element(x: Any) -> None:
    x[0] += 1


def branch(x: Any) -> Any:
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (assign, ad.DTypeError, "elements of an adtrain array do not change; write x = ops.where(mask, y, x)"),
        (add_to_element, ad.DTypeError, "elements of an adtrain array do not change; write x = ops.where(mask, y, x)"),
        (ad.jit(assign), ad.DTypeError, "elements of an adtrain array do not change; write x = ops.where(mask, y, x)"),
        (
            lambda x: np.add(x, 1, out=x),
            ad.DTypeError,
            "np.add: found an adtrain array as output, which does not change",
        ),
        (
            lambda x: x.backward(),
            AttributeError,
            "no attribute 'backward'; functions are differentiated, not arrays: w",
        ),
        (lambda x: x.requires_grad, AttributeError, "functions are differentiated, not arrays: write ad.grad(f)(x)"),
        (lambda x: x.detach(), AttributeError, "no attribute 'detach'; write ops.stop_gradient(x)"),
        (lambda x: x.cuda(), AttributeError, "no attribute 'cuda'; write x.to('gpu')"),
        (lambda x: x.view(1, 2), AttributeError, "no attribute 'view'; write x.reshape(shape)"),
        (lambda x: x.exp(), AttributeError, "no attribute 'exp'; write ops.exp(x, ...)"),
        (lambda x: x.add_(1), AttributeError, "no attribute 'add_'; arrays do not change: write x = x + y"),
        (lambda x: x.assign_add(1), AttributeError, "no attribute 'assign_add'; arrays do not change: write x = x + y"),
        (lambda x: x.at[0].set(1), AttributeError, "'at'; arrays do not change: write x = ops.where(mask, y, x)"),
        (ad.jit(lambda x: x.detach()), AttributeError, "no attribute 'detach'; write ops.stop_gradient(x)"),
        (ad.grad(lambda x: x.view(-1)), AttributeError, "no attribute 'view'; write x.reshape(shape)"),
        (lambda x: len(x.sum()), ad.ShapeError, "len: a 0-d array has no length; its element is x.item()"),
        (lambda x: 1 if x > 0 else 0, ad.ShapeError, "bool: found shape (2,), expected one element; write x.any() or"),
        (ad.jit(branch), ad.TraceError, "use ops.where instead of a branch, and ops instead of NumPy and float()"),
        (ad.grad(lambda x: x[0] if x[0] else x[1]), ad.TraceError, "and ops.where instead of if"),
        (ad.jit(lambda x: x.numpy()), ad.TraceError, "reads the elements of a traced value float32[2], which has none"),
        (lambda x: x.to("cuda"), ad.DeviceError, "device 'cuda' is not available; this version runs on: cpu, gpu"),
    ],
)
def test_code_in_the_style_of_another_library_gets_a_hint_of_what_to_write(call: Any, error: Any, message: str) -> None:
    x = ad.array([1.0, 2.0])
    with pytest.raises(error, match=re.escape(message)) as caught:
        call(x)
    assert "\n" not in str(caught.value)
    assert x.numpy().tolist() == [1, 2]


def test_advice_names_operations_and_attributes_that_exist() -> None:
    x = ad.array([1.0])
    for name, text in operators._ADVICE.items():
        assert not hasattr(x, name)
        assert all(operation in ops.__all__ for operation in re.findall(r"ops\.(\w+)", text))
        assert all(hasattr(x, attribute) for attribute in re.findall(r"(?<!\w)x\.(\w+)", text))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "parameters",
            "Linear has no attribute 'parameters'; its arrays are a tree: write params, state = model.init(shape)",
        ),
        ("eval", "Linear has no attribute 'eval'; the mode is an argument: model.forward(params, state, x, mode)"),
        ("weight", "Linear has no attribute 'weight'"),
        ("step", "Adam has no attribute 'step'; write params, state = optimizer.update(params, grads, state)"),
    ],
)
def test_attributes_of_pytorchs_layers_and_optimizers_get_a_hint_of_what_to_write(name: str, message: str) -> None:
    described = ad.optim.Adam(0.1) if name == "step" else ad.nn.Linear(3)
    with pytest.raises(AttributeError, match=f"^{re.escape(message)}$"):
        getattr(described, name)
    assert not any(hasattr(ad.nn.Linear(3), attribute) for attribute in operators.OF_PYTORCH_MODULES)
    assert not any(hasattr(ad.optim.Adam(0.1), attribute) for attribute in operators.OF_PYTORCH_OPTIMIZERS)


def test_an_unknown_attribute_is_an_ordinary_error() -> None:
    x = ad.array([1.0])
    assert getattr(x, "unknown", None) is None
    with pytest.raises(AttributeError, match=r"^an adtrain array has no attribute 'unknown'$"):
        _ = x.unknown


def test_augmented_assignment_makes_a_new_array() -> None:
    before = ad.array([1.0, 2.0])
    x: ad.Value = before
    x += 1
    x *= 2
    assert (before.numpy().tolist(), x.numpy().tolist()) == ([1, 2], [4, 6])
