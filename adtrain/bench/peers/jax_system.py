"""JAX as a system: steps of one network or of many, and operations.

A step is one jitted call, or many steps are one scan. In bfloat16 the parameters and images are converted in the step,
as mixed precision in JAX does; the loss is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from adtrain import nn
from adtrain.bench.op_table import OpCase
from adtrain.bench.peers import jax_network, optimizers
from adtrain.bench.peers.jax_network import pooled
from adtrain.bench.peers.jobs import REPEATS, Job, OpRunner, Runner
from adtrain.bench.peers.layers import Arrays, operations, unsupported

PRECISIONS = {"float32": "highest", "float64": "highest", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}
"""From the config's precision to jax_default_matmul_precision."""


def steps(job: Job, form: str) -> Runner:
    """The step as `form` says: "jit", "scan", or "vmap" for the networks of a `MembersJob`.

    Raises:
        Unsupported: JAX has no counterpart of a layer or loss.
    """
    import jax
    import jax.numpy as jnp

    experiment = job.experiment
    configure(experiment.config.training.precision)
    network, optimizer = experiment.network, experiment.optimizer
    outputs, loss_of = jax_network.model(network.model), jax_network.loss(experiment.config)
    parameters = {path: jnp.array(x) for path, x in job.weights.items()}
    statistics = {path: jnp.array(x) for path, x in job.statistics.items()}
    given = jnp.asarray(experiment.train.images), jnp.asarray(np.asarray(experiment.train.labels, np.int32))
    scale, shift = map(jnp.asarray, job.normalization)
    mixed = experiment.config.training.precision == "bfloat16"
    computed = jnp.bfloat16 if mixed else scale.dtype

    def forward(parameters: Arrays, statistics: Arrays, images: Any, labels: Any, at: Any) -> Any:
        x = (images[at].astype(scale.dtype) * scale + shift).reshape(len(at), *network.input_shape)
        arrays = {**{path: w.astype(computed) for path, w in parameters.items()}, **statistics}
        loss = loss_of(outputs(arrays, x.astype(computed)).astype(scale.dtype), labels[at])
        return loss, {path: arrays[path] for path in statistics}

    def step(state: Any, images: Any, labels: Any, at: Any) -> Any:
        parameters, statistics, averages = state
        (loss, statistics), grads = jax.value_and_grad(forward, has_aux=True)(
            parameters, statistics, images, labels, at
        )
        grads = optimizers.clipped(jnp, experiment.config, grads)
        parameters, averages = optimizers.update(jnp, optimizer, parameters, averages, grads)
        return (parameters, statistics, averages), loss

    averages_of = partial(optimizers.start, jnp)
    if form == "vmap":
        step, averages_of = jax.vmap(step, (0, None, None, 0)), jax.vmap(averages_of)

    def scanned(state: Any, images: Any, labels: Any, order: Any) -> Any:
        return jax.lax.scan(lambda s, at: step(s, images, labels, at), state, order)

    one, many = jax.jit(step, donate_argnums=0), jax.jit(scanned, donate_argnums=0)
    # optimizers.start returns averages that share memory; donated buffers must not.
    state: Any = jax.tree.map(jnp.copy, (parameters, statistics, averages_of(parameters)))
    on_device = [jnp.asarray(order) for order in job.orders.astype(np.int32)]
    orders = cycle([list(order) for order in on_device] if form == "jit" else on_device)

    def losses_of_call() -> Any:
        """On the device."""
        nonlocal state
        if form != "jit":
            state, losses = many(state, *given, next(orders))
            return losses
        losses = []
        for at in next(orders):
            state, loss = one(state, *given, at)
            losses.append(loss)
        return losses

    def run(calls: int) -> float:
        for _ in range(calls):
            losses = losses_of_call()
        return float(np.mean(np.asarray(losses[-1])))

    return Runner(lambda: [np.asarray(loss).tolist() for loss in losses_of_call()], run)


members = steps
"""A step of many networks is a step of one, mapped over them (form "vmap")."""


def configure(precision: str) -> None:
    """Set the precision of matrix products and convolutions in this process."""
    import jax

    jax.config.update("jax_default_matmul_precision", PRECISIONS[precision])
    jax.config.update("jax_enable_x64", precision == "float64")


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
        **operations(jnp),
        "conv2d": convolved,
        "conv_transpose2d": convolved_transposed,
        "take": lambda x, indices, axis: jnp.take(x, indices, axis),
        "relu": jax.nn.relu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "max": lambda x, axis: jnp.max(x, axis),
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
