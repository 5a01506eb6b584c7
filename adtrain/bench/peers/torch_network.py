"""Layers, losses and optimizers in PyTorch, as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adtrain import nn, optim
from adtrain.bench.peers.layers import Apply, Arrays, built, unsupported
from adtrain.config import Config
from adtrain.nn.fields import pair


def model(layers: nn.Module) -> Apply:
    """The model; see `layers.built`."""
    import torch

    return built(layers, _layer, lambda outputs: torch.cat(list(outputs), 1))


def _layer(layer: nn.Module, path: str) -> Apply:
    import torch

    F = torch.nn.functional
    weight, bias = f"{path}weight", f"{path}bias"
    match layer:
        case nn.Linear():
            return lambda a, x: F.linear(x, a[weight], a.get(bias))
        case nn.Embedding():
            return lambda a, x: F.embedding(x.long(), a[weight])
        case nn.Conv1d():
            return lambda a, x: F.conv1d(
                x, a[weight], a.get(bias), layer.stride, layer.padding, layer.dilation, layer.groups
            )
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
        case nn.AdaptiveMaxPool2d():
            return lambda a, x: F.adaptive_max_pool2d(x, pair(layer.output_size))
        case nn.Upsample():
            return lambda a, x: F.interpolate(x, scale_factor=pair(layer.scale_factor), mode=layer.mode)
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            mean, var = f"{path}running_mean", f"{path}running_var"
            return lambda a, x: F.batch_norm(
                x, a[mean], a[var], a.get(weight), a.get(bias), True, layer.momentum, layer.eps
            )
        case nn.RMSNorm():
            given = layer.normalized_shape
            last = len(given) if isinstance(given, tuple) else 1
            return lambda a, x: F.rms_norm(x, x.shape[-last:], a.get(weight), layer.eps)
        case nn.LayerNorm():
            sizes = layer.normalized_shape
            axes = len(sizes) if isinstance(sizes, tuple) else 1
            return lambda a, x: F.layer_norm(x, x.shape[-axes:], a.get(weight), a.get(bias), layer.eps)
        case nn.GroupNorm():
            return lambda a, x: F.group_norm(x, layer.num_groups, a.get(weight), a.get(bias), layer.eps)
        case nn.InstanceNorm2d():
            return lambda a, x: F.instance_norm(x, weight=a.get(weight), bias=a.get(bias), eps=layer.eps)
        case nn.PReLU():
            return lambda a, x: F.prelu(x, a[weight])
        case nn.Scale():
            return lambda a, x: layer.factor * x
        case nn.Flatten():
            return lambda a, x: x.flatten(1)
        case nn.Reshape():
            return lambda a, x: x.reshape(len(x), *layer.shape)
        case nn.Select():
            return lambda a, x: x[:, layer.indices]
        case nn.Dropout(p=0):
            return lambda a, x: x
        case nn.MultiheadAttention(dropout=0, is_plain=True):
            return lambda a, x: _attention(layer, path, a, x)
        case nn.ClassToken():
            return lambda a, x: torch.cat([a[weight].expand(len(x), 1, -1), x], 1)
        case nn.PositionalEmbedding("learned"):
            return lambda a, x: x + a[weight]
        case nn.Patches():
            return lambda a, x: _patches(layer, x)
        case nn.Mean():
            return lambda a, x: x.mean(layer.dim)
        case nn.RNN(dropout=0) | nn.LSTM(dropout=0) | nn.GRU(dropout=0):
            return lambda a, x: _recurrent(layer, path, a, x)
    f = {
        "relu": torch.relu,
        "leaky_relu": lambda x: F.leaky_relu(x, layer.negative_slope),  # type: ignore[attr-defined]
        "elu": lambda x: F.elu(x, layer.alpha),  # type: ignore[attr-defined]
        "gelu": lambda x: F.gelu(x, approximate=layer.approximate),  # type: ignore[attr-defined]
        "silu": F.silu,
        "hardswish": F.hardswish,
        "squared_relu": lambda x: torch.relu(x).square(),
        "soft_cap": lambda x: torch.tanh(x / layer.cap) * layer.cap,  # type: ignore[attr-defined]
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "softplus": F.softplus,
        "softmax": lambda x: torch.softmax(x, layer.dim),  # type: ignore[attr-defined]
        "log_softmax": lambda x: torch.log_softmax(x, layer.dim),  # type: ignore[attr-defined]
    }.get(layer.kind())
    if f is None:
        unsupported("PyTorch", layer.kind())
    return lambda a, x: f(x)


def _attention(layer: nn.MultiheadAttention, path: str, arrays: Arrays, x: Any) -> Any:
    import torch

    F = torch.nn.functional
    projected = F.linear(x, arrays[f"{path}in_proj_weight"], arrays.get(f"{path}in_proj_bias"))
    q, k, v = projected.unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=layer.causal)
    joined = heads.transpose(1, 2).flatten(2)
    return F.linear(joined, arrays[f"{path}out_proj.weight"], arrays.get(f"{path}out_proj.bias"))


def _patches(layer: nn.Patches, x: Any) -> Any:
    import torch

    size = pair(layer.patch_size)
    return torch.nn.functional.unfold(x, size, stride=size).transpose(1, 2)


def _recurrent(layer: nn.RNN | nn.LSTM | nn.GRU, path: str, arrays: Arrays, x: Any) -> Any:
    import torch

    directions = 2 if layer.bidirectional else 1
    of_directions = [names for k in range(layer.num_layers) for names in layer.names(k)]
    weights = [arrays[path + name] for names in of_directions for name in names]
    first = x.new_zeros(len(of_directions), len(x), layer.hidden_size)
    options = weights, layer.bias, layer.num_layers, 0.0, True, layer.bidirectional, True  # in training, batch first
    if isinstance(layer, nn.LSTM):
        steps, hidden, _ = torch.lstm(x, (first, first), *options)
    else:
        name = f"rnn_{layer.nonlinearity}" if isinstance(layer, nn.RNN) else "gru"
        steps, hidden = getattr(torch, name)(x, first, *options)
    return steps if layer.output == "all" else torch.cat(list(hidden[-directions:]), 1)


def loss(cfg: Config, one_hot: Any) -> Callable[[Any, Any], Any]:
    """The loss of outputs (..., C) and labels (...). `one_hot` is the identity matrix (C, C)."""
    import torch

    F = torch.nn.functional
    found: dict[str, Callable[..., Any]] = {
        "cross_entropy": F.cross_entropy,
        "nll": F.nll_loss,
        "mse": lambda outputs, labels: F.mse_loss(outputs, one_hot[labels]),
        "l1": lambda outputs, labels: F.l1_loss(outputs, one_hot[labels]),
        "huber": lambda outputs, labels, delta: F.huber_loss(outputs, one_hot[labels], delta=delta),
        "binary_cross_entropy_with_logits": lambda outputs, labels, **weights: F.binary_cross_entropy_with_logits(
            outputs, one_hot[labels], **weights
        ),
    }
    if cfg.loss.kind not in found:
        unsupported("PyTorch", f"the loss {cfg.loss.kind}")
    f = found[cfg.loss.kind]
    options = {
        name: one_hot.new_tensor(value) if isinstance(value, tuple) else value
        for name, value in cfg.loss.options().items()
    }
    return lambda outputs, labels: f(outputs.flatten(0, -2), labels.flatten(), **options)


def optimizer(cfg: optim.Optimizer, parameters: Sequence[Any], captured: bool) -> Any:
    """The same optimizer in PyTorch, fused where PyTorch has a fused one.

    Args:
        captured: whether its steps are captured in a CUDA graph.
    """
    import torch

    match cfg:
        case optim.AdamW() | optim.Adam():
            kind = torch.optim.AdamW if isinstance(cfg, optim.AdamW) else torch.optim.Adam
            options: Any = {"amsgrad": cfg.amsgrad, "fused": True, "capturable": captured}
            return kind(parameters, cfg.lr, cfg.betas, cfg.eps, cfg.weight_decay, **options)
        case optim.SGD():
            return torch.optim.SGD(parameters, cfg.lr, cfg.momentum, 0, cfg.weight_decay, cfg.nesterov, fused=True)
        case optim.RMSprop():
            return torch.optim.RMSprop(
                parameters,
                cfg.lr,
                cfg.alpha,
                cfg.eps,
                cfg.weight_decay,
                cfg.momentum,
                foreach=True,
                capturable=captured,
            )
    unsupported("PyTorch", cfg.kind())
