"""vmap: equal to a loop over the members for every operation, in any nesting with derivatives and Programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from sweeps import cases_of

import adtrain as ad
from adtrain import nn, ops
from adtrain.cases import CASES, Case
from adtrain.core.trace import Call, Hook, hook

MEMBERS = 3


def outputs(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def stacked(members: Sequence[Sequence[Any]], axis: int = 0) -> list[ad.Array]:
    """The arguments of all members, with the members along ``axis`` of each."""
    return [ad.array(np.stack([x.numpy() for x in column], axis)) for column in zip(*members, strict=True)]


def assert_loop(found: Any, each: Sequence[Any], axis: int = 0) -> None:
    """``found`` has the results of ``each`` member along ``axis``."""
    for x, column in zip(outputs(found), zip(*map(outputs, each), strict=True), strict=True):
        expected = np.stack([y.numpy() for y in column], axis)
        assert x.dtype == expected.dtype
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", cases_of(WITH_INPUTS := [c for c in CASES if c.inputs]))
def test_mapping_an_operation_equals_a_loop(case: Case) -> None:
    members = [case.sample(number=i) for i in range(MEMBERS)]
    each = [case.f(*args) for args in members]
    everything = stacked(members)
    assert_loop(ad.vmap(case.f)(*everything), each)
    assert_loop(ad.vmap(case.f, -1, -1)(*stacked(members, -1)), each, -1)
    for i in range(len(case.inputs) if len(case.inputs) > 1 else 0):
        axes = tuple(None if k == i else 0 for k in range(len(case.inputs)))
        shared = [members[0][k] if k == i else x for k, x in enumerate(everything)]
        alone = [case.f(*(members[0][k] if k == i else x for k, x in enumerate(args))) for args in members]
        assert_loop(ad.vmap(case.f, axes)(*shared), alone)
    # the first argument differs along the outer axis only, the others along the inner axis only
    inner = (None,) + (0,) * (len(case.inputs) - 1)
    outer = (0,) + (None,) * (len(case.inputs) - 1)
    grid = [ad.vmap(lambda *rest, x=args[0]: case.f(x, *rest), axis_size=MEMBERS)(*everything[1:]) for args in members]
    assert_loop(ad.vmap(ad.vmap(case.f, inner, axis_size=MEMBERS), outer)(*everything), grid)


DIFFERENTIABLE = [c for c in WITH_INPUTS if c.order > 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", cases_of(DIFFERENTIABLE))
def test_derivatives_of_two_orders_equal_a_loop_inside_and_outside(case: Case) -> None:
    members = [case.sample(number=i) for i in range(MEMBERS)]
    everything = stacked(members)
    floats = tuple(i for i, x in enumerate(everything) if x.dtype.kind == "f")
    weight = ad.array(np.random.default_rng(3).normal(size=outputs(case.f(*members[0]))[0].shape))

    def loss(*args: Any) -> Any:
        return (ops.sin(outputs(case.f(*args))[0]) * weight).sum()

    def slope(grads: Any) -> Any:
        return sum((ops.sin(g) * g).sum() for g in grads)

    gradient = ad.grad(loss, floats)
    second = ad.grad(lambda *args: slope(gradient(*args)), floats)
    once, twice = ([f(*args) for args in members] for f in (gradient, second))
    assert_loop(ad.vmap(gradient)(*everything), once)
    assert_loop(ad.grad(lambda *args: ad.vmap(loss)(*args).sum(), floats)(*everything), once)
    assert_loop(ad.vmap(second)(*everything), twice)
    assert_loop(ad.grad(lambda *args: slope(ad.vmap(gradient)(*args)), floats)(*everything), twice)


def test_a_shared_argument_gets_the_sum_of_the_gradients() -> None:
    for case in DIFFERENTIABLE:
        members = [case.sample(number=i) for i in range(MEMBERS)]
        if members[0][0].dtype.kind != "f" or len(case.inputs) < 2:
            continue
        shared, rest = members[0][0], stacked(members)[1:]

        def loss(*args: Any, f: Callable[..., Any] = case.f) -> Any:
            return ops.sin(outputs(f(*args))[0]).sum()

        mapped = ad.vmap(loss, (None,) + (0,) * len(rest))
        found = ad.grad(lambda x, mapped=mapped, rest=rest: mapped(x, *rest).sum())(shared)
        expected = sum(ad.grad(loss)(shared, *args[1:]).numpy() for args in members)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-11, err_msg=case.op)


@pytest.mark.parametrize("op", [ops.add, ops.sub, ops.mul, ops.div, ops.maximum, ops.hypot, ops.power])
def test_a_shared_number_has_the_derivatives_of_a_loop_in_each_mode(op: Callable[..., Any]) -> None:
    xs, number = np.array([0.3, 0.8, 1.4]), np.array(0.7)
    mapped = lambda s: ad.vmap(lambda x: op(x, s) + 2.0 * op(s, x))(xs)  # noqa: E731
    each = lambda s: ops.stack([op(x, s) + 2.0 * op(s, x) for x in xs])  # noqa: E731
    for derivative in (
        lambda f: ad.jet(f, (number,), [(number,), None])[1],
        lambda f: [ad.jacfwd(f)(number), ad.jacobian(f)(number)],
        lambda f: [ad.grad(lambda s: f(s).sum())(number), ad.hessian(lambda s: f(s).sum())(number)],
        lambda f: [ad.grad(lambda s: ad.jvp(f, (s,), (s,))[1].sum())(number)],
    ):
        for found, expected in zip(derivative(mapped), derivative(each), strict=True):
            np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-12, atol=1e-12, strict=True)


SMALL = st.integers(1, 3)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_products_of_any_form_equal_a_loop(data: st.DataObject) -> None:
    m, k, n, batch = (data.draw(SMALL) for _ in range(4))
    flags = data.draw(st.booleans()), data.draw(st.booleans())
    lead = data.draw(st.sampled_from([(), (batch,)]))
    shapes = (*lead, *((k, m) if flags[0] else (m, k))), (*lead, *((n, k) if flags[1] else (k, n)))
    check(lambda a, b: ops.matmul(a, b, *flags), shapes, data)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_convolutions_and_their_gradients_equal_a_loop(data: st.DataObject) -> None:
    images, groups, c, o = (data.draw(SMALL) for _ in range(4))
    options = {"stride": data.draw(SMALL), "padding": data.draw(st.integers(0, 2)), "groups": groups}
    shapes = (images, c * groups, 4, 3), (o * groups, c, data.draw(SMALL), data.draw(SMALL))

    def f(x: Any, w: Any) -> Any:
        out, pullback = ad.vjp(lambda x, w: ops.conv2d(x, w, **options), x, w)
        return out, *pullback(ops.sin(out))

    check(f, shapes, data)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_gathers_and_scatters_equal_a_loop(data: st.DataObject) -> None:
    shape = data.draw(npst.array_shapes(min_dims=1, max_dims=3, max_side=3))
    places = data.draw(npst.array_shapes(min_dims=0, max_dims=2, max_side=3, min_side=0))
    axis = data.draw(st.integers(0, len(shape) - 1))

    def f(x: Any, i: Any) -> Any:
        i = ops.floor(i * shape[axis] / 4.0).astype("int32") % shape[axis]
        out, pullback = ad.vjp(lambda x: ops.take(x, i, axis), x)
        return out, *pullback(ops.sin(out))

    check(f, (shape, places), data)


def check(f: Callable[..., Any], shapes: Sequence[tuple[int, ...]], data: st.DataObject) -> None:
    """vmap of ``f`` equals a loop, for any axes of the arguments and of the result."""
    mapped = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    axes = tuple(
        data.draw(st.integers(-len(s) - 1, len(s))) if m else None for s, m in zip(shapes, mapped, strict=True)
    )
    count, rng = data.draw(SMALL), np.random.default_rng(data.draw(st.integers(0, 9)))
    members = [[rng.normal(size=s) for s in shapes] for _ in range(count)]
    for args in members:
        args[:] = [x if m else first for x, m, first in zip(args, mapped, members[0], strict=True)]
    args = [members[0][i] if axis is None else np.stack([m[i] for m in members], axis) for i, axis in enumerate(axes)]
    out_axis = data.draw(st.integers(-1, 0))
    assert_loop(ad.vmap(f, axes, out_axis)(*args), [f(*map(ad.array, m)) for m in members], out_axis)


class Counting(Hook):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def after(self, call: Call) -> None:
        self.calls[call.primitive.name] += 1


def count(run: Callable[[], Any]) -> Counter[str]:
    with hook(counting := Counting()):
        run()
    return counting.calls


def test_the_number_of_operations_does_not_depend_on_the_number_of_members() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, kernel_size=3),
        nn.BatchNorm2d(),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(5),
    )
    params, state = model.init((1, 8, 8))
    rng = np.random.default_rng(0)

    def loss(params: Any, x: Any, labels: Any, key: Any) -> Any:
        out, _ = model.forward(params, state, x, nn.Mode(training=True, rng=key))
        return ops.cross_entropy(out, labels)

    def run(members: int) -> Counter[str]:
        each = ad.tree.map(lambda p: ops.stack([p] * members), params)
        keys = np.stack([ops.rng_state(i).numpy() for i in range(members)])
        images, labels = rng.normal(size=(members, 2, 1, 8, 8)).astype("f4"), rng.integers(0, 5, (members, 2))
        return count(lambda: ad.vmap(ad.grad(loss))(each, images, labels, keys))

    assert run(2) == run(7)


def test_jacobian_and_hessian_run_one_backward_pass_whatever_the_size() -> None:
    def run(n: int) -> list[Counter[str]]:
        x = np.linspace(0.1, 1, n)
        return [
            count(lambda: ad.jacobian(lambda x: ops.tanh(ops.matmul(np.ones((n, n)), x)))(x)),
            count(lambda: ad.hessian(lambda x: (ops.tanh(x) ** 3).sum())(x)),
        ]

    assert run(2) == run(9)


def ten_by_both() -> Any:
    """x y, with a derivative that is not its own: 10 by x and 10 by y."""
    return ad.custom_vjp(lambda x, y: (x * y, ()), lambda residuals, ct: (10.0 * ct, 10.0 * ct))


def test_a_custom_derivative_serves_inside_and_outside() -> None:
    f, x, y = ten_by_both(), np.array([1.0, 2.0, 3.0]), np.array(5.0)
    by_y = ad.vmap(ad.grad(f, (0, 1)), (0, None))(x, y)
    assert [g.numpy().tolist() for g in by_y] == [[10] * 3, [10] * 3]
    outside = ad.grad(lambda x, y: ad.vmap(f, (0, None))(x, y).sum(), (0, 1))(x, y)
    assert [g.numpy().tolist() for g in outside] == [[10] * 3, 30]
    both = ad.vmap(ad.grad(lambda x, y: ad.vmap(f, (0, None))(x, y).sum(), (0, 1)), (None, 0))(x, np.ones(2))
    assert [g.numpy().tolist() for g in both] == [[[10] * 3] * 2, [30, 30]]


def test_a_custom_derivative_of_mapped_values_is_differentiated_again() -> None:
    cube = ad.custom_vjp(lambda x: (x**3, x), lambda x, ct: (3.0 * x**2 * ct,))
    x = np.array([1.0, 2.0])
    slopes = ad.grad(lambda x: ad.vmap(ad.grad(cube))(x).sum())(x)
    outside = ad.grad(lambda x: ad.grad(lambda x: ad.vmap(cube)(x).sum())(x).sum())(x)
    assert slopes.numpy().tolist() == outside.numpy().tolist() == [6, 12]


def test_a_mapped_value_that_is_no_argument_of_a_custom_derivative_is_refused() -> None:
    with pytest.raises(ad.TraceError, match="uses a mapped value that is not among its arguments; pass it in"):
        ad.vmap(lambda w: ad.custom_vjp(lambda x: (x * w, x), lambda x, ct: (ct,))(ops.ones(())))(np.ones(3))


def row_sums(name: str, **options: Any) -> Any:
    return ad.custom_op(
        name,
        shape=lambda x, y: (ad.ArrayType(x.shape[:-1], x.dtype), ad.ArrayType(x.shape, x.dtype)),
        numpy=lambda x, y: ((x * y).sum(-1), x * y),
        vjp=lambda ct, out, x, y: (ops.expand_dims(ct, -1) * y, ops.expand_dims(ct, -1) * x),
        residuals=1,
        **options,
    )


def test_an_operation_of_the_user_runs_member_by_member_or_by_its_rule() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 2, 3)), rng.normal(size=(2, 3))
    looped = row_sums("test_vmap_loop")
    ruled = row_sums("test_vmap_rule", vmap=lambda op, mapped, x, y: op(x, ops.broadcast_to(y, x.shape)))
    for op, calls in ((looped, 4), (ruled, 1)):

        def loss(x: Any, y: Any, op: Any = op) -> Any:
            return (op(x, y) ** 2).sum()

        mapped = ad.vmap(ad.value_and_grad(loss, (0, 1)), (0, None))
        value, grads = mapped(x, y)
        assert_loop(value, [loss(ad.array(each), ad.array(y)) for each in x])
        assert_loop(grads, [ad.grad(loss, (0, 1))(each, y) for each in x])
        with hook(counting := Counting()):
            ad.vmap(op, (0, None))(x, y)
        assert counting.calls[op.primitive.name] == calls
    wrong = row_sums("test_vmap_wrong", vmap=lambda op, mapped, x, y: op(x[0], y))
    with pytest.raises(
        ad.ShapeError, match=r"test_vmap_wrong: its batching rule returned .*\[2\].* expected .*\[4, 2\]"
    ):
        ad.vmap(wrong, (0, None))(x, y)


def test_mapped_functions_and_programs_nest() -> None:
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(4, 3)), rng.normal(size=(5, 3))

    def loss(w: Any, x: Any, scale: Any) -> Any:
        return (ops.tanh(ops.matmul(w, x)) ** 2).sum() * scale

    each = [ad.grad(loss)(ad.array(w), ad.array(row), 0.5) for row in x]
    axes = (None, 0, None)
    assert_loop(ad.jit(ad.vmap(ad.grad(loss), axes))(w, x, 0.5), each)
    assert_loop(ad.vmap(ad.jit(ad.grad(loss)), axes)(w, x, 0.5), each)
    assert_loop(ad.vmap(ad.grad(ad.jit(loss)), axes)(w, x, 0.5), each)
    tangents = [ad.jvp(lambda w, row=row: loss(w, row, 0.5), (w,), (w,))[1] for row in x]
    assert_loop(ad.vmap(lambda w, x: ad.jvp(lambda w: loss(w, x, 0.5), (w,), (w,))[1], (None, 0))(w, x), tangents)
    products = [ad.hvp(lambda w, row=row: loss(w, row, 0.5), (w,), (w,)) for row in x]
    assert_loop(ad.vmap(lambda w, x: ad.hvp(lambda w: loss(w, x, 0.5), (w,), (w,)), (None, 0))(w, x), products)
    hessians = [ad.hessian(loss)(w, row, 0.5) for row in x]
    assert_loop(ad.jit(ad.vmap(ad.hessian(loss), axes))(w, x, 0.5), hessians)


def test_axes_are_trees_that_begin_as_the_arguments_and_results_do() -> None:
    params = {"w": np.arange(6.0).reshape(2, 3), "b": (np.arange(3.0), None, ops.ones(()))}

    def f(p: Any, x: Any, *, scale: float) -> Any:
        return {"out": p["w"] * x * scale + p["b"][0], "shared": p["b"][2]}, x

    mapped = ad.vmap(f, ({"b": (0, 0, None), "w": 1}, None), ({"shared": None, "out": -1}, 0))
    found, xs = mapped(params, 2.0 * ops.ones(2, "float64"), scale=3.0)
    assert found["out"].numpy().tolist() == [[0, 7, 14], [18, 25, 32]]
    assert found["shared"].item() == 1
    assert xs.shape == (3, 2)  # a result that is the same for all members, with an axis, is repeated
    assert ad.vmap(lambda: ops.zeros((2,)), axis_size=4)().shape == (4, 2)


def test_no_members_give_empty_results() -> None:
    def loss(x: Any, w: Any) -> Any:
        return ops.max_pool2d(ops.conv2d(x, w), 2).sum()

    value, grads = ad.vmap(ad.value_and_grad(loss, (0, 1)))(np.ones((0, 2, 1, 6, 6)), np.ones((0, 3, 1, 3, 3)))
    assert (value.shape, *(g.shape for g in grads)) == ((0,), (0, 2, 1, 6, 6), (0, 3, 1, 3, 3))


def test_a_member_has_the_random_numbers_that_it_has_alone() -> None:
    states = np.stack([ops.rng_state(i, step=5).numpy() for i in (3, 1, 2)])
    found = ad.vmap(lambda state: ops.random_normal(state, (3, 7), stream=4))(states).numpy()
    assert all(
        np.array_equal(x, ops.random_normal(s, (3, 7), stream=4).numpy()) for x, s in zip(found, states, strict=True)
    )
    masks = ad.vmap(lambda x: ops.dropout(x, 0.5, states[0]))(np.ones((2, 50))).numpy()
    assert np.array_equal(masks[0], masks[1])  # one state: one mask


@pytest.mark.parametrize("indices", [[[4, 0], [0, 1]], [[0, 1], [-1, 0]]])
def test_an_index_out_of_range_for_its_member_never_reads_another_member(indices: Any) -> None:
    for rule in (ops.embedding, lambda i, x: ad.vjp(lambda x: ops.embedding(i, x), x)[1](ops.ones((2, 2), "float64"))):
        with pytest.raises(ad.ShapeError, match="is out of range"):
            ad.vmap(rule)(np.array(indices), np.ones((2, 4, 2)))


X = np.ones((3, 4))


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (
            lambda: ad.vmap(lambda x, p: x)(X, {"w": np.ones(2)}),
            ad.ShapeError,
            r"vmap: found 3 members \(axis 0 of argument 0\) and 2 \(axis 0 of argument 1, w\), expected equally many",
        ),
        (lambda: ad.vmap(lambda x: x, axis_size=5)(X), ad.ShapeError, r"found 5 members \(axis_size\) and 3 \(axis 0"),
        (lambda: ad.vmap(cast(Any, X)), ad.OptionError, "vmap: found .*, expected a function"),
        (lambda: ad.vmap(lambda x: x, axis_size=-1), ad.OptionError, "axis_size is -1, expected an integer"),
        (lambda: ad.vmap(lambda x: x, None)(X), ad.OptionError, "in_axes maps no array; .* or give axis_size"),
        (lambda: ad.vmap(lambda x: x, (0, 0))(X), ad.OptionError, "found 2 in_axes for 1 arguments"),
        (
            lambda: ad.vmap(lambda x: x, ({"a": 0},))({"b": X}),
            ad.OptionError,
            r"in_axes\[0\] is {'a': 0}, expected .* as argument 0 does: {'b': \*}",
        ),
        (lambda: ad.vmap(lambda x: x, 2)(X), ad.ShapeError, r"in_axes has axis 2 for argument 0, .* shape \(3, 4\)"),
        (lambda: ad.vmap(lambda x: x, "a")(X), ad.OptionError, "in_axes has 'a' for argument 0, expected an integer"),
        (
            lambda: ad.vmap(lambda x, y: x)(X, 2.0),
            ad.DTypeError,
            "argument 1 is a number, which has no axis; make it an",
        ),
        (
            lambda: ad.vmap(lambda x: (x, {"y": x}), out_axes=(0, None))(X),
            ad.ShapeError,
            "result, 1.y differs between members, but out_axes has None for it; give it an axis",
        ),
        (lambda: ad.vmap(lambda x: x, out_axes=2)(X), ad.ShapeError, r"out_axes has axis 2 for result, .* \(3, 4\)"),
        (lambda: ad.vmap(lambda x: x, out_axes=(0, 0))(X), ad.OptionError, r"out_axes is \(0, 0\), .* the result does"),
        (
            lambda: ad.vmap(lambda x: 1.0)(X),
            ad.DTypeError,
            "the function returned a value of type float, expected adtrain arrays",
        ),
        (lambda: ad.vmap(lambda x: ops.matmul(x, np.ones(3)))(X), ad.ShapeError, r"inner lengths 4 and 3"),
        (lambda: ad.vmap(lambda x: x if x.sum() > 0 else -x)(X), ad.TraceError, "mapped or jitted function use"),
        (lambda: ad.vmap(lambda x: x[x > 0])(X), ad.TraceError, "a boolean mask selects is not known"),
    ],
)
def test_errors_name_the_argument_and_say_what_to_do(run: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        run()


def test_a_mapped_value_that_leaves_its_function_is_refused() -> None:
    kept: list[Any] = []

    def keeping(x: Any) -> Any:
        kept.append(x)
        return x

    ad.vmap(keeping)(X)
    with pytest.raises(ad.TraceError, match="is a traced value from a function that has already returned"):
        kept[0] + 1
