"""Slices and concatenations as views: the same bits with fewer copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_tokens import assert_plan_holds
from program_samples import ON_GPU, names
from test_train_ranks import IMAGES
from thread_ranks import ThreadRank, on_ranks
from training_runs import write_config

import adtrain as ad
from adtrain import config, ops
from adtrain.backends.cpu.codegen import workspace
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.program import Equation
from adtrain.core.staging import Pass, stage
from adtrain.passes import ALL, SIMPLIFY, fold_collectives, optimize_regions, place_collectives, place_views
from adtrain.passes.plan_memory import plan_memory
from adtrain.training.preparation import outline

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def joined(x: Any) -> Any:
    parts = [ops.reshape(ops.matmul(x, x), (-1,)), ops.sum(ops.sin(x), 0), ops.zeros((6,), np.float32)]
    return ops.exp(ops.concatenate(parts)) + 1.0


CASES = {
    "values that are computed": (joined, ["concat_view"]),
    "rows": (lambda x: sum(ops.slice(ops.matmul(x, x), [i, 0], [i + 2, 16]) for i in (0, 2)), ["subview", "subview"]),
    "rows of an argument": (lambda x: ops.matmul(ops.slice(x, [4, 0], [8, 16]), x), ["subview"]),
    "columns": (lambda x: ops.exp(ops.slice(ops.matmul(x, x), [0, 0], [16, 8])), ["slice"]),
    "unaligned elements": (lambda x: ops.exp(ops.slice(ops.matmul(x, x), [0, 1], [1, 9])), ["slice"]),
    "the same value twice": (lambda x: ops.exp(ops.concatenate([y := ops.matmul(x, x), y])), ["concatenate"]),
    "an argument": (lambda x: ops.exp(ops.concatenate([x, ops.matmul(x, x)])), ["concatenate"]),
    "unaligned products": (
        lambda x: ops.exp(ops.concatenate([ops.matmul(x[:1, :], x)[0, :3], ops.matmul(x, x)[0]])), ["concatenate"],
    ),
    "an unaligned value with another reader": (
        lambda x: ops.sum(ops.exp(ops.concatenate([ops.sum(x[:3], 1), y := ops.reshape(ops.sin(x), (-1,))])))
        + ops.matmul(ops.reshape(y, (16, 16)), x), ["concatenate"],
    ),
    "a result of the program": (lambda x: ops.slice(ops.matmul(x, x), [0, 0], [4, 16]), ["slice"]),
    "a joined result of the program": (
        lambda x: ops.concatenate([ops.matmul(x, x), ops.matmul(x, x + 1.0)]), ["concatenate"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_copies_become_views_where_memory_allows(case: str) -> None:
    f, expected = CASES[case]
    program = stage(f, (*SIMPLIFY, place_views)).program(ad.array(X))
    names = [e.name for e in program.equations]
    assert [name for name in names if name in ("concat_view", "subview", "concatenate", "slice")][
        -len(expected) :
    ] == expected


@pytest.mark.compiled
def test_views_give_the_bits_of_copies() -> None:
    def all_cases(x: Any) -> tuple[Any, ...]:
        return tuple(f(x) for f, _ in CASES.values())

    x = ad.array(X)
    for found, expected in zip(
        stage(all_cases, (*SIMPLIFY, place_views))(x), stage(all_cases, SIMPLIFY)(x), strict=True
    ):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.compiled
def test_a_result_does_not_overwrite_an_argument_that_is_also_read_by_a_part() -> None:
    def f(x: Any) -> Any:
        h = ops.tanh(x)
        y = h + ops.slice(h, [5, 0], [6, 16])
        return ops.matmul(y, ops.transpose(y))

    x = ad.array(np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32))
    np.testing.assert_array_equal(stage(f, (*ALL, place_views))(x).numpy(), stage(f, ALL)(x).numpy())


@pytest.mark.parametrize(
    ("passes", "sizes"),
    [(SIMPLIFY, workspace), (ALL, workspace), (ON_GPU, Lowering(H200).scratch)],
    ids=["simplified", "cpu", "gpu"],
)
@pytest.mark.parametrize(
    "settings", [pytest.param([], marks=pytest.mark.exhaustive), IMAGES], ids=["linear layers", "convolutions"]
)
def test_plans_of_sharded_training_steps_are_valid(
    tmp_path: Path, settings: Sequence[str], passes: Sequence[Pass], sizes: Callable[[Equation], int]
) -> None:
    cfg = config.load(write_config(tmp_path), ["data.shards=2", "training.clip_norm=1.0", *settings])
    placed = (fold_collectives, partial(optimize_regions, passes=passes), place_collectives, place_views)

    def check(rank: ThreadRank) -> None:
        program = outline(cfg).step_program(passes=placed)
        assert {"subview", "concat_view", "exchange_done"} <= set(names(program))
        assert_plan_holds(program, plan_memory(program, sizes), sizes)

    on_ranks(2, check)


STEPS: list[Callable[[Any, Any, int], Any]] = [
    lambda x, y, start: ops.tanh(x),
    lambda x, y, start: ops.flip(x),
    lambda x, y, start: x + ops.slice(y, [start], [start + 1]),
    lambda x, y, start: ops.slice(y, [start], [y.shape[0]]),
    lambda x, y, start: ops.concatenate([ops.sin(x), y]),
]


def slices_and_concatenations(seed: int, x: Any) -> Any:
    """A vector, computed from the vector ``x`` by random STEPS. Each reads one or two of the last three vectors."""
    rng = np.random.default_rng(seed)
    vectors = [x]
    for _ in range(12):
        a, b = (vectors[-rng.integers(1, min(len(vectors), 3) + 1)] for _ in range(2))
        start = 16 * rng.integers((b.shape[0] + 15) // 16)  # at an aligned byte
        vectors.append(STEPS[rng.integers(len(STEPS))](a, b, start))
    return ops.flip(vectors[-1])


@pytest.mark.parametrize("passes", [(), SIMPLIFY, ALL], ids=["traced", "simplified", "cpu"])
def test_plans_of_random_slices_and_concatenations_are_valid(passes: Sequence[Pass]) -> None:
    x = ad.array(np.ones(40, np.float32))
    found: Counter[str] = Counter()
    for seed in range(40):
        program = stage(partial(slices_and_concatenations, seed), (*passes, place_views)).program(x)
        assert_plan_holds(program, plan_memory(program, workspace), workspace)
        found.update(names(program))
    assert min(found["subview"], found["concat_view"]) > 20
