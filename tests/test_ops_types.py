"""Arguments of operations that have another type than the operation takes."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops

X = np.ones((3, 4), np.float32)
WRONG: list[Any] = [
    "ab", b"x", object(), 1.5, 5, {}, None, {1: 2}, ["a"], [None], [1.5], [[1], [2, 3]], np.array(["a"]), lambda: 0
]  # fmt: skip
RIGHT = {
    "shape": (3, 4), "normalized_shape": (4,), "axes": (0, 1), "axis": 0, "starts": [0, 0], "stops": [1, 1], "start": 0,
    "stop": 3, "shift": 1, "reps": 2, "repeats": 2, "k": 1, "num_classes": 3, "value": 1.0, "p": 0.5, "pad_width": 1,
    "dtype": "float32", "indices": np.zeros(3, int), "targets": np.zeros(3, int), "indices_or_sections": 1,
    "rng": ops.rng_state(0, 0), "mask": X > 0, "condition": X > 0, "xs": [X, X],
}  # fmt: skip


def wrong_calls(f: Callable[..., Any]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Calls of `f` with one argument of WRONG, and its name: all but that one are right for many operations."""
    parameters = inspect.signature(f).parameters.values()
    for wrong in parameters:
        for value in WRONG:
            args, options = list[Any](), dict[str, Any]()
            for x in parameters:
                if x is wrong or x.default is x.empty:
                    given = value if x is wrong else RIGHT.get(x.name, X)
                    if x.kind is x.KEYWORD_ONLY or x.default is not x.empty:
                        options[x.name] = given
                    else:
                        args.extend([given, given] if x.kind is x.VAR_POSITIONAL else [given])
            yield wrong.name, args, options


def test_an_argument_of_a_wrong_type_is_an_error_of_adtrain() -> None:
    """No operation raises another error, whichever of its arguments is wrong."""
    for name in ops.__all__:
        f = getattr(ops, name)
        for wrong, args, options in wrong_calls(f) if inspect.isfunction(f) else ():
            try:
                f(*args, **options)
            except ad.AdtrainError:
                pass
            except Exception as error:
                pytest.fail(f"ops.{name}, {wrong}: {error!r} for {args}, {options}")


def test_an_error_about_a_shape_says_what_was_found_and_expected() -> None:
    for call in ops.reshape, ops.broadcast_to, ops.sum_to:
        with pytest.raises(ad.AdtrainError, match=rf"{call.__name__}: shape is 'ab', expected an integer or several"):
            call(X, "ab")  # type: ignore[arg-type]
    with pytest.raises(ad.AdtrainError, match=r"reshape: shape is \[1.5\], expected an integer or several"):
        ops.reshape(X, [1.5])  # type: ignore[list-item]
    with pytest.raises(ad.AdtrainError, match="concatenate: found an int, expected a sequence of arrays"):
        ops.concatenate(5)  # type: ignore[arg-type]
