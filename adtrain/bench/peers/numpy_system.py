"""NumPy as a system: steps and operations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from adtrain import training
from adtrain.bench.op_table import OpCase
from adtrain.bench.peers import numpy_network, optimizers
from adtrain.bench.peers.jobs import REPEATS, Job, OpRunner, Runner
from adtrain.bench.peers.layers import operations, unsupported
from adtrain.bench.peers.numpy_network import PLAIN, Kit, convolved, naive_convolved, naive_product


def steps(job: Job, form: str) -> Runner:
    """The job in plain NumPy. Raises Unsupported as `stepper` does."""
    step, orders = stepper(job, PLAIN), cycle(job.orders)

    def run(calls: int) -> float:
        for _ in range(calls):
            loss = [step(at) for at in next(orders)][-1]
        return loss

    return Runner(lambda: [step(at) for at in next(orders)], run)


def naive_step(experiment: training.Experiment) -> Callable[[], float]:
    """A function that takes a step and returns its loss, with naive loops on one thread for matrix products and
    convolutions.

    Raises:
        Unsupported: as `stepper`, or the precision is not float32.
    """
    if (precision := experiment.config.training.precision) != "float32":
        unsupported("naive loops", f"precision {precision}")
    job = Job(experiment, "cpu")
    step, at = stepper(job, Kit(naive_product, naive_convolved)), job.orders[0, 0]
    return lambda: step(at)


def stepper(job: Job, kit: Kit) -> Callable[[np.ndarray], float]:
    """A function that takes a step on the images at indices int64 (batch,) and returns its loss.

    Raises:
        Unsupported: this module has no counterpart of a layer, option or precision.
    """
    experiment = job.experiment
    cfg, network, optimizer = experiment.config, experiment.network, experiment.optimizer
    if cfg.loss.kind != "cross_entropy" or any(cfg.loss.options().values()):
        unsupported("plain NumPy", f"the loss {cfg.loss.kind} with these options")
    if cfg.training.precision not in ("float32", "float64"):
        unsupported("plain NumPy", f"precision {cfg.training.precision}")
    forward = numpy_network.model(network.model, kit)
    parameters = job.weights
    averages = optimizers.start(np, parameters)
    images, labels = experiment.train.images, experiment.train.labels
    scale, shift = job.normalization

    def step(at: np.ndarray) -> float:
        nonlocal parameters, averages
        x = (images[at].astype(scale.dtype) * scale + shift).reshape(len(at), *network.input_shape)
        outputs, pull = forward(parameters, x)
        loss, ct = cross_entropy(outputs, labels[at])
        grads = optimizers.clipped(np, cfg, pull(ct)[1])
        parameters, averages = optimizers.update(np, optimizer, parameters, averages, grads)
        return loss

    return step


def cross_entropy(outputs: Any, labels: np.ndarray) -> tuple[float, Any]:
    """The mean loss of outputs (N, C) and labels (N,), and its gradient with respect to the outputs."""
    rows = np.arange(len(labels))
    shifted = outputs - outputs.max(1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(1, keepdims=True)
    loss = float((np.log(sums[:, 0]) - shifted[rows, labels]).mean())
    by_outputs = exponentials / sums
    by_outputs[rows, labels] -= 1
    return loss, by_outputs / len(labels)


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
    **operations(np),
    "conv2d": lambda x, w, padding: convolved(x, w, (1, 1), (padding, padding))[0],
    "take": np.take,
    "relu": lambda x: np.maximum(x, 0),
    "max": lambda x, axis: np.asarray(x.max(axis)),
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
