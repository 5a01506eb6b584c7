"""onnxruntime computes the same outputs with an exported network as the network itself."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_networks import LAYERS, fitting, images, matrices, networks, samples, with_arrays

import adtrain
from adtrain import config, nn
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.data import Split
from adtrain.export import onnx_check, onnx_graph, onnx_model
from adtrain.export.onnx_graph import Graph, LayerWriter, ValueType
from adtrain.export.onnx_layers import TRANSLATIONS, translate
from adtrain.training import TrainedModel

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.needs_onnx

IMAGES_ONLY = (
    nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.BatchNorm2d, nn.Patches,
)  # fmt: skip
TOKENS_ONLY = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.PositionalEmbedding)
SHAPES: dict[type[nn.Module], st.SearchStrategy[nn.Shape]] = {
    **dict.fromkeys(IMAGES_ONLY, images),
    **dict.fromkeys(TOKENS_ONLY, matrices),
    **dict.fromkeys((nn.RNN, nn.LSTM, nn.GRU), matrices),
    nn.BatchNorm1d: st.one_of(st.tuples(st.integers(1, 6)), matrices),
}
EPS = float(np.finfo(np.float32).eps)
SMALL = nn.Sequential(nn.Linear(4), nn.BatchNorm1d(), nn.ReLU(), nn.Linear(3))


def run(content: bytes, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    found: list[np.ndarray] = onnx_check.session(content).run(None, inputs)
    return found


def some_images(trained: TrainedModel, count: int, seed: int = 0) -> np.ndarray:
    rng, shape = np.random.default_rng(seed), (count, *trained.image_shape)
    if trained.network.scale == 1:
        return rng.normal(size=shape).astype(np.float32)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def check(trained: TrainedModel, seed: int = 0, count: int = 3, tolerance: float = 16 * EPS) -> None:
    """Compare outputs and probabilities; `tolerance` is relative to the largest output."""
    batch = some_images(trained, count, seed)
    outputs, _ = trained.network.outputs(trained.params, trained.statistics, array(batch), nn.Mode(training=False))
    logits, probabilities = run(onnx_model.encode(trained), {"images": batch})
    expected = outputs.numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(probabilities, trained.network.task.predictions(array(logits)), rtol=16 * EPS, atol=EPS)


def test_every_module_class_has_a_translation() -> None:
    assert set(TRANSLATIONS) == {*nn.LAYERS.values(), nn.Sequential, nn.Residual, nn.Concat, nn.Add}


def test_random_networks_cover_every_layer_except_embedding() -> None:
    assert {*LAYERS, nn.Embedding} == set(nn.LAYERS.values())


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.kind())
@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_layer_of_any_options_is_exported(kind: type[nn.Module], data: st.DataObject, seed: int) -> None:
    shape = data.draw(SHAPES.get(kind, samples))
    layer = data.draw(fitting(kind, shape))
    assume(layer is not None)
    check(with_arrays(nn.Sequential(layer), shape, seed), seed)


@settings(max_examples=100)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_network_of_any_layers_is_exported(data: st.DataObject, seed: int) -> None:
    shape = data.draw(samples)
    # Normalising nearly equal numbers amplifies rounding errors.
    check(with_arrays(data.draw(networks(shape)), shape, seed), seed, tolerance=1e-4)


def test_an_embedding_is_exported() -> None:
    weight = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    graph, indices = Graph({"weight": weight}), np.array([[1, 0, 6], [6, 6, 2]])
    graph.add("y", "Identity", translate(LayerWriter(graph), nn.Embedding(7, embedding_dim=4), "x", (3,)))
    content = graph.encode({"x": ValueType("int64", (3,))}, {"y": ValueType("float32", (3, 4))}, {})
    np.testing.assert_array_equal(run(content, {"x": indices})[0], weight[indices])


@pytest.mark.parametrize("loss", sorted(nn.LOSSES))
def test_probabilities_match_the_loss(loss: str) -> None:
    check(with_arrays(SMALL, (5,), loss=loss), count=50)


def test_float32_data_are_not_rescaled() -> None:
    trained = with_arrays(SMALL, (5,), scale=1)
    check(trained, count=50)
    assert onnx_check.session(onnx_model.encode(trained)).get_inputs()[0].type == "tensor(float)"


@pytest.mark.parametrize("count", [0, 1, 11])
def test_the_batch_may_be_of_any_size(count: int) -> None:
    layers = [
        nn.Conv2d(4, kernel_size=3),
        nn.GroupNorm(2),
        nn.Residual(nn.ReLU()),
        nn.Flatten(),
        nn.Reshape((2, -1)),
        nn.Linear(3),
    ]
    check(with_arrays(nn.Sequential(*layers), (2, 5, 6)), count=count)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float64", 16 * EPS), ("tf32", 2**-8), ("bfloat16", 2**-5)], ids=lambda x: str(x)
)
def test_a_network_of_any_precision_is_exported_in_float32(precision: str, tolerance: float) -> None:
    trained = with_arrays(SMALL, (5,), precision=precision)
    check(trained, tolerance=tolerance)
    stored = onnx.load_from_string(onnx_model.encode(trained)).graph.initializer
    assert {x.data_type for x in stored if x.name != "input/shape"} == {onnx.TensorProto.FLOAT}


def test_the_file_declares_inputs_outputs_and_metadata() -> None:
    trained = with_arrays(nn.Sequential(nn.Conv2d(4, kernel_size=3), nn.Flatten(), nn.Linear(3)), (2, 5, 6))
    session = onnx_check.session(onnx_model.encode(trained))
    assert [(x.name, x.type, x.shape) for x in session.get_inputs()] == [("images", "tensor(uint8)", ["N", 2, 5, 6])]
    assert [(x.name, x.type, x.shape) for x in session.get_outputs()] == [
        ("logits", "tensor(float)", ["N", 3]),
        ("probabilities", "tensor(float)", ["N", 3]),
    ]
    about = session.get_modelmeta()
    assert about.producer_name == "adtrain"
    assert json.loads(about.custom_metadata_map["classes"]) == ["one", "two"]
    assert about.custom_metadata_map["config"] == config.dump(trained.config)
    assert about.custom_metadata_map["adtrain_version"] == adtrain.__version__


def test_arrays_have_the_same_names_as_in_the_run() -> None:
    trained = with_arrays(nn.Sequential(nn.Linear(4), nn.Residual(nn.Sequential(nn.BatchNorm1d()))), (5,))
    names = {x.name for x in onnx.load_from_string(onnx_model.encode(trained)).graph.initializer}
    assert {*tree.paths(trained.params), *tree.paths(trained.statistics)} <= names


def test_the_same_network_gives_the_same_bytes() -> None:
    assert onnx_model.encode(with_arrays(SMALL, (5,))) == onnx_model.encode(with_arrays(SMALL, (5,)))


def test_weights_larger_than_an_onnx_file_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "MAX_BYTES", 100)
    with pytest.raises(AdtrainError, match=r"the weights are \d+ bytes, an ONNX file holds at most 100"):
        onnx_model.encode(with_arrays(SMALL, (5,)))


def test_a_comparison_counts_images_with_different_predictions() -> None:
    trained = with_arrays(nn.Sequential(nn.Linear(2)), (4,))
    examples = Split(some_images(trained, 300), np.zeros(300, np.int64))
    same = onnx_check.compare(onnx_model.encode(trained), trained, examples)
    assert (same.images, same.different) == (300, 0)
    assert 0 <= same.outputs["logits"] < 1e-5
    assert 0 <= same.outputs["probabilities"] < 1e-6
    swapped = replace(trained, params=tree.map(lambda x: array(x.numpy()[::-1]), trained.params))
    other = onnx_check.compare(onnx_model.encode(trained), swapped, examples)
    assert other.different == 300
    assert other.outputs["logits"] > 0.1
