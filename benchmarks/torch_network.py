"""A config's network and optimizer in PyTorch, with the weights that it starts from here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import numpy as np
import torch

from adtrain import nn, optim, training
from adtrain.core import tree


def torch_model(experiment: training.Experiment) -> Any:
    """The network as a torch.nn.Sequential on the CPU."""
    model = torch.nn.Sequential(*(torch_layer(layer, shape) for layer, shape in with_shapes(experiment.network)))
    start = experiment.initial_state("cpu").params
    weights = zip(tree.paths(start), tree.leaves(start), strict=True)
    model.load_state_dict({name: torch.tensor(np.array(x.numpy())) for name, x in weights})
    return model


def with_shapes(network: Any) -> Iterator[tuple[nn.Module, nn.Shape]]:
    """Each layer with the shape of its input."""
    shape = network.input_shape
    for layer in network.model.layers:
        yield layer, shape
        shape = layer.output_shape(shape)


def torch_layer(layer: nn.Module, shape: nn.Shape) -> Any:
    """The same layer in PyTorch, which wants to be told the size of its input."""
    match layer:
        case nn.Linear():
            return torch.nn.Linear(shape[-1], layer.out_features, layer.bias)
        case nn.Conv2d():
            options = (layer.stride, layer.padding, layer.dilation, layer.groups, layer.bias)
            return torch.nn.Conv2d(shape[0], layer.out_channels, layer.kernel_size, *options)
        case nn.MaxPool2d():
            return torch.nn.MaxPool2d(layer.kernel_size, layer.stride, layer.padding)
        case nn.Relu():
            return torch.nn.ReLU()
        case nn.Flatten():
            return torch.nn.Flatten()
    raise click.UsageError(f"{layer.kind()} has no counterpart in this benchmark")


def torch_optimizer(optimizer: optim.Optimizer, parameters: Any, **options: Any) -> Any:
    """The same optimizer in PyTorch; `options` are those that change its speed only."""
    match optimizer:
        case optim.Adam():
            values = (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay)
            return torch.optim.Adam(parameters, *values, **options)
        case optim.SGD():
            return torch.optim.SGD(parameters, optimizer.lr, optimizer.momentum, 0, optimizer.weight_decay, **options)
    raise click.UsageError(f"{type(optimizer).__name__} has no counterpart in this benchmark")
