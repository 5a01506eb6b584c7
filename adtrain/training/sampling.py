"""Text that a trained network writes: each character, byte or token is drawn, by its probability after those before."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np

from adtrain import nn, ops
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.data import text_file
from adtrain.data.tokenizer import pieces_in
from adtrain.passes import ALL
from adtrain.text import first_names
from adtrain.training.model_file import TrainedModel
from adtrain.training.tasks import NextClass

LogProbabilities: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""From the classes so far, integers (n,) with n >= 1, to log-probabilities of the next one, float64 (classes,)."""

MOST_NAMED = 8
"""The most characters that an error names."""


def next_class_of(trained: TrainedModel, device: str) -> LogProbabilities:
    """The network as a function of the text so far; only the last `length` classes count.

    A shorter text is followed by class 0. That changes nothing for a network whose outputs depend on earlier positions
    only. The function raises AdtrainError where an output is NaN or infinite.
    """
    network = trained.network
    assert isinstance(network.task, NextClass)
    length = network.task.length

    def logits_at(params: nn.Params, statistics: nn.State, inputs: Value, position: Value) -> Value:
        outputs, _ = network.outputs(params, statistics, inputs, nn.Mode(training=False))
        return ops.embedding(position, ops.reshape(outputs, outputs.shape[1:]))

    step = stage(logits_at, ALL)

    def log_probabilities(classes: np.ndarray) -> np.ndarray:
        last = classes[-length:]
        inputs = np.zeros((1, 1, 1, length), np.float32)
        inputs[..., : len(last)] = last
        position = array(np.int64(len(last) - 1), device=device)
        found = step(trained.params, trained.statistics, array(inputs, device=device), position).numpy()
        logits = found[: len(trained.classes)].astype(np.float64)
        if not np.isfinite(logits).all():
            raise AdtrainError("the model's predictions are NaN or infinite: its weights overflowed in training")
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    return log_probabilities


def sample(trained: TrainedModel, device: str, prompt: np.ndarray, temperature: float, seed: int) -> Iterator[int]:
    """Endless classes that follow those of the prompt, int32 (n,) with n >= 1; the same seed gives the same ones.

    Log-probabilities are divided by `temperature`, above 0: below 1 the probable classes become more probable.
    """
    log_probabilities, rng = next_class_of(trained, device), np.random.default_rng(seed)
    text = prompt
    assert isinstance(trained.network.task, NextClass)
    while True:
        found = log_probabilities(text)
        with np.errstate(over="ignore"):  # at a tiny temperature all but the most probable become -infinity
            sums = np.cumsum(np.exp((found - found.max()) / temperature))
        drawn = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
        yield drawn
        text = np.append(text, drawn)[-trained.network.task.length :]


def decoded(trained: TrainedModel, classes: Iterable[int]) -> Iterator[str]:
    """The text of the classes, a string at a time. Bytes that are not UTF-8 become U+FFFD."""
    if trained.tokenizer is not None:
        yield from trained.tokenizer.decode(classes)
        return
    if trained.config.data.options.unit != "byte":
        yield from (trained.classes[number] for number in classes)
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield from (decoder.decode(bytes([number])) for number in classes)
    yield decoder.decode(b"", final=True)


def prompt_classes(trained: TrainedModel, prompt: str) -> np.ndarray:
    """The classes of a prompt, int32 (n,). An empty one becomes a line feed, or the first class if that is unknown.

    For a network on tokens it becomes the end of another text, after which a text begins, if the tokenizer has that.
    Raises AdtrainError that names the characters that the training's text does not have.
    """
    if trained.tokenizer is not None:
        if not prompt and trained.tokenizer.end_of_text is not None:
            return np.array([trained.tokenizer.end_of_text], np.int32)
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise AdtrainError("found bytes in the prompt that are not UTF-8, expected text") from None
        return trained.tokenizer.encode(pieces_in(prompt or "\n"))
    if trained.config.data.options.unit == "byte":
        return np.frombuffer((prompt or "\n").encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)
    if not prompt:
        return np.array([trained.classes.index("\n") if "\n" in trained.classes else 0], np.int32)
    found, unknown = text_file.classes_of(prompt, trained.classes)
    if unknown:
        names = first_names(list(map(repr, unknown)), MOST_NAMED)
        raise AdtrainError(f"found {names} in the prompt, expected characters of the text that the run was trained on")
    return found
