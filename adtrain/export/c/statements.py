"""The equations of a Program as statements in C: calls of functions, or loops of their own; in one table, `WRITERS`.

A training step and an evaluation use the same table. Forms are in evaluations only, on one image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from adtrain.codegen.elementwise import Axis, axes_of, c_type, merged, place, pointer, statements, strides
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, body_of
from adtrain.export.c.code import Argument, Code, Part, Statement, Struct, number
from adtrain.lowering import shapes
from adtrain.lowering.shapes import attention_lengths, contiguous_strides, product_lengths, split_at
from adtrain.passes.fusion import by_element

Writer = Callable[[Code, Equation], list[Statement]]
"""(code, equation) to the statements that compute its outputs."""

_FUNCTIONS = re.compile(r"\b(atan2|ceil|cos|erf|expm1|exp|fabs|floor|hypot|log1p|log|pow|rint|sin|sqrt|tanh|trunc)\(")
"""Functions of <math.h> in the expressions of elementwise equations."""

_LIBRARY = re.compile(r"\b(normal_cdf|normal_pdf|integer_power|floor_divide\w*|floor_remainder\w*)\(")
"""Functions of `kernels/export/` in the expressions of elementwise equations."""

NULL: list[Argument] = ["NULL"]
"""The argument in place of an array that a layer does not have."""

SCRATCH = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 9, "gru": 6}
"""Numbers for each hidden unit that the C function of a recurrent layer needs for itself."""


def loops(code: Code, equation: Equation) -> list[Statement]:
    """Elementwise equations: a loop for each axis. Numbers that are known stand in the text."""
    body: Program = body_of(equation)
    axes = axes_of(body)
    given = equation.inputs if equation.form else body.inputs
    operands = [*given, *equation.outputs]
    names = [f"x{i}" for i in range(len(body.inputs))] + [f"y{i}" for i in range(len(body.outputs))]
    elements = [f"{name}[{_place(axes, n)}]" for n, name in enumerate(names)]
    single = {n for n, v in enumerate(given) if v in code.known and v.size == 1 and v not in code.names}
    values = {
        v: re.sub("^-.*", r"(\g<0>)", number(code.known[given[n]].reshape(-1)[0])) if n in single else elements[n]
        for n, v in enumerate(body.inputs)
    }
    inside = [_in_c99(line) for line in statements(body, values, elements[len(body.inputs) :])]
    used = [n for n in range(len(operands)) if n not in single]
    parameters = [f"{pointer(operands[n], n < len(given))}{names[n]}" for n in used]
    calls = tuple(dict.fromkeys(name for line in inside for name in _LIBRARY.findall(line)))
    text = _function(parameters, [axis.length for axis in axes], inside)
    results = equation.outputs
    same = tuple(v for v in given if len(results) == 1 and v.type == results[0].type)
    return [Statement("elementwise", [operands[n] for n in used], text, calls, same)]


def _in_c99(line: str) -> str:
    """A statement whose functions are those for float, where its result is a float.

    <tgmath.h> would choose them, but it needs complex functions, which C libraries of microcontrollers lack.
    """
    line = re.sub(r"\b(floor_divide|floor_remainder)\(", rf"\1{'' if ' float ' in line else '_integers'}(", line)
    return _FUNCTIONS.sub(r"\1f(", line) if line.startswith("const float ") else line


def _function(
    parameters: Sequence[str], lengths: Sequence[int], inside: Sequence[str], checks: Sequence[str] = ()
) -> str:
    """Parameters and body of a function with one loop in another for each length, after ``checks`` of the input."""
    lines = [f"({', '.join(parameters)}) {{", *checks]
    for k, length in enumerate(lengths):
        lines.append(
            f"{'    ' * (k + 1)}for (int i{k} = 0; i{k} < {length}; i{k}++){' {' if k == len(lengths) - 1 else ''}"
        )
    indent = "    " * (len(lengths) + 1)
    lines += [f"{indent}{line}" for line in inside]
    ends = ["    " * len(lengths) + "}"] if lengths else []
    return "\n".join([*lines, *ends, *(["    return 1;"] if checks else []), "}"])


def _place(axes: Sequence[Axis], operand: int = 0) -> str:
    """C text of the offset of an operand's element in loops over these axes."""
    return place([(f"i{k}", [axis]) for k, axis in enumerate(axes)], operand)


def copies(code: Code, e: Equation) -> list[Statement]:
    """The strided copies that `lowering.shapes` describes, one for each argument; of a pad, after its value."""
    (y,), types = e.outputs, [v.type for v in e.inputs]
    found = [_fill(e.params["value"], y)] if e.name == "pad" else []
    for i, x in enumerate(e.inputs):
        layout = getattr(shapes, e.name)(*([i] if e.name == "concatenate" else []), *types, **e.params)
        axes = merged(tuple(layout.lengths), [layout.source_strides, layout.target_strides])
        parameters = [f"{pointer(x, True)}x", f"{pointer(y)}y"]
        line = f"y[{_place(axes, 1)}] = x[{_place(axes)}];"
        text = _function(parameters, [axis.length for axis in axes], [line])
        found.append(Statement("move", [Part(x, layout.source_offset), Part(y, layout.target_offset)], text))
    return found


def subview(code: Code, e: Equation) -> list[Statement]:
    """A copy of consecutive elements."""
    (x,), (y,) = e.inputs, e.outputs
    text = _function([f"{pointer(x, True)}x", f"{pointer(y)}y"], [y.size], ["y[i0] = x[i0];"])
    return [Statement("move", [Part(x, e.params["start"]), y], text)]


def _fill(value: float, y: Variable) -> Statement:
    text = f"""({c_type(y.type.dtype)} value, int n, {pointer(y)}y) {{
    for (int i = 0; i < n; i++) y[i] = value;
}}"""
    return Statement("fill", [value, y.size, y], text)


def by_line(*lines: str, outputs: Sequence[str] = ("y",)) -> Writer:
    """A function of each line of numbers along some axes.

    In the lines, {each} is the loop along the line, {x} its number, {at} the number's place and {i} its index, {first}
    the first number, {n} the count. {X} and {Y} are the types of the argument and the result. {after} is whether the
    number comes after `most` in an ascending order, in which NaN is the last.
    """

    def write(code: Code, e: Equation) -> list[Statement]:
        (x,), shape = e.inputs, e.inputs[0].type.shape
        axes = e.params["axes"] if "axes" in e.params else (e.params["axis"],)
        names, steps = [f"i{i}" for i in range(len(shape))], contiguous_strides(shape)
        kept = [i for i in range(len(shape)) if i not in axes]
        loop = "for (int {0} = {1} - 1; {0} >= 0; {0}--)" if e.params.get("reverse") else LOOP
        at = _place([Axis(n, (step,)) for n, step in zip(shape, steps, strict=True)])
        first = _place([Axis(n, (steps[i] if i in kept else 0,)) for i, n in enumerate(shape)])
        values = {
            "each": "".join(f"{loop.format(names[i], shape[i])} " for i in axes),
            "x": f"x[{at}]",
            "at": at,
            "i": names[axes[-1]],
            "first": f"x[{first}]",
            "n": prod(shape[i] for i in axes),
            "X": c_type(x.type.dtype),
            "Y": c_type(e.outputs[0].type.dtype),
            "after": _before(x, "most", f"x[{at}]"),
            "eps": repr(e.params.get("eps")),
        }
        parameters = [f"{pointer(v)}{name}" for v, name in zip(e.outputs, outputs, strict=True)]
        text = [f"({', '.join([f'{pointer(x, True)}x', *parameters])}) {{"]
        text += [f"    {LOOP.format(names[i], shape[i])}" for i in kept]
        text += ["    {", *(f"        {line.format(**values)}" for line in lines), "    }", "}"]
        return [Statement(e.name, [x, *e.outputs], "\n".join(text))]

    return write


LOOP = "for (int {0} = 0; {0} < {1}; {0}++)"


def _before(x: Variable, a: str, b: str) -> str:
    """C text of whether `a` is before `b` in an ascending order, in which NaN is the last."""
    return f"({a} < {b} || ({b} != {b} && {a} == {a}))" if x.type.dtype.kind == "f" else f"({a} < {b})"


def indexed(code: Code, e: Equation) -> list[Statement]:
    """A gather or a scatter. Indices that are not known are checked, except in a training step."""
    (x, indices), (y,) = e.inputs, e.outputs
    outer, length, inner, count = getattr(shapes, e.name)(x.type, indices.type, **e.params)
    element = f"[(i0 * {length} + {'indices[i1]' if e.name == 'take' else '*indices++'}) * {inner} + i2]"
    scatters = e.name == "scatter_along_axis"
    line = f"y{element} += *x++;" if scatters else f"*y++ = x{element};"
    parameters = [f"{pointer(x, True)}x", f"{pointer(indices, True)}indices", f"{pointer(y)}y"]
    checks = [
        f"    for (int i = 0; i < {indices.size}; i++)",
        f"        if (indices[i] < 0 || indices[i] >= {length}) return 0;",
    ]
    checked = indices not in code.known and not code.training
    text = _function(parameters, (outer, count, inner), [line], checks if checked else [])
    call = Statement(e.name, [x, indices, y], text, checked=checked)
    return [_fill(0, y), call] if scatters else [call]


def one_hot(code: Code, e: Equation) -> list[Statement]:
    (indices,), (y,), width = e.inputs, e.outputs, e.params["num_classes"]
    line = f"y[i0] = indices[i0 / {width}] == i0 % {width};"
    text = _function([f"{pointer(indices, True)}indices", f"{pointer(y)}y"], [y.size], [line])
    return [Statement("one_hot", [indices, y], text)]


def argsort(code: Code, e: Equation) -> list[Statement]:
    """The place of each number is the count of those before it; equal ones, and several NaN, keep their order."""
    (x,), (y,), n, count = e.inputs, e.outputs, e.inputs[0].type.shape[-1], e.params["count"]
    pair = ("x[i]", "x[j]") if e.params["descending"] else ("x[j]", "x[i]")
    text = f"""({pointer(x, True)}x, {pointer(y)}y) {{
    for (int line = 0; line < {x.size // max(n, 1)}; line++, x += {n}, y += {count})
        for (int i = 0; i < {n}; i++) {{
            int place = 0;
            for (int j = 0; j < i; j++) place += !{_before(x, *reversed(pair))};
            for (int j = i + 1; j < {n}; j++) place += {_before(x, *pair)};
            if (place < {count}) y[place] = i;
        }}
}}"""
    return [Statement("order", [x, y], text)]


def matmul(code: Code, e: Equation) -> list[Statement]:
    """A product for each matrix of a batch."""
    (a, b), (y,) = e.inputs, e.outputs
    _, m, n, k = product_lengths(a.type, b.type, **{name: e.params[name] for name in ("transpose_a", "transpose_b")})
    sizes = m, k, n, int(e.params["transpose_a"]), int(e.params["transpose_b"])
    batch = y.type.shape[:-2]
    if not batch:
        return [Statement("matmul", [a, b, *sizes, y])]
    steps = [[s * size for s in strides(x.type.shape[:-2], batch)] for x, size in ((a, m * k), (b, k * n))]
    axes = [Axis(*each) for each in zip(batch, zip(*steps, contiguous_strides(batch), strict=True), strict=True)]
    factors = [f"{x} + ({_place(axes, n)})" for n, x in enumerate("ab")]
    call = f"matmul({', '.join([*factors, *map(str, sizes)])}, y + ({_place(axes, 2)}) * {m * n});"
    text = _function(["const float *a", "const float *b", "float *y"], batch, [call])
    return [Statement("products", [a, b, y], text, ("matmul",))]


def along_axis(code: Code, e: Equation) -> list[Statement]:
    """A function of lines of numbers, which may overwrite them."""
    (x,), (y,) = e.inputs, e.outputs
    return [Statement(e.name, [x, *split_at(x.type.shape, e.params["axis"]), y], overwrites=(x,))]


def attention(code: Code, e: Equation) -> list[Statement]:
    """Attention of all heads, or of `self_attention` of those of each example, whose queries, keys and values lie side
    by side in a row."""
    x, y, heads = e.inputs[0], e.outputs[0], e.params.get("heads", 0)
    n = attention_lengths(*(v.type for v in e.inputs[:3]), heads=heads)
    queries, keys, out = (n.row, n.queries * n.width), (n.row, n.keys * n.width), (n.out_row, n.queries * n.width)
    count, examples = n.batch, 1
    if heads:
        queries = keys = (n.row, n.width)
        out, count, examples = (n.out_row, n.width), heads, n.batch // heads
    sizes = Struct("heads", (count, n.queries, n.keys, n.width, int(e.params["causal"]), *queries, *keys, *out))
    found = []
    for i in range(examples):
        start, row = i * n.queries * n.row, heads * n.width
        qkv = [Part(x, start + k * row) for k in range(3)] if heads else [Part(v, 0) for v in e.inputs[:3]]
        result = Part(y, i * n.queries * n.out_row)
        found.append(Statement("attention", [sizes, float(e.params["scale"]), *qkv, code.value((n.keys,)), result]))
    return found


def conv(function: str, image: int, result: int) -> Writer:
    """A convolution of a batch, or a gradient. `image` and `result` say which of (inputs..., output) are x and y."""

    def write(code: Code, e: Equation) -> list[Statement]:
        (a, b), (y,) = e.inputs, e.outputs
        x, out = ((a, b, y)[i].type.shape for i in (image, result))
        weight = (a, b, y)[({0, 1, 2} - {image, result}).pop()].type.shape
        sizes = conv_sizes(x, out, weight, e.params["window"], e.params["window"].padding)
        return [Statement(function, [sizes, x[0], a, b, y])]

    return write


def conv_sizes(
    x: Sequence[int], y: Sequence[int], weight: Sequence[int], window: Any, padding: Sequence[int]
) -> Struct:
    sizes = *x[1:], y[1], window.groups, *y[2:], *weight[2:], *window.stride, *window.dilation, *padding
    return Struct("conv", sizes)


def conv_form(code: Code, e: Equation) -> list[Statement]:
    """A convolution of one image, whose borders are copied before."""
    (x, weight, *bias), (y,) = e.inputs, e.outputs
    window, kernel = e.kernel_params["window"], weight.type.shape
    x, copies = padded(code, e, x)
    function: str = "conv2d"
    weights: Argument = weight
    if code.simd and window.groups == 1 and weight in code.known:
        function, weights = "conv2d_vectors", code.weight(weight, vectors_of_filters(code.known[weight]))
    sizes = conv_sizes(x.type.shape, y.type.shape, kernel, window, (0, 0))
    return [*copies, Statement(function, [sizes, x, weights, *(bias or NULL), y])]


def padded(code: Code, e: Equation, x: Variable) -> tuple[Variable, list[Statement]]:
    """`x`, the image (1, C, H, W) of a convolution, with its borders of zeros, and the statement that makes it."""
    padding = e.kernel_params["window"].padding
    low, high = (e.kernel_params.get(name, (0, 0, 0, 0))[2:] for name in ("low", "high"))
    (top, left), (bottom, right) = ([p + extra for p, extra in zip(padding, side, strict=True)] for side in (low, high))
    _, channels, height, width = x.type.shape
    if not any((top, left, bottom, right)):
        return x, []
    larger = code.value((1, channels, height + top + bottom, width + left + right), x.type.dtype.name)
    return larger, [Statement("pad", [x, channels, height, width, top, left, bottom, right, larger])]


def conv_transpose_form(code: Code, e: Equation) -> list[Statement]:
    (x, weight, *bias), (y,), window = e.inputs, e.outputs, e.kernel_params["window"]
    sizes = conv_sizes(x.type.shape, y.type.shape, weight.type.shape, window, window.padding)
    return [Statement("conv_transpose2d", [sizes, x, weight, *(bias or NULL), y])]


def pool(function: str, image: int, result: int) -> Writer:
    """A pooling or its gradient; see `conv`."""

    def write(code: Code, e: Equation) -> list[Statement]:
        operands = [*e.inputs, *e.outputs]
        x, out = operands[image].type.shape, operands[result].type.shape
        windows = e.params["windows"]
        channels = x[0] * x[1]  # of all images
        averages = function == "avg_pool2d"
        sizes = (channels if averages else 1, *x[2:], *out[2:], *windows.kernel, *windows.stride, *windows.padding)
        count = [] if averages else [channels]
        return [Statement(function, [Struct("pool", sizes), *count, *operands])]

    return write


def pool_sizes(e: Equation) -> Struct:
    """The sizes of a pooling of one image."""
    x, out, windows = e.inputs[0].type.shape, e.outputs[0].type.shape, e.kernel_params["windows"]
    return Struct("pool", (*x[1:], *out[2:], *windows.kernel, *windows.stride, *windows.padding))


def adaptive_avg_pool_form(code: Code, e: Equation) -> list[Statement]:
    x, y = e.inputs[0], e.outputs[0]
    n, channels, *sizes = x.type.shape
    return [Statement("adaptive_avg_pool2d", [x, n * channels, *sizes, *y.type.shape[2:], y])]


def linear_form(code: Code, e: Equation) -> list[Statement]:
    (x, weight, *bias), (y,) = e.inputs, e.outputs
    matrix: Argument = weight
    if weight in code.known:
        matrix = code.weight(weight, matrix_layout(code, weight, e.kernel_params["transpose_b"]))
    function = "linear" if weight in code.known else "linear_transposed"
    sizes = prod(x.type.shape[:-1]), x.type.shape[-1], y.type.shape[-1]
    return [Statement(function, [x, *sizes, matrix, *(bias or NULL), y])]


def matrix_layout(code: Code, weight: Variable, transposed: bool = True) -> np.ndarray:
    """A matrix that is known in the layout that `linear` reads; `transposed`: it is (outputs, inputs)."""
    x = code.known[weight] if transposed else code.known[weight].T
    return blocks_of_outputs(x) if code.simd else x.T


def blocks_of_outputs(weight: np.ndarray) -> np.ndarray:
    """A matrix (outputs, inputs) as the vector version of `linear` reads it, with zeros for missing outputs."""
    rows = np.pad(weight, ((0, -len(weight) % 8), (0, 0)))
    return np.concatenate([rows[i : i + 32].T.reshape(-1) for i in range(0, len(rows), 32)])


def vectors_of_filters(weight: np.ndarray) -> np.ndarray:
    """The weight of a convolution as `conv2d_vectors` reads it, with zeros for missing filters."""
    filters = weight.reshape(len(weight), -1)
    rows = np.pad(filters, ((0, -len(filters) % 8), (0, 0)))
    return rows.reshape(-1, 8, filters.shape[1]).transpose(0, 2, 1)


def layer_norm_form(code: Code, e: Equation) -> list[Statement]:
    (x, *affine), y = e.inputs, e.outputs[0]
    n = prod(x.type.shape[i] for i in e.kernel_params["axes"])
    given = affine or NULL * 2
    return [Statement("layer_norm", [x, x.size // n, n, float(e.kernel_params["eps"]), *given, y], overwrites=(x,))]


def embedding_form(code: Code, e: Equation) -> list[Statement]:
    (x, weight), (y,) = e.inputs, e.outputs
    return [Statement("embedding", [x, x.size, *weight.type.shape, weight, y], checked=True)]


def hash_grid(code: Code, e: Equation) -> list[Statement]:
    (x, table, levels), (y,) = e.inputs, e.outputs
    return [Statement("hash_grid", [x, *x.type.shape, table, levels, *y.type.shape[1:], y])]


def recurrent_form(code: Code, e: Equation) -> list[Statement]:
    """A recurrent layer. Its final state is that of the last step; in the backward direction, that of the first one."""
    x, w_ih, w_hh, *biases = e.inputs
    inner = e.params["body"].equations[-1]
    cell, reverse = inner.name, int(inner.params["reverse"])
    _, length, inputs = x.type.shape
    hidden = w_hh.type.shape[1]
    found = {inner.outputs.index(inside): v for inside, v in zip(e.params["body"].outputs, e.outputs, strict=True)}
    states = found.get(0) or code.value((1, length, hidden))
    matrices = [code.weight(w, matrix_layout(code, w)) for w in (w_ih, w_hh)]
    scratch = code.value((SCRATCH[cell] * hidden,))
    given: list[Argument] = [biases[1], biases[0]] if cell == "gru" else [biases[0], *NULL]
    call = Statement(cell, [x, length, inputs, hidden, *matrices, *given, reverse, scratch, states])
    last = Part(states, 0 if reverse else (length - 1) * hidden)
    return [call, *([Statement("copy", [last, hidden, found[1]])] if 1 in found else [])]


RESULT = "*y++ = result;"

WRITERS: dict[str, Writer] = {
    "sum": by_line("{Y} result = 0;", "{each}result += {x};", RESULT),
    "max": by_line("{Y} result = {first};", "{each}result = {x} > result || {x} != {x} ? {x} : result;", RESULT),
    "min": by_line("{Y} result = {first};", "{each}result = {x} < result || {x} != {x} ? {x} : result;", RESULT),
    "logsumexp": by_line(
        "float most = {first}, sum = 0;",
        "{each}most = {x} > most ? {x} : most;",
        "most = isfinite(most) ? most : 0;",
        "{each}sum += expf({x} - most);",
        "*y++ = most + logf(sum);",
    ),
    "argmax": by_line("{Y} result = 0;", "{X} most = {first};", "{each}if ({after}) most = {x}, result = {i};", RESULT),
    "cumsum": by_line("{Y} sum = 0;", "{each}y[{at}] = sum += {x};"),
    "standardize": by_line(
        "const float first = {first};",
        "float mean = 0, variance = 0;",
        "{each}mean += {x} - first;",
        "mean /= {n};",
        "{each}variance += ({x} - first - mean) * ({x} - first - mean);",
        "variance /= {n};",
        "const float scale = 1 / sqrtf(variance + {eps}f);",
        "{each}y[{at}] = ({x} - first - mean) * scale;",
        "*means++ = first + mean;",
        "*variances++ = variance;",
        outputs=("y", "means", "variances"),
    ),
    "argsort": argsort,
    **dict.fromkeys(("take", "take_along_axis", "scatter_along_axis"), indexed),
    "one_hot": one_hot,
    "hash_grid": hash_grid,
    "full": lambda code, e: [_fill(e.params["value"], e.outputs[0])],
    **dict.fromkeys(("transpose", "flip", "slice", "pad", "concatenate"), copies),
    "subview": subview,
    "matmul": matmul,
    **dict.fromkeys(("softmax", "log_softmax"), along_axis),
    **dict.fromkeys(("attention", "self_attention"), attention),
    "conv2d": conv("conv2d_batch", 0, 2),
    "conv2d_input_grad": conv("conv2d_input_grad", 2, 0),
    "conv2d_weight_grad": conv("conv2d_weight_grad", 0, 1),
    "max_pool2d": pool("max_pool2d_where", 0, 1),
    "max_pool2d_put": pool("max_pool2d_put", 2, 0),
    "avg_pool2d": pool("avg_pool2d", 0, 1),
    "avg_pool2d_put": pool("avg_pool2d_put", 1, 0),
}
"""The statements of each primitive that is not elementwise."""

IN_FLOAT = ("logsumexp", "standardize")
"""The primitives whose generated functions compute in float, as the functions of `kernels/export/` do."""

FORM_WRITERS: dict[str, Writer] = {
    "linear": linear_form,
    "conv2d": conv_form,
    "conv2d_input_grad": conv_transpose_form,
    "max_pool2d": lambda code, e: [Statement("max_pool2d", [pool_sizes(e), *e.inputs, e.outputs[0]])],
    "adaptive_avg_pool2d": adaptive_avg_pool_form,
    "layer_norm": layer_norm_form,
    "embedding": embedding_form,
    **dict.fromkeys(("rnn_tanh_layer", "rnn_relu_layer", "lstm_layer", "gru_layer"), recurrent_form),
}
"""The statements of each form. Other forms are written equation by equation."""


def write(code: Code, e: Equation) -> str:
    """Add the statements of an equation. Returns what has no C, such as "matmul of float64", or ""."""
    if e.has(Trait.RESHAPE):
        code.same(e.outputs[0], e.inputs[0])
        return ""
    writer = FORM_WRITERS.get(e.form) or (loops if by_element(e) else WRITERS.get(e.name))
    statements = [] if writer is None else writer(code, e)
    of_float64 = any(v.type.dtype == np.float64 for v in (*e.inputs, *e.outputs)) and not by_element(e)
    if of_float64 and (e.name in IN_FLOAT or any(x.text is None or x.calls for x in statements)):
        return f"{e.name} of float64"
    for statement in statements:
        code.add(statement)
    return e.name if writer is None else ""
