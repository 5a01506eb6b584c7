"""Slices and concatenations as views: the same bits with fewer copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.core.staging import stage
from adtrain.passes import ALL, SIMPLIFY, place_views

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
    names = [e.primitive.name for e in program.equations]
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
