"""Documents that share a sequence: what the network computes for one does not depend on the others."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import command
from test_sampling import CLASSES, LAYERS, LENGTH, model, trained
from test_train_tokens import error_of, generated, write_tokens

import adtrain as ad
from adtrain import config, nn, ops, training
from adtrain.bench.peers import jobs
from adtrain.bench.peers.systems import Unsupported
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.precision import FULL
from adtrain.training import sampling
from adtrain.training.network import Network, starts_of
from adtrain.training.tasks import NextToken

pytestmark = pytest.mark.unfused

SEPARATOR = 0
DOCUMENTS = ([4, 5], [0, 3, 7, 1, 1], [0, 9])
"""Those of a sequence of nine tokens; the first one began before."""


def network(layers: nn.Sequential, separator: int | None = SEPARATOR) -> Network:
    task = NextToken(False, ops.softmax, LENGTH, lengths=(1,) * CLASSES, separator=separator)
    return Network(layers, (LENGTH,), np.dtype(np.float64), FULL, (0.0,), (1.0,), 1.0, ops.cross_entropy, task)


def derivatives(net: Network, params: Any, tokens: list[int], positions: slice) -> list[Value]:
    """The outputs at some positions, the gradient of a function of them by all parameters, and that of the gradient."""

    def loss(params: Any) -> Value:
        inputs = array(np.array([tokens], np.float64))
        outputs, _ = net.run(params, {}, inputs, nn.Mode(training=False))
        return ops.sum(ops.sin(outputs[0, positions]))

    def of_gradient(params: Any) -> Value:
        return sum((ops.sum(ops.square(x)) for x in tree.leaves(ad.grad(loss)(params))), start=array(np.float64(0)))

    outputs, _ = net.run(params, {}, array(np.array([tokens], np.float64)), nn.Mode(training=False))
    return [outputs[0, positions], *tree.leaves(ad.grad(loss)(params)), *tree.leaves(ad.grad(of_gradient)(params))]


@pytest.mark.parametrize("options", LAYERS[1:], ids=str)
def test_packed_documents_equal_separate_ones(options: dict[str, Any]) -> None:
    layers = model(**options)
    params, _ = layers.init((LENGTH,), 0, np.float64)
    tokens, begin = [token for document in DOCUMENTS for token in document], 0
    for document in DOCUMENTS:
        end = begin + len(document)
        packed = derivatives(network(layers), params, tokens, slice(begin, end))
        alone = document + [SEPARATOR] * (LENGTH - len(document))
        separate = derivatives(network(layers, None), params, alone, slice(len(document)))
        for mine, theirs in zip(packed, separate, strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-11)
        begin = end


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_a_document_begins_at_the_last_separator(length: int) -> None:
    begins = np.random.default_rng(0).random((20, length)) < 0.3
    expected = np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1)
    np.testing.assert_array_equal(starts_of(array(begins)).numpy(), expected)


@pytest.mark.parametrize(
    "options",
    [LAYERS[1], *(pytest.param(options, marks=pytest.mark.exhaustive) for options in LAYERS[2:])],
    ids=str,
)
def test_samples_of_separate_documents_are_those_without_caches(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = model(**options)

    def drawn() -> list[list[int]]:
        run = trained(layers)
        object.__setattr__(run, "network", network(layers))
        prompts = [np.array([SEPARATOR], np.int32), np.array([3, SEPARATOR, 5], np.int32)]
        found = sampling.sample(run, "cpu", prompts)
        return [next(found).tolist() for _ in range(3 * LENGTH)]

    with_caches = drawn()
    assert any(SEPARATOR in row for row in with_caches)
    monkeypatch.setattr(nn.Sequential, "by_token", lambda self, shape: False)
    assert with_caches == drawn()


def test_a_run_with_separate_documents_trains_and_writes(tmp_path: Path) -> None:
    path = write_tokens(tmp_path)
    layers = "[embedding: {num_embeddings: 270, embedding_dim: 8}, positional_embedding, decoder_layer: 2, linear: 270]"
    settings = ["--set", f"model.layers={layers}", "--set", "data.documents=separate", "--set", "training.steps=2"]
    command("train", path, "--output-dir", tmp_path / "run", *settings)
    assert command("sample", tmp_path / "run", "--length", "5", "--prompt", "the").stdout.startswith("the")
    experiment = training.prepare(config.load(path, [f"model.layers={layers}", "data.documents=separate"]))
    assert isinstance(experiment.network.task, NextToken)
    assert experiment.data.tokenizer is not None
    assert experiment.network.task.separator == experiment.data.tokenizer.end_of_text
    for kind in ("c", *(["onnx"] if find_spec("onnx") else [])):
        error = command("export", tmp_path / "run", tmp_path / f"net.{kind}", expect=2).stderr
        assert "layer 2.self_attn: multihead_attention: " in error
        assert "with a mask, documents or dropout" in error
    with pytest.raises(Unsupported, match="no counterpart of separate documents"):
        jobs.runner("numpy", jobs.Job(experiment, "cpu"))


GRU = "[embedding: {num_embeddings: 270, embedding_dim: 8}, gru: {hidden_size: 4, output: all}, linear: 270]"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            [f"model.layers={GRU}"],
            "found separate, but layer 1, gru, reads whole sequences; expected layers that compute each position by "
            "itself, and attention with causal",
        ),
        (["data.unit=character", "data.path=words.txt"], "found separate, expected joined unless data.unit is token"),
    ],
)
def test_documents_that_cannot_be_separate_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_tokens(tmp_path)
    (tmp_path / "words.txt").write_text(generated(300), encoding="utf-8")
    options = [word for setting in ("data.documents=separate", *settings) for word in ("--set", setting)]
    assert f"data.documents: {expected}" in error_of("train", path, "--dry-run", *options)
