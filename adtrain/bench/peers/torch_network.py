"""Layers, losses and optimizers in PyTorch, as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adtrain import nn, optim
from adtrain.bench.peers.network import Apply, built, lacks
from adtrain.config import Config
from adtrain.nn.fields import pair


def model(layers: nn.Module) -> Apply:
    """The model; see `network.built`."""
    import torch

    return built(layers, _layer, lambda outputs: torch.cat(list(outputs), 1))


def _layer(layer: nn.Module, path: str) -> Apply:
    import torch

    F = torch.nn.functional
    weight, bias = f"{path}weight", f"{path}bias"
    match layer:
        case nn.Linear():
            return lambda a, x: F.linear(x, a[weight], a.get(bias))
        case nn.Conv2d():
            options: Any = layer.stride, layer.padding, layer.dilation, layer.groups
            return lambda a, x: F.conv2d(x, a[weight], a.get(bias), *options)
        case nn.ConvTranspose2d():
            options = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
            return lambda a, x: F.conv_transpose2d(x, a[weight], a.get(bias), *options)
        case nn.MaxPool2d():
            return lambda a, x: F.max_pool2d(x, layer.kernel_size, layer.stride, layer.padding)
        case nn.AvgPool2d():
            return lambda a, x: F.avg_pool2d(x, layer.kernel_size, layer.stride, layer.padding)
        case nn.AdaptiveAvgPool2d():
            return lambda a, x: F.adaptive_avg_pool2d(x, pair(layer.output_size))
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            mean, var = f"{path}running_mean", f"{path}running_var"
            return lambda a, x: F.batch_norm(
                x, a[mean], a[var], a.get(weight), a.get(bias), True, layer.momentum, layer.eps
            )
        case nn.LayerNorm():
            sizes = layer.normalized_shape
            axes = len(sizes) if isinstance(sizes, tuple) else 1
            return lambda a, x: F.layer_norm(x, x.shape[-axes:], a.get(weight), a.get(bias), layer.eps)
        case nn.GroupNorm():
            return lambda a, x: F.group_norm(x, layer.num_groups, a.get(weight), a.get(bias), layer.eps)
        case nn.Flatten():
            return lambda a, x: x.flatten(1)
        case nn.Reshape():
            return lambda a, x: x.reshape(len(x), *layer.shape)
        case nn.Dropout(p=0):
            return lambda a, x: x
    f = _activation(layer)
    return lambda a, x: f(x)


def _activation(layer: nn.Module) -> Callable[[Any], Any]:
    import torch

    F = torch.nn.functional
    match layer:
        case nn.Relu():
            return torch.relu
        case nn.LeakyRelu():
            return lambda x: F.leaky_relu(x, layer.negative_slope)
        case nn.Elu():
            return lambda x: F.elu(x, layer.alpha)
        case nn.Gelu():
            return lambda x: F.gelu(x, approximate=layer.approximate)
        case nn.Silu():
            return F.silu
        case nn.Tanh():
            return torch.tanh
        case nn.Sigmoid():
            return torch.sigmoid
        case nn.Softplus():
            return F.softplus
        case nn.Softmax():
            return lambda x: torch.softmax(x, layer.dim)
        case nn.LogSoftmax():
            return lambda x: torch.log_softmax(x, layer.dim)
    lacks("PyTorch", layer.kind())


def loss(cfg: Config, one_hot: Any) -> Callable[[Any, Any], Any]:
    """The loss of outputs (N, C) and labels (N,); `one_hot` is the identity (C, C), whose rows some losses take."""
    import torch

    F = torch.nn.functional
    found: dict[str, Callable[..., Any]] = {
        "cross_entropy": F.cross_entropy,
        "nll": F.nll_loss,
        "mse": lambda outputs, labels: F.mse_loss(outputs, one_hot[labels]),
        "l1": lambda outputs, labels: F.l1_loss(outputs, one_hot[labels]),
        "huber": lambda outputs, labels, delta: F.huber_loss(outputs, one_hot[labels], delta=delta),
        "binary_cross_entropy_with_logits": lambda outputs, labels: F.binary_cross_entropy_with_logits(
            outputs, one_hot[labels]
        ),
    }
    f, options = found[cfg.loss.kind], cfg.loss.options()
    return lambda outputs, labels: f(outputs, labels, **options)


def optimizer(ours: optim.Optimizer, parameters: Sequence[Any], captured: bool) -> Any:
    """The same optimizer in PyTorch, in its fastest form: fused where there is one.

    Args:
        captured: whether its steps are to be part of a CUDA graph.
    """
    import torch

    match ours:
        case optim.AdamW() | optim.Adam():
            kind = torch.optim.AdamW if isinstance(ours, optim.AdamW) else torch.optim.Adam
            return kind(parameters, ours.lr, ours.betas, ours.eps, ours.weight_decay, fused=True, capturable=captured)
        case optim.SGD():
            return torch.optim.SGD(parameters, ours.lr, ours.momentum, 0, ours.weight_decay, ours.nesterov, fused=True)
        case optim.RMSprop():
            return torch.optim.RMSprop(
                parameters,
                ours.lr,
                ours.alpha,
                ours.eps,
                ours.weight_decay,
                ours.momentum,
                foreach=True,
                capturable=captured,
            )
    lacks("PyTorch", ours.kind())
