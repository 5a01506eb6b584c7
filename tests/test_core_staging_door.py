"""Nothing in the core, the operations, the layers or the optimizers assumes that bind runs at once.

A base trace that only writes equations down sees a whole training step, random mask, gradient and update included; run
afterwards, the equations compute what the step computes eagerly, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import adtrain as ad
from adtrain import nn, ops, optim
from adtrain.core import tree
from adtrain.core.array import ArrayType, Value
from adtrain.core.primitive import Primitive
from adtrain.core.trace import Tracer, base_trace, bind


class Symbol(Tracer):
    """A value of which only the type is known."""

    __slots__ = ("device", "dtype", "shape", "trace")

    def __init__(self, trace: Recorder, type_: ArrayType) -> None:
        self.trace, self.shape, self.dtype, self.device = trace, type_.shape, type_.dtype, "cpu"


class Recorder:
    level = 0
    live = True

    def __init__(self) -> None:
        self.equations: list[tuple[Primitive, tuple[Value, ...], Mapping[str, Any], list[Symbol]]] = []

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        outputs = [Symbol(self, t) for t in primitive.output_types(args, params)]
        self.equations.append((primitive, tuple(args), params, outputs))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def run(self, known: dict[int, Value]) -> dict[int, Value]:
        for primitive, args, params, outputs in self.equations:
            found = bind(primitive, *(known.get(id(x), x) for x in args), **params)
            for symbol, value in zip(outputs, found if isinstance(found, tuple) else (found,), strict=True):
                known[id(symbol)] = value
        return known


def test_a_training_step_can_be_recorded_and_run_later() -> None:
    model = nn.Sequential(
        (
            nn.Conv2d(4, 3, padding=1),
            nn.BatchNorm2d(),
            nn.Relu(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(3),
        )
    )
    params, buffers = model.init((1, 6, 6), np.random.default_rng(0), np.dtype("float32"))
    optimizer = optim.Adam(lr=0.01)
    schedule = optim.schedules.Cosine(total_steps=10)

    def step(params: Any, buffers: Any, state: Any, x: Value, labels: Value, rng: Value) -> Any:
        def loss(params: Any) -> Any:
            out, new = model(params, buffers, x, nn.Mode(training=True, rng=rng))
            return ops.cross_entropy(out, labels), new

        (value, new), grads = ad.value_and_grad(loss, has_aux=True)(params)
        grads, _ = optim.clip_by_norm(grads, 1.0)
        lr = schedule(state["step"]) * 0.01
        return (*optimizer.update(grads, state, params, lr), new, value)

    rng = np.random.default_rng(1)
    x = ad.array(rng.normal(size=(4, 1, 6, 6)).astype("float32"))
    inputs = (params, buffers, optimizer.init(params), x, ad.array(rng.integers(0, 3, 4)), ops.rng_state(3, 1))
    leaves, structure = tree.flatten(inputs)
    recorder = Recorder()
    symbols = [Symbol(recorder, ArrayType(leaf.shape, leaf.dtype)) for leaf in leaves]
    with base_trace(recorder):
        staged = step(*tree.unflatten(structure, symbols))
    known = recorder.run({id(s): leaf for s, leaf in zip(symbols, leaves, strict=True)})
    eager = tree.leaves(step(*inputs))
    for symbol, expected in zip(tree.leaves(staged), eager, strict=True):
        np.testing.assert_array_equal(known.get(id(symbol), symbol).numpy(), expected.numpy())
