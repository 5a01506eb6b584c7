"""Optimizers equal PyTorch's over 20 steps in float64, are pure functions, and minimise in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops, optim
from adtrain.core import tree
from adtrain.core.errors import OptionError

OPTIMIZERS: dict[str, tuple[optim.Optimizer, str, dict[str, Any]]] = {
    "sgd": (optim.SGD(0.1), "SGD", {}),
    "sgd decay": (optim.SGD(0.1, weight_decay=0.05), "SGD", {"weight_decay": 0.05}),
    "sgd momentum": (optim.SGD(0.1, momentum=0.9), "SGD", {"momentum": 0.9}),
    "sgd nesterov": (
        optim.SGD(0.1, momentum=0.8, weight_decay=0.05, nesterov=True),
        "SGD",
        {"momentum": 0.8, "weight_decay": 0.05, "nesterov": True},
    ),
    "adam": (optim.Adam(0.1), "Adam", {}),
    "adam options": (
        optim.Adam(0.1, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.05),
        "Adam",
        {"betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.05},
    ),
    "adamw": (optim.AdamW(0.1), "AdamW", {}),
    "adamw options": (
        optim.AdamW(0.1, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.2),
        "AdamW",
        {"betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.2},
    ),
    "adam amsgrad": (optim.Adam(0.1, amsgrad=True), "Adam", {"amsgrad": True}),
    "adamw amsgrad": (optim.AdamW(0.1, eps=1e-3, amsgrad=True), "AdamW", {"eps": 1e-3, "amsgrad": True}),
    "rmsprop": (optim.RMSprop(0.01), "RMSprop", {}),
    "rmsprop options": (
        optim.RMSprop(0.01, alpha=0.8, eps=1e-3, weight_decay=0.05, momentum=0.7), "RMSprop",
        {"alpha": 0.8, "eps": 1e-3, "weight_decay": 0.05, "momentum": 0.7},
    ),
}  # fmt: skip
LION = optim.Lion(0.02, betas=(0.8, 0.9), weight_decay=0.3)
each_optimizer = pytest.mark.parametrize(
    "optimizer", [*(row[0] for row in OPTIMIZERS.values()), LION], ids=[*OPTIMIZERS, "lion"]
)


def start(dtype: type = np.float64) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"a": {"weight": rng.normal(size=(3, 4)).astype(dtype)}, "b": rng.normal(size=5).astype(dtype)}


def as_arrays(params: Any) -> Any:
    return tree.map(ad.array, params)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.needs_torch
def test_twenty_steps_equal_pytorch(name: str) -> None:
    import torch

    ours, class_name, options = OPTIMIZERS[name]
    theirs = [torch.nn.Parameter(torch.tensor(x)) for x in tree.leaves(start())]
    their_optimizer = getattr(torch.optim, class_name)(theirs, lr=ours.lr, **options)
    params = as_arrays(start())
    state = ours.init(params)
    rng = np.random.default_rng(1)
    for i in range(20):
        lr = ours.lr * (1 + i % 3)
        grads = tree.map(lambda p: rng.normal(size=p.shape), params)
        for parameter, grad in zip(theirs, tree.leaves(grads), strict=True):
            parameter.grad = torch.tensor(grad)
        their_optimizer.param_groups[0]["lr"] = lr
        their_optimizer.step()
        params, state = ours.update(params, as_arrays(grads), state, lr)
        for mine, parameter in zip(tree.leaves(params), theirs, strict=True):
            np.testing.assert_allclose(mine, parameter.detach().numpy(), rtol=1e-12, atol=1e-12)
    assert state["step"].item() == 20


def test_twenty_steps_of_lion_are_those_of_its_paper() -> None:
    params = as_arrays(start())
    state = LION.init(params)
    theirs = [(x.copy(), np.zeros_like(x)) for x in tree.leaves(start())]
    rng = np.random.default_rng(1)
    for i in range(20):
        lr, grads = LION.lr * (1 + i % 3), tree.map(lambda p: rng.normal(size=p.shape), params)
        for (p, m), g in zip(theirs, tree.leaves(grads), strict=True):
            p -= lr * (np.sign(0.8 * m + 0.2 * g) + 0.3 * p)
            m[...] = 0.9 * m + 0.1 * g
        params, state = LION.update(params, as_arrays(grads), state, lr)
    for mine, average, (p, m) in zip(tree.leaves(params), tree.leaves(state["exp_avg"]), theirs, strict=True):
        np.testing.assert_allclose(mine, p, rtol=1e-12)
        np.testing.assert_allclose(average, m, rtol=1e-12)


@each_optimizer
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_update_is_pure_and_keeps_shapes_dtypes_and_structure(optimizer: optim.Optimizer, dtype: type) -> None:
    params = as_arrays(start(dtype))
    state = optimizer.init(params)
    before = [x.numpy().copy() for x in tree.leaves((params, state))]
    lr = ad.array(0.1, "float64")
    new = optimizer.update(params, params, state, lr)
    again = optimizer.update(params, params, state, lr)
    assert tree.paths(new) == tree.paths((params, state))
    for old, copy, first, second in zip(
        tree.leaves((params, state)), before, tree.leaves(new), tree.leaves(again), strict=True
    ):
        np.testing.assert_array_equal(old, copy)
        np.testing.assert_array_equal(first, second)
        assert (first.shape, first.dtype) == (old.shape, old.dtype)
    assert state["step"].dtype == np.int64


@each_optimizer
def test_a_quadratic_loss_falls_in_float32(optimizer: optim.Optimizer) -> None:
    params = as_arrays(start(np.float32))

    def loss(params: Any) -> ad.Value:
        return ops.square(params["a"]["weight"] - 1.0).sum() + ops.square(params["b"]).sum()

    value_and_grad = ad.value_and_grad(loss)
    state = optimizer.init(params)
    first, _ = value_and_grad(params)
    for _ in range(60):
        _, grads = value_and_grad(params)
        params, state = optimizer.update(params, grads, state)
    last, _ = value_and_grad(params)
    assert last.item() < 0.7 * first.item()


def test_adams_first_step_in_float32_has_the_size_of_the_learning_rate() -> None:
    params = {"w": ad.array(np.zeros(3, np.float32))}
    optimizer = optim.Adam(0.125, eps=0.0)
    grads = {"w": ad.array(np.array([1e-12, -3.0, 1e6], np.float32))}
    params, _ = optimizer.update(params, grads, optimizer.init(params))
    np.testing.assert_allclose(params["w"], [-0.125, 0.125, -0.125], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.SGD(float("nan")), "sgd: lr is nan, expected a number in (0, 3.4e38]"),
        (lambda: optim.SGD(-0.1), "sgd: lr is -0.1, expected a number in (0, 3.4e38]"),
        (lambda: optim.SGD(0.1, momentum=1.0), "sgd: momentum is 1.0, expected a number in [0, 1)"),
        (lambda: optim.SGD(0.1, nesterov=True), "sgd: nesterov needs a momentum above 0"),
        (lambda: optim.Adam(betas=(0.9, 1.0)), "adam: betas is (0.9, 1.0), expected a tuple of 2 numbers in [0, 1)"),
        (lambda: optim.AdamW(weight_decay=-1.0), "adamw: weight_decay is -1.0, expected a number in [0, 3.4e38]"),
        (lambda: optim.RMSprop(eps=float("inf")), "rmsprop: eps is inf, expected a number in [0, 3.4e38]"),
    ],
)
def test_the_error_of_an_invalid_option(make: Callable[[], optim.Optimizer], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert str(caught.value) == message


@each_optimizer
def test_the_learning_rate_is_the_optimizers_own_a_number_or_an_array(optimizer: optim.Optimizer) -> None:
    params, grads = as_arrays(start(np.float32)), as_arrays(start(np.float32))
    state = optimizer.init(params)
    own = optimizer.update(params, grads, state)
    given: list[Any] = [optimizer.lr, np.float64(optimizer.lr), ad.array(optimizer.lr, "float64")]
    for other in [optimizer.update(params, grads, state, lr) for lr in given]:
        for a, b in zip(tree.leaves(own), tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("lr", [float("nan"), -1, "0.1", True])
def test_a_learning_rate_that_is_no_rate_is_refused(lr: Any) -> None:
    params = as_arrays(start())
    with pytest.raises(OptionError, match=f"^sgd: lr is {lr!r}, expected a number in \\[0, 3\\.4e38\\]$"):
        optim.SGD(0.1).update(params, params, {}, lr)


@each_optimizer
def test_a_state_that_is_not_from_init_is_refused(optimizer: optim.Optimizer) -> None:
    params = as_arrays(start())
    with pytest.raises(OptionError, match="step is not in the state, expected the state from init or the last update"):
        optimizer.update(params, params, {})


def test_gradients_of_another_structure_than_the_parameters_are_refused() -> None:
    params = as_arrays(start())
    state = optim.Adam().init(params)
    for given in ((params, state, params), (state, params, params)):
        with pytest.raises(ad.ShapeError, match=r"^adam: .*, expected the same: write update\(params, grads, state\)$"):
            optim.Adam().update(*given)


def test_optimizers_are_registered_under_their_kind() -> None:
    assert {name: cls.kind() for name, cls in optim.OPTIMIZERS.items()} == {
        name: name for name in ("sgd", "adam", "adamw", "rmsprop", "lion", "muon", "lbfgs", "sequence")
    }
