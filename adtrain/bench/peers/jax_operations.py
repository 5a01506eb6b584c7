"""Single operations in JAX, one jitted call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from adtrain import nn
from adtrain.bench.peers.jax_network import pooled
from adtrain.bench.peers.jax_steps import configure
from adtrain.bench.peers.layers import unsupported
from adtrain.bench.peers.op_cases import REPEATS, OpCase, OpRunner


def operation(case: OpCase, phase: str, device: str, form: str) -> OpRunner:
    """The operation; in phase "backward" only the pullback, whose residuals are computed beforehand."""
    import jax
    import jax.numpy as jnp

    configure("float32" if case.precision == "full" else case.precision)
    functions = _functions()
    if case.op not in functions:
        unsupported("JAX", case.op)
    f, args = case.of(functions), [jnp.asarray(x.astype(np.int32) if x.dtype.kind == "i" else x) for x in case.arrays()]
    if phase == "forward":
        call = jax.jit(lambda *args: (f(*args),))
        given: tuple[Any, ...] = tuple(args)
    else:
        _, pullback = jax.vjp(lambda *floats: f(*case.with_indices(args, floats)), *case.floats(args))
        call = jax.jit(lambda pullback, ct: pullback(ct))
        given = pullback, jnp.asarray(case.cotangent())

    def run(calls: int) -> float:
        for _ in range(calls * REPEATS):
            found = call(*given)
        return float(jnp.ravel(jax.block_until_ready(found)[0])[0])

    def results(*ct: np.ndarray) -> list[np.ndarray]:
        found = call(given[0], jnp.asarray(ct[0])) if ct else call(*given)
        return [np.asarray(x) for x in found]

    return OpRunner(run, results)


def _functions() -> dict[str, Callable[..., Any]]:
    import jax
    import jax.numpy as jnp

    def convolved(x: Any, w: Any, padding: int, groups: int = 1) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), [(padding, padding)] * 2, feature_group_count=groups)

    def convolved_transposed(x: Any, w: Any, stride: int, padding: int) -> Any:
        flipped, around = jnp.flip(w, (2, 3)).swapaxes(0, 1), w.shape[2] - 1 - padding
        return jax.lax.conv_general_dilated(x, flipped, (1, 1), [(around, around)] * 2, lhs_dilation=(stride, stride))

    def cross_entropy(x: Any, labels: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1).mean()

    def layer_norm(x: Any, normalized_shape: int) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    return {
        "matmul": lambda a, b, transpose_b=False: a @ (b.T if transpose_b else b),
        "conv2d": convolved,
        "conv_transpose2d": convolved_transposed,
        "take": lambda x, indices, axis: jnp.take(x, indices, axis),
        "exp": jnp.exp,
        "relu": jax.nn.relu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "tanh": jnp.tanh,
        "add": jnp.add,
        "mul": jnp.multiply,
        "sum": lambda x, axis: jnp.sum(x, axis),
        "max": lambda x, axis: jnp.max(x, axis),
        "cumsum": lambda x, axis: jnp.cumsum(x, axis),
        "transpose": jnp.transpose,
        "attention": lambda q, k, v: jax.nn.softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5) @ v,
        "softmax": jax.nn.softmax,
        "log_softmax": jax.nn.log_softmax,
        "cross_entropy": cross_entropy,
        "layer_norm": layer_norm,
        "max_pool2d": lambda x, kernel_size: pooled(x, nn.MaxPool2d(kernel_size)),
        "avg_pool2d": lambda x, kernel_size: pooled(x, nn.AvgPool2d(kernel_size)),
        "embedding": lambda indices, table: table[indices],
    }
