"""What the case table consists of."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain.core.array import Array, array
from adtrain.core.precision import FULL, matmul_precision
from adtrain.samplers import Sampler


@dataclass(frozen=True)
class Case:
    """One operation on one kind of input.

    Attributes:
        op: the name of the public function.
        name: the variant; ``op`` and ``name`` together are unique.
        f: the operation as a function of the inputs; returns a value or a tuple of values.
        inputs: samplers of the inputs. Floating-point inputs (float64) are differentiated, integers are not.
        linear: positions of the inputs in which ``f`` is linear while the others are fixed.
        order: the highest order of derivative that is checked; 0 for none.
        precision: the `ops.matmul_precision` of ``f``.
    """

    op: str
    name: str
    f: Callable[..., Any]
    inputs: tuple[Sampler, ...]
    linear: tuple[int, ...] = ()
    order: int = 3
    precision: str = FULL

    def sample(self, dtype: str = "float64", number: int = 0) -> list[Array]:
        """The inputs, the same in every call; another ``number`` gives others."""
        rng = np.random.default_rng(zlib.crc32(f"{self.op}/{self.name}".encode()) + number)
        drawn = [make(rng) for make in self.inputs]
        return [array(x.astype(dtype) if x.dtype.kind == "f" else x) for x in drawn]


CASES: list[Case] = []


def case(
    op: str,
    name: str,
    f: Callable[..., Any],
    *inputs: Sampler,
    linear: tuple[int, ...] = (),
    order: int = 3,
    precision: str = FULL,
) -> None:
    """Add a row to the table."""
    CASES.append(Case(op, name, matmul_precision(precision)(f), inputs, linear, order, precision))
