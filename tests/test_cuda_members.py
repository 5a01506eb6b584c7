"""The kernels of a Program by member are the same for any number of members: for every primitive, without a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from cuda_samples import LARGE, MEDIUM, TARGETS, Large, Shaped, traced

from adtrain import config, ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.fusions import by_batching_rules, gpu_fusions
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core import tree
from adtrain.core.errors import DeviceError
from adtrain.core.kernel import MAX_GRID, Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, renamed
from adtrain.core.staging import stage
from adtrain.core.views import by_member
from adtrain.passes import SIMPLIFY
from adtrain.passes.fusion import is_loops
from adtrain.sweeps.members import groups_of, members_of
from adtrain.sweeps.session import step_arguments
from adtrain.sweeps.step import DONATED, sweep_step

COUNTS = (1, 3, 31, 32, 33, 64, 1000)
MOVES = {"copy", "copy_tiles", "join", "loops", "pad"}
"""Kernels that compute each element of the result by itself."""
SORTS = {"sort_tiles", "merge_runs"}
"""Kernels that sort positions by index. The number of positions of all members decides how often they are launched."""
SAME_SUMS = ("-DWIDE_", "-DWIDTH", "-DONE_TILE")
"""Macros that change no number: how many a thread loads at once; whether a block computes one tile."""
SAMPLES: Mapping[str, Large] = {
    **MEDIUM,
    **LARGE,
    "conv2d of few pixels": Large(ops.conv2d, [Shaped(2, 3, 6, 5), Shaped(4, 3, 3, 2)]),
    "softmax of many lengths": Large(lambda x: ops.softmax(x) + ops.log_softmax(x), [Shaped(64, 3000)]),
    "layer_norm": Large(lambda x: ops.layer_norm(x, (768,)), [Shaped(64, 128, 768)]),
    "attention of few queries": Large(ops.attention, [Shaped(4, 16, 32)] * 3),
    "causal attention": Large(lambda q, k, v: ops.attention(q, k, v, causal=True), [Shaped(2, 4, 1024, 64)] * 3),
    "self attention": Large(lambda x: ops.self_attention(x, 4, causal=True), [Shaped(8, 256, 768)]),
    "short self attention": Large(lambda x: ops.self_attention(x, 4), [Shaped(4, 16, 192)]),
    "masked attention": Large(
        lambda q, k, v, m: ops.attention(q, k, v, mask=m), [*[Shaped(6, 100, 48)] * 3, Shaped(6, 100, dtype="bool")]
    ),
}


@cache
def equations() -> Mapping[str, Sequence[Equation]]:
    """The equations of the samples and of their gradients that kernels of files compute, by primitive, the largest
    arguments first."""
    found: dict[Any, Equation] = {}
    for program in map(traced, SAMPLES.values()):
        for e in program.equations:
            if not (is_loops(e) or e.is_view or e.has(Trait.COLLECTIVE)) and any(v.type.shape for v in e.inputs):
                found[e.primitive, tuple(v.type for v in e.inputs), str(e.params.get("precision"))] = e
    by_name = defaultdict[str, list[Equation]](list)
    for e in found.values():
        by_name[e.name].append(e)
    return {name: sorted(each, key=lambda e: -sum(v.size for v in e.inputs)) for name, each in by_name.items()}


def of_members(equation: Equation, mapped: Sequence[bool], count: int) -> Program:
    """The Program of ``count`` members that each compute an equation, of arguments of which the ``mapped`` ones are
    their own."""
    own = {*equation.outputs, *(v for v, flag in zip(equation.inputs, mapped, strict=True) if flag)}
    variables = (*equation.inputs, *equation.outputs)
    e = renamed(equation, {v: Variable(v.type, v.device, count if v in own else 0) for v in variables})
    return by_batching_rules(Program(tuple(dict.fromkeys(e.inputs)), {}, (e,), e.outputs), H200)


def launches(target: Target, program: Program) -> list[LaunchPlan]:
    """The launches that add numbers. If members run one after another, those of one member."""
    lowering = Lowering(target)
    different = {(e.primitive, tuple(v.type for v in e.inputs)): e for e in program.equations}
    found = [x for e in different.values() for x in lowering.launches(e) if isinstance(x, LaunchPlan)]
    return [x for x in found if x.name not in MOVES | SORTS]


def kernel(plan: LaunchPlan) -> tuple[Any, ...]:
    """What decides on the numbers that a block adds, and on their order."""
    macros = tuple(option for option in plan.source.options if not option.startswith(SAME_SUMS))
    generated = (plan.source.text, plan.size.blocks[0]) if plan.source.name == f"{plan.name}.cu" else ()
    return plan.name, macros, plan.size.threads, plan.size.shared, generated


def mappings(equation: Equation) -> Iterator[tuple[bool, ...]]:
    """All arguments are the members' own, or one of the first two is."""
    count = len(equation.inputs)
    yield (True,) * count
    if count > 1:
        yield from (tuple(i == own for i in range(count)) for own in (0, 1))


def counts(equation: Equation, mapped: Sequence[bool]) -> Sequence[int]:
    """Few, where members run one after another: so their launches are those of one.

    Indices have at most 32 bits, and the groups of all members are blocks along an axis of the grid.
    """
    of_three = of_members(equation, mapped, 3).equations
    if sum(e.primitive is equation.primitive for e in of_three) == 3:
        return COUNTS[:2]
    longest = {"scatter_add": (1 << 32) - 1}.get(equation.name, MAX_GRID[1])
    window = equation.params.get("window")
    each = equation.params["length"] if equation.name == "scatter_add" else getattr(window, "groups", 0)
    return [n for n in COUNTS if n * each <= longest]


def check(equation: Equation, target: Target) -> None:
    for mapped in mappings(equation):
        numbers_of_members = counts(equation, mapped)
        found = [launches(target, of_members(equation, mapped, count)) for count in numbers_of_members]
        chosen = [[*map(kernel, plans)] for plans in found]
        assert all(each == chosen[0] for each in chosen), (equation.inputs, mapped, chosen)
        if equation.primitive.name == "scatter_add":  # its kernels have the numbers of the sort
            continue
        for plans in zip(*found, strict=True):
            for numbers in zip(*(plan.numbers for plan in plans), strict=True):  # of members together, or the same
                more = zip(numbers[1:], numbers_of_members[1:], strict=True)
                steps = {(x - numbers[0]) / (count - 1) for x, count in more}
                assert len(steps) == 1, (equation.inputs, mapped, plans[0].name, numbers)


BY_PRIMITIVE = pytest.mark.parametrize("name", sorted(equations()))
BY_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda target: "sm_{}{}".format(*target.capability))


@BY_PRIMITIVE
def test_the_kernel_does_not_depend_on_the_number_of_members(name: str) -> None:
    """Plain pytest takes the two equations with the largest arguments and the one with the smallest."""
    *others, last = equations()[name]
    for equation in (*others[:2], last):
        check(equation, H200._replace(by_member=True))


@pytest.mark.exhaustive
@BY_PRIMITIVE
def test_no_kernel_depends_on_the_number_of_members(name: str) -> None:
    """The same on the oldest GPU, for every second equation."""
    for equation in equations()[name][::2]:
        check(equation, TARGETS[0]._replace(by_member=True))


@pytest.mark.parametrize("target", TARGETS[::2], ids=lambda target: "sm_{}{}".format(*target.capability))
def test_every_gpu_has_a_kernel_for_every_primitive(target: Target) -> None:
    lowering = Lowering(target)
    for each in equations().values():
        for equation in each:
            assert lowering.launches(equation), equation


def test_a_scatter_of_too_many_members_is_refused() -> None:
    equation = max(equations()["scatter_add"], key=lambda e: e.params["length"])
    with pytest.raises(DeviceError, match="no kernel for the GPU"):
        launches(H200._replace(by_member=True), of_members(equation, (True, True), 1000))


def test_the_samples_have_kernels_that_are_chosen_by_size() -> None:
    """Alone, an equation has another kernel among many rows."""
    assert len(equations()) > 20
    attention = equations()["attention"][0]
    few, many = (of_members(attention, (True,) * 3, count) for count in (1, 64))
    assert [*map(kernel, launches(H200, few))] != [*map(kernel, launches(H200, many))]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            "mlp-small",
            ["model.layers=[{linear: 40}, relu, {dropout: 0.1}, {linear: 10}]", "data.batch_size=32"],
            marks=pytest.mark.exhaustive,
        ),
        ("mlp-small", ["model.layers=[{linear: 128}, relu, {linear: 10}]", "data.batch_size=64"]),
        pytest.param(
            "mlp-small",
            ["model.layers=[{linear: 512}, layer_norm, relu, {linear: 256}, relu, {linear: 10}]"],
            marks=pytest.mark.exhaustive,
        ),
        ("lenet5", []),
    ],
    ids=["dropout", "on_chip", "wide", "convolutions"],
)
def test_the_launches_of_a_step_do_not_depend_on_the_number_of_members(name: str, settings: list[str]) -> None:
    cfg = config.load(name, [*settings, "sweep={training.seed: [0, 1]}"])
    (group,) = groups_of(cfg, members_of(cfg))
    target = H200._replace(by_member=True)
    step = stage(sweep_step(group.experiment), (by_member, *SIMPLIFY, *gpu_fusions(target)), donate=DONATED)
    found = []
    for count in COUNTS:
        arguments = tree.map(lambda x: Shaped(*x.shape, dtype=x.dtype), step_arguments(group, count))
        program = step.program(*arguments)
        assert program.members == count
        found.append([*map(kernel, launches(target, program))])
    assert all(each == found[0] for each in found)
