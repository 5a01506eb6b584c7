"""The training step in JAX: one jitted call a step, or one scan over many steps, of one network or of many.

In bfloat16 the parameters and images are converted in the step, as mixed precision in JAX does; the loss is float32.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from adtrain.bench.peers import jax_network, optimizers
from adtrain.bench.peers.layers import Arrays
from adtrain.bench.peers.steps import Job, Runner

PRECISIONS = {"float32": "highest", "float64": "highest", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}
"""From the config's precision to jax_default_matmul_precision."""


def runner(job: Job, form: str) -> Runner:
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
    given = jnp.asarray(experiment.train.images), jnp.asarray(experiment.train.labels.astype(np.int32))
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


def configure(precision: str) -> None:
    """Set the precision of matrix products and convolutions in this process."""
    import jax

    jax.config.update("jax_default_matmul_precision", PRECISIONS[precision])
    jax.config.update("jax_enable_x64", precision == "float64")
