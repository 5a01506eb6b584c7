"""Networks exported in int8: near to float32, by integers alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import c_programs
import numpy as np
import pytest
from composed_layers import Composed
from random_networks import some_images, with_arrays
from test_export_c import SANITIZE

from adtrain import nn, ops
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.export.c import network, source
from adtrain.export.c.code import blocks
from adtrain.export.c.source import compiled
from adtrain.training import TrainedModel

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not c_programs.has("gcc"), reason="gcc is not installed"),
]

BLOCK = [nn.Conv2d(4, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d()]
NETWORKS = {
    "linear": [nn.Flatten(), nn.Linear(12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(3)],
    "convolution": [
        nn.Conv2d(6, kernel_size=3, padding="same"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3),
    ],
    "residual": [
        nn.Conv2d(4, kernel_size=2), nn.BatchNorm2d(), nn.ReLU(), nn.Residual(nn.Sequential(*BLOCK, nn.ReLU(), *BLOCK)),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(3),
    ],
    "branches": [
        nn.Concat(nn.Conv2d(3, kernel_size=1, groups=1), nn.Sequential(nn.Conv2d(2, kernel_size=1), nn.GELU())),
        nn.Add(nn.Tanh(), nn.Sigmoid(), nn.LeakyReLU()), nn.Select((4, 0)), nn.AvgPool2d(2, padding=1),
        nn.BatchNorm2d(), nn.Flatten(), nn.Linear(6), nn.SiLU(), nn.Linear(3), nn.ELU(),
    ],
    "composed": [
        nn.Linear(6), Composed(lambda x: x * ops.sigmoid(1.5 * x) + ops.abs(x), (4, 6)), nn.Flatten(), nn.Linear(3),
    ],
}  # fmt: skip
SHAPES = {"composed": (4, 5)}


def probabilities(trained: TrainedModel, batch: np.ndarray) -> np.ndarray:
    outputs, _ = trained.network.outputs(trained.params, trained.statistics, array(batch), nn.Mode(training=False))
    found: np.ndarray = trained.network.task.predictions(outputs).numpy()
    return found


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_probabilities_are_near_to_those_in_float32(name: str, seed: int) -> None:
    trained = with_arrays(nn.Sequential(*NETWORKS[name]), SHAPES.get(name, (2, 6, 7)), seed)
    batch, path = some_images(trained, 200, seed), Path("net.c")
    files = source.generate(trained, path, calibration=batch[:100])
    with compiled(files, path, network.interface(trained, int8=True)) as program:
        found, classes = program.predict(batch)
    expected = probabilities(trained, batch)
    # An error of 1/254 of the largest logit, some times over.
    assert np.abs(found - expected).mean() < 0.02
    np.testing.assert_array_equal(classes, found.argmax(axis=1))
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=3e-4)


def test_weights_are_a_quarter_of_those_in_float32() -> None:
    trained, path = with_arrays(nn.Sequential(nn.Linear(300), nn.ReLU(), nn.Linear(3)), (400,)), Path("net.c")
    files = source.generate(trained, path, calibration=some_images(trained, 2))
    assert files.constants < 0.28 * source.generate(trained, path).constants


def test_its_text_has_no_floating_point_and_touches_its_own_memory_only(tmp_path: Path) -> None:
    trained = with_arrays(nn.Sequential(*NETWORKS["residual"]), (2, 6, 7))
    files = source.generate(trained, tmp_path / "net.c", calibration=some_images(trained, 20))
    code = re.sub(r"/\*.*?\*/", "", files.source.split("#ifdef NET_MAIN")[0], flags=re.DOTALL)
    assert not re.search(r"\b(float|double)\b|\d\.\d|math\.h", code)
    (tmp_path / "net.c").write_text(files.source)
    (tmp_path / "net.h").write_text(files.header)
    channels = with_arrays(nn.Sequential(*NETWORKS["linear"]), (1, 6, 7))
    files = source.generate(channels, tmp_path / "net.c", calibration=some_images(channels, 20))
    (tmp_path / "net.c").write_text(files.source)
    (tmp_path / "net.h").write_text(files.header)
    (tmp_path / "image.pgm").write_bytes(b"P5 7 6 255\n" + some_images(channels, 1).tobytes())
    c_programs.compile_c(["gcc"], tmp_path, *SANITIZE, "-DNET_MAIN", "net.c", "-o", "program")
    done = subprocess.run(["./program", "image.pgm"], cwd=tmp_path, capture_output=True, text=True, check=True)
    row = probabilities(channels, some_images(channels, 1))[0]
    name, shown = done.stdout.split()[1:]
    assert name == ("one", "two", "2")[row.argmax()]
    assert abs(float(shown) - row.max()) < 0.05


def test_no_function_of_int8_computes_with_floats() -> None:
    for name, block in blocks("layers_int8.c").items():
        assert not re.search(r"\b(float|double)\b", block.text), name


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(), nn.Softmax(), nn.MultiheadAttention(1), nn.ClassToken()], ids=lambda x: x.kind()
)
def test_a_layer_without_an_int8_version_is_refused_by_name(layer: nn.Module) -> None:
    trained = with_arrays(nn.Sequential(nn.Tanh(), nn.Concat(layer), nn.Flatten(), nn.Linear(3)), (2, 4))
    with pytest.raises(AdtrainError, match=rf"layer 1\.0: {layer.kind()} has no int8 version"):
        source.generate(trained, Path("net.c"), calibration=some_images(trained, 4))


def test_data_of_floats_and_other_losses_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3))
    floats, sigmoid = with_arrays(model, (5,), scale=1), with_arrays(model, (5,), loss="mse")
    with pytest.raises(AdtrainError, match="int8 takes images of bytes"):
        source.generate(floats, Path("net.c"), calibration=some_images(floats, 4))
    with pytest.raises(AdtrainError, match="int8 gives classes with the probabilities of a softmax"):
        source.generate(sigmoid, Path("net.c"), calibration=some_images(sigmoid, 4))
