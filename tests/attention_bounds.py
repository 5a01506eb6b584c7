"""What attention by WGMMA has to compute, and how far it may be off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adtrain.core.primitive import Primitive

TOLERANCE = {"bfloat16": 1e-2, "full": 2e-6}
"""Of the norm, by precision. Operands have 8 or 22 significant bits."""


def exact_results(
    primitive: Primitive, arrays: Sequence[np.ndarray], params: Mapping[str, Any]
) -> list[tuple[np.ndarray, float]]:
    """The results for float64 arrays, and the largest norm of the error of each.

    That is TOLERANCE of its norm, or twice the error of NumPy's form in this precision if that is larger:
    few products may cancel.
    """

    def results(*given: np.ndarray, precision: str) -> tuple[np.ndarray, ...]:
        found = primitive.reference(*given, **{**params, "precision": precision})
        return found if isinstance(found, tuple) else (found,)

    exact = results(*arrays, precision="full")
    rounded = results(*(x.astype(np.float32) for x in arrays), precision=params["precision"])
    least = TOLERANCE[params["precision"]]
    bounds = (max(least * np.linalg.norm(x), 2 * np.linalg.norm(y - x)) for x, y in zip(exact, rounded, strict=True))
    return [(x, float(bound)) for x, bound in zip(exact, bounds, strict=True)]
