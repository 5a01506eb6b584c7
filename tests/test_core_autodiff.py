"""Differentiation: values against PyTorch, operations counted, memory freed, and errors."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.core.trace import Call, Hook, hook


class Counting(Hook):
    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def after(self, call: Call) -> None:
        self.calls[call.phase, call.primitive.name] += 1


def mlp_loss(params: Any, x: Any, targets: Any) -> Any:
    for weight, bias in params[:-1]:
        x = ops.relu(ops.matmul(x, weight, transpose_b=True) + bias)
    weight, bias = params[-1]
    return ops.cross_entropy(ops.matmul(x, weight, transpose_b=True) + bias, targets)


def mlp(widths: tuple[int, ...] = (12, 8, 7, 5), batch: int = 6) -> Any:
    rng = np.random.default_rng(0)
    params = [(rng.normal(size=(o, i)), rng.normal(size=o)) for i, o in pairwise(widths)]
    return params, rng.normal(size=(batch, widths[0])), rng.integers(0, widths[-1], batch)


def test_a_step_of_three_layers_takes_five_backward_matmuls() -> None:
    counting = Counting()
    with hook(counting):
        ad.value_and_grad(mlp_loss)(*mlp())
    assert counting.calls["forward", "matmul"] == 3
    assert counting.calls["backward", "matmul"] == 5  # none for the first layer's input


@pytest.mark.needs_torch
def test_the_gradient_of_a_network_agrees_with_pytorch() -> None:
    import torch

    params, x, targets = mlp()
    value, grads = ad.value_and_grad(mlp_loss)(params, x, targets)
    leaves = [(torch.tensor(w, requires_grad=True), torch.tensor(b, requires_grad=True)) for w, b in params]
    h = torch.tensor(x)
    for i, (w, b) in enumerate(leaves):
        h = torch.nn.functional.linear(h, w, b)
        h = torch.relu(h) if i < 2 else h
    loss = torch.nn.functional.cross_entropy(h, torch.tensor(targets))
    loss.backward()
    assert value.item() == pytest.approx(loss.item(), rel=1e-13)
    for pair, expected in zip(grads, leaves, strict=True):
        for g, t in zip(pair, expected, strict=True):
            np.testing.assert_allclose(g.numpy(), t.grad.numpy(), rtol=1e-11, atol=1e-14)


def test_the_backward_pass_frees_residuals_as_it_goes() -> None:
    megabyte, depth = 1 << 20, 20
    held: list[int] = []

    class Memory(Hook):
        def after(self, call: Call) -> None:
            if call.phase == "backward" and call.primitive.name == "mul":
                held.append(tracemalloc.get_traced_memory()[0] // megabyte)

    def chain(x: Any) -> Any:
        for _ in range(depth):
            x = ops.exp(x)
        return ops.sum(x)

    tracemalloc.start()
    try:
        with hook(Memory()):
            ad.grad(chain)(np.zeros(megabyte // 8))
    finally:
        tracemalloc.stop()
    assert held[0] >= depth - 1
    assert held[-1] <= 5
    assert all(late <= early for early, late in pairwise(held))


def test_ten_thousand_chained_operations_neither_recurse_nor_leak() -> None:
    def chain(x: Any) -> Any:
        for _ in range(10_000):
            x = ops.sin(x)
        return x

    gc.collect()
    gc.disable()  # reference counts alone must free everything
    try:
        assert np.isfinite(ad.grad(chain)(1.0).item())
        _, pullback = ad.vjp(chain, 1.0)  # without a backward pass
        del pullback
        assert gc.collect() < 100
    finally:
        gc.enable()


def test_a_shared_subexpression_is_visited_once() -> None:
    counting = Counting()

    def doubling(x: Any) -> Any:
        for _ in range(30):  # 2**30 paths
            x = x + x
        return x

    with hook(counting):
        assert ad.grad(doubling)(1.0).item() == 2.0**30
    assert counting.calls["backward", "add"] == 30


def test_gradients_nest_to_any_order() -> None:
    third = ad.grad(ad.grad(ad.grad(lambda x: x**5)))
    assert third(np.float64(2.0).reshape(())).item() == 60 * 2.0**2


def test_levels_are_not_confused() -> None:
    # d/dx [x * d/dy (x + y)] = 1; confusing the levels gives 2
    x = np.array(3.0)
    assert ad.grad(lambda x: x * ad.grad(lambda y: x + y)(np.array(1.0)))(x).item() == 1.0


@pytest.mark.needs_torch
def test_jvp_hvp_jacobian_and_hessian_agree_with_pytorch() -> None:
    import torch

    rng = np.random.default_rng(1)
    x, v = rng.normal(size=5), rng.normal(size=5)
    a = rng.normal(size=(3, 5))

    def f(x: Any) -> Any:
        return ops.tanh(ops.matmul(a, x)) * ops.sin(x[:3])

    def g(x: Any) -> Any:
        return torch.tanh(torch.tensor(a) @ x) * torch.sin(x[:3])

    tx, tv = torch.tensor(x), torch.tensor(v)
    out, tangent = ad.jvp(f, (x,), (v,))
    expected_out, expected = torch.autograd.functional.jvp(g, tx, tv)
    np.testing.assert_allclose(out.numpy(), expected_out.numpy(), rtol=1e-12)
    np.testing.assert_allclose(tangent.numpy(), expected.numpy(), rtol=1e-12)
    jacobian = torch.autograd.functional.jacobian(g, tx).numpy()
    np.testing.assert_allclose(ad.jacobian(f)(x).numpy(), jacobian, rtol=1e-12)
    hessian = torch.autograd.functional.hessian(lambda x: g(x).sum(), tx).numpy()
    np.testing.assert_allclose(ad.hessian(lambda x: f(x).sum())(x).numpy(), hessian, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(ad.hvp(lambda x: f(x).sum(), (x,), (v,)).numpy(), hessian @ v, rtol=1e-10)


def test_transformations_accept_trees_and_several_arguments() -> None:
    params = {"w": np.array([2.0, 3.0]), "b": (np.array(1.0), None)}

    def f(p: Any, x: Any) -> Any:
        return (p["w"] * x).sum() * p["b"][0]

    grads = ad.grad(f, argnums=(0, 1))(params, np.array([5.0, 7.0]))
    assert grads[0]["w"].numpy().tolist() == [5.0, 7.0]
    assert grads[0]["b"][0].item() == 31.0
    assert grads[0]["b"][1] is None
    assert grads[1].numpy().tolist() == [2.0, 3.0]
    product = ad.hvp(lambda x, y: (x * y).sum(), (np.ones(2), np.ones(2)), (np.ones(2), np.zeros(2)))
    assert [p.numpy().tolist() for p in product] == [[0.0, 0.0], [1.0, 1.0]]
    hessian = ad.hessian(lambda p: (p["a"] * p["b"]).sum())({"a": np.ones(2), "b": np.ones(1)})
    assert hessian["a"]["b"].numpy().tolist() == [[1.0], [1.0]]


def test_a_pullback_may_be_called_again_and_takes_trees() -> None:
    out, pullback = ad.vjp(lambda x: {"square": x * x, "index": ops.argmax(x)}, np.array([1.0, 3.0]))
    ct = {"square": np.array([1.0, 0.0]), "index": None}
    with pytest.raises(ad.ShapeError, match="found a cotangent of structure"):
        pullback(ct)
    for _ in range(2):
        (grad,) = pullback({"square": np.array([1.0, 10.0]), "index": 0})
        assert grad.numpy().tolist() == [2.0, 60.0]
    assert out["index"].item() == 1


def test_an_unused_argument_has_gradient_zero() -> None:
    assert ad.grad(lambda x: ops.sum(ops.zeros((2,), np.float64)))(np.ones(3)).numpy().tolist() == [0, 0, 0]
    assert ad.jacobian(lambda x: ops.stop_gradient(x))(np.ones(2)).numpy().tolist() == [[0, 0], [0, 0]]


def test_auxiliary_results_are_not_tracers() -> None:
    (value, aux), _ = ad.value_and_grad(lambda x: (x.sum(), {"double": x * 2}), has_aux=True)(np.ones(2))
    assert value.item() == 2
    assert aux["double"].numpy().tolist() == [2, 2]


@pytest.mark.parametrize(
    ("f", "argument", "error", "message"),
    [
        (lambda x: x, np.ones(3), ad.ShapeError, r"grad: the function returned shape \(3,\), expected one scalar"),
        (lambda x: x.sum(), np.arange(3), ad.DTypeError, "grad: argument 0 is int64, expected float32 or float64"),
        (lambda x: ops.argmax(x), np.ones(3), ad.DTypeError, "the function's value is int64, expected float32"),
        (lambda x: None, np.ones(3), ad.ShapeError, "grad: the function returned no array, expected one scalar"),
        (
            lambda x: 1.0,
            np.ones(3),
            ad.DTypeError,
            "the function returned a value of type float, expected adtrain arrays",
        ),
        (lambda x: x.sum() * float(x[0]), np.ones(3), ad.TraceError, "a traced value .* has no elements yet"),
        (lambda x: ops.exp(np.asarray(x)), np.ones(3), ad.TraceError, "use adtrain.ops instead of NumPy"),
    ],
)
def test_invalid_uses_raise_errors(f: Any, argument: Any, error: Any, message: Any) -> None:
    with pytest.raises(error, match=message):
        ad.grad(f)(argument)


def test_an_error_names_the_function_that_was_called() -> None:
    x, f = np.ones(3), lambda x: (x * x).sum()
    for name, call in {"jvp": ad.jvp, "hvp": ad.hvp}.items():
        with pytest.raises(ad.ShapeError, match=rf"^{name}: found a tangent float64\[2\], expected float64\[3\]"):
            call(f, (x,), (np.ones(2),))
    with pytest.raises(ad.DTypeError, match=r"^jvp: argument 0 is int64"):
        ad.jvp(f, (np.arange(3),), (x,))
    for name, make in {"grad": ad.grad, "jacobian": ad.jacobian, "vjp": lambda f: ad.vjp(f, x)}.items():
        with pytest.raises(ad.OptionError, match=f"^{name}: found 3.0, expected a function"):
            make(3.0)


def test_tangents_and_primals_may_be_traced_numbers() -> None:
    for f in (lambda t: ad.jvp(lambda x: x**3, (t,), (t,))[1], lambda t: ad.hvp(lambda x: x**3, (t,), (t,))):
        assert ad.jit(f)(2.0).item() == f(2.0).item() == 24.0


def test_branches_may_depend_on_data() -> None:
    slope = ad.grad(lambda x: x * 2 if x > 0 else x * 3)  # a comparison has no derivative, so its result is an array
    assert [slope(np.array(v)).item() for v in (1.0, -1.0)] == [2, 3]


def test_a_leaked_tracer_is_refused() -> None:
    leaked: list[Any] = []

    def keeping(x: Any) -> Any:
        leaked.append(x * 2)
        return x.sum()

    ad.grad(keeping)(np.ones(2))
    with pytest.raises(ad.TraceError, match="is a traced value from a function that has already returned"):
        leaked[0] + 1


def test_an_error_inside_the_function_leaves_the_levels_closed() -> None:
    with pytest.raises(ZeroDivisionError):
        ad.grad(lambda x: 1 / 0)(1.0)
    assert ad.grad(ad.grad(lambda x: x**3))(1.0).item() == 6.0


def test_threads_differentiate_independently() -> None:
    # the inner gradient runs in another thread, on a tracer of this one
    def f(x: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return x * pool.submit(ad.grad(lambda y: x * y * y), np.array(1.5)).result()

    assert ad.grad(f)(np.array(2.0)).item() == 2 * 2.0 * 2 * 1.5


def test_grad_takes_its_options_and_refuses_wrong_ones() -> None:
    value, aux = ad.grad(lambda x, scale: ((x * scale).sum(), "note"), has_aux=True)(np.ones(2), scale=3.0)
    assert (value.numpy().tolist(), aux) == ([3, 3], "note")
    assert ad.grad(lambda x, y: (x * y).sum(), -1)(np.ones(2), np.full(2, 5.0)).numpy().tolist() == [1, 1]
    with pytest.raises(ad.ShapeError, match=r"argnums \(0, 0\) names an argument twice"):
        ad.grad(lambda x: x.sum(), (0, 0))(np.ones(2))
    with pytest.raises(ad.ShapeError, match="found 1 in argnums, expected an integer in"):
        ad.jacobian(lambda x: x, 1)(np.ones(2))
    with pytest.raises(ad.DTypeError, match=r"did not return a pair \(value, aux\)"):
        ad.value_and_grad(lambda x: x.sum(), has_aux=True)(np.ones(2))
    with pytest.raises(ad.ShapeError, match="hvp: found no arrays"):
        ad.hvp(lambda p: ops.zeros(()), ({},), ({},))
