"""A model in another system: containers are built here, other layers by the system's own function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add, mul
from typing import Any, NoReturn, TypeAlias

from adtrain import nn
from adtrain.bench.peers.processes import Unsupported

Arrays: TypeAlias = dict[str, Any]
"""Parameters and running statistics by dotted path, in the other system's arrays."""

Apply: TypeAlias = Callable[[Arrays, Any], Any]
"""A layer: (arrays, x (N, ...)) to the output (N, ...). It updates the running statistics in `arrays`."""


def built(
    layer: nn.Module, leaf: Callable[[nn.Module, str], Apply], concatenate: Callable[[Sequence[Any]], Any]
) -> Apply:
    """The layer as a function.

    Args:
        leaf: makes the function of a layer that is not a container; its second argument is the prefix of the paths of
            the layer's arrays ("3.body.0.").
        concatenate: joins arrays along axis 1.
    """

    def within(layer: nn.Module, path: str) -> Apply:
        match layer:
            case nn.Sequential():
                parts = [within(child, f"{path}{i}.") for i, child in enumerate(layer.layers)]
                for i, child in enumerate(layer.layers):
                    if isinstance(child, nn.Linear) and child.tied:
                        names = f"{path}{i}.weight", f"{path}{layer.shared_embedding()}.weight"
                        parts[i] = tied(parts[i], *names)
                return lambda arrays, x: reduce(lambda x, part: part(arrays, x), parts, x)
            case nn.Residual(shortcut=None):
                body = within(layer.body, f"{path}body.")
                return lambda arrays, x: body(arrays, x) + x
            case nn.Residual(shortcut=nn.Module() as projection):
                body, shortcut = within(layer.body, f"{path}body."), within(projection, f"{path}shortcut.")
                return lambda arrays, x: body(arrays, x) + shortcut(arrays, x)
            case nn.Branches():
                branches = [within(branch, f"{path}{i}.") for i, branch in enumerate(layer.branches)]
                joins: dict[type[nn.Module], Callable[[Sequence[Any]], Any]]
                joins = {nn.Concat: concatenate, nn.Add: partial(reduce, add), nn.Multiply: partial(reduce, mul)}
                join = joins[type(layer)]
                return lambda arrays, x: join([branch(arrays, x) for branch in branches])
            case nn.TransformerLayer(dropout=0):
                return transformer_layer(layer, path)
        return leaf(layer, path)

    def tied(part: Apply, weight: str, shared: str) -> Apply:
        return lambda arrays, x: part({**arrays, weight: arrays[shared]}, x)

    def transformer_layer(layer: nn.TransformerLayer, path: str) -> Apply:
        layers = layer.layers((1, 1))
        parts = {name: within(child, f"{path}{name}.") for name, child in layers.items()}
        activation = leaf(nn.ACTIVATIONS[layer.activation], path)

        def feed_forward(arrays: Arrays, x: Any) -> Any:
            if "gate" in parts:
                return activation(arrays, parts["gate"](arrays, x)) * parts["linear1"](arrays, x)
            return activation(arrays, parts["linear1"](arrays, x))

        def run(arrays: Arrays, x: Any) -> Any:
            for norm, inner in (("norm1", (parts["self_attn"],)), ("norm2", (feed_forward, parts["linear2"]))):
                y = parts[norm](arrays, x) if layer.normalises_first else x
                y = x + reduce(lambda y, part: part(arrays, y), inner, y)
                x = y if layer.normalises_first else parts[norm](arrays, y)
            return x

        return run

    return within(layer, "")


def unsupported(package: str, what: str) -> NoReturn:
    raise Unsupported(f"no counterpart of {what} in {package}")
