"""The translation of recurrent layers to calls of C functions; see `layers`."""

from __future__ import annotations

from adtrain import nn
from adtrain.export.c.writer import NULL, Argument, Buffer, Part, Writer

SCRATCH = {nn.RNN: 1, nn.LSTM: 9, nn.GRU: 6}
"""Numbers for each hidden unit that the C function of a layer needs for itself."""


def recurrent(writer: Writer, layer: nn.RNN | nn.LSTM | nn.GRU, x: Buffer, shape: nn.Shape) -> Buffer:
    """A call for each layer and direction; both directions write to the same steps of the output."""
    (length, inputs), hidden = shape, layer.hidden_size
    function = f"rnn_{layer.nonlinearity}" if isinstance(layer, nn.RNN) else layer.kind()
    for number in range(layer.num_layers):
        y = Buffer(length * layer.width)
        for reverse, names in enumerate(layer.names(number)):
            matrices = [writer.matrix(name) for name in names[:2]]
            biases = [writer.weight(name) for name in names[2:]] or [NULL, NULL]
            sizes = length, layer.width if number else inputs, hidden
            target = Part(y, reverse * hidden)
            arguments: tuple[Argument, ...] = (*sizes, *matrices, *biases, reverse, layer.width)
            writer.call(function, x, *arguments, out=target, scratch=SCRATCH[type(layer)] * hidden)
        x = y
    if layer.output == "all":
        return x
    last = Buffer(layer.width)
    for reverse in range(layer.width // hidden):
        step = 0 if reverse else length - 1
        writer.call("copy", Part(x, step * layer.width + reverse * hidden), hidden, out=Part(last, reverse * hidden))
    return last
