"""Functions compiled and eager side by side: many in one Program, which costs one compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from program_samples import ALL

from adtrain.backends.cpu.codegen import supported
from adtrain.backends.cpu.compiled_program import CompiledProgram
from adtrain.core import tree
from adtrain.core.array import Array, array
from adtrain.core.staging import stage

Function: TypeAlias = "tuple[Callable[..., Any], Sequence[np.ndarray | Array]]"
"""A function of arrays to a tree of arrays, and its arguments."""

TOLERANCE = {"float32": 2e-5, "float64": 1e-11}


class Both(NamedTuple):
    """The results of a function, compiled and eager."""

    compiled: list[np.ndarray]
    eager: list[np.ndarray]

    def check(self, tolerance: float, largest: bool = False) -> None:
        """Raise AssertionError unless they agree to ``tolerance``, relative and absolute.

        Args:
            largest: the absolute one is relative to the largest element, if that is above 1.
        """
        assert len(self.compiled) == len(self.eager)
        for found, expected in zip(self.compiled, self.eager, strict=True):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            scale = float(np.abs(expected).max(initial=1)) if largest else 1.0
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale)


def both(functions: Mapping[str, Function], improve: Sequence[Any] = ALL) -> dict[str, Both | Exception]:
    """Each function's results, or what went wrong with it, whatever goes wrong with the others."""
    if not functions:
        return {}
    try:
        return dict(_together(functions, improve))
    except Exception as error:
        if len(functions) == 1:
            return dict.fromkeys(functions, error)
        names = list(functions)
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        found = {n: x for half in halves for n, x in both({n: functions[n] for n in half}, improve).items()}
        # Where the halves are right, what is wrong with the whole is wrong with each of them.
        return found if any(isinstance(x, Exception) for x in found.values()) else dict.fromkeys(functions, error)


def _together(functions: Mapping[str, Function], improve: Sequence[Any]) -> dict[str, Both]:
    given = {name: [array(x) for x in args] for name, (_, args) in functions.items()}

    def all_of_them(given: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: tree.leaves(f(*given[name])) for name, (f, _) in functions.items()}

    program = stage(all_of_them, improve).program(given)
    unknown = {e.name for e in program.equations if not supported(e)}
    assert not unknown, f"no C for {', '.join(sorted(unknown))}"
    eager = {name: [x.numpy() for x in out] for name, out in all_of_them(given).items()}
    flat = iter(CompiledProgram(program).run([x.numpy() for x in tree.leaves(given)])[0])
    order = tree.leaves({name: [name] * len(out) for name, out in eager.items()})
    compiled: dict[str, list[np.ndarray]] = {name: [] for name in functions}
    for name in order:
        compiled[name].append(next(flat))
    return {name: Both(compiled[name], eager[name]) for name in functions}


def check_all(functions: Mapping[str, Function], tolerance: float, largest: bool = False) -> None:
    """Raise AssertionError that names each function whose compiled results differ from its eager ones."""
    wrong = []
    for name, found in both(functions).items():
        try:
            if isinstance(found, Exception):
                raise found
            found.check(tolerance, largest)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error).strip()[:600]}")
    assert not wrong, "\n\n".join(wrong)
