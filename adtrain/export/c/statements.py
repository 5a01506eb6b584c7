"""The equations of a Program as statements in C: calls of functions, or loops of their own; in one table, `WRITERS`.

A training step and an evaluation use the same table. Forms (`adtrain.export.forms`) are in evaluations only, on one
image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from adtrain.codegen.elementwise import axes_of, merged, statements, strides
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.fused import body_of
from adtrain.core.program import Equation, Program, Variable
from adtrain.export.c.code import CONV, POOL, Argument, Code, Part, Statement, struct
from adtrain.export.c.text import number

Writer = Callable[[Code, Equation], list[Statement]]
"""(code, equation) to the statements that compute its outputs."""

_FUNCTIONS = re.compile(r"\b(atan2|ceil|cos|erf|expm1|exp|fabs|floor|hypot|log1p|log|pow|rint|sin|sqrt|tanh|trunc)\(")
"""Functions of <math.h> in the expressions of elementwise equations."""

_LIBRARY = re.compile(r"\b(normal_cdf|normal_pdf|integer_power|floor_divide\w*|floor_remainder\w*)\(")
"""Functions of `kernels/export/` in them."""

NULL: list[Argument] = ["NULL"]
"""In place of an array that a layer does not have."""

SCRATCH = {"rnn_tanh": 1, "rnn_relu": 1, "lstm": 9, "gru": 6}
"""Numbers for each hidden unit that the C function of a recurrent layer needs for itself."""


def loops(code: Code, equation: Equation) -> list[Statement]:
    """Elementwise equations: a loop for each axis. Numbers that are known stand in the text."""
    body: Program = body_of(equation)
    axes = axes_of(body)
    given = equation.inputs if equation.form else body.inputs
    operands = [*given, *equation.outputs]
    names = [f"x{i}" for i in range(len(body.inputs))] + [f"y{i}" for i in range(len(body.outputs))]
    indices = [f"i{k}" for k in range(len(axes))]
    elements = [f"{name}[{_index([axis.strides[n] for axis in axes], indices)}]" for n, name in enumerate(names)]
    single = {n for n, v in enumerate(given) if v in code.known and v.size == 1 and v not in code.names}
    values = {
        v: _in_brackets(number(code.known[given[n]].reshape(-1)[0])) if n in single else elements[n]
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


def _in_brackets(text: str) -> str:
    """A negative number in brackets; another one as it is."""
    return f"({text})" if text.startswith("-") else text


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


def _sum(terms: Any) -> str:
    return " + ".join(terms) or "0"


def _index(steps: Sequence[int], names: Sequence[str]) -> str:
    return _sum(f"{name} * {step}" if step != 1 else name for name, step in zip(names, steps, strict=True) if step)


def _row_major(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def _moved(
    x: Variable, y: Variable, lengths: Sequence[int], source: Sequence[int], target: Sequence[int],
    start: int = 0, into: int = 0,
) -> list[Statement]:  # fmt: skip
    """A copy of elements of `x`, from number `start` on, to those of `y` from `into` on, by these steps."""
    axes = merged(tuple(lengths), [source, target])
    names = [f"i{k}" for k in range(len(axes))]
    from_, to = (_index([axis.strides[n] for axis in axes], names) for n in (0, 1))
    parameters = [f"{pointer(x, True)}x", f"{pointer(y)}y"]
    text = _function(parameters, [axis.length for axis in axes], [f"y[{to}] = x[{from_}];"])
    return [Statement("move", [Part(x, start), Part(y, into)], text)]


def transpose(code: Code, e: Equation) -> list[Statement]:
    (x,), (y,) = e.inputs, e.outputs
    steps = _row_major(x.type.shape)
    return _moved(x, y, y.type.shape, [steps[i] for i in e.params["axes"]], _row_major(y.type.shape))


def flip(code: Code, e: Equation) -> list[Statement]:
    (x,), (y,), axes = e.inputs, e.outputs, e.params["axes"]
    steps, shape = _row_major(x.type.shape), x.type.shape
    start = sum((shape[i] - 1) * steps[i] for i in axes)
    return _moved(x, y, shape, [-s if i in axes else s for i, s in enumerate(steps)], steps, start)


def slice_(code: Code, e: Equation) -> list[Statement]:
    (x,), (y,) = e.inputs, e.outputs
    steps = _row_major(x.type.shape)
    start = sum(a * b for a, b in zip(e.params["starts"], steps, strict=True))
    source = [a * b for a, b in zip(e.params["steps"], steps, strict=True)]
    return _moved(x, y, y.type.shape, source, _row_major(y.type.shape), start)


def pad(code: Code, e: Equation) -> list[Statement]:
    (x,), (y,) = e.inputs, e.outputs
    steps = _row_major(y.type.shape)
    into = sum(a * b for a, b in zip(e.params["low"], steps, strict=True))
    target = [(gap + 1) * step for gap, step in zip(e.params["gaps"], steps, strict=True)]
    return [
        _fill(e.params["value"], y),
        *_moved(x, y, x.type.shape, _row_major(x.type.shape), target, into=into),
    ]


def concatenate(code: Code, e: Equation) -> list[Statement]:
    (y,), axis, start, found = e.outputs, e.params["axis"], 0, list[Statement]()
    steps = _row_major(y.type.shape)
    for x in e.inputs:
        found += _moved(x, y, x.type.shape, _row_major(x.type.shape), steps, into=start * steps[axis])
        start += x.type.shape[axis]
    return found


def _fill(value: float, y: Variable) -> Statement:
    text = f"""({c_type(y.type.dtype)} value, int n, {pointer(y)}y) {{
    for (int i = 0; i < n; i++) y[i] = value;
}}"""
    return Statement("fill", [value, y.size, y], text)


def full(code: Code, e: Equation) -> list[Statement]:
    return [_fill(e.params["value"], e.outputs[0])]


def reduction(add: str, from_zero: bool = False) -> Writer:
    """A reduction over some axes: `add` joins a number, `x`, to the result so far, at first 0 or the first number."""

    def write(code: Code, e: Equation) -> list[Statement]:
        (x,), (y,) = e.inputs, e.outputs
        loops, element, first, inner = _lines_of(x, e.params["axes"])
        c = c_type(y.type.dtype)
        lines = [f"({pointer(x, True)}x, {pointer(y)}y) {{", *loops, "    {"]
        lines += [
            f"        {c} result = {0 if from_zero else first};",
            f"        {inner}{add.format(x=element)};",
            "        *y++ = result;",
            "    }",
            "}",
        ]
        return [Statement(f"{e.name}s", [x, y], "\n".join(lines))]

    return write


def _lines_of(x: Variable, axes: Sequence[int]) -> tuple[list[str], str, str, str]:
    """Loops over the axes that are kept, an element, the first of a line, and the loops along a line."""
    shape, steps = x.type.shape, _row_major(x.type.shape)
    kept = [i for i in range(len(shape)) if i not in axes]
    loops = [f"    for (int i{i} = 0; i{i} < {shape[i]}; i{i}++)" for i in kept]
    element = f"x[{_index(steps, [f'i{i}' for i in range(len(shape))])}]"
    first = f"x[{_index([steps[i] for i in kept], [f'i{i}' for i in kept])}]"
    return loops, element, first, "".join(f"for (int i{i} = 0; i{i} < {shape[i]}; i{i}++) " for i in axes)


def logsumexp(code: Code, e: Equation) -> list[Statement]:
    (x,), (y,) = e.inputs, e.outputs
    loops, element, first, inner = _lines_of(x, e.params["axes"])
    lines = [
        f"({pointer(x, True)}x, {pointer(y)}y) {{",
        *loops,
        "    {",
        f"        float most = {first}, sum = 0;",
        f"        {inner}most = {element} > most ? {element} : most;",
        "        most = isfinite(most) ? most : 0;",
        f"        {inner}sum += expf({element} - most);",
        "        *y++ = most + logf(sum);",
        "    }",
        "}",
    ]
    return [Statement("logsumexps", [x, y], "\n".join(lines))]


def standardize(code: Code, e: Equation) -> list[Statement]:
    """(x - mean) / sqrt(variance + eps) over some axes, the mean and the variance."""
    (x,), outputs = e.inputs, e.outputs
    loops, element, first, inner = _lines_of(x, e.params["axes"])
    count = prod(x.type.shape[i] for i in e.params["axes"])
    lines = [
        f"({pointer(x, True)}x, float *y, float *means, float *variances) {{",
        *loops,
        "    {",
        f"        const float first = {first};",
        "        float mean = 0, variance = 0;",
        f"        {inner}mean += {element} - first;",
        f"        mean /= {count};",
        f"        {inner}variance += ({element} - first - mean) * ({element} - first - mean);",
        f"        variance /= {count};",
        f"        const float scale = 1 / sqrtf(variance + {e.params['eps']!r}f);",
        f"        {inner}y{element[1:]} = ({element} - first - mean) * scale;",
        "        *means++ = first + mean;",
        "        *variances++ = variance;",
        "    }",
        "}",
    ]
    return [Statement("standardize_axes", [x, *outputs], "\n".join(lines))]


def take(code: Code, e: Equation) -> list[Statement]:
    """Slices along an axis at indices. Indices that are not known are checked, except in a training step."""
    (x, indices), (y,), axis = e.inputs, e.outputs, e.params["axis"]
    outer, length, inner = along(x, axis)
    checks = _index_checks(code, indices, length)
    parameters = [f"{pointer(x, True)}x", f"{pointer(indices, True)}indices", f"{pointer(y)}y"]
    line = f"*y++ = x[(i0 * {length} + indices[i1]) * {inner} + i2];"
    text = _function(parameters, (outer, indices.size, inner), [line], checks)
    return [Statement("take", [x, indices, y], text, checked=bool(checks))]


def _index_checks(code: Code, indices: Variable, length: int) -> list[str]:
    """Lines that return 0 for an index that is out of range. None for known indices, and in a training step."""
    if indices in code.known or code.training:
        return []
    return [
        f"    for (int i = 0; i < {indices.size}; i++)",
        f"        if (indices[i] < 0 || indices[i] >= {length}) return 0;",
    ]


def along(v: Variable, axis: int) -> tuple[int, int, int]:
    """An array as (rows, n, columns), n being along an axis."""
    shape = v.type.shape
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


def take_along_axis(code: Code, e: Equation) -> list[Statement]:
    (x, indices), (y,), axis = e.inputs, e.outputs, e.params["axis"]
    (_, length, columns), (rows, count, _) = along(x, axis), along(indices, axis)
    parameters = [f"{pointer(x, True)}x", f"{pointer(indices, True)}indices", f"{pointer(y)}y"]
    line = f"*y++ = x[(i0 * {length} + *indices++) * {columns} + i2];"
    checks = _index_checks(code, indices, length)
    text = _function(parameters, (rows, count, columns), [line], checks)
    return [Statement("take_along_axis", [x, indices, y], text, checked=bool(checks))]


def scatter_along_axis(code: Code, e: Equation) -> list[Statement]:
    (x, indices), (y,) = e.inputs, e.outputs
    (_, length, columns), (rows, count, _) = along(y, e.params["axis"]), along(x, e.params["axis"])
    parameters = [f"{pointer(x, True)}x", f"{pointer(indices, True)}indices", f"{pointer(y)}y"]
    line = f"y[(i0 * {length} + *indices++) * {columns} + i2] += *x++;"
    checks = _index_checks(code, indices, length)
    text = _function(parameters, (rows, count, columns), [line], checks)
    return [_fill(0, y), Statement("scatter_along_axis", [x, indices, y], text, checked=bool(checks))]


def one_hot(code: Code, e: Equation) -> list[Statement]:
    (indices,), (y,), width = e.inputs, e.outputs, e.params["num_classes"]
    text = f"""({pointer(indices, True)}indices, {pointer(y)}y) {{
    for (int i = 0; i < {y.size}; i++) y[i] = indices[i / {width}] == i % {width};
}}"""
    return [Statement("one_hot", [indices, y], text)]


def _before(x: Variable, a: str, b: str) -> str:
    """C text of whether `a` is before `b` in an ascending order, in which NaN is the last."""
    return f"({a} < {b} || ({b} != {b} && {a} == {a}))" if x.type.dtype.kind == "f" else f"({a} < {b})"


def argmax(code: Code, e: Equation) -> list[Statement]:
    """The first of the largest numbers, or the first NaN."""
    (x,), (y,) = e.inputs, e.outputs
    rows, n, columns = along(x, e.params["axis"])
    larger = _before(x, "top", f"from[i * {columns}]")
    text = f"""({pointer(x, True)}x, {pointer(y)}y) {{
    for (int line = 0; line < {rows * columns}; line++) {{
        {pointer(x, True)}from = x + line / {columns} * {n * columns} + line % {columns};
        int best = 0;
        for (int i = 1; i < {n}; i++) {{
            const {c_type(x.type.dtype)} top = from[best * {columns}];
            best = {larger} ? i : best;
        }}
        y[line] = best;
    }}
}}"""
    return [Statement("argmaxima", [x, y], text)]


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


def cumsum(code: Code, e: Equation) -> list[Statement]:
    (x,), (y,) = e.inputs, e.outputs
    rows, n, columns = along(x, e.params["axis"])
    position = f"{n} - 1 - i" if e.params["reverse"] else "i"
    text = f"""({pointer(x, True)}x, {pointer(y)}y) {{
    for (int line = 0; line < {rows * columns}; line++) {{
        {c_type(y.type.dtype)} sum = 0;
        for (int i = 0; i < {n}; i++) {{
            const int at = (line / {columns} * {n} + {position}) * {columns} + line % {columns};
            y[at] = sum += x[at];
        }}
    }}
}}"""
    return [Statement("running_sums", [x, y], text)]


def matmul(code: Code, e: Equation) -> list[Statement]:
    """A product for each matrix of a batch."""
    (a, b), (y,) = e.inputs, e.outputs
    transpose_a, transpose_b = (int(e.params[f"transpose_{x}"]) for x in "ab")
    m, n = y.type.shape[-2:]
    k = a.type.shape[-2 if transpose_a else -1]
    sizes = m, k, n, transpose_a, transpose_b
    batch = y.type.shape[:-2]
    if not batch:
        return [Statement("matmul", [a, b, *sizes, y])]
    steps = [[s * size for s in strides(x.type.shape[:-2], batch)] for x, size in ((a, m * k), (b, k * n))]
    names = [f"i{i}" for i in range(len(batch))]
    factors = [f"{x} + {_index(step, names)}" for x, step in zip("ab", steps, strict=True)]
    call = f"matmul({', '.join([*factors, *map(str, sizes)])}, y + ({_index(_row_major(batch), names)}) * {m * n});"
    text = _function(["const float *a", "const float *b", "float *y"], batch, [call])
    return [Statement("products", [a, b, y], text, ("matmul",))]


def along_axis(code: Code, e: Equation) -> list[Statement]:
    """A function of lines of numbers, which may overwrite them."""
    (x,), (y,) = e.inputs, e.outputs
    return [Statement(e.name, [x, *along(x, e.params["axis"]), y], overwrites=(x,))]


def self_attention(code: Code, e: Equation) -> list[Statement]:
    """Attention of heads whose queries, keys and values lie side by side in each row of a sequence."""
    (x, *_), y, heads = e.inputs, e.outputs[0], e.params["heads"]
    *leading, tokens, width = x.type.shape
    size = width // 3 // heads
    parts = [[Part(x, i * tokens * width + k * heads * size) for k in range(3)] for i in range(prod(leading))]
    return [
        _attention(
            code,
            e,
            qkv,
            Part(y, i * tokens * heads * size),
            (heads, tokens, tokens, size),
            (width, size) * 2,
            (heads * size, size),
        )
        for i, qkv in enumerate(parts)
    ]


def attention(code: Code, e: Equation) -> list[Statement]:
    (q, k, v, *_), y = e.inputs, e.outputs[0]
    (queries, size), keys = q.type.shape[-2:], k.type.shape[-2]
    rows = (size, queries * size, size, keys * size)
    lengths = (prod(q.type.shape[:-2]), queries, keys, size)
    return [_attention(code, e, [Part(x, 0) for x in (q, k, v)], Part(y, 0), lengths, rows, rows[:2])]


def _attention(
    code: Code,
    e: Equation,
    qkv: Sequence[Part],
    y: Part,
    lengths: Sequence[int],
    rows: Sequence[int],
    out: Sequence[int],
) -> Statement:
    """`lengths` are heads, queries, keys and numbers of each; `rows` and `out` the steps of a row and a head."""
    sizes = struct("heads", HEADS, (*lengths, int(e.params["causal"]), *rows, *out))
    return Statement("attention", [sizes, float(e.params["scale"]), *qkv, code.value(lengths[2]), y])


HEADS = (
    "count", "queries", "keys", "size", "causal", "query_row", "query_head", "key_row", "key_head", "row", "head",
)  # fmt: skip
"""The members of the struct heads of `layers.c`."""


def conv(function: str, image: int, result: int) -> Writer:
    """A convolution of a batch, or a gradient. `image` and `result` say which of (inputs..., output) are x and y."""

    def write(code: Code, e: Equation) -> list[Statement]:
        (a, b), (y,) = e.inputs, e.outputs
        x, out = ((a, b, y)[i].type.shape for i in (image, result))
        weight = (a, b, y)[({0, 1, 2} - {image, result}).pop()].type.shape
        sizes = conv_sizes(x, out, weight, e.params["window"], e.params["window"].padding)
        return [Statement(function, [sizes, x[0], a, b, y])]

    return write


def conv_sizes(x: Sequence[int], y: Sequence[int], weight: Sequence[int], window: Any, padding: Sequence[int]) -> str:
    sizes = *x[1:], y[1], window.groups, *y[2:], *weight[2:], *window.stride, *window.dilation, *padding
    return struct("conv", CONV, sizes)


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
        return [Statement(function, [struct("pool", POOL, sizes), *count, *operands])]

    return write


def max_pool_form(code: Code, e: Equation) -> list[Statement]:
    """Max pooling without the positions."""
    return [Statement("max_pool2d", [pool_sizes(e), e.inputs[0], e.outputs[0]])]


def pool_sizes(e: Equation) -> str:
    """A struct pool as C text for one image."""
    x, out, windows = e.inputs[0].type.shape, e.outputs[0].type.shape, e.kernel_params["windows"]
    return struct("pool", POOL, (*x[1:], *out[2:], *windows.kernel, *windows.stride, *windows.padding))


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
    scratch = code.value(SCRATCH[cell] * hidden)
    given: list[Argument] = [biases[1], biases[0]] if cell == "gru" else [biases[0], *NULL]
    call = Statement(cell, [x, length, inputs, hidden, *matrices, *given, reverse, scratch, states])
    last = Part(states, 0 if reverse else (length - 1) * hidden)
    return [call, *([Statement("copy", [last, hidden, found[1]])] if 1 in found else [])]


WRITERS: dict[str, Writer] = {
    "loops": loops,
    "sum": reduction("result += {x}", from_zero=True),
    "max": reduction("result = {x} > result || {x} != {x} ? {x} : result"),  # NaN if there is one
    "min": reduction("result = {x} < result || {x} != {x} ? {x} : result"),
    "logsumexp": logsumexp,
    "argmax": argmax,
    "argsort": argsort,
    "cumsum": cumsum,
    "standardize": standardize,
    "take": take,
    "take_along_axis": take_along_axis,
    "scatter_along_axis": scatter_along_axis,
    "one_hot": one_hot,
    "full": full,
    "transpose": transpose,
    "flip": flip,
    "slice": slice_,
    "pad": pad,
    "concatenate": concatenate,
    "matmul": matmul,
    "softmax": along_axis,
    "log_softmax": along_axis,
    "attention": attention,
    "self_attention": self_attention,
    "conv2d": conv("conv2d_batch", 0, 2),
    "conv2d_input_grad": conv("conv2d_input_grad", 2, 0),
    "conv2d_weight_grad": conv("conv2d_weight_grad", 0, 1),
    "max_pool2d": pool("max_pool2d_where", 0, 1),
    "max_pool2d_put": pool("max_pool2d_put", 2, 0),
    "avg_pool2d": pool("avg_pool2d", 0, 1),
    "avg_pool2d_put": pool("avg_pool2d_put", 1, 0),
}
"""The statements of each primitive that is not elementwise; "loops" are all elementwise ones."""

IN_FLOAT = ("logsumexp", "standardize")
"""The primitives whose generated functions compute in float, as the functions of `kernels/export/` do."""

FORM_WRITERS: dict[str, Writer] = {
    "linear": linear_form,
    "conv2d": conv_form,
    "conv2d_input_grad": conv_transpose_form,
    "max_pool2d": max_pool_form,
    "adaptive_avg_pool2d": adaptive_avg_pool_form,
    "layer_norm": layer_norm_form,
    "embedding": embedding_form,
    "rnn_tanh_layer": recurrent_form,
    "rnn_relu_layer": recurrent_form,
    "lstm_layer": recurrent_form,
    "gru_layer": recurrent_form,
}
"""The statements of each form. Other forms are written equation by equation."""
