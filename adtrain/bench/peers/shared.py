"""What systems share: containers and layers of a model, operations, and optimizers, over `numpy`, `jax.numpy` or
`torch` as `xp`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add, mul
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeAlias

from adtrain import nn, optim
from adtrain.bench.peers.systems import Unsupported
from adtrain.config import Config

Arrays: TypeAlias = dict[str, Any]
"""Parameters and running statistics by dotted path, in the other system's arrays."""

Apply: TypeAlias = Callable[[Arrays, Any], Any]
"""A layer: (arrays, x (N, ...)) to the output (N, ...). It updates the running statistics in `arrays`."""


def built(layer: nn.Module, leaf: Callable[[nn.Module, str], Apply], xp: ModuleType, f: ModuleType) -> Apply:
    """The layer as a function.

    Args:
        leaf: makes the function of a layer that is not built here; its second argument is the prefix of the paths of
            the layer's arrays ("3.body.0.").
        xp, f: `torch` and `torch.nn.functional`, or `jax.numpy` and `jax.nn`.
    """

    def within(layer: nn.Module, path: str) -> Apply:
        match layer:
            case nn.Sequential():
                parts = [within(child, f"{path}{i}.") for i, child in enumerate(layer.layers)]
                for i, child in enumerate(layer.layers):
                    if isinstance(child, nn.Linear) and child.tied:
                        names = f"{path}{i}.weight", f"{path}{layer.shared_embedding()}.weight"
                        parts[i] = _tied(parts[i], *names)
                return lambda arrays, x: reduce(lambda x, part: part(arrays, x), parts, x)
            case nn.Residual(shortcut=None):
                body = within(layer.body, f"{path}body.")
                return lambda arrays, x: body(arrays, x) + x
            case nn.Residual(shortcut=nn.Module() as projection):
                body, shortcut = within(layer.body, f"{path}body."), within(projection, f"{path}shortcut.")
                return lambda arrays, x: body(arrays, x) + shortcut(arrays, x)
            case nn.Branches():
                branches = [within(branch, f"{path}{i}.") for i, branch in enumerate(layer.branches)]
                joins: dict[type[nn.Module], Callable[[Sequence[Any]], Any]]
                joins = {
                    nn.Concat: lambda xs: xp.concatenate(xs, 1),
                    nn.Add: partial(reduce, add),
                    nn.Multiply: partial(reduce, mul),
                }
                join = joins[type(layer)]
                return lambda arrays, x: join([branch(arrays, x) for branch in branches])
            case nn.TransformerLayer(dropout=0):
                return transformer_layer(layer, path)
            case nn.FourierFeatures():
                return lambda arrays, x: _fourier_features(xp, x @ arrays[f"{path}frequencies"].T)
            case nn.Scale():
                return lambda arrays, x: layer.factor * x
            case nn.Flatten():
                return lambda arrays, x: x.reshape(len(x), -1)
            case nn.Reshape():
                return lambda arrays, x: x.reshape(len(x), *layer.shape)
            case nn.Dropout(p=0):
                return lambda arrays, x: x
            case nn.PositionalEmbedding("learned"):
                return lambda arrays, x: x + arrays[f"{path}weight"]
            case nn.Mean():
                return lambda arrays, x: x.mean(layer.dim)
        activation = _activations(layer, xp, f).get(layer.kind())
        return leaf(layer, path) if activation is None else lambda arrays, x: activation(x)

    def transformer_layer(layer: nn.TransformerLayer, path: str) -> Apply:
        layers = layer.layers((1, 1))
        parts = {name: within(child, f"{path}{name}.") for name, child in layers.items()}
        activation = within(nn.ACTIVATIONS[layer.activation], path)

        def feed_forward(arrays: Arrays, x: Any) -> Any:
            if "gate" in parts:
                return activation(arrays, parts["gate"](arrays, x)) * parts["linear1"](arrays, x)
            return activation(arrays, parts["linear1"](arrays, x))

        def run(arrays: Arrays, x: Any) -> Any:
            for norm, inner in (("norm1", (parts["self_attn"],)), ("norm2", (feed_forward, parts["linear2"]))):
                y = parts[norm](arrays, x) if layer.normalises_first else x
                y = x + reduce(lambda y, part: part(arrays, y), inner, y)
                x = y if layer.normalises_first else parts[norm](arrays, y)
            return x

        return run

    return within(layer, "")


def _activations(layer: Any, xp: ModuleType, f: ModuleType) -> dict[str, Callable[[Any], Any]]:
    """The activations by the kind of layer, with the options of a layer."""
    return {
        "relu": f.relu,
        "leaky_relu": lambda x: f.leaky_relu(x, layer.negative_slope),
        "elu": lambda x: f.elu(x, layer.alpha),
        "silu": f.silu,
        "squared_relu": lambda x: f.relu(x) ** 2,
        "soft_cap": lambda x: xp.tanh(x / layer.cap) * layer.cap,
        "tanh": xp.tanh,
        "sigmoid": f.sigmoid,
        "softplus": f.softplus,
        "softmax": lambda x: f.softmax(x, layer.dim),
        "log_softmax": lambda x: f.log_softmax(x, layer.dim),
    }


def _fourier_features(xp: ModuleType, products: Any) -> Any:
    return xp.concatenate([xp.cos(2 * xp.pi * products), xp.sin(2 * xp.pi * products)], 1)


def _tied(part: Apply, weight: str, shared: str) -> Apply:
    """A layer whose array `weight` is the array `shared` of another layer."""
    return lambda arrays, x: part({**arrays, weight: arrays[shared]}, x)


def operations(xp: ModuleType) -> dict[str, Callable[..., Any]]:
    """Operations that NumPy, `jax.numpy` and PyTorch write alike."""
    return {
        "matmul": lambda a, b, transpose_b=False: a @ (b.T if transpose_b else b),
        "exp": xp.exp,
        "tanh": xp.tanh,
        "add": xp.add,
        "mul": xp.multiply,
        "sum": lambda x, axis: xp.sum(x, axis),
        "cumsum": lambda x, axis: xp.cumsum(x, axis),
    }


def unsupported(package: str, what: str) -> NoReturn:
    raise Unsupported(f"no counterpart of {what} in {package}")


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
