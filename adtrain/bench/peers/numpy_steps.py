"""The training step in plain NumPy, and with naive loops in C for its matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from adtrain import training
from adtrain.bench.peers import naive, numpy_network, optimizers
from adtrain.bench.peers.layers import unsupported
from adtrain.bench.peers.numpy_network import PLAIN, Kit
from adtrain.bench.peers.steps import Job, Runner


def runner(job: Job, form: str) -> Runner:
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
    step, at = stepper(job, Kit(naive.product, naive.convolved)), job.orders[0, 0]
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
