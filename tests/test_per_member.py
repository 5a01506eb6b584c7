"""Programs by member against `vmap`, as passes and batching rules leave them."""

from __future__ import annotations

from typing import Any

import numpy as np

import adtrain as ad
from adtrain import ops
from adtrain.core.program import HORIZONTAL, fuse
from adtrain.core.staging import evaluate, stage
from adtrain.core.views import by_member, per_member
from adtrain.passes import ALL_BY_MEMBER
from adtrain.passes.plan_memory import overwrites
from adtrain.passes.stack_members import stack_all_members, stack_members
from adtrain.training.program_cache import decoded, encoded

AXES = (0, None, 1, None)


def member(weight: Any, shared: Any, by_column: Any, number: Any) -> Any:
    def loss(weight: Any) -> Any:
        return ops.sum((shared @ weight) * by_column) * number

    value, grad = ad.value_and_grad(loss)(weight)
    return {"loss": value, "same": number + np.float32(1), "weight": weight - 0.1 * grad}


def arguments() -> list[Any]:
    rng = np.random.default_rng(0)
    return [ad.array(rng.normal(size=shape).astype("float32")) for shape in ((3, 4, 5), (2, 4), (5, 3), ())]


def assert_near(found: Any) -> None:
    expected = ad.vmap(member, AXES)(*arguments())
    for x, name in zip(found, ("loss", "same", "weight"), strict=True):
        np.testing.assert_allclose(x.numpy(), expected[name].numpy(), rtol=1e-6, atol=1e-6)


def test_a_program_by_member_has_the_equations_of_one_member_and_computes_all() -> None:
    program = stage(per_member(member, AXES), (by_member,)).program(*arguments())
    assert program.members == 3
    weight, *_ = program.inputs
    assert (weight.type.shape, weight.stored.shape) == ((4, 5), (3, 4, 5))
    products = [e for e in program.equations if e.primitive.name == "matmul"]
    assert {v.type.shape for e in products for v in e.outputs} == {(2, 5), (4, 5)}
    assert_near(evaluate(program, arguments()))


def test_batching_rules_compute_a_program_by_member_in_whole_or_in_part() -> None:
    program = stage(per_member(member, AXES), (by_member,)).program(*arguments())
    whole = stack_all_members(program)
    assert not whole.mapped
    assert_near(evaluate(whole, arguments()))
    part = stack_members(program, stays=lambda e: e.primitive.name != "matmul")
    assert {e.members for e in part.equations if e.primitive.name == "matmul"} == {0}
    assert part.members == 3
    assert_near(evaluate(part, arguments()))


def test_a_staged_function_of_members_equals_vmap_on_the_cpu() -> None:
    found = stage(per_member(member, AXES), ALL_BY_MEMBER)(*arguments())
    assert_near([found[name] for name in ("loss", "same", "weight")])


def test_a_cached_program_by_member_has_the_same_members() -> None:
    program = stage(per_member(member, AXES), (by_member,)).program(*arguments())
    kept = decoded(encoded(program))
    assert str(kept) == str(program)
    assert [v.members for v in kept.inputs] == [3, 0, 0, 0]


def test_a_value_that_all_members_share_is_not_overwritten_where_members_read_it() -> None:
    def step(weights: Any, counter: Any) -> Any:
        return per_member(lambda w: w * 2.0)(weights), counter + 1

    program = stage(step, (by_member,)).program(ops.ones((3, 4)), ad.array(np.int64(0)))
    doubled, counted = program.equations[-2:]
    together = fuse(HORIZONTAL, [doubled, counted], program.outputs)
    (weights, counter), (new_weights, new_counter) = program.inputs, program.outputs
    assert overwrites(together, weights, new_weights)
    assert overwrites(counted, counter, new_counter)
    assert not overwrites(together, counter, new_counter)
