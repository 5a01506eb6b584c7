"""Optimizers for NumPy and JAX, which have none: functions of arrays, over `numpy` or `jax.numpy` as `xp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from adtrain import optim
from adtrain.bench.peers.layers import Arrays, unsupported
from adtrain.config import Config


class Averages(NamedTuple):
    """The optimizer's state: two averages of each parameter, by path, and the number of updates, of shape ()."""

    first: Arrays
    second: Arrays
    steps: Any


def start(xp: Any, parameters: Arrays) -> Averages:
    """The averages before the first update."""
    zeros = {path: xp.zeros_like(p) for path, p in parameters.items()}
    return Averages(zeros, dict(zeros), xp.zeros((), xp.result_type(float)))


def update(
    xp: Any, optimizer: optim.Optimizer, p: Arrays, averages: Averages, grads: Arrays
) -> tuple[Arrays, Averages]:
    """The parameters and averages after one update at the optimizer's own learning rate."""
    first, second, lr = averages.first, averages.second, optimizer.lr
    steps = averages.steps + 1

    def each(f: Callable[..., Any], *trees: Arrays) -> Arrays:
        return {path: f(*(tree[path] for tree in trees)) for path in p}

    decay = getattr(optimizer, "weight_decay", 0.0)
    if decay and isinstance(optimizer, (optim.AdamW, optim.Lion)):
        p = each(lambda p: p * (1 - lr * decay), p)
    elif decay:
        grads = each(lambda g, p: g + decay * p, grads, p)
    match optimizer:
        case optim.Adam(betas=(b1, b2), eps=eps, amsgrad=False):
            first = each(lambda m, g: b1 * m + (1 - b1) * g, first, grads)
            second = each(lambda v, g: b2 * v + (1 - b2) * g * g, second, grads)
            root = xp.sqrt(1 - b2**steps)
            rate, small = root * lr / (1 - b1**steps), root * eps
            p = each(
                lambda p, m, v: p - rate.astype(p.dtype) * m / (xp.sqrt(v) + small.astype(p.dtype)), p, first, second
            )
        case optim.Lion(betas=(b1, b2)):
            p = each(lambda p, m, g: p - lr * xp.sign(b1 * m + (1 - b1) * g), p, first, grads)
            first = each(lambda m, g: b2 * m + (1 - b2) * g, first, grads)
        case optim.SGD(momentum=momentum, nesterov=nesterov):
            direction = grads
            if momentum:
                first = each(lambda m, g: momentum * m + g, first, grads)
                direction = each(lambda g, m: g + momentum * m, grads, first) if nesterov else first
            p = each(lambda p, d: p - lr * d, p, direction)
        case optim.RMSprop(alpha=alpha, eps=eps, momentum=momentum):
            second = each(lambda s, g: alpha * s + (1 - alpha) * g * g, second, grads)
            direction = each(lambda g, s: g / (xp.sqrt(s) + eps), grads, second)
            if momentum:
                first = direction = each(lambda m, d: momentum * m + d, first, direction)
            p = each(lambda p, d: p - lr * d, p, direction)
        case _:
            unsupported(xp.__name__, f"{optimizer.kind()} with these options")
    return p, Averages(first, second, steps)


def clipped(xp: Any, cfg: Config, grads: Arrays) -> Arrays:
    """The gradients, clipped as the config's `clip_value` and `clip_norm` say."""
    value, norm = cfg.training.clip_value, cfg.training.clip_norm
    if value is not None:
        grads = {path: xp.clip(g, -value, value) for path, g in grads.items()}
    if norm is not None:
        length = xp.sqrt(sum((g * g).sum() for g in grads.values()))
        scale = xp.minimum(norm / (length + 1e-6), 1.0)
        grads = {path: scale * g for path, g in grads.items()}
    return grads
