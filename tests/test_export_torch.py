"""PyTorch computes the same outputs with the exported weights in the same network."""

from __future__ import annotations

import json
from functools import reduce
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_networks import fitting, images, matrices, networks, samples, with_arrays
from safetensors import safe_open
from torch_fields import torch_field
from torch_recurrent import torch_recurrent
from torch_tokens import torch_tokens

from adtrain import nn
from adtrain.core.array import array
from adtrain.export import architectures
from adtrain.training import TrainedModel

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.needs_torch
safetensors_torch = pytest.importorskip("safetensors.torch")

SHAPES = {
    nn.Linear: samples,
    nn.Conv1d: matrices,
    nn.Conv2d: images,
    nn.ConvTranspose2d: images,
    nn.BatchNorm1d: st.tuples(st.integers(1, 6), st.integers(1, 6)),
    nn.BatchNorm2d: images,
    nn.InstanceNorm2d: images,
    nn.LayerNorm: samples,
    nn.RMSNorm: samples,
    nn.PReLU: samples,
    nn.GroupNorm: samples,
    nn.Sine: samples,
    nn.RNN: matrices,
    nn.LSTM: matrices,
    nn.GRU: matrices,
    nn.MultiheadAttention: matrices,
    nn.TransformerEncoderLayer: matrices,
    nn.DecoderLayer: matrices,
    nn.ClassToken: matrices,
    nn.PositionalEmbedding: matrices,
}


class Residual(torch.nn.Module):
    def __init__(self, body: Any, shortcut: Any) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Any) -> Any:
        return self.body(x) + self.shortcut(x)


class Concat(torch.nn.ModuleList):
    def forward(self, x: Any) -> Any:
        return torch.cat([branch(x) for branch in self], 1)


class Select(torch.nn.Module):
    def __init__(self, indices: tuple[int, ...]) -> None:
        super().__init__()
        self.indices = list(indices)

    def forward(self, x: Any) -> Any:
        return x[:, self.indices]


def sequential(layers: list[Any]) -> Any:
    return torch.nn.Sequential(*layers)


class Add(torch.nn.ModuleList):
    def forward(self, x: Any) -> Any:
        return sum(branch(x) for branch in self)


class Multiply(torch.nn.ModuleList):
    def forward(self, x: Any) -> Any:
        return reduce(mul, (branch(x) for branch in self))


class Scale(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Any) -> Any:
        return self.factor * x


def torch_module(module: nn.Module, shape: nn.Shape) -> Any:
    """The same module in PyTorch, with the size of the input filled in."""
    if (found := torch_tokens(module, shape) or torch_field(module, shape)) is not None:
        return found
    if isinstance(module, nn.Container):
        children = {name: torch_module(child, inner) for name, child, inner in module.children(shape)}
        if isinstance(module, nn.Residual):
            return Residual(children["body"], children.get("shortcut", torch.nn.Identity()))
        make = {nn.Sequential: sequential, nn.Concat: Concat, nn.Add: Add, nn.Multiply: Multiply}[type(module)]
        return make(list(children.values()))
    if isinstance(module, nn.Reshape):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Unflatten(1, module.shape))
    if isinstance(module, nn.Select):
        return Select(module.indices)
    if isinstance(module, nn.Scale):
        return Scale(module.factor)
    if isinstance(module, nn.PReLU):
        return torch.nn.PReLU(module.num_parameters)
    if isinstance(module, nn.InstanceNorm2d):
        assume(shape[1] * shape[2] > 1)  # PyTorch refuses one pixel
    inferred = {
        "in_features": shape[-1],
        "in_channels": shape[0],
        "num_features": shape[0],
        "num_channels": shape[0],
        "normalized_shape": shape[-1],
        "input_size": shape[-1],
    }
    options: dict[str, Any] = {
        name: inferred.get(name) if x is None else x
        for name, x in vars(module).items()
        if name
        not in ("weight_init", "init_gain", "tied", "sync")  # PyTorch's batch norm of a whole batch has no shards
    }
    only_one = options["affine"] if options.get("affine") in ("weight", "bias") else None
    if isinstance(module, (nn.RNN, nn.LSTM, nn.GRU)):
        return torch_recurrent(type(module).__name__, **options)
    found = getattr(torch.nn, type(module).__name__)(**{**options, "affine": True} if only_one else options)
    if only_one:
        setattr(found, "bias" if only_one == "weight" else "weight", None)
    return found


def check(trained: TrainedModel, folder: Path) -> None:
    """Write the weights, load them with PyTorch, and compare the outputs of both networks."""
    path = folder / "weights.safetensors"
    path.write_bytes(architectures.encode_weights(trained))
    network = trained.network
    theirs = torch_module(network.model, network.input_shape).double().eval()
    state = safetensors_torch.load_file(path)
    theirs.load_state_dict(state, strict=True)
    counted = (name for name in theirs.state_dict() if name.endswith(".num_batches_tracked"))  # 0, which PyTorch adds
    shapes = {name: x.shape for name, x in theirs.state_dict().items()}
    assert {name: x.shape for name, x in state.items()} | dict.fromkeys(counted, torch.Size()) == shapes
    x = np.random.default_rng(0).normal(size=(3, *network.input_shape))
    y, _ = network.model.forward(trained.params, trained.statistics, array(x), nn.Mode(training=False))
    with torch.no_grad():
        expected = theirs(torch.tensor(x)).numpy()
    np.testing.assert_allclose(y.numpy(), expected, rtol=0, atol=1e-10 * max(1.0, np.abs(expected).max()))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch warns about speed
@pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.kind())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 99))
def test_pytorch_agrees_with_a_layers_exported_weights(
    tmp_path: Path, kind: type[nn.Module], data: st.DataObject, seed: int
) -> None:
    shape = data.draw(SHAPES[kind])
    layer = data.draw(fitting(kind, shape))
    assume(layer is not None)
    check(with_arrays(nn.Sequential(layer), shape, seed, precision="float64"), tmp_path)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 99))
def test_pytorch_agrees_with_a_networks_exported_weights(tmp_path: Path, data: st.DataObject, seed: int) -> None:
    shape = data.draw(samples)
    check(with_arrays(data.draw(networks(shape)), shape, seed, precision="float64"), tmp_path)


def test_every_layer_with_parameters_is_tested() -> None:
    assert {nn.Embedding, nn.HashGrid, *SHAPES} == {
        kind for kind in nn.LAYERS.values() if kind.parameter_shapes is not nn.Module.parameter_shapes
    }


def test_the_metadata_describe_the_normalisation(tmp_path: Path) -> None:
    trained = with_arrays(nn.Sequential(nn.Flatten(), nn.Linear(3)), (2, 5, 6))
    (tmp_path / "weights.safetensors").write_bytes(architectures.encode_weights(trained))
    with safe_open(tmp_path / "weights.safetensors", framework="numpy") as file:
        about = json.loads(file.metadata()["adtrain"])
    assert list(about) == ["version", "config", "classes", "scale", "mean", "std", "encoder", "targets"]
    batch = np.random.default_rng(0).integers(0, 256, (3, 2, 5, 6), dtype=np.uint8)
    mean, std = (np.array(about[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
    np.testing.assert_allclose(
        (batch / about["scale"] - mean) / std, trained.network.inputs(array(batch)).numpy(), rtol=1e-4
    )


def test_the_same_run_gives_the_same_bytes() -> None:
    model = nn.Sequential(nn.Linear(3), nn.BatchNorm1d())
    assert architectures.encode_weights(with_arrays(model, (5,))) == architectures.encode_weights(
        with_arrays(model, (5,))
    )
