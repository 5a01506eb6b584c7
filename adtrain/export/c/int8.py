"""A trained network as a program in int8, by integer arithmetic alone.

A value x stands for x * scale. Weights have a scale for each output channel, activations one for each array, from their
largest numbers on training images (B. Jacob et al., "Quantization and training of neural networks for efficient
integer-arithmetic-only inference", 2018; here without zero points). Batch normalisation becomes part of the layer
before it, and a relu that follows is a limit of that layer's result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import frexp, log, prod
from typing import Any, NamedTuple

import numpy as np

from adtrain import nn, ops
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.data.statistics import PIXEL_MAX
from adtrain.export.c.layers import conv_sizes, factor_and_summand, padded, pool_sizes
from adtrain.export.c.network import IMAGE, PROBABILITIES, Translated, finite_arrays
from adtrain.export.c.writer import Buffer, Name, Part, Program, Writer, describe, refuse, size_text
from adtrain.nn.fields import pair
from adtrain.training import TrainedModel

MOST = 127
"""The largest magnitude of a value."""
LOGIT_UNIT = log(2) / 256
"""The scale of the last layer's results, which have 32 bits: e^-x is then 2^(-k / 256)."""
ELEMENTWISE = (nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ReLU)
WEIGHTED, NORMS = (nn.Linear, nn.Conv2d), (nn.BatchNorm1d, nn.BatchNorm2d)
MOVING = (nn.Dropout, nn.Flatten, nn.Reshape)


class Norm(NamedTuple):
    """A batch normalisation that becomes part of the layer before it, and the writer for its path."""

    writer: Writer
    layer: Any


class Quantized(NamedTuple):
    """A value of the program.

    Attributes:
        buffer: its bytes.
        scale: the number that 1 stands for.
        floats: the same value of the network on calibration images, (N, *shape).
    """

    buffer: Buffer
    scale: float
    floats: np.ndarray

    @property
    def shape(self) -> nn.Shape:
        return self.floats.shape[1:]


def translated(trained: TrainedModel, images: np.ndarray) -> Translated:
    """The program of a network in int8, calibrated on `images` (N, C, H, W) of the training set.

    Raises AdtrainError for images that are not uint8, for probabilities that are not a softmax, and for a layer without
    an int8 version, which it names.
    """
    network = trained.network
    if network.scale != PIXEL_MAX:
        raise AdtrainError("int8 takes images of bytes, and this run was trained on float32 data; leave out --int8")
    if trained.targets or network.task.predictions is not ops.softmax or trained.config.data.is_text:
        raise AdtrainError("int8 gives classes with the probabilities of a softmax, this run other numbers")
    program = Program(finite_arrays(trained), int8=True)
    quantizer = _Quantizer(trained, Writer(program))
    outputs = quantizer.logits(images)
    return Translated(program, outputs, outputs)


@dataclass(frozen=True)
class _Quantizer:
    trained: TrainedModel
    writer: Writer

    def logits(self, images: np.ndarray) -> Buffer:
        network, writer = self.trained.network, self.writer
        x = self._input(images)
        layers = [*network.model.children(network.input_shape)]
        while layers and isinstance(layers[-1][1], MOVING):
            layers.pop()
        last = layers.pop() if layers and isinstance(layers[-1][1], nn.Linear) and len(layers[-1][2]) == 1 else None
        x = _Layers(writer, self.trained).sequence(iter(layers), x)
        classes = network.model.output_shape(network.input_shape)[-1]
        if last is not None:
            name, layer, _ = last
            child = writer.child(name)
            describe(child, layer, x.shape)
            weight, bias = _matrix(child)
            arrays = _Product(weight, bias, x.scale, LOGIT_UNIT).constants(child)
            y = child.call("linear_32", x.buffer, x.shape[0], classes, *arrays, out=Buffer(classes))
        else:
            if x.shape != (classes,):
                raise AdtrainError(f"int8 gives one vector of probabilities, this run {size_text(x.shape)} outputs")
            y = writer.call("rescale_32", x.buffer, classes, *_multiplier(x.scale / LOGIT_UNIT), out=Buffer(classes))
        writer.comment("probabilities")
        powers = writer.constant("powers_of_2", np.round(2.0 ** (16 - np.arange(256) / 256)).astype(np.int32))
        writer.call("softmax_16", y, classes, powers, out=PROBABILITIES)
        return y

    def _input(self, images: np.ndarray) -> Quantized:
        """The image, normalised and quantized by a table of the 256 bytes of each channel."""
        network, inputs = self.trained.network, Writer(self.writer.program, ("input",))
        factor, summand = (x.reshape(-1, 1) for x in network.normalization())
        numbers = np.arange(256) * factor + summand
        scale = float(np.abs(numbers).max()) / MOST
        table = inputs.constant("table", np.round(numbers / scale).astype(np.int8))
        channels, n = images.shape[1], prod(images.shape[2:])
        self.writer.comment(f"input: {size_text(images.shape[1:])}, normalised")
        x = inputs.call("look_up_image", IMAGE, channels, n, table, out=Buffer(channels * n, 1))
        return Quantized(x, scale, network.inputs(array(images)).numpy())


class _Layers(NamedTuple):
    """Adds the layers of a module to the program of `writer`, whose path is the module's."""

    writer: Writer
    trained: TrainedModel

    def sequence(self, layers: Iterator[tuple[str, nn.Module, nn.Shape]], x: Quantized) -> Quantized:
        """Layers one after the other. A batch normalisation and a relu become part of the product before them."""
        rest = [each for each in layers if not isinstance(each[1], nn.Dropout)]
        while rest:
            name, layer, _ = rest.pop(0)
            norm, relu = None, False
            if isinstance(layer, WEIGHTED) and rest and isinstance(rest[0][1], NORMS):
                other, module, _ = rest.pop(0)
                norm = Norm(self.writer.child(other), module)
            if isinstance(layer, (*WEIGHTED, *NORMS, nn.Residual, nn.Add)) and rest and isinstance(rest[0][1], nn.ReLU):
                relu = bool(rest.pop(0))
            x = self.child(name)._run(layer, x, norm, relu)
        return x

    def child(self, name: str) -> _Layers:
        return self._replace(writer=self.writer.child(name))

    def _run(self, layer: nn.Module, x: Quantized, norm: Norm | None, relu: bool) -> Quantized:
        if isinstance(layer, nn.Sequential):
            return self.sequence(layer.children(x.shape), x)
        if isinstance(layer, (nn.Residual, nn.Add, nn.Concat)):
            return self._branches(layer, x, relu)
        floats = self._floats(layer, x.floats, self.writer)
        if isinstance(layer, MOVING):
            return x._replace(floats=floats)
        describe(self.writer, layer, x.shape)
        if norm is not None:
            describe(norm.writer, norm.layer, floats.shape[1:])
            floats = self._floats(norm.layer, floats, norm.writer)
        if relu:
            self.writer.comment("relu: the least result is 0")
            floats = np.maximum(floats, 0)
        if isinstance(layer, (*WEIGHTED, *NORMS)):
            return self._product(layer, x, norm, floats, 0 if relu else -MOST)
        return self._other(layer, x, floats)

    def _floats(self, layer: nn.Module, floats: np.ndarray, writer: Writer) -> np.ndarray:
        """The layer's outputs in float32."""
        params, statistics = self.trained.params, self.trained.statistics
        for name in writer.path:
            params, statistics = params.get(name, {}), statistics.get(name, {})
        found: np.ndarray = layer.forward(params, statistics, array(floats), nn.Mode(training=False))[0].numpy()
        return found

    def _product(self, layer: Any, x: Quantized, norm: Norm | None, floats: np.ndarray, least: int) -> Quantized:
        writer, shape = self.writer, x.shape
        if isinstance(layer, NORMS):  # a convolution 1x1 of each channel
            weight, bias = factor_and_summand(writer, layer)
            layer = nn.Conv2d(shape[0], kernel_size=1, groups=shape[0])
            weight = weight.reshape(-1, 1, 1, 1)
            shape = (shape[0], 1, prod(shape[1:]))
        else:
            weight, bias = _matrix(writer)
        if norm is not None:
            factor, summand = factor_and_summand(*norm)
            weight, bias = weight * factor.reshape(-1, *[1] * (weight.ndim - 1)), bias * factor + summand
        scale = _scale(floats)
        arrays = _Product(weight, bias, x.scale, scale).constants(writer)
        if isinstance(layer, nn.Linear):
            rows = prod(shape[:-1])
            if rows != 1 and norm is not None:
                raise refuse(norm.writer.path, norm.layer, "has no int8 version after a linear layer on several rows")
            y = Buffer(rows * len(weight), 1)
            writer.call("linear", x.buffer, rows, shape[-1], len(weight), *arrays, least, out=y)
            return Quantized(y, scale, floats)
        source, shape = padded(writer, layer, x.buffer, shape)
        output = layer.output_shape(x.shape if prod(x.shape) != prod(shape) else shape)
        sizes = conv_sizes(layer, shape, output, (0, 0))
        y = Buffer(prod(output), 1)
        writer.call("conv2d", sizes, source, *arrays, least, out=y, scratch=prod(output[1:]))
        return Quantized(y, scale, floats)

    def _other(self, layer: nn.Module, x: Quantized, floats: np.ndarray) -> Quantized:
        writer, size = self.writer, prod(floats.shape[1:])
        y = Buffer(size, 1)
        if isinstance(layer, nn.MaxPool2d):
            writer.call("max_pool2d", pool_sizes(layer, x.shape), x.buffer, out=y)
            return Quantized(y, x.scale, floats)
        if isinstance(layer, nn.Select):
            n = prod(x.shape[1:])
            indices = writer.constant("indices", np.array(layer.indices))
            writer.call("take_channels", x.buffer, indices, len(layer.indices), n, out=y)
            return Quantized(y, x.scale, floats)
        scale = _scale(floats)
        if isinstance(layer, ELEMENTWISE):
            numbers = self._floats(layer, (np.arange(-128, 128) * x.scale).astype(np.float32)[None], writer)
            table = np.clip(np.round(numbers / scale), -MOST, MOST).astype(np.int8)
            writer.call("look_up", x.buffer, size, writer.constant("table", table), out=y, in_place=True)
        elif isinstance(layer, nn.AvgPool2d):
            writer.call("avg_pool2d", pool_sizes(layer, x.shape), x.buffer, *_multiplier(x.scale / scale), out=y)
        elif isinstance(layer, nn.AdaptiveAvgPool2d):
            sizes = *x.shape, *pair(layer.output_size)
            writer.call("adaptive_avg_pool2d", x.buffer, *sizes, *_multiplier(x.scale / scale), out=y)
        else:
            raise refuse(writer.path, layer, "has no int8 version; leave out --int8")
        return Quantized(y, scale, floats)

    def _branches(self, layer: nn.Residual | nn.Add | nn.Concat, x: Quantized, relu: bool) -> Quantized:
        found = [self.child(name)._run(child, x, None, False) for name, child, _ in layer.children(x.shape)]
        if isinstance(layer, nn.Residual) and len(found) == 1:
            found.append(x)
        self.writer.comment(f"{'.'.join(self.writer.path)} {layer.kind()}{' and relu' if relu else ''}")
        if isinstance(layer, nn.Concat):
            floats = np.concatenate([each.floats for each in found], axis=1)
            scale, y, start = _scale(floats), Buffer(prod(floats.shape[1:]), 1), 0
            for each in found:
                n = each.buffer.size
                self.writer.call("rescale", each.buffer, n, *_multiplier(each.scale / scale), out=Part(y, start))
                start += n
            return Quantized(y, scale, floats)
        total = found[0]
        for i, each in enumerate(found[1:], 2):
            limit = relu and i == len(found)
            floats = total.floats + each.floats
            floats = np.maximum(floats, 0) if limit else floats
            total = self._sum(total, each, floats, 0 if limit else -MOST)
        return total

    def _sum(self, a: Quantized, b: Quantized, floats: np.ndarray, least: int) -> Quantized:
        scale, y = _scale(floats), Buffer(a.buffer.size, 1)
        ratios = a.scale / scale, b.scale / scale
        _, shift = _multiplier(max(ratios))
        multipliers = [round(ratio * 2.0**shift) for ratio in ratios]
        self.writer.call("add", a.buffer, b.buffer, y.size, *multipliers, shift, least, out=y, in_place=True)
        return Quantized(y, scale, floats)


@dataclass(frozen=True)
class _Product:
    """A product with a weight (outputs, ...) and a bias; its input has the scale `given`, its result `wanted`."""

    weight: np.ndarray
    bias: np.ndarray
    given: float
    wanted: float

    def constants(self, writer: Writer) -> tuple[Name, Name, Name, Name]:
        """The C names of weight, bias, multiplier and shift. The scale of a channel is that of its largest weight."""
        rows = self.weight.reshape(len(self.weight), -1)
        scales = np.maximum(np.abs(rows).max(axis=1), 1e-30) / MOST
        weight = np.round(rows / scales[:, None]).astype(np.int8)
        limit = 2.0**30
        bias = np.clip(np.round(self.bias / (scales * self.given)), -limit, limit).astype(np.int32)
        pairs = np.array([_multiplier(float(s) * self.given / self.wanted) for s in scales])
        return (
            writer.constant("weight", weight),
            writer.constant("bias", bias),
            writer.constant("multiplier", pairs[:, 0].astype(np.int32)),
            writer.constant("shift", pairs[:, 1].astype(np.int8)),
        )


def _matrix(writer: Writer) -> tuple[np.ndarray, np.ndarray]:
    """The layer's weight and its bias, or zeros, in float64."""
    weight = writer.trained("weight").astype(np.float64)
    return weight, writer.trained("bias").astype(np.float64) if writer.has("bias") else np.zeros(len(weight))


def _scale(floats: np.ndarray) -> float:
    """The scale at which the largest number is MOST."""
    return max(float(np.abs(floats).max(initial=0)), 1e-30) / MOST


def _multiplier(ratio: float) -> tuple[int, int]:
    """(m, shift) with ratio = m / 2^shift, m of 30 bits, and 1 <= shift <= 62."""
    _, exponent = frexp(ratio)
    shift = min(max(30 - exponent, 1), 62)
    return min(round(ratio * 2.0**shift), 2**31 - 1), shift
