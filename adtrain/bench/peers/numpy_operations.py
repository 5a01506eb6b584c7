"""Single operations in NumPy; a few of them with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from adtrain.bench.peers.layers import unsupported
from adtrain.bench.peers.numpy_network import convolved
from adtrain.bench.peers.op_cases import REPEATS, OpCase, OpRunner


def operation(case: OpCase, phase: str, device: str, form: str) -> OpRunner:
    """The operation; in phase "backward" only the pullback, whose residuals are computed beforehand."""
    args = case.arrays()
    if "groups" in case.options:
        unsupported("NumPy", "a convolution in groups")
    if phase == "forward":
        if case.op not in FORWARD:
            unsupported("NumPy", case.op)
        f = case.of(FORWARD)

        def once() -> tuple[Any, ...]:
            return (f(*args),)
    else:
        if case.op not in BACKWARD:
            unsupported("plain NumPy", f"the gradient of {case.op}")
        pull, cotangent = case.of(BACKWARD)(*args), case.cotangent()

        def once(ct: Any = cotangent) -> tuple[Any, ...]:  # type: ignore[misc]
            found: tuple[Any, ...] = pull(ct)
            return found

    def run(calls: int) -> float:
        for _ in range(calls * REPEATS):
            found = once()
        return float(found[0].flat[0])

    return OpRunner(run, lambda *ct: [np.asarray(x) for x in once(*ct)])


def _softmax(x: Any) -> Any:
    exponentials = np.exp(x - x.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def _log_softmax(x: Any) -> Any:
    shifted = x - x.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _layer_norm(x: Any, normalized_shape: int) -> Any:
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + np.float32(1e-5))


def _matmul_pull(a: Any, b: Any, transpose_b: bool = False) -> Callable[[Any], tuple[Any, ...]]:
    if transpose_b:
        return lambda ct: (ct @ b, ct.T @ a)
    return lambda ct: (ct @ b.T, a.T @ ct)


FORWARD: dict[str, Callable[..., Any]] = {
    "matmul": lambda a, b, transpose_b=False: a @ (b.T if transpose_b else b),
    "conv2d": lambda x, w, padding: convolved(x, w, (1, 1), (padding, padding))[0],
    "take": np.take,
    "exp": np.exp,
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "add": np.add,
    "mul": np.multiply,
    "sum": lambda x, axis: np.asarray(x.sum(axis)),
    "max": lambda x, axis: np.asarray(x.max(axis)),
    "cumsum": lambda x, axis: np.cumsum(x, axis),
    "transpose": lambda x: np.ascontiguousarray(x.T),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "layer_norm": _layer_norm,
    "embedding": lambda indices, table: table[indices],
}
BACKWARD: dict[str, Callable[..., Callable[[Any], tuple[Any, ...]]]] = {
    "matmul": _matmul_pull,
    "conv2d": lambda x, w, padding: convolved(x, w, (1, 1), (padding, padding))[1],
    "relu": lambda x: lambda ct: (ct * (x > 0),),
}
