"""NumPy as a system: layers with derivatives written by hand, steps and operations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from adtrain import nn, training
from adtrain.backends.cpu import naive
from adtrain.bench.op_table import OpCase
from adtrain.bench.peers.jobs import (
    REPEATS,
    Arrays,
    Job,
    OpRunner,
    Runner,
    clipped,
    operations,
    start,
    unsupported,
    update,
)
from adtrain.nn.module import pair

Pull: TypeAlias = Callable[[Any], tuple[Any, Arrays]]
"""From the gradient of the output to that of the input, and those of the parameters by path."""

Forward: TypeAlias = Callable[[Arrays, Any], tuple[Any, Pull]]
"""(arrays, x (N, ...)) to the output (N, ...) and its `Pull`."""


class Kit(NamedTuple):
    """Implementations of matrix products, and of convolutions with their pullback; see `convolved`."""

    product: Callable[[Any, Any], Any]
    convolved: Callable[..., tuple[Any, Callable[[Any], tuple[Any, Any]]]]


def model(layers: nn.Module, kit: Kit) -> Forward:
    """The model, a sequence of layers.

    Raises:
        Unsupported: a layer has no counterpart here.
    """
    assert isinstance(layers, nn.Sequential)
    parts = [_layer(layer, f"{i}.", kit) for i, layer in enumerate(layers.layers)]

    def forward(arrays: Arrays, x: Any) -> tuple[Any, Pull]:
        pulls = []
        for part in parts:
            x, pull = part(arrays, x)
            pulls.append(pull)

        def back(ct: Any) -> tuple[Any, Arrays]:
            grads: Arrays = {}
            for pull in reversed(pulls):
                ct, found = pull(ct)
                grads |= found
            return ct, grads

        return x, back

    return forward


def _layer(layer: nn.Module, path: str, kit: Kit) -> Forward:
    """One layer; `path` is the prefix of the paths of its arrays."""
    match layer:
        case nn.Linear():
            return lambda arrays, x: _linear(kit, arrays, path, x)
        case nn.Conv2d(groups=1, dilation=1) if layer.padding != "same":
            return lambda arrays, x: _conv2d(layer, kit, arrays, path, x)
        case nn.MaxPool2d(padding=0) if layer.stride in (None, layer.kernel_size):
            return lambda arrays, x: _max_pool(pair(layer.kernel_size), x)
        case nn.ReLU():
            return lambda arrays, x: (np.maximum(x, 0), lambda ct: (ct * (x > 0), {}))
        case nn.Tanh():
            return lambda arrays, x: _by_output(np.tanh(x), lambda y: 1 - y * y)
        case nn.Sigmoid():
            return lambda arrays, x: _by_output(1 / (1 + np.exp(-x)), lambda y: y * (1 - y))
        case nn.Flatten():
            return lambda arrays, x: (x.reshape(len(x), -1), lambda ct: (ct.reshape(x.shape), {}))
    unsupported("plain NumPy", layer.kind())


def _by_output(y: Any, slope: Callable[[Any], Any]) -> tuple[Any, Pull]:
    return y, lambda ct: (ct * slope(y), {})


def _with_bias(arrays: Arrays, path: str, y: Any, pull_both: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, Pull]:
    """The product `y` (N, C, ...) of an input and a weight, plus the bias if the layer has one, with the pullback.

    `pull_both` is the pullback of the product: the cotangents of the input and of the weight.
    """
    bias, axes = arrays.get(f"{path}bias"), (0, *range(2, y.ndim))

    def pull(ct: Any) -> tuple[Any, Arrays]:
        by_x, by_weight = pull_both(ct)
        return by_x, {f"{path}weight": by_weight, **({} if bias is None else {f"{path}bias": ct.sum(axes)})}

    return (y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))), pull


def _linear(kit: Kit, arrays: Arrays, path: str, x: Any) -> tuple[Any, Pull]:
    weight = arrays[f"{path}weight"]
    pull_both = lambda ct: (kit.product(ct, weight), kit.product(ct.T, x))  # noqa: E731
    return _with_bias(arrays, path, kit.product(x, weight.T), pull_both)


def _conv2d(layer: nn.Conv2d, kit: Kit, arrays: Arrays, path: str, x: Any) -> tuple[Any, Pull]:
    padding: Any = layer.padding
    product = kit.convolved(x, arrays[f"{path}weight"], pair(layer.stride), pair(padding))
    return _with_bias(arrays, path, *product)


def convolved(
    x: Any, weight: Any, stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """The convolution of x (N, C, H, W) with weight (O, C, kh, kw) by a matrix product with the column matrix (im2col),
    and its pullback to (x, weight)."""
    (n, channels, height, width), (out, _, kh, kw), (sh, sw), (ph, pw) = x.shape, weight.shape, stride, padding
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    windows = sliding_window_view(padded, (kh, kw), (2, 3))[:, :, ::sh, ::sw]
    high, wide = windows.shape[2:4]
    columns = windows.transpose(0, 2, 3, 1, 4, 5).reshape(n * high * wide, -1)
    kernel = weight.reshape(out, -1)
    y = (columns @ kernel.T).reshape(n, high, wide, out).transpose(0, 3, 1, 2)

    def pull(ct: Any) -> tuple[Any, Any]:
        rows = ct.transpose(0, 2, 3, 1).reshape(-1, out)
        by_columns = (rows @ kernel).reshape(n, high, wide, channels, kh, kw).transpose(0, 3, 4, 5, 1, 2)
        by_padded = np.zeros_like(padded)
        for i in range(kh):
            for j in range(kw):
                by_padded[:, :, i : i + sh * high : sh, j : j + sw * wide : sw] += by_columns[:, :, i, j]
        return by_padded[:, :, ph : ph + height, pw : pw + width], (rows.T @ columns).reshape(weight.shape)

    return y, pull


def _max_pool(kernel: tuple[int, int], x: Any) -> tuple[Any, Pull]:
    kh, kw = kernel
    n, channels, height, width = x.shape[0], x.shape[1], x.shape[2] // kh, x.shape[3] // kw
    whole = x[:, :, : height * kh, : width * kw]
    blocks = whole.reshape(n, channels, height, kh, width, kw).transpose(0, 1, 2, 4, 3, 5)
    flat = blocks.reshape(n, channels, height, width, kh * kw)
    at = flat.argmax(-1)[..., None]

    def pull(ct: Any) -> tuple[Any, Arrays]:
        by_flat = np.zeros_like(flat)
        np.put_along_axis(by_flat, at, ct[..., None], -1)
        by_x = np.zeros_like(x)
        by_blocks = by_flat.reshape(blocks.shape).transpose(0, 1, 2, 4, 3, 5)
        by_x[:, :, : height * kh, : width * kw] = by_blocks.reshape(whole.shape)
        return by_x, {}

    return np.take_along_axis(flat, at, -1)[..., 0], pull


PLAIN = Kit(np.matmul, convolved)


def naive_product(a: Any, b: Any) -> Any:
    """a @ b in float32, by a naive loop. A transposed view is passed as its base with a flag, without a copy."""
    transposed = [x.flags.f_contiguous and not x.flags.c_contiguous for x in (a, b)]
    return naive.matmul(*(x.T if flag else x for x, flag in zip((a, b), transposed, strict=True)), *transposed)


def naive_convolved(
    x: Any, weight: Any, stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """As `convolved`, by a naive loop, without a column matrix."""
    sizes = naive.conv_sizes(x.shape, weight.shape, stride, padding)
    n, out, high, wide = sizes[0], sizes[4], *sizes[7:9]

    def pull(ct: Any) -> tuple[Any, Any]:
        by_x = naive.call("conv2d_input_grad", x.shape, ct, weight, *sizes)
        return by_x, naive.call("conv2d_weight_grad", weight.shape, x, ct, *sizes)

    return naive.call("conv2d", (n, out, high, wide), x, weight, *sizes), pull


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
    forward = model(network.model, kit)
    parameters = job.weights
    averages = start(np, parameters)
    images, labels = experiment.train.images, experiment.train.labels
    scale, shift = job.normalization

    def step(at: np.ndarray) -> float:
        nonlocal parameters, averages
        x = (images[at].astype(scale.dtype) * scale + shift).reshape(len(at), *network.input_shape)
        outputs, pull = forward(parameters, x)
        loss, ct = cross_entropy(outputs, labels[at])
        grads = clipped(np, cfg, pull(ct)[1])
        parameters, averages = update(np, optimizer, parameters, averages, grads)
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
