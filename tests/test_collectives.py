"""Exchanges between ranks as operations: values, derivatives, vmap, and Programs that contain them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from thread_ranks import ThreadRank, on_ranks

import adtrain as ad
from adtrain import ops
from adtrain.core.errors import ShapeError
from adtrain.core.primitive import Trait
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.ops.collectives import fusion_barrier, tree_sum
from adtrain.passes import ALL, optimize_regions, place_collectives

RANKS = 2
INPUTS = np.random.default_rng(0).normal(size=(RANKS, RANKS, 3))


def functions() -> dict[str, Any]:
    return {
        "all_gather": lambda x: ops.sum(ops.all_gather(ops.square(x)) * INPUTS[0].sum()),
        "all_to_all": lambda x: ops.sum(ops.exp(ops.all_to_all(x)) * INPUTS[1]),
        "all_reduce": lambda x: ops.sum(ops.square(ops.all_reduce(x * x))),
    }


def total(name: str, inputs: np.ndarray, f: Any = None) -> float:
    """The sum of the function's results on all ranks."""
    return sum(on_ranks(RANKS, lambda rank: float(functions()[name](ad.array(inputs[rank.rank])))))


def test_every_rank_gets_its_part() -> None:
    found = on_ranks(RANKS, lambda rank: ops.all_to_all(ad.array(INPUTS[rank.rank])).numpy())
    for rank, x in enumerate(found):
        np.testing.assert_array_equal(x, INPUTS[:, rank])
    for x in on_ranks(RANKS, lambda rank: ops.all_gather(ad.array(INPUTS[rank.rank])).numpy()):
        np.testing.assert_array_equal(x, INPUTS)


@pytest.mark.parametrize("name", functions())
def test_gradients_of_the_sum_over_ranks_agree_with_finite_differences(name: str) -> None:
    """Orders 1 and 2: of the total, and of a product of its gradient with fixed numbers."""
    other = np.random.default_rng(1).normal(size=INPUTS.shape)

    def first(inputs: np.ndarray) -> list[np.ndarray]:
        return on_ranks(RANKS, lambda rank: ad.grad(functions()[name])(ad.array(inputs[rank.rank])).numpy())

    def second(rank: ThreadRank) -> np.ndarray:
        def product(x: Any) -> Any:
            return ops.sum(ad.grad(functions()[name])(x) * other[rank.rank])

        return ad.grad(product)(ad.array(INPUTS[rank.rank])).numpy()

    gradients, hessian_products = first(INPUTS), on_ranks(RANKS, second)
    step = 1e-5
    for rank in range(RANKS):
        for i in np.ndindex(INPUTS.shape[1:]):
            moved = [INPUTS.copy(), INPUTS.copy()]
            for sign, x in zip((1, -1), moved, strict=True):
                x[(rank, *i)] += sign * step
            values = [total(name, x) for x in moved]
            assert gradients[rank][i] == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6, abs=1e-7)
            products = [np.vdot(np.stack(first(x)), other) for x in moved]
            assert hessian_products[rank][i] == pytest.approx(
                (products[0] - products[1]) / (2 * step), rel=1e-6, abs=1e-7
            )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gather_shards_outside_of_a_step_gathers_and_adds_as_all_gather_does(ranks: int) -> None:
    """Values and gradients have the same bits, also for a number of ranks that is no power of two."""

    def on(rank: ThreadRank, gather: Any) -> list[np.ndarray]:
        x = ad.array(np.random.default_rng(rank.rank).normal(size=(5,)))
        value, gradient = ad.value_and_grad(lambda x: ops.sum(ops.exp(gather(x)) * INPUTS[0][0, 0]))(x)
        return [value.numpy(), gradient.numpy()]

    found = on_ranks(ranks, lambda rank: on(rank, lambda x: ops.gather_shards(x, ranks)))
    for x, y in zip(found, on_ranks(ranks, lambda rank: on(rank, ops.all_gather)), strict=True):
        np.testing.assert_array_equal(np.concatenate(x, None), np.concatenate(y, None))


@pytest.mark.parametrize("f", [ops.all_gather, ops.all_to_all, ops.all_reduce])
def test_vmap_exchanges_all_members_at_once(f: Any) -> None:
    members = np.random.default_rng(2).normal(size=(RANKS, 4, RANKS, 3))

    def both(rank: ThreadRank) -> tuple[np.ndarray, np.ndarray, int]:
        mapped = ad.vmap(f)(ad.array(members[rank.rank])).numpy()
        exchanges = len(rank.recorded)
        return mapped, np.stack([f(ad.array(x)).numpy() for x in members[rank.rank]]), exchanges

    for mapped, one_by_one, exchanges in on_ranks(RANKS, both):
        np.testing.assert_array_equal(mapped, one_by_one)
        assert exchanges == 1


def test_axis_0_of_all_to_all_has_an_item_for_each_rank() -> None:
    with pytest.raises(ShapeError, match=r"all_to_all: found shape \(3, 2\), expected 1 items along axis 0"):
        ops.all_to_all(np.zeros((3, 2)))


def step(x: Any) -> Any:
    return ops.all_reduce(ops.exp(x)) * 2.0 + ops.all_to_all(x)


def collectives(program: Program) -> list[str]:
    return [e.name for e in program.equations if e.has(Trait.COLLECTIVE)]


def test_a_program_of_one_rank_has_no_exchange() -> None:
    program = stage(step, ALL).program(ad.array(np.ones((1, 3))))
    assert collectives(program) == []


def test_compiled_programs_exchange_in_the_order_of_their_equations_and_give_the_eager_bits() -> None:
    def both(rank: ThreadRank) -> tuple[Any, ...]:
        x = ad.array(INPUTS[rank.rank])
        staged = stage(step, ALL)
        program = staged.program(x)
        found = staged(x).numpy(), staged(x).numpy()
        recorded = [name for name, _ in rank.recorded]
        return found, collectives(program) * 2, recorded, step(x).numpy()

    for found, expected, recorded, eager in on_ranks(RANKS, both):
        assert recorded == expected
        for x in found:
            np.testing.assert_allclose(x, eager, rtol=1e-14)


def test_the_sum_of_halves_is_the_sum_in_the_same_tree() -> None:
    x = np.random.default_rng(3).normal(size=(8, 100)).astype(np.float32)
    halves = [tree_sum(ad.array(part)) for part in (x[:4], x[4:])]
    np.testing.assert_array_equal(tree_sum(ad.array(x)).numpy(), (halves[0] + halves[1]).numpy())


def test_equations_on_two_sides_of_a_barrier_are_not_fused() -> None:
    def f(x: Any, barrier: Any) -> Any:
        return ops.exp(barrier(ops.sin(x) * 2.0)[0]) + 1.0

    x = ad.array(np.ones(5))
    sizes = []
    for barrier in (lambda *xs: xs, fusion_barrier):
        staged = stage(lambda x, barrier=barrier: f(x, barrier), [lambda p: optimize_regions(p, ALL)])
        sizes.append(len(staged.program(x).equations))
        np.testing.assert_allclose(staged(x).numpy(), np.exp(2 * np.sin(np.ones(5))) + 1, rtol=1e-12)
    assert sizes == [1, 2]


def test_exchanges_start_early_and_are_waited_for_late() -> None:
    """The exchange of the second layer's gradient starts before the first layer's is computed."""

    def two_layers(x: Any, y: Any) -> Any:
        last = ops.exp(y)
        first = ops.sin(ops.exp(ops.sin(x)))
        a, b = ops.all_gather(last), ops.all_gather(first)
        return ops.sum(b) + ops.sum(a)

    def names(rank: ThreadRank) -> list[str]:
        x = ad.array(INPUTS[rank.rank])
        program = place_collectives(stage(two_layers).program(x, x))
        assert stage(two_layers, [place_collectives])(x, x).numpy() == two_layers(x, x).numpy()
        return [e.name for e in program.equations]

    for found in on_ranks(RANKS, names):
        assert found[:6] == ["exp", "all_gather", "sin", "exp", "sin", "all_gather"]
        assert found[6:] == ["exchange_done", "sum", "exchange_done", "sum", "add"]
