"""The axes that each primitive states, proved by execution: see `adtrain.core.axes` and `adtrain.gradcheck`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from program_samples import ALL, ON_GPU, arguments, training_program
from random_programs import graphs, program_of
from sweeps import cases_of, check_examples, examples

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda.forms.one_block import ONE_BLOCK
from adtrain.cases import CASES, Case
from adtrain.core.axes import Axes, Items, summed_items
from adtrain.core.errors import ShapeError
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.program import Equation, Program, Variable, fuse
from adtrain.core.staging import stage
from adtrain.core.trace import Call, Hook, hook
from adtrain.core.types import ArrayType
from adtrain.core.views import per_member
from adtrain.gradcheck import AxesCheck
from adtrain.ops.conv import Window
from adtrain.ops.pool import Windows


def check(primitive: Primitive, args: Sequence[np.ndarray], params: Mapping[str, Any]) -> int:
    """Check what a primitive states about such arguments; the number of its labels."""
    found = AxesCheck(primitive, args, params)
    tolerance = 1e-9 if all(x.dtype != np.float32 for x in found.results) else 1e-4
    assert max(found.errors().values(), default=0) <= tolerance, (found.axes, found.errors())
    return len(found.lengths)


class Calls(Hook):
    """Keeps the calls of a block."""

    def __init__(self) -> None:
        self.found: list[Call] = []

    def after(self, call: Call) -> None:
        self.found.append(call)


def calls(case: Case) -> Iterator[Call]:
    """What a case and its derivative run."""
    observer = Calls()
    args = case.sample()
    floats = [i for i, x in enumerate(args) if x.dtype.kind == "f"]

    def f(*given: Any) -> Any:
        values = dict(zip(floats, given, strict=True))
        return case.f(*(values.get(i, x) for i, x in enumerate(args)))

    with hook(observer):
        if case.order:
            y, pullback = ad.vjp(f, *(args[i] for i in floats))
            rng = np.random.default_rng(0)
            pullback(_cotangent(y, rng))
        else:
            case.f(*args)
    return iter(observer.found)


def _cotangent(y: Any, rng: np.random.Generator) -> Any:
    if isinstance(y, tuple):
        return tuple(_cotangent(x, rng) for x in y)
    return ad.array(rng.normal(size=y.shape).astype(y.dtype))


@pytest.mark.parametrize("case", cases_of(CASES))
def test_what_primitives_state_about_their_axes_holds(case: Case) -> None:
    for call in calls(case):
        args = [x.numpy() for x in call.args]
        check(call.primitive, args, call.params)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def positions(most: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(most, size=shape).astype(np.int32)


def bits(*shape: int) -> np.ndarray:
    """Elements of bfloat16."""
    return positions(2**14, *shape).astype(np.uint16)


def of_pooling(groups: int) -> dict[str, Any]:
    """The parameters of a convolution (N, 4, 6, 6) to (N, 4, 4, 4), and of its pooling to (N, 4, 2, 2)."""
    windows = Windows((2, 2), (2, 2), (0, 0))
    window = Window((1, 1), (0, 0), (1, 1), groups)
    return {"window": window, "windows": windows, "shape": (5, 4, 4, 4), "precision": "full"}


WINDOW = Window((2, 1), (1, 0), (1, 1), 1)
X, G, AT = normal(5, 4, 6, 6), normal(5, 4, 2, 2), positions(4, 5, 4, 2, 2)
OTHERS: list[tuple[str, list[np.ndarray], dict[str, Any]]] = [
    ("max_pool2d_pick", [normal(5, 4, 4, 4), AT], {"windows": Windows((2, 2), (2, 2), (0, 0))}),
    ("fusion_barrier", [normal(3, 4), normal(4, 3)], {}),
    ("exchange_done", [normal(3, 4), normal(3, 4)], {}),
    ("subview", [normal(3, 4)], {"start": 2, "shape": (5, 2)}),
    ("concat_view", [normal(3, 4), normal(2, 4)], {}),
    ("to_bfloat16", [normal(3, 4).astype(np.float32)], {}),
    ("from_bfloat16", [bits(3, 4)], {}),
    *(
        (f"{name}_bfloat16", [bits(*shape) for shape in shapes], {"window": WINDOW, "precision": "bfloat16", **size})
        for name, shapes, size in (
            ("conv2d", ((2, 5, 4, 3), (6, 3, 2, 3)), {}),
            ("conv2d_input_grad", ((2, 3, 3, 6), (6, 3, 2, 3)), {"size": (5, 4)}),
            ("conv2d_weight_grad", ((2, 5, 4, 3), (2, 3, 3, 6)), {"size": (3, 2)}),
        )
    ),
    ("weight_tiles", [normal(64, 128).astype(np.float32)], {"permuted": (0,)}),
    ("with_tiles", [normal(64, 128).astype(np.float32), np.zeros((1, 2, 3, 64, 64), np.uint16)], {}),
    ("reshape", [normal(2, 1, 3, 4)], {"shape": (6, 1, 2, 2)}),
    ("reshape", [normal(4, 6)], {"shape": (6, 4)}),
    *(
        (
            "matmul_bfloat16",
            [bits(3, 4), bits(*shape)],
            {"transpose_a": False, "transpose_b": transposed, "precision": "bfloat16"},
        )
        for shape, transposed in (((4, 5), False), ((5, 4), True))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "params"), OTHERS, ids=[name for name, *_ in OTHERS])
def test_what_primitives_of_passes_state_about_their_axes_holds(
    name: str, args: list[np.ndarray], params: dict[str, Any]
) -> None:
    check(PRIMITIVES[name], args, params)


def check_equations(program: Program) -> int:
    """Check the equations of a Program on their values; the number of labels of fused ones."""
    known = {v: np.asarray(x) for v, x in zip(program.inputs, arguments(program), strict=True)}
    known |= {v: x.numpy() for v, x in program.constants.items()}
    count = 0
    for e in program.equations:
        args = [known[v] for v in e.inputs]
        known |= zip(e.outputs, AxesCheck(e.primitive, args, e.params).results, strict=True)
        found = check(e.primitive, args, e.params)
        count += found if "body" in e.params else 0
    return count


@pytest.mark.parametrize("improve", [ALL, ON_GPU], ids=["cpu", "gpu"])
def test_the_axes_of_fused_equations_follow_from_their_bodies(improve: Sequence[Any]) -> None:
    assert check_equations(training_program(improve=improve)) > 20


@examples(3, 50)
def test_the_axes_of_random_fused_equations_follow_from_their_bodies(examples: int) -> None:
    def check(graph: Any) -> None:
        for improve in (ALL, ON_GPU):
            program = program_of(graph)
            for apply in improve:
                program = apply(program)
            check_equations(program)

    check_examples(examples, check, graphs.graphs())


def test_an_equation_of_members_has_the_axes_of_one_member() -> None:
    def member(weight: Any, shared: Any) -> Any:
        return ops.relu(shared @ weight)

    arrays = ad.array(normal(3, 4, 5)), ad.array(normal(2, 4))
    traced = stage(per_member(member, (0, None)), ()).program(*arrays)
    split, *of_member, stacked = traced.equations
    assert (split.axes.follow(0, 0), split.axes.follow(0, 2), stacked.axes.follow(0, 0)) == ([None], [1], [1])
    assert [e.items for e in of_member] == [Items(2, (True, False)), Items(2, (True,))]
    e = fuse(ONE_BLOCK, of_member, stacked.inputs)
    assert (e.members, e.items) == (3, Items(2, (True, False)))


def of_body(f: Any, *args: np.ndarray) -> Axes:
    """The axes of a function as one fused equation."""
    body = stage(f).program(*map(ad.array, args))
    e = fuse(ONE_BLOCK, body.equations, body.outputs)
    check(e.primitive, args, e.params)
    return e.axes


def test_an_axis_that_a_fused_equation_uses_in_two_ways_is_not_related() -> None:
    square = normal(4, 4)
    assert of_body(lambda x: x + ops.exp(x), square).follow(0, 0) == [0]
    assert of_body(lambda x: x + ops.transpose(x), square).follow(0, 0) == [None]
    # the second result depends on all of x, so no label may relate it to y and the first result to x
    axes = of_body(lambda x, y: (x + y, y + ops.sum(x, 0, keepdims=True)), square, normal(4, 4))
    assert axes.follow(1, 0) == [None, None]
    assert axes.follow(1, 1) == [1, 1]


def test_an_axis_over_which_all_results_of_a_fused_equation_are_sums_is_added() -> None:
    x, y = normal(5, 3), normal(5, 4)

    def sums(f: Any) -> Items | None:
        return summed_items(of_body(f, x, y), (x.shape, y.shape))

    def product(x: Any, y: Any) -> Any:
        return ops.matmul(ops.exp(x), y, transpose_a=True)

    assert sums(lambda x, y: (product(x, y), ops.sum(x, 0))) == Items(5, (True, True))
    assert sums(lambda x, y: ops.exp(product(x, y))) is None
    assert sums(lambda x, y: (product(x, y), ops.exp(y))) is None
    assert sums(lambda x, y: product(x[::-1], y)) is None


@pytest.mark.parametrize(
    ("numpy", "axes"),
    [(lambda x: x[::-1], "nc->nc"), (lambda x: x.cumsum(1), "nc->nc"), (lambda x: x - x.mean(0), "nc->nc"),
     (lambda x: x * np.arange(4), "nc->nc"), (lambda x: x.T, "nn->nn"), (lambda x: x.max(0), "nc->c"),
     (lambda x: x.T, "nc->nc")],
)  # fmt: skip
def test_a_wrong_statement_is_found(numpy: Any, axes: str) -> None:
    primitive = Primitive("wrong", lambda x: ArrayType(numpy(np.zeros(x.shape)).shape, x.dtype), numpy, axes=axes)
    del PRIMITIVES["wrong"]
    with pytest.raises((AssertionError, ShapeError)):
        check(primitive, [normal(4, 4)], {})


def test_equations_work_by_the_items_and_rows_that_their_axes_allow() -> None:
    def equation(name: str, *shapes: tuple[int, ...], **params: Any) -> Equation:
        types = [ArrayType(shape, np.dtype(np.float32)) for shape in shapes]
        outputs = PRIMITIVES[name].output_types(types, params)
        given, results = (tuple(Variable(t, "cpu") for t in side) for side in (types, outputs))
        return Equation(PRIMITIVES[name], given, params, results)

    def found(name: str, *shapes: tuple[int, ...], rows: int = 0, **params: Any) -> Items | None:
        e = equation(name, *shapes, **params)
        return e.rows(rows) if rows else e.items

    product: dict[str, Any] = {"transpose_a": False, "transpose_b": False, "precision": "full"}
    assert found("matmul", (3, 4), (4, 5), **product) == Items(3, (True, False))
    assert found("matmul", (2, 3, 4), (2, 4, 5), **product) == Items(2, (True, True))
    assert found("add", (3, 4), ()) == Items(3, (True, False))
    assert found("softmax", (3, 4), axis=1) == Items(3, (True,))
    assert found("softmax", (3, 4), axis=0) is None
    assert found("sum", (3, 4), axes=(0,)) is None
    assert found("transpose", (3, 4, 2), axes=(1, 0, 2)) is None
    assert found("reshape", (3, 4, 2), shape=(3, 8)) == Items(3, (True,))
    assert found("reshape", (3, 4, 2), shape=(12, 2)) is None
    assert found("reshape", (3, 4, 2), shape=(12, 2), rows=12) == Items(12, (True,))
    assert found("add", (3, 4, 2), (3, 4, 2), rows=12) == Items(12, (True, True))
    assert found("add", (3, 4, 2), (3, 4, 2), rows=5) is None
    assert found("flip", (3, 4, 2), axes=(1,)) == Items(3, (True,))
    assert found("flip", (3, 4, 2), axes=(1,), rows=12) is None
    assert found("standardize", (3, 4, 2), axes=(2,), eps=1e-5, rows=12) == Items(12, (True,))
    assert found("standardize", (3, 4, 2), axes=(1, 2), eps=1e-5, rows=12) is None
    assert equation("sum", (3, 4, 2), axes=(1, 2)).rows_along == 3
    assert equation("sum", (3, 4, 1), axes=(1,)).rows_along == 3
    assert equation("softmax", (3, 4, 2), axis=2).rows_along == 12
    assert equation("softmax", (3, 4, 2), axis=1).rows_along is None
    assert equation("sum", (3, 4, 2), axes=(0, 2)).rows_along is None
    assert equation("sum", (3, 4, 2), axes=(0, 1, 2)).rows_along is None
    assert equation("exp", (3, 4, 2)).rows_along is None
    assert equation("reshape", (3, 4, 2), shape=(12, 2)).outer_items == Items(3, (True,))
    assert equation("reshape", (12, 2), shape=(3, 4, 2)).outer_items == Items(3, (True,))
    assert equation("reshape", (12, 2), shape=(8, 3)).outer_items is None
    assert equation("add", (3, 4), ()).outer_items == Items(3, (True, False))
    assert equation("sum", (3, 4), axes=(0, 1)).summed_items == Items(3, (True,))
    assert equation("max", (3, 4), axes=(0, 1)).summed_items is None
    assert equation("matmul", (4, 3), (4, 5), **{**product, "transpose_a": True}).summed_items == Items(4, (True, True))


MISSTATED: list[Any] = [
    "nc->nc",
    "n",
    "n,n->n",
    "*n.c->*n",
    "N->N",
    "n->n,n",
    None,
    lambda x: Axes((("n", "c"),), (("n",),)),
]


@pytest.mark.parametrize("axes", MISSTATED)
def test_a_statement_that_does_not_fit_the_arguments_is_an_error(axes: Any) -> None:
    primitive = Primitive(
        "misstated", lambda x: ArrayType(x.shape, x.dtype), lambda x: x, axes=axes if callable(axes) else lambda x: axes
    )
    del PRIMITIVES["misstated"]
    with pytest.raises(ShapeError, match=r"misstated: axes .* do not fit the shapes \(3,\) -> \(3,\)"):
        primitive.related_axes([ArrayType((3,), np.dtype(np.float32))], {})


def test_every_primitive_of_the_package_states_its_axes() -> None:
    own = [p for p in PRIMITIVES.values() if p.shape.__module__.startswith("adtrain.")]
    assert {"matmul", "fused", "subview", "lstm_grad"} <= {p.name for p in own}
    assert not [p.name for p in own if p.axes is None and p.expression is None]
