"""Python numbers as constants: the same in eager and compiled code, or one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.core.staging import stage

BYTES = np.array([0, 1, 200, 255], np.uint8)
WIDE = np.array([-(2**63), -1, 0, 2**53 + 1, 2**63 - 1])
FLOATS = np.array([-2.0, 0.5, np.nan, 3.0], np.float32)

SAME: dict[str, tuple[Callable[[Any], Any], np.ndarray, Any]] = {
    "clip beyond the type": (lambda x: ops.clip(x, -5, 300), BYTES, BYTES),
    "clip from below": (lambda x: ops.clip(x, 5, 300), BYTES, [5, 5, 200, 255]),
    "clip to the limits": (lambda x: ops.clip(x, -(2**63), 2**63 - 1), WIDE, WIDE),
    "clip with NaN": (lambda x: ops.clip(x, np.nan, 1.0), FLOATS, [np.nan] * 4),
    "clip with NaN above": (lambda x: ops.clip(x, 0.0, np.nan), FLOATS, [np.nan] * 4),
    "less than a number beyond the type": (lambda x: x < 300, BYTES, [True] * 4),
    "less than a negative number": (lambda x: x < -1, BYTES, [False] * 4),
    "equal to a number beyond the type": (lambda x: x == 256, BYTES, [False] * 4),
    "number beyond the type is less": (lambda x: ops.less(-1, x), BYTES, [True] * 4),
    "pad with a large integer": (lambda x: ops.pad(x[:1], 1, 2**53 + 1), WIDE, [2**53 + 1, -(2**63), 2**53 + 1]),
    "pad with the smallest integer": (lambda x: ops.pad(x[:1], (0, 1), -(2**63)), WIDE, [-(2**63)] * 2),
    "full": (lambda x: ops.full((2,), 255, "uint8") + x[:2], BYTES, [255, 0]),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", SAME)
def test_constants_mean_the_same_in_eager_and_compiled_code(name: str) -> None:
    f, x, expected = SAME[name]
    for run in (f, stage(f)):
        np.testing.assert_array_equal(run(ad.array(x)).numpy(), expected)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda: ops.full((1,), 300, "uint8"), "full: found 300 for elements of type uint8, expected a whole"),
        (lambda: ops.full((1,), -1, "uint32"), "full: found -1 for elements of type uint32"),
        (lambda: ops.full((1,), np.nan, "int32"), "full: found nan for elements of type int32"),
        (lambda: ops.full((1,), 1.5, "int64"), "full: found 1.5 for elements of type int64"),
        (lambda: ops.full((1,), 2, "bool"), "full: found 2 for elements of type bool, expected .* from 0 to 1"),
        (lambda: ops.full((1,), 1e300), "full: found 1e[+]300 for elements of type float32, expected a number"),
        (lambda: ops.full((1,), 10**400), "full: found 10000"),
        (lambda: ops.pad(BYTES, 1, 300), "pad: found 300 for elements of type uint8"),
        (lambda: ops.pad(BYTES, 1, np.inf), "pad: found inf for elements of type uint8"),
        (lambda: ops.clip(BYTES, 300, 400), "clip: found 300 for elements of type uint8"),
    ],
)  # fmt: skip
def test_a_number_that_the_type_cannot_hold_is_an_error(f: Callable[[], Any], message: str) -> None:
    for run in (f, stage(f)):
        with pytest.raises(ad.DTypeError, match=message):
            run()


def test_infinity_is_a_number_of_floating_point_types() -> None:
    assert ops.full((1,), np.inf).item() == np.inf
    assert ops.pad(FLOATS[:1], (0, 1), -np.inf).numpy()[1] == -np.inf


def test_static_numbers_that_compare_equal_have_programs_of_their_own() -> None:
    f = stage(lambda x, c: 1.0 / (x * c))
    x = ad.array([1.0])
    assert (f(x, 0.0).item(), f(x, -0.0).item()) == (np.inf, -np.inf)
    f(x, float("nan"))
    count = len(f.compiled)
    f(x, -float("nan"))
    assert len(f.compiled) == count


def test_a_staged_function_may_return_arrays_that_it_did_not_compute() -> None:
    captured = ad.array([1.0, 2.0])
    f = stage(lambda x: (captured, ops.arange(3), x, x + 1, captured))
    for _ in range(2):
        for found, expected in zip(f(captured), ([1, 2], [0, 1, 2], [1, 2], [2, 3], [1, 2]), strict=True):
            assert found.numpy().tolist() == expected


@pytest.mark.compiled
def test_compiled_code_names_the_index_that_is_out_of_range() -> None:
    f = stage(lambda x, i: ops.take(x, i) * 2)
    with pytest.raises(ad.ShapeError, match="take: index -4 is out of range for length 3"):
        f(np.ones(3, np.float32), np.array([0, -4]))


def test_argnums_may_be_an_integer_of_numpy() -> None:
    position: Any = np.int64(1)
    assert ad.grad(lambda a, b: a * b, position)(2.0, 3.0).item() == 2
