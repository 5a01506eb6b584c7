"""rnn, lstm and gru: derivatives against PyTorch, C against the NumPy reference, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compiled_parity import check_all
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_tokens import assert_plan_holds
from program_samples import ALL

import adtrain as ad
from adtrain import ops
from adtrain.backends.cpu.codegen import workspace
from adtrain.core.errors import DTypeError, OptionError, ShapeError
from adtrain.core.program import Equation
from adtrain.core.staging import stage
from adtrain.passes.plan_memory import MemoryPlan, plan_memory

GATES = {"rnn": 1, "lstm": 4, "gru": 3}
STATES = {"rnn": 1, "lstm": 2, "gru": 1}


def arguments(op: str, batch: int, length: int, features: int, hidden: int, dtype: str = "float64") -> list[Any]:
    """x, weights, biases and initial states; hidden states keep their size over many steps."""
    rng, rows = np.random.default_rng(hidden), GATES[op] * hidden
    shapes = [(batch, length, features), (rows, features), (rows, hidden), (rows,), (rows,)]
    shapes += [(batch, hidden)] * STATES[op]
    return [rng.uniform(-1, 1, shape).astype(dtype) / np.sqrt(shape[-1]) for shape in shapes]


def outputs_and_gradients(op: str, options: dict[str, Any]) -> Any:
    """A function of the arguments: all outputs, and the gradients of a sum in which each element has its own weight."""

    def f(*args: Any) -> tuple[Any, ...]:
        outputs, pullback = ad.vjp(lambda *xs: getattr(ops, op)(*xs, **options), *args)
        cts = tuple(ops.cos(ops.cumsum(ops.reshape(ops.ones_like(y), (-1,)), 0)).reshape(y.shape) for y in outputs)
        return (*outputs, *pullback(cts))

    return f


@pytest.mark.exhaustive
@pytest.mark.compiled
@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        ("float32", "quick_compiler"),
        ("float64", "quick_compiler"),
        pytest.param("float32", "optimised", marks=pytest.mark.exhaustive),
    ],
)
def test_c_equals_the_reference_at_sizes_around_its_blocks(
    op: str, dtype: str, code: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(code)
    sizes = [(101, 3, 2, 33), (1, 2, 3, 520), (5, 2, 1, 64)]  # blocks of rows, slices of the product, whole panels
    functions = {
        f"{size}, reverse {reverse}": (
            outputs_and_gradients(op, {"reverse": reverse}),
            [ad.array(x) for x in arguments(op, *size, dtype)],
        )
        for size, reverse in zip(sizes, (False, True, True), strict=True)
    }
    tolerance = 2e-5 if dtype == "float32" else 1e-12
    check_all(functions, tolerance)


def gradients(op: str, options: dict[str, Any]) -> Any:
    """A function of the arguments: the gradients of a sum of the last hidden state."""

    def f(*args: Any) -> tuple[Any, ...]:
        loss = ad.grad(lambda *xs: ops.sin(getattr(ops, op)(*xs, **options)[1]).sum(), tuple(range(len(args))))
        return tuple(loss(*args))

    return f


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("op", "options"),
    [("rnn", {}), ("rnn", {"nonlinearity": "relu"}), ("lstm", {}), ("gru", {}), ("lstm", {"reverse": True})],
)
def test_results_in_the_memory_of_arguments_equal_the_reference(
    op: str, options: dict[str, Any], quick_compiler: None
) -> None:
    args = [ad.array(x) for x in arguments(op, 5, 4, 3, 18)]
    program = stage(gradients(op, options), ALL).program(*args)
    plan = plan_memory(program, workspace)
    assert_plan_holds(program, plan, workspace)
    shared = [e for e in program.equations if op in e.name and _overlap(e, plan)]
    assert len(shared) == (1 if op == "gru" else 2)
    check_all({op: (gradients(op, options), args)}, 1e-12)


def _overlap(equation: Equation, plan: MemoryPlan) -> bool:
    """Whether a result has the memory of an argument."""
    return not {plan.places[v] for v in equation.inputs}.isdisjoint(plan.places[v] for v in equation.outputs)


@pytest.mark.needs_torch
@pytest.mark.parametrize("op", GATES)
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)),
    relu=st.booleans(),
)
def test_values_gradients_and_second_derivatives_equal_pytorch(
    op: str, sizes: tuple[int, int, int, int], relu: bool
) -> None:
    torch = pytest.importorskip("torch")
    args = arguments(op, *sizes)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    options = {"nonlinearity": "relu" if relu else "tanh"} if op == "rnn" else {}
    module = getattr(torch.nn, op.upper())(sizes[2], sizes[3], batch_first=True, **options).double()
    tensors = [torch.tensor(x, requires_grad=True) for x in args]
    states = tuple(x[None] for x in tensors[5:])
    given_states = states if op == "lstm" else states[0]
    parameters = dict(zip(names, tensors[1:5], strict=True))
    steps, last = torch.func.functional_call(module, parameters, (tensors[0], given_states))
    expected = [steps, *(x[0] for x in (last if op == "lstm" else (last,)))]
    weights = [np.cos(np.arange(1.0, y.numel() + 1)).reshape(y.shape) for y in expected]

    def loss(*xs: Any) -> Any:
        return sum((ops.sin(y) * w).sum() for y, w in zip(getattr(ops, op)(*xs, **options), weights, strict=True))

    for y, z in zip(getattr(ops, op)(*map(ad.array, args), **options), expected, strict=True):
        np.testing.assert_allclose(y, z.detach(), rtol=1e-10, atol=1e-12)
    theirs = sum((torch.sin(y) * torch.tensor(w)).sum() for y, w in zip(expected, weights, strict=True))
    every = tuple(range(len(args)))
    first = torch.autograd.grad(theirs, tensors, create_graph=True)
    squares = torch.autograd.grad(sum((g * g).sum() for g in first), tensors)
    ours = ad.grad(loss, every)

    def squared(*xs: Any) -> Any:
        return sum((g * g).sum() for g in ours(*xs))

    for mine, other in zip(ours(*map(ad.array, args)), first, strict=True):
        np.testing.assert_allclose(mine, other.detach(), rtol=1e-9, atol=1e-11)
    for mine, other in zip(ad.grad(squared, every)(*map(ad.array, args)), squares, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("op", GATES)
def test_reverse_equals_the_reversed_sequence(op: str) -> None:
    x, *others = arguments(op, 2, 5, 3, 4)
    steps, *last = getattr(ops, op)(x, *others, reverse=True)
    expected, *last_expected = getattr(ops, op)(x[:, ::-1].copy(), *others)
    np.testing.assert_array_equal(steps.numpy()[:, ::-1], expected)
    for a, b in zip(last, last_expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: (2, 0, 3)}, "lstm: found shape (2, 0, 3), expected (batch, length, features) of length at least 1"),
        ({0: (2, 3)}, "lstm: found shape (2, 3), expected (batch, length, features) of length at least 1"),
        ({2: (12, 4)}, "lstm: weight_hh has shape (12, 4), expected (4 hidden, hidden)"),
        ({2: (0, 0)}, "lstm: weight_hh has shape (0, 0), expected (4 hidden, hidden)"),
        ({1: (16, 2)}, "lstm: weight_ih has shape (16, 2), expected (16, 3)"),
        ({4: (4,)}, "lstm: bias_hh has shape (4,), expected (16,)"),
        ({6: (3, 4)}, "lstm: c0 has shape (3, 4), expected (2, 4)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[int, tuple[int, ...]], message: str) -> None:
    args = arguments("lstm", 2, 3, 3, 4)
    for position, shape in change.items():
        args[position] = np.zeros(shape)
    with pytest.raises(ShapeError) as error:
        ops.lstm(*args)
    assert str(error.value) == message


def test_arguments_of_two_types_are_refused() -> None:
    args = arguments("gru", 2, 3, 3, 4)
    args[2] = args[2].astype(np.float32)
    with pytest.raises(DTypeError, match=r"gru: found float64 and float32, expected one type; use astype"):
        ops.gru(*args)


def test_an_unknown_nonlinearity_is_refused() -> None:
    nonlinearity: Any = "sine"
    with pytest.raises(OptionError, match=r"rnn: nonlinearity is 'sine', expected one of tanh, relu"):
        ops.rnn(*arguments("rnn", 1, 1, 1, 1), nonlinearity=nonlinearity)
