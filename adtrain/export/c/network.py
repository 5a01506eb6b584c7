"""A trained network as a program: from an image before normalisation to probabilities, or to numbers."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from adtrain import ops
from adtrain.core.errors import AdtrainError
from adtrain.data.statistics import PIXEL_MAX
from adtrain.export.c.layers import translate
from adtrain.export.c.writer import Buffer, Name, Program, Writer, size_text
from adtrain.export.torch_weights import named_arrays
from adtrain.training import TrainedModel
from adtrain.training.evaluation import class_names
from adtrain.training.network import clip_probabilities
from adtrain.training.tasks import Multilabel, NextClass, Regression

IMAGE, PROBABILITIES = Name("image"), Name("probabilities")
"""The parameters of the exported function."""


class Interface(NamedTuple):
    """What a program takes and gives.

    Attributes:
        c_type: of an element of an image: uint8_t or float, or double where float would lose differences.
        image, outputs: shapes of an image and of its outputs.
        labels: the names of the numbers along the last axis of the outputs.
        chooses: whether the function returns a class.
        output_type: of an output: float, or double as for `c_type`; in int8 uint16_t, in units of 1 / 65536.
        is_text: whether an image is a text, given by the classes of its characters.
    """

    c_type: str
    image: tuple[int, ...]
    outputs: tuple[int, ...]
    labels: tuple[str, ...]
    chooses: bool
    output_type: str = "float"
    is_text: bool = False

    @property
    def gives_integers(self) -> bool:
        """Whether outputs are integers, in units of 1 / 65536."""
        return self.output_type == "uint16_t"


def interface(trained: TrainedModel, int8: bool = False) -> Interface:
    network = trained.network
    outputs = network.model.output_shape(network.input_shape)
    names = trained.targets or class_names(trained.classes, np.zeros((1, outputs[-1])))
    labels = tuple(names[i] if i < len(names) else str(i) for i in range(outputs[-1]))
    c_type = "uint8_t" if network.scale == PIXEL_MAX else "double" if any(network.offset) else "float"
    output_type = "uint16_t" if int8 else "double" if network.task.needs_float64 else "float"
    is_text = isinstance(network.task, NextClass)
    return Interface(c_type, trained.image_shape, outputs, labels, not trained.targets, output_type, is_text)


class Translated(NamedTuple):
    """A program, the buffer of the network's outputs, and that of its first layer."""

    program: Program
    outputs: Buffer
    first: Buffer


def translated(trained: TrainedModel, simd: bool = False, training: bool = False) -> Translated:
    """The program of a network, in float32. Raises AdtrainError for a layer of a plug-in, and for weights with NaN."""
    program = Program(finite_arrays(trained), simd, training=training)
    writer, network = Writer(program), trained.network
    inputs = Writer(program, ("input",))
    writer.comment(f"input: {size_text(trained.image_shape)}, normalised")
    factor, summand = (x.reshape(-1) for x in network.normalization())
    channels, n = trained.image_shape[0], prod(trained.image_shape[1:])
    function = "normalize_bytes" if network.scale == PIXEL_MAX else "scale_channels"
    arrays = [inputs.constant("factor", factor), inputs.constant("summand", summand)]
    if any(network.offset):
        function = "normalize_doubles"
        arrays.insert(0, inputs.doubles("offset", network.offset))
    x = inputs.call(function, IMAGE, channels, n, *arrays, size=channels * n)
    outputs = translate(writer, network.model, x, network.input_shape)
    first = _first_layer(program, outputs)
    _predictions(writer, trained, outputs)
    return Translated(program, outputs, first)


def finite_arrays(trained: TrainedModel) -> dict[str, np.ndarray]:
    """Parameters and running statistics by name. Raises AdtrainError where a number is NaN or infinite."""
    weights = named_arrays(trained)
    if not all(np.isfinite(x).all() for x in weights.values()):
        raise AdtrainError("the model's weights are NaN or infinite: they overflowed in training")
    return weights


def _first_layer(program: Program, outputs: Buffer) -> Buffer:
    """The result of the first layer with weights and of the activation after it."""
    calls = [call for call in program.calls[2:] if call.writes and call.function != "pad"]
    if not calls:
        return outputs
    first = calls[0].writes[0]
    for call in calls[1:]:
        if not call.in_place or call.reads != (first,):
            break
        first = call.writes[0]
    return first


def _predictions(writer: Writer, trained: TrainedModel, outputs: Buffer) -> None:
    """`Task.predictions` as a call that writes to the caller's array."""
    task, n = trained.network.task, outputs.size
    if isinstance(task, Regression):
        writer.comment("values in original units")
        if not task.normalized:
            writer.call("copy", outputs, n, out=PROBABILITIES)
            return
        values = Writer(writer.program, ("values",))
        if task.needs_float64:
            doubles = values.doubles("std", task.std), values.doubles("mean", task.mean)
            values.call("scale_to_doubles", outputs, n, *doubles, out=PROBABILITIES)
            return
        arrays = values.constant("std", np.array(task.std)), values.constant("mean", np.array(task.mean))
        values.call("scale_channels", outputs, n, 1, *arrays, out=PROBABILITIES)
        return
    writer.comment("probabilities")
    function = ops.sigmoid if isinstance(task, Multilabel) else task.predictions
    if function is ops.softmax:
        columns = trained.network.model.output_shape(trained.network.input_shape)[-1]
        writer.call("softmax", outputs, n // columns, columns, 1, out=PROBABILITIES)
    else:
        name = {ops.sigmoid: "sigmoid", clip_probabilities: "clip"}[function]
        writer.call(name, outputs, n, out=PROBABILITIES)
