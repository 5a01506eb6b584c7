"""Sampling from networks on sequences: one token at a time with caches, and how a class is drawn."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain import nn, ops
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.core.precision import FULL
from adtrain.nn import Mode
from adtrain.training import sampling
from adtrain.training.model_file import TrainedModel
from adtrain.training.network import Network
from adtrain.training.tasks import NextClass

pytestmark = pytest.mark.unfused

CLASSES, LENGTH = 11, 9
LAYERS: list[dict[str, Any]] = [
    {},
    {"rotary_base": 10_000.0},
    {"num_key_value_heads": 2, "rotary_base": 100.0, "qk_norm": True, "window": 3},
    {"num_key_value_heads": 1, "soft_cap": 5.0, "window": 4, "activation": "swiglu", "norm": "rms_norm"},
]


def model(encoding: str = "learned", **options: Any) -> nn.Sequential:
    layer = nn.DecoderLayer(4, **options)
    positions = nn.PositionalEmbedding(encoding)  # type: ignore[arg-type]
    return nn.Sequential(
        nn.Embedding(CLASSES, embedding_dim=16), positions, layer, layer, nn.LayerNorm(), nn.Linear(CLASSES)
    )


def trained(layers: nn.Sequential, seed: int = 0) -> TrainedModel:
    """A model with random weights whose classes differ in probability."""
    params, statistics = layers.init((LENGTH,), seed, np.float64)
    task = NextClass(one_hot=False, predictions=ops.softmax, length=LENGTH)
    net = Network(layers, (LENGTH,), np.dtype(np.float64), FULL, (0.0,), (1.0,), 1.0, ops.cross_entropy, task)
    return TrainedModel(None, net, params, statistics, tuple(map(str, range(CLASSES))), (1, 1, LENGTH))  # type: ignore[arg-type]


def drawn(layers: nn.Sequential, prompts: list[list[int]], count: int) -> np.ndarray:
    """(count, batch) classes."""
    starts = [np.array(prompt, np.int32) for prompt in prompts]
    return np.array(list(islice(sampling.sample(trained(layers), "cpu", starts), count)))


@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("encoding", ["learned", "sinusoidal"])
def test_a_token_after_the_other_has_the_outputs_of_the_whole_sequence(encoding: str, options: dict[str, Any]) -> None:
    layers = model(encoding, **options)
    params, state = layers.init((LENGTH,), 0, np.float64)
    classes = np.random.default_rng(0).integers(0, CLASSES, (2, LENGTH))
    whole = layers.forward(params, state, array(classes), Mode(training=False))[0].numpy()
    cache = layers.new_cache((LENGTH,), 2, np.dtype(np.float64))
    assert cache is not None
    _, filled = layers.forward(params, cache, array(classes), Mode(training=False))
    for i in range(LENGTH):
        mode = Mode(training=False, token=nn.Token(array(np.array([i, i])), LENGTH))
        found, cache = layers.forward(params, cache, array(classes[:, i : i + 1]), mode)
        np.testing.assert_allclose(found.numpy()[:, 0], whole[:, i], rtol=1e-10, atol=1e-12)
    for one, all_at_once in zip(tree.leaves(cache), tree.leaves(filled), strict=True):
        np.testing.assert_allclose(one.numpy(), all_at_once.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", LAYERS)
def test_samples_with_caches_are_those_without(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layers, prompts = model(**options), [[1], [2, 3, 4], [5] * (LENGTH + 3)]
    with_caches = drawn(layers, prompts, 3 * LENGTH)
    monkeypatch.setattr(nn.Sequential, "by_token", lambda self, shape: False)
    assert layers.new_cache((LENGTH,), 1, np.dtype(np.float64)) is None
    np.testing.assert_array_equal(with_caches, drawn(layers, prompts, 3 * LENGTH))
    assert len(np.unique(with_caches)) > CLASSES / 2


def test_what_follows_a_prompt_does_not_depend_on_those_after_it() -> None:
    together = drawn(model(), [[1, 2], [3]], 2 * LENGTH)
    np.testing.assert_array_equal(together[:, :1], drawn(model(), [[1, 2]], 2 * LENGTH))


@pytest.mark.parametrize(
    "layers",
    [
        nn.Sequential(nn.Embedding(CLASSES, embedding_dim=8), nn.GRU(8, output="all"), nn.Linear(CLASSES)),
        nn.Sequential(nn.Embedding(CLASSES, embedding_dim=8), nn.PReLU(LENGTH), nn.Linear(CLASSES)),
        nn.Sequential(nn.Embedding(CLASSES, embedding_dim=8), nn.DecoderLayer(2, causal=False)),
        nn.Sequential(nn.Embedding(CLASSES, embedding_dim=8), nn.LayerNorm((LENGTH, 8))),
        nn.Sequential(nn.Linear(LENGTH), nn.Embedding(CLASSES, embedding_dim=8)),
        nn.Sequential(nn.Embedding(CLASSES, embedding_dim=8), nn.Softmax(1)),
    ],
)
def test_a_layer_that_needs_the_whole_sequence_has_no_cache(layers: nn.Sequential) -> None:
    assert layers.new_cache((LENGTH,), 1, np.dtype(np.float64)) is None


def test_a_network_without_caches_writes_too() -> None:
    gru = nn.Sequential(nn.Embedding(CLASSES, embedding_dim=8), nn.GRU(8, output="all"), nn.Linear(CLASSES))
    assert drawn(gru, [[1], [2, 3]], 2 * LENGTH).shape == (2 * LENGTH, 2)


def test_weights_that_overflowed_are_an_error() -> None:
    broken = trained(model())
    broken.params["5"]["bias"] = array(np.full(CLASSES, np.nan))
    with pytest.raises(AdtrainError, match="NaN or infinite"):
        next(sampling.sample(broken, "cpu", [np.array([1], np.int32)]))


def chances(logits: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> np.ndarray:
    """The probabilities with which the classes are drawn, written down from their definition."""
    order = np.argsort(-logits, kind="stable")[:top_k]
    kept = np.exp(logits[order] / temperature)
    kept /= kept.sum()
    fewest = int(np.searchsorted(np.cumsum(kept), top_p)) + 1
    found = np.zeros(len(logits))
    found[order[:fewest]] = kept[:fewest] / kept[:fewest].sum()
    return found


@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 4, 50]),
    top_p=st.sampled_from([None, 0.05, 0.6, 1.0]),
)
def test_classes_are_drawn_with_their_probabilities(
    seed: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits, rows = np.random.default_rng(seed).normal(size=7) * 2, 2000
    all_rows = array(np.tile(logits, (rows, 1)))
    found = sampling.drawn(all_rows, ops.rng_state(seed), array(np.float64(temperature)), top_k, top_p).numpy()
    expected = chances(logits, temperature, top_k, 1.0 if top_p is None else top_p)
    often = np.bincount(found, minlength=7) / rows
    assert (often[expected == 0] == 0).all()
    np.testing.assert_allclose(often, expected, atol=6 * np.sqrt(0.25 / rows))
