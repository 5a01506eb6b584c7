"""The training step of an experiment on one GPU: here, and in what it is compared with, each in its fastest fair form.

All sides start from the same weights and go through the same CHUNK batches again and again: `order`, int64 (CHUNK,
batch), of the uint8 images on the device. A step gathers its batch, normalises it, and does forward, cross-entropy,
backward and update. Nothing waits for the device but the reading of the last loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import click
import numpy as np

from adtrain import data, nn, optim, training
from adtrain.core import tree
from adtrain.training.step import empty_log, repeated

CHUNK = 20
"""Steps of one call of a runner, unless it is called for several chunks."""

Runner = Callable[[int], float]
"""Goes through the batches so many times, and returns the loss of the last step once it is done."""


def order_of(experiment: training.Experiment) -> np.ndarray:
    size = experiment.full_batch
    epochs = (data.batches(len(experiment.train), size, 0, epoch) for epoch in count(1))
    return np.stack(list(islice((b for batches in epochs for b in batches if len(b) == size), CHUNK)))


def ours(experiment: training.Experiment) -> Runner:
    """The library's own step, repeated as training does it."""
    state, seed, order = experiment.initial_state("gpu"), experiment.seed("gpu"), order_of(experiment)
    given = training.on_device(experiment.train, "gpu").batches(order)

    def take(chunks: int) -> float:
        nonlocal state
        for _ in range(chunks):
            log = empty_log(len(order), "gpu")
            state, log = repeated(experiment.logged_step, len(order), (state, log), seed, *given)
        return float(log.loss.numpy()[-1])

    return take


def torch_steps(experiment: training.Experiment, form: str) -> Runner:
    """PyTorch with a fused optimizer: "eager", "compile" of forward and loss, or the whole step as one CUDA "graph"."""
    import torch
    from torch_network import torch_model, torch_optimizer

    tf32 = experiment.config.training.precision == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    model = torch_model(experiment).cuda()
    adam = {"capturable": form == "graph"} if isinstance(experiment.optimizer, optim.Adam) else {}
    update = torch_optimizer(experiment.optimizer, model.parameters(), fused=True, **adam)
    images, labels = (torch.from_numpy(np.array(x)).cuda() for x in (experiment.train.images, experiment.train.labels))
    order = torch.from_numpy(order_of(experiment)).cuda()
    scale, shift = (torch.tensor(x, dtype=torch.float32).cuda() for x in normalization(experiment))

    def loss_of(at: Any) -> Any:
        x = images.index_select(0, at).float() * scale + shift
        outputs = model(x.reshape(len(at), *experiment.network.input_shape))
        return torch.nn.functional.cross_entropy(outputs, labels.index_select(0, at))

    forward = torch.compile(loss_of) if form == "compile" else loss_of

    def step(at: Any) -> Any:
        update.zero_grad(set_to_none=True)
        loss = forward(at)
        loss.backward()
        update.step()
        return loss.detach()

    take_step = graphed(torch, step, order[0].clone(), model, update) if form == "graph" else step

    def take(chunks: int) -> float:
        for _ in range(chunks):
            for at in order:
                loss = take_step(at)
        return float(loss)

    return take


def graphed(torch: Any, step: Callable[[Any], Any], at: Any, model: Any, update: Any) -> Callable[[Any], Any]:
    """The step as a CUDA graph that reads its indices in `at`; model and optimizer begin anew after its warm-up."""
    start = [p.detach().clone() for p in model.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(at)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    update.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = step(at)
    with torch.no_grad():
        for p, first in zip(model.parameters(), start, strict=True):
            p.copy_(first)
    for averages in update.state.values():
        for x in averages.values():
            x.zero_()

    def take_step(indices: Any) -> Any:
        at.copy_(indices)
        graph.replay()
        return loss

    return take_step


def jax_steps(experiment: training.Experiment) -> Runner:
    """JAX: all steps of a chunk in one call, a scan over the batches' indices."""
    import jax
    import jax.numpy as jnp

    tf32 = experiment.config.training.precision == "tf32"
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if tf32 else "highest")
    layers, names = list(experiment.network.model.layers), experiment.initial_state("cpu").params
    params = [jnp.asarray(np.array(x.numpy())) for x in tree.leaves(names)]
    places = {path: i for i, path in enumerate(tree.paths(names))}
    images, labels = jnp.asarray(experiment.train.images), jnp.asarray(experiment.train.labels.astype(np.int32))
    scale, shift = (jnp.asarray(x, jnp.float32) for x in normalization(experiment))
    order = jnp.asarray(order_of(experiment).astype(np.int32))

    def loss_of(params: Any, images: Any, labels: Any, at: Any) -> Any:
        x = (images[at].astype(jnp.float32) * scale + shift).reshape(len(at), *experiment.network.input_shape)
        for i, layer in enumerate(layers):
            mine = {n: params[places[f"{i}.{n}"]] for n in ("weight", "bias") if f"{i}.{n}" in places}
            x = jax_layer(jax, layer, mine, x)
        at_label = jnp.take_along_axis(jax.nn.log_softmax(x), labels[at][:, None], axis=1)
        return -jnp.mean(at_label)

    def step(state: Any, at: Any, images: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state[0], images, labels, at)
        return jax_update(jnp, experiment.optimizer, state, grads), loss

    def chunk(state: Any, images: Any, labels: Any, order: Any) -> Any:
        state, losses = jax.lax.scan(lambda s, at: step(s, at, images, labels), state, order)
        return state, losses[-1]

    run = jax.jit(chunk, donate_argnums=0)
    state: Any = (params, [jnp.zeros_like(p) for p in params], [jnp.zeros_like(p) for p in params], jnp.zeros(()))

    def take(chunks: int) -> float:
        nonlocal state
        for _ in range(chunks):
            state, loss = run(state, images, labels, order)
        return float(loss)

    return take


def jax_layer(jax: Any, layer: nn.Module, params: dict[str, Any], x: Any) -> Any:
    """The layer's output for `x`."""
    match layer:
        case nn.Linear():
            return x @ params["weight"].T + params["bias"]
        case nn.Conv2d():
            window = (1, 1), [(p, p) for p in pair(layer.padding)]
            return jax.lax.conv_general_dilated(x, params["weight"], *window) + params["bias"][:, None, None]
        case nn.MaxPool2d():
            size = (1, 1, *pair(layer.kernel_size))
            return jax.lax.reduce_window(x, -np.inf, jax.lax.max, size, size, "VALID")
        case nn.Relu():
            return jax.nn.relu(x)
        case nn.Flatten():
            return x.reshape(len(x), -1)
    raise click.UsageError(f"{layer.kind()} has no counterpart in this benchmark")


def jax_update(jnp: Any, optimizer: optim.Optimizer, state: Any, grads: Any) -> Any:
    """The state (parameters, two averages of each, steps) after the optimizer's update."""
    params, first, second, steps = state
    match optimizer:
        case optim.Adam():
            (b1, b2), steps = optimizer.betas, steps + 1
            first = [b1 * m + (1 - b1) * g for m, g in zip(first, grads, strict=True)]
            second = [b2 * v + (1 - b2) * g * g for v, g in zip(second, grads, strict=True)]
            rate, root = optimizer.lr / (1 - b1**steps), jnp.sqrt(1 - b2**steps)
            each = zip(params, first, second, strict=True)
            params = [p - rate * m / (jnp.sqrt(v) / root + optimizer.eps) for p, m, v in each]
        case optim.SGD():
            first = [optimizer.momentum * m + g for m, g in zip(first, grads, strict=True)]
            params = [p - optimizer.lr * m for p, m in zip(params, first, strict=True)]
        case _:
            raise click.UsageError(f"{type(optimizer).__name__} has no counterpart in this benchmark")
    return params, first, second, steps


def normalization(experiment: training.Experiment) -> Iterator[np.ndarray]:
    """What pixels (C, H, W) are multiplied with, and what is added then."""
    std, mean = (np.array(x).reshape(-1, 1, 1) for x in (experiment.network.std, experiment.network.mean))
    yield from (1 / (255 * std), -mean / std)


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


SIDES: dict[str, Callable[[training.Experiment], Runner]] = {
    "ours": ours,
    "torch-eager": lambda experiment: torch_steps(experiment, "eager"),
    "torch-compile": lambda experiment: torch_steps(experiment, "compile"),
    "torch-graph": lambda experiment: torch_steps(experiment, "graph"),
    "jax": jax_steps,
}
