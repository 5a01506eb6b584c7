"""The equations of a training step as statements in C: calls of functions, or loops of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from adtrain.codegen.elementwise import axes_of, statements, strides
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.fused import body_of
from adtrain.core.program import Equation, Program, Variable
from adtrain.export.c.writer import CONV, POOL, struct


class Statement(NamedTuple):
    """A call of a function.

    Without a `text` the function is one of `kernels/export/`. With it the function is generated: `text` is its
    parameters and body, and `calls` are the functions of `kernels/export/` that it calls.
    """

    function: str
    arguments: Sequence[Variable | int | float | str]
    text: str | None = None
    calls: tuple[str, ...] = ()


_FUNCTIONS = re.compile(r"\b(ceil|cos|erf|expm1|exp|fabs|floor|hypot|log1p|log|pow|rint|sin|sqrt|tanh|trunc)\(")
"""Functions of <math.h> in the expressions of elementwise equations."""


def loops(equation: Equation) -> list[Statement]:
    """Elementwise equations: a loop for each axis."""
    body: Program = body_of(equation)
    axes = axes_of(body)
    operands = [*body.inputs, *body.outputs]
    names = [f"x{i}" for i in range(len(body.inputs))] + [f"y{i}" for i in range(len(body.outputs))]
    indices = [f"i{k}" for k in range(len(axes))]
    elements = [f"{name}[{_index([axis.strides[n] for axis in axes], indices)}]" for n, name in enumerate(names)]
    values = dict(zip(body.inputs, elements, strict=False))
    inside = [_in_float32(line) for line in statements(body, values, elements[len(body.inputs) :])]
    parameters = [f"{pointer(v, n < len(body.inputs))}{names[n]}" for n, v in enumerate(operands)]
    calls = tuple(f for f in ("normal_cdf", "normal_pdf") if any(f in line for line in inside))
    return [Statement("elementwise", operands, _function(parameters, [axis.length for axis in axes], inside), calls)]


def _in_float32(line: str) -> str:
    """A statement whose functions are those for float, where its result is a float.

    <tgmath.h> would choose them, but it needs complex functions, which C libraries of microcontrollers lack.
    """
    return _FUNCTIONS.sub(r"\1f(", line) if line.startswith("const float ") else line


def _function(parameters: Sequence[str], lengths: Sequence[int], inside: Sequence[str]) -> str:
    """Parameters and body of a function with one loop in another for each length."""
    lines = [f"({', '.join(parameters)}) {{"]
    for k, length in enumerate(lengths):
        lines.append(
            f"{'    ' * (k + 1)}for (int i{k} = 0; i{k} < {length}; i{k}++){' {' if k == len(lengths) - 1 else ''}"
        )
    indent = "    " * (len(lengths) + 1)
    lines += [f"{indent}{line}" for line in inside]
    return "\n".join([*lines, *(["    " * len(lengths) + "}"] if lengths else []), "}"])


def _sum(terms: Any) -> str:
    return " + ".join(terms) or "0"


def _index(steps: Sequence[int], names: Sequence[str]) -> str:
    return _sum(f"{name} * {step}" if step != 1 else name for name, step in zip(names, steps, strict=True) if step)


def _row_major(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def reduction(equation: Equation) -> list[Statement]:
    """The sum over some axes."""
    (x,), (y,) = equation.inputs, equation.outputs
    shape, axes = x.type.shape, equation.params["axes"]
    kept = [i for i in range(len(shape)) if i not in axes]
    names, steps = [f"i{i}" for i in range(len(shape))], _row_major(shape)
    c = c_type(y.type.dtype)
    lines = [f"({pointer(x, True)}x, {pointer(y)}y) {{"]
    lines += [f"    for (int i{i} = 0; i{i} < {shape[i]}; i{i}++)" for i in kept]
    lines += ["    {", f"        {c} sum = 0;"]
    lines += [f"        for (int i{i} = 0; i{i} < {shape[i]}; i{i}++)" for i in axes]
    lines += [f"            sum += x[{_index(steps, names)}];", "        *y++ = sum;", "    }", "}"]
    return [Statement("sums", [x, y], "\n".join(lines))]


def standardize(equation: Equation) -> list[Statement]:
    """(x - mean) / sqrt(variance + eps) over some axes, the mean and the variance."""
    (x,), outputs = equation.inputs, equation.outputs
    shape, axes = x.type.shape, equation.params["axes"]
    kept = [i for i in range(len(shape)) if i not in axes]
    steps = _row_major(shape)
    element = _index(steps, [f"i{i}" for i in range(len(shape))])
    inner = "".join(f"for (int i{i} = 0; i{i} < {shape[i]}; i{i}++) " for i in axes)
    count = prod(shape[i] for i in axes)
    lines = [f"({pointer(x, True)}x, float *y, float *means, float *variances) {{"]
    lines += [f"    for (int i{i} = 0; i{i} < {shape[i]}; i{i}++)" for i in kept]
    lines += [
        "    {",
        f"        const float first = x[{_index([steps[i] for i in kept], [f'i{i}' for i in kept]) if kept else 0}];",
        "        float mean = 0, variance = 0;",
        f"        {inner}mean += x[{element}] - first;",
        f"        mean /= {count};",
        f"        {inner}variance += (x[{element}] - first - mean) * (x[{element}] - first - mean);",
        f"        variance /= {count};",
        f"        const float scale = 1 / sqrtf(variance + {equation.params['eps']!r}f);",
        f"        {inner}y[{element}] = (x[{element}] - first - mean) * scale;",
        "        *means++ = first + mean;",
        "        *variances++ = variance;",
        "    }",
        "}",
    ]
    return [Statement("standardize_axes", [x, *outputs], "\n".join(lines))]


def take(equation: Equation) -> list[Statement]:
    """The rows of an array at indices."""
    (x, indices), (y,) = equation.inputs, equation.outputs
    row = x.size // max(x.type.shape[0], 1)
    parameters = f"({pointer(x, True)}x, {pointer(indices, True)}indices, {pointer(y)}y)"
    text = f"""{parameters} {{
    for (int i = 0; i < {indices.size}; i++)
        for (int j = 0; j < {row}; j++) *y++ = x[indices[i] * {row} + j];
}}"""
    return [Statement("take", [x, indices, y], text)]


def _along(equation: Equation, width: int, body: str) -> list[Statement]:
    (x, indices), (y,) = equation.inputs, equation.outputs
    rows, columns = indices.type.shape[0], prod(indices.type.shape[1:])
    parameters = f"({pointer(x, True)}x, {pointer(indices, True)}indices, {pointer(y)}y)"
    clear = f"    for (int i = 0; i < {y.size}; i++) y[i] = 0;\n" if "+=" in body else ""
    text = f"""{parameters} {{
{clear}    for (int i = 0; i < {rows}; i++)
        for (int j = 0; j < {columns}; j++) {body.format(n=columns, w=width)};
}}"""
    return [Statement(equation.primitive.name, [x, indices, y], text)]


def take_along_axis(equation: Equation) -> list[Statement]:
    return _along(equation, equation.inputs[0].type.shape[1], "y[i * {n} + j] = x[i * {w} + indices[i * {n} + j]]")


def scatter_along_axis(equation: Equation) -> list[Statement]:
    return _along(equation, equation.params["length"], "y[i * {w} + indices[i * {n} + j]] += x[i * {n} + j]")


def one_hot(equation: Equation) -> list[Statement]:
    (indices,), (y,) = equation.inputs, equation.outputs
    width = equation.params["num_classes"]
    text = f"""({pointer(indices, True)}indices, {pointer(y)}y) {{
    for (int i = 0; i < {y.size}; i++) y[i] = indices[i / {width}] == i % {width};
}}"""
    return [Statement("one_hot", [indices, y], text)]


def full(equation: Equation) -> list[Statement]:
    (y,) = equation.outputs
    text = f"""({c_type(y.type.dtype)} value, int n, {pointer(y)}y) {{
    for (int i = 0; i < n; i++) y[i] = value;
}}"""
    return [Statement("fill", [equation.params["value"], y.size, y], text)]


def transpose(equation: Equation) -> list[Statement]:
    (x,), (y,) = equation.inputs, equation.outputs
    steps = _row_major(x.type.shape)
    names = [f"i{i}" for i in range(len(y.type.shape))]
    source = _index([steps[i] for i in equation.params["axes"]], names)
    target = _index(_row_major(y.type.shape), names)
    parameters = [f"{pointer(x, True)}x", f"{pointer(y)}y"]
    return [Statement("transpose", [x, y], _function(parameters, y.type.shape, [f"y[{target}] = x[{source}];"]))]


def matmul(equation: Equation) -> list[Statement]:
    """A product for each matrix of a batch."""
    (a, b), (y,) = equation.inputs, equation.outputs
    transpose_a, transpose_b = (int(equation.params[f"transpose_{x}"]) for x in "ab")
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


def along_last(equation: Equation) -> list[Statement]:
    (x,), (y,) = equation.inputs, equation.outputs
    shape, axis = x.type.shape, equation.params["axis"]
    sizes = prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])
    return [Statement(equation.primitive.name, [x, *sizes, y])]


def conv(function: str, image: int, result: int) -> Callable[[Equation], list[Statement]]:
    """A convolution or a gradient. `image` and `result` say which of (inputs..., output) are x and y of conv2d."""

    def write(equation: Equation) -> list[Statement]:
        (a, b), (y,) = equation.inputs, equation.outputs
        x, out = ((a, b, y)[i].type.shape for i in (image, result))
        kernel = ({0, 1, 2} - {image, result}).pop()
        weight = (a, b, y)[kernel].type.shape
        window = equation.params["window"]
        sizes = (
            *x[1:],
            out[1],
            window.groups,
            *out[2:],
            *weight[2:],
            *window.stride,
            *window.dilation,
            *window.padding,
        )
        return [Statement(function, [struct("conv", CONV, sizes), x[0], a, b, y])]

    return write


def pool(function: str, image: int, result: int) -> Callable[[Equation], list[Statement]]:
    """A pooling or its gradient; see `conv`."""

    def write(equation: Equation) -> list[Statement]:
        operands = [*equation.inputs, *equation.outputs]
        x, out = operands[image].type.shape, operands[result].type.shape
        windows = equation.params["windows"]
        channels = x[0] * x[1]  # of all images
        averages = function == "avg_pool2d"
        sizes = (channels if averages else 1, *x[2:], *out[2:], *windows.kernel, *windows.stride, *windows.padding)
        count = [] if averages else [channels]
        return [Statement(function, [struct("pool", POOL, sizes), *count, *operands])]

    return write


WRITERS: dict[str, Callable[[Equation], list[Statement]]] = {
    "loops": loops,
    "sum": reduction,
    "standardize": standardize,
    "take": take,
    "take_along_axis": take_along_axis,
    "scatter_along_axis": scatter_along_axis,
    "one_hot": one_hot,
    "full": full,
    "transpose": transpose,
    "matmul": matmul,
    "softmax": along_last,
    "log_softmax": along_last,
    "conv2d": conv("conv2d_batch", 0, 2),
    "conv2d_input_grad": conv("conv2d_input_grad", 2, 0),
    "conv2d_weight_grad": conv("conv2d_weight_grad", 0, 1),
    "max_pool2d": pool("max_pool2d_where", 0, 1),
    "max_pool2d_put": pool("max_pool2d_put", 2, 0),
    "avg_pool2d": pool("avg_pool2d", 0, 1),
    "avg_pool2d_put": pool("avg_pool2d_put", 1, 0),
}
"""The statements of each primitive that is not elementwise; "loops" are all elementwise ones."""
