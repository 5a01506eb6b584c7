"""Text that a trained network writes: each character, byte or token is drawn, by its probability after those before."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import ne
from typing import NamedTuple, TypeAlias

import numpy as np

from adtrain import nn, ops
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.data import text_file
from adtrain.data.tokenizer import pieces_in
from adtrain.passes import ALL
from adtrain.text import first_names
from adtrain.training.model_file import TrainedModel
from adtrain.training.network import starts_of
from adtrain.training.step import random_state
from adtrain.training.tasks import NextClass, NextToken

LogProbabilities: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""From the classes so far, integers (n,) with n >= 1, to log-probabilities of the next one, float64 (classes,)."""

MOST_NAMED = 8
"""The most characters that an error names."""
NOT_FINITE = "the model's predictions are NaN or infinite: its weights overflowed in training"
QUICK_SECONDS = 0.03
"""Steps that take less time in all are repeated twice as often before their classes are read."""


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
            raise AdtrainError(NOT_FINITE)
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    return log_probabilities


@dataclass(frozen=True)
class Drawing:
    """How a class is drawn from the logits of a network.

    Attributes:
        temperature: divides log-probabilities, above 0: below 1 the probable classes become more probable.
        top_k: only this number of classes, the most probable ones, are drawn.
        top_p: only the most probable classes are drawn: the fewest that have at least this probability together.
        seed: the same seed draws the same classes on the same device.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


class Writing(NamedTuple):
    """What a step of sampling changes.

    Attributes:
        text: the classes so far, int32 (batch, length + 1).
        counts: how many of them there are, int32 (batch,).
        step: the number of steps so far, int64 ().
        is_finite: whether all logits were finite, bool ().
        caches: what the layers keep of earlier tokens, see `nn.Module.new_cache`; {} without caches.
    """

    text: Value
    counts: Value
    step: Value
    is_finite: Value
    caches: nn.State


def sample(
    trained: TrainedModel, device: str, prompts: Sequence[np.ndarray], drawing: Drawing = Drawing()
) -> Iterator[np.ndarray]:
    """Endless classes, int32 (batch,), that follow those of each prompt, int32 (n,) with n >= 1.

    A class depends on the ones before it in a window of `length`: when the window is full, its last half remains. What
    follows a prompt depends neither on the other prompts nor on whether the layers have caches, up to rounding.

    Raises AdtrainError where an output of the network is NaN or infinite.
    """
    steps = _Steps(trained.merged(), device, len(prompts), drawing)
    length, rows, repeats, before = steps.length, np.arange(len(prompts)), 1, 0
    texts, caches = [prompt[-length:] for prompt in prompts], steps.caches
    while True:
        writing, counts = steps.begin(texts, before, caches), np.array([len(text) for text in texts])
        while room := length + 1 - counts.max():
            repeats, started = min(repeats, room), time.monotonic()
            writing = steps.step.repeat(repeats, writing, *steps.inputs)
            written, is_finite = writing.text.numpy(), writing.is_finite.numpy()
            if not is_finite:
                raise AdtrainError(NOT_FINITE)
            yield from (written[rows, counts + i] for i in range(repeats))
            counts, before = counts + repeats, before + repeats
            repeats = 2 * repeats if time.monotonic() - started < QUICK_SECONDS else max(1, repeats // 2)
        half, caches = (length + 1) // 2, writing.caches
        texts = [row[:n] if n <= length else row[-half:] for row, n in zip(written, counts, strict=True)]


class _Steps:
    """The step that draws a class for each text, and what it needs."""

    def __init__(self, trained: TrainedModel, device: str, batch: int, drawing: Drawing) -> None:
        task = trained.network.task
        assert isinstance(task, NextClass)
        self.network, self.length, self.device = trained.network, task.length, device
        found = self.network.model.new_cache(self.network.input_shape, batch, self.network.dtype)
        self.has_caches = found is not None and not trained.statistics
        self.caches = tree.map(lambda x: array(x.numpy(), device=device), found or {}) if self.has_caches else {}
        seed = np.array([drawing.seed & 0xFFFFFFFF, drawing.seed >> 32], np.uint32)
        self.inputs = (
            trained.params,
            trained.statistics,
            array(seed, device=device),
            array(np.float64(drawing.temperature), device=device),
        )
        classes = len(trained.classes)

        def step(writing: Writing, params: nn.Params, statistics: nn.State, seed: Value, temperature: Value) -> Writing:
            logits, caches = self._logits(writing, params, statistics)
            logits = ops.astype(logits[:, :classes], np.float64)
            found = drawn(logits, random_state(seed, writing.step), temperature, drawing.top_k, drawing.top_p)
            places = ops.arange(self.length + 1, device=device)
            here = ops.equal(places, ops.expand_dims(writing.counts, 1))
            text = ops.where(here, ops.expand_dims(ops.astype(found, np.int32), 1), writing.text)
            is_finite = writing.is_finite & ops.all(ops.isfinite(logits))
            return Writing(text, writing.counts + 1, writing.step + 1, is_finite, caches)

        self.step = stage(step, ALL, donate=(0,))
        self.prefill = stage(self._caches, ALL, donate=(0,))

    def begin(self, texts: Sequence[np.ndarray], step: int, caches: nn.State) -> Writing:
        """The state before the classes that follow `texts`, after `step` steps, in the memory of earlier `caches`."""
        written = np.zeros((len(texts), self.length + 1), np.int32)
        for row, classes in zip(written, texts, strict=True):
            row[: len(classes)] = classes
        lengths = np.array([len(classes) for classes in texts], np.int32)
        values = written, lengths, np.int64(step), np.bool_(True)
        text, counts, number, is_finite = (array(x, device=self.device) for x in values)
        if caches and lengths.max() > 1:
            caches = self.prefill(caches, self.inputs[0], text)
        return Writing(text, counts, number, is_finite, caches)

    def _caches(self, caches: nn.State, params: nn.Params, text: Value) -> nn.State:
        """The caches of whole texts. What they have behind the end of a text is overwritten before it is read."""
        return self._run(params, caches, text[:, : self.length], nn.Mode(training=False))[1]

    def _logits(self, writing: Writing, params: nn.Params, statistics: nn.State) -> tuple[Value, nn.State]:
        """The logits (batch, outputs) of what follows the texts, and the new caches."""
        position = writing.counts - 1
        if self.has_caches:
            token = ops.take_along_axis(writing.text, ops.expand_dims(position, 1), 1)
            mode = nn.Mode(training=False, token=nn.Token(position, self.length, self._start(writing.text, position)))
            outputs, caches = self._run(params, writing.caches, token, mode)
            return outputs[:, 0], caches
        outputs, _ = self._run(params, statistics, writing.text[:, : self.length], nn.Mode(training=False))
        batch, _, classes = outputs.shape
        places = ops.broadcast_to(ops.reshape(position, (batch, 1, 1)), (batch, 1, classes))
        return ops.take_along_axis(outputs, places, 1)[:, 0], {}

    def _run(self, params: nn.Params, state: nn.State, classes: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        return self.network.run(params, state, ops.astype(classes, self.network.dtype), mode)

    def _start(self, text: Value, position: Value) -> Value | None:
        """Where the document of each position begins; None if documents are not separate."""
        separator = self.network.task.separator if isinstance(self.network.task, NextToken) else None
        if separator is None:
            return None
        starts = starts_of(ops.equal(text, separator))
        return ops.take_along_axis(starts, ops.expand_dims(position, 1), 1)[:, 0]


def drawn(logits: Value, rng: Value, temperature: Value, top_k: int | None = None, top_p: float | None = None) -> Value:
    """A class for each row of logits (batch, classes), drawn as `Drawing` says: integers (batch,).

    The numbers of a row depend on its index and the random state alone.
    """
    batch, classes = logits.shape
    scores, order = (logits - ops.max(logits, -1, keepdims=True)) / temperature, None
    if top_k is not None or top_p is not None:
        scores, order = ops.topk(scores, min(top_k or classes, classes))
    chances = ops.exp(scores)
    sums = ops.cumsum(chances, axis=-1)
    total = sums[:, -1:]
    if top_p is not None:
        total = ops.max(ops.where(sums - chances < total * top_p, sums, 0.0), -1, keepdims=True)
    high_low = ops.random_uniform(rng, (batch, 2), dtype=np.float64)
    aim = (high_low[:, :1] + high_low[:, 1:] * 2.0**-24) * total
    rank = ops.sum(ops.astype((sums <= aim) & (sums < total), np.int32), -1)
    return rank if order is None else ops.take_along_axis(order, ops.expand_dims(rank, 1), 1)[:, 0]


def until_end(trained: TrainedModel, drawn: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """What `sample` draws, until the end of a text was drawn for each prompt."""
    ended: np.ndarray | bool = False
    for classes in drawn:
        if trained.tokenizer is not None:
            ended = ended | (classes == trained.tokenizer.end_of_text)
        if np.all(ended):
            return
        yield classes


def decoded_texts(trained: TrainedModel, drawn: Iterable[np.ndarray], batch: int) -> list[str]:
    """The texts that were drawn for a batch of prompts, each up to its end."""
    columns = np.array(list(drawn), np.int32).reshape(-1, batch).T
    end = None if trained.tokenizer is None else trained.tokenizer.end_of_text
    return ["".join(decoded(trained, takewhile(partial(ne, end), column.tolist()))) for column in columns]


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
