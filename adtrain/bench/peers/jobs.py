"""The work that is the same in each system: single operations, and the training of an experiment, of one network or of
many with other seeds.

All systems start from the same weights and use the same batches. A step gathers its batch from the images, uint8 or
float32, in the device's memory, normalises it, and runs forward pass, loss, backward pass, clipping and an update at a
constant rate. The host waits for the device only when it reads the loss of the last step.

Systems share containers and layers of a model, operations, and optimizers, over `numpy`, `jax.numpy` or `torch`: `xp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import count, islice
from operator import add, mul
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from adtrain import config, data, nn, ops, optim, training
from adtrain.bench.op_table import OpCase
from adtrain.bench.peers.systems import ADTRAIN, Unsupported, Work, made
from adtrain.config import Config
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.autodiff import vjp
from adtrain.nn.network import layers
from adtrain.sweeps.members import Group, groups_of, members_of

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


CHUNK = {"cpu": 5, "gpu": 20}
"""Steps in one call, by device."""

CHUNKS = 20
"""Calls with different batches; after them the same batches repeat."""

COMPARED, COMPARED_WITH_MUON = 5, 3
"""Numbers of first steps whose losses are compared before timing. A step of Muon makes differences of rounding, and of
which one of equal pixels is a maximum, about ten times as large."""


class Runner(NamedTuple):
    """A system's training.

    Attributes:
        losses: makes one call, and returns the loss of each of its steps; of many networks a list for each step.
        run: makes the given number of calls, waits for the device, and returns the loss of the last step, or a mean.
    """

    losses: Callable[[], Sequence[Any]]
    run: Callable[[int], float]


class Checked(NamedTuple):
    """The seconds of training until the end of an epoch, and the test accuracy there."""

    seconds: float
    accuracy: float


@dataclass(frozen=True)
class Job:
    """The input of every system."""

    experiment: training.Experiment
    device: str

    @cached_property
    def orders(self) -> np.ndarray:
        """Indices of batches: int64 (CHUNKS, CHUNK, batch)."""
        size, chunk = self.experiment.full_batch, CHUNK[self.device]
        return np.stack(list(islice(self._batches(0), CHUNKS * chunk))).reshape(CHUNKS, chunk, size)

    def _batches(self, seed: int) -> Iterator[np.ndarray]:
        """The indices of full batches, epoch after epoch."""
        size = self.experiment.full_batch
        epochs = (data.batches(len(self.experiment.train), size, seed, epoch) for epoch in count(1))
        return (batch for epoch in epochs for batch in epoch if len(batch) == size)

    @property
    def compared(self) -> int:
        """The number of first steps whose losses are compared."""
        rule = self.experiment.optimizer
        rule = rule.rule if isinstance(rule, optim.Grouped) else rule
        return COMPARED_WITH_MUON if isinstance(rule, optim.Muon) else COMPARED

    @cached_property
    def initial_state(self) -> training.TrainState:
        """The state before the first step, as NumPy arrays."""
        return tree.map(lambda x: x.numpy(), self.experiment.initial_state("cpu"))

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The parameters before the first step, by dotted path: "0.weight"."""
        return by_path(self.initial_state.params)

    @cached_property
    def statistics(self) -> dict[str, np.ndarray]:
        """The running statistics before the first step, by dotted path: "1.running_mean"."""
        return by_path(self.initial_state.statistics)

    @cached_property
    def normalization(self) -> Sequence[np.ndarray]:
        """Scale and shift (C, 1, 1) that normalise pixels, in the network's dtype: pixel * scale + shift."""
        return self.experiment.network.normalization()


def by_path(arrays: Any) -> dict[str, np.ndarray]:
    """Copies of the arrays of a tree by dotted path."""
    return {path: np.array(x) for path, x in zip(tree.paths(arrays), tree.leaves(arrays), strict=True)}


def runner(name: str, job: Job, work: Work = "steps") -> Runner:
    """The training of a system: of one network, or of many if `work` is "members" and `job` a `MembersJob`.

    Raises:
        Unsupported: it has no counterpart of something in the job.
    """
    experiment, network = job.experiment, job.experiment.network
    parts = [layer for _, layer, _ in layers(network.model, network.input_shape)]
    drops = any(x.p if isinstance(x, nn.Dropout) else getattr(x, "dropout", 0) for x in parts)
    separate = experiment.config.data.options.documents == "separate"
    for found, reason in (
        (drops, "dropout draws other random numbers (set it to 0 to compare)"),
        (experiment.average is not None, "no counterpart of an average of the weights (training.average)"),
        (experiment.data.targets, "no counterpart of numbers to predict (data.target)"),
        (separate, "no counterpart of separate documents (data.documents)"),
    ):
        if found and name != ADTRAIN:
            raise Unsupported(reason)
    ready: Runner = made(name, work, job)
    return ready


@dataclass(frozen=True)
class MembersJob(Job):
    """The input of every system. All arrays have a leading axis of members.

    Attributes:
        group: the members; `experiment` is that of the first one.
    """

    group: Group

    @property
    def count(self) -> int:
        return len(self.group.members)

    @cached_property
    def orders(self) -> np.ndarray:
        """Indices of batches: int64 (CHUNKS, CHUNK, members, batch)."""
        size, steps = self.experiment.full_batch, CHUNKS * CHUNK[self.device]
        found = np.empty((steps, self.count, size), np.int64)
        for i, member in enumerate(self.group.members):
            found[:, i] = list(islice(self._batches(self.group.data_seed(member)), steps))
        return found.reshape(CHUNKS, CHUNK[self.device], self.count, size)

    @cached_property
    def initial_state(self) -> training.TrainState:
        states = [self.group.of_member(member).initial_state("cpu") for member in self.group.members]
        return tree.map(lambda *xs: np.stack([x.numpy() for x in xs]), *states)


def members_job(cfg: config.Config, device: str) -> MembersJob:
    """The members of a config with a section `sweep`, which are one group."""
    (group,) = groups_of(cfg, members_of(cfg))
    return MembersJob(group.experiment, device, group)


REPEATS = 10
"""Runs of an operation in one call."""

CHECKED_ITEMS = 4
"""Items (rows, images) of a result that are compared with float64, where items are independent."""


class OpRunner(NamedTuple):
    """A system's operation.

    Attributes:
        run: makes the given number of calls of REPEATS runs, waits for the device, returns one element of the result.
        results: the arrays that one run returns: the output, or the gradients of the floating-point inputs. In phase
            "backward" it takes another cotangent as an optional argument.
    """

    run: Callable[[int], float]
    results: Callable[..., list[np.ndarray]]


def operation_error(case: OpCase, phase: str, runner: OpRunner) -> float:
    """The relative error of a result: norm of its difference from the NumPy reference in float64, over the norm of the
    reference. Of several gradients, the largest error.

    Where the items of a batch are independent, only the first CHECKED_ITEMS are checked. The cotangent is then 0 for
    all other items, so that the gradient of a weight is still checked in every element.
    """
    count = CHECKED_ITEMS if case.by_item else None
    inputs = [x[:count] if i in case.by_item else x for i, x in enumerate(case.arrays())]
    exact = [array(x.astype(np.float64) if x.dtype.kind == "f" else x) for x in inputs]
    if phase == "forward":
        expected = [case.of(ops)(*exact).numpy()]
        results = [x[:count] if count else x for x in runner.results()]
    else:
        cotangent = case.cotangent()
        if count:
            cotangent[count:] = 0
        _, pullback = vjp(lambda *floats: case.of(ops)(*case.with_indices(exact, floats)), *case.floats(exact))
        exact_cotangent = (cotangent[:count] if count else cotangent).astype(np.float64)
        expected = [x.numpy() for x in pullback(array(exact_cotangent))]
        results = runner.results(cotangent)
        results = [x[: len(y)] if x.shape != y.shape else x for x, y in zip(results, expected, strict=True)]
    return max(map(_relative_error, results, expected))


def _relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact)) / max(float(np.linalg.norm(exact)), 1e-30)
