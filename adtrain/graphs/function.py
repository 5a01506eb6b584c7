"""`adtrain.graph`: the graph of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from adtrain.graphs.formats import Graph
from adtrain.graphs.step import SIMPLIFIED, program_graph
from adtrain.jitted import Jitted, jit


def graph(f: Callable[..., Any], *args: Any, after: str = SIMPLIFIED, detail: bool = False, **options: Any) -> Graph:
    """The graph of a function for arguments of these types. The function is traced as by `jit`; nothing is run.

    Forward equations run down the left, gradients up the right, and equations that depend on gradients follow at the
    far right. What is stored for the gradients is drawn between them, with its bytes. Equations in layers are drawn as
    one box for each layer, others one by one.

    Args:
        f: function of trees of arrays to a tree of arrays, or the result of `jit`.
        args, options: its arguments.
        after: the pass of the compiler after which equations are shown, or "trace"; by default the last one before
            fusion.
        detail: draw a box for each equation in layers as well.

    Returns:
        The graph: `svg`, `html` and `dot` as text, `save(path)` for files. A notebook shows it.

    Raises:
        OptionError: `f` is not a function. AdtrainError: there is no pass of that name.
        TraceError, DTypeError: see `jit`.
    """
    jitted = f if isinstance(f, Jitted) else jit(f)
    program, places = jitted.trace(*args, **options)
    try:
        parameters = list(inspect.signature(jitted).parameters)
    except (TypeError, ValueError):  # a function written in C
        parameters = []
    names: dict[int | str, str] = dict(enumerate(parameters[: len(args)]))
    inputs = [".".join(filter(None, (str(names.get(place, place)), path))) for place, path in places]
    name = getattr(jitted, "__name__", "function")
    title = f"{name}({', '.join(dict.fromkeys(path.partition('.')[0] for path in inputs))})"
    return program_graph(program, inputs, title, {}, after, detail)
