"""onnxruntime computes the same outputs with an exported network as the network itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from composed_layers import OPERATIONS, Composed, Gated
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_networks import LAYERS, fitting, images, matrices, networks, samples, some_images, with_arrays

import adtrain
from adtrain import config, nn, ops
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.data import Split
from adtrain.export import onnx_model
from adtrain.export.onnx_model import BATCHES
from adtrain.training import TrainedModel
from adtrain.training.preparation import outline

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
    found: list[np.ndarray] = onnx_model.session(content).run(None, inputs)
    return found


def packaged(name: str) -> TrainedModel:
    network = outline(config.load(name)).network
    return with_arrays(network.model, network.input_shape)


def check(
    trained: TrainedModel,
    seed: int = 0,
    count: int = 3,
    tolerance: float = 16 * EPS,
    batch: np.ndarray | None = None,
) -> None:
    """Compare outputs and probabilities; `tolerance` is relative to the largest output."""
    batch = some_images(trained, count, seed) if batch is None else batch
    outputs, _ = trained.network.outputs(trained.params, trained.statistics, array(batch), nn.Mode(training=False))
    logits, probabilities = run(onnx_model.encode(trained), {"images": batch})
    expected = outputs.numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(probabilities, trained.network.task.predictions(array(logits)), rtol=16 * EPS, atol=EPS)


def test_random_networks_cover_every_layer_that_all_exports_take() -> None:
    assert {*LAYERS, nn.Embedding, nn.HashGrid} == set(nn.LAYERS.values())


def test_a_hash_grid_is_refused_in_one_line() -> None:
    with pytest.raises(AdtrainError, match=r"^layer 0: hash_grid: ONNX export has no hash_grid; "):
        onnx_model.encode(with_arrays(nn.Sequential(nn.HashGrid(2, base_resolution=2, finest_resolution=4)), (2,)))


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.kind())
@settings(max_examples=8)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_layer_of_any_options_is_exported(kind: type[nn.Module], data: st.DataObject, seed: int) -> None:
    shape = data.draw(SHAPES.get(kind, samples))
    layer = data.draw(fitting(kind, shape))
    assume(layer is not None)
    check(with_arrays(nn.Sequential(layer), shape, seed), seed)


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_network_of_any_layers_is_exported(data: st.DataObject, seed: int) -> None:
    shape = data.draw(samples)
    # Normalising nearly equal numbers amplifies rounding errors.
    check(with_arrays(data.draw(networks(shape)), shape, seed), seed, tolerance=1e-4)


def test_an_embedding_is_exported() -> None:
    trained = with_arrays(nn.Sequential(nn.Embedding(7, embedding_dim=4), nn.Flatten(), nn.Linear(2)), (3,), scale=1)
    trained = replace(trained, network=replace(trained.network, mean=(0.0,), std=(1.0,)))
    check(trained, batch=np.array([[1, 0, 6], [6, 6, 2]], np.float32).reshape(2, 1, 1, 3))


@pytest.mark.parametrize("loss", sorted(nn.LOSSES))
def test_probabilities_match_the_loss(loss: str) -> None:
    check(with_arrays(SMALL, (5,), loss=loss), count=50)


def test_float32_data_are_not_rescaled() -> None:
    trained = with_arrays(SMALL, (5,), scale=1)
    check(trained, count=50)
    assert onnx_model.session(onnx_model.encode(trained)).get_inputs()[0].type == "tensor(float)"


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
    session = onnx_model.session(onnx_model.encode(trained))
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
    monkeypatch.setattr(onnx_model, "MAX_BYTES", 100)
    with pytest.raises(AdtrainError, match=r"the weights are \d+ bytes, an ONNX file holds at most 100"):
        onnx_model.encode(with_arrays(SMALL, (5,)))


def test_weights_that_overflowed_are_refused() -> None:
    trained = with_arrays(SMALL, (5,))
    trained.params["0"]["bias"] = array(np.full_like(trained.params["0"]["bias"].numpy(), np.nan))
    with pytest.raises(AdtrainError, match="weights are NaN or infinite"):
        onnx_model.encode(trained)


def test_a_comparison_counts_images_with_different_predictions() -> None:
    trained = with_arrays(nn.Sequential(nn.Linear(2)), (4,))
    examples = Split(some_images(trained, 300), np.zeros(300, np.int64))
    same = onnx_model.compare(onnx_model.encode(trained), trained, examples)
    assert (same.images, same.different) == (300, 0)
    assert 0 <= same.outputs["logits"] < 1e-5
    assert 0 <= same.outputs["probabilities"] < 1e-6
    swapped = replace(trained, params=tree.map(lambda x: array(x.numpy()[::-1]), trained.params))
    other = onnx_model.compare(onnx_model.encode(trained), swapped, examples)
    assert other.different == 300
    assert other.outputs["logits"] > 0.1


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_layer_composed_of_operations_is_exported(name: str) -> None:
    trained = with_arrays(nn.Sequential(Composed(*OPERATIONS[name])), (4, 6), loss="mse", scale=1)
    check(trained, tolerance=64 * EPS, count=2)


def test_a_composed_layer_with_weights_is_exported_with_their_names() -> None:
    trained = with_arrays(nn.Sequential(Gated(3), nn.Flatten(), nn.Linear(2)), (4, 6))
    check(trained)
    names = {x.name for x in onnx.load_from_string(onnx_model.encode(trained)).graph.initializer}
    assert {"0.weight", "0.gate.weight", "0.gate.bias", "2.weight", "2.bias"} <= names


INPUT = {"Cast": 1, "Mul": 1, "Add": 1, "Reshape": 1}
CLASSES = {"Softmax": 1, "Identity": 2}
PACKAGED = {
    "mlp": {"Gemm": 3, "Relu": 2},
    "lenet5": {"Conv": 2, "MaxPool": 2, "Gemm": 3, "Relu": 4},
    "cnn": {"Conv": 2, "MaxPool": 1, "Gemm": 2, "Relu": 3},
    "resnet": {
        "Conv": 6,
        "BatchNormalization": 6,
        "Relu": 5,
        "Add": 2,
        "GlobalAveragePool": 1,
        "Gemm": 1,
    },
    "lstm": {"Transpose": 1, "LSTM": 1, "Squeeze": 1, "Gemm": 1},
}


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_network_has_one_node_for_each_layer(name: str) -> None:
    trained = packaged(name)
    check(trained, tolerance=1e-4)
    nodes = onnx.load_from_string(onnx_model.encode(trained)).graph.node
    assert Counter(x.op_type for x in nodes) == Counter(INPUT) + Counter(CLASSES) + Counter(PACKAGED[name])


def test_a_packaged_transformer_is_exported_with_its_layers_as_names() -> None:
    trained = packaged("vit")
    check(trained, tolerance=1e-4)
    nodes = onnx.load_from_string(onnx_model.encode(trained)).graph.node
    counts = Counter(x.op_type for x in nodes)
    assert [counts[op] for op in ("LayerNormalization", "Softmax", "Erf", "Expand")] == [9, 5, 4, 0]
    assert {"3.norm1/LayerNormalization", "3.self_attn/Softmax", "3.linear1/MatMul"} <= {x.name for x in nodes}


def test_an_operation_without_a_node_is_refused_with_the_names_of_layer_and_operation() -> None:
    layer = Composed(lambda x: ops.arctan2(x, x), (5,))
    message = r"layer 1\.body: composed: ONNX export has no arctan2; FILE\.safetensors holds the weights"
    with pytest.raises(AdtrainError, match=message):
        onnx_model.encode(with_arrays(nn.Sequential(nn.Tanh(), nn.Residual(layer)), (5,)))


@pytest.mark.parametrize(
    "function",
    [lambda x: x * float(x.shape[0]), lambda x: x * x if x.shape[0] == BATCHES[0] else x + 1.0],
    ids=["a number", "an operation"],
)
def test_a_network_that_depends_on_the_number_of_images_is_refused(function: Callable[[Value], Value]) -> None:
    with pytest.raises(AdtrainError, match="computes otherwise for another number of images"):
        onnx_model.encode(with_arrays(nn.Sequential(Composed(function, (5,))), (5,)))
