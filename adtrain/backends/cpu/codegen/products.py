"""Products: a call of the matrix product with an epilogue, the loops that run on each finished block of it."""

from __future__ import annotations

from collections.abc import Callable

from adtrain.backends.cpu.build import Source
from adtrain.backends.cpu.codegen.text import Writer
from adtrain.backends.cpu.forms.batchwise import kernels
from adtrain.codegen.access import access, read
from adtrain.codegen.elementwise import statements
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.kernel import value_for
from adtrain.core.program import PRODUCT, Equation, Program, Variable, body_of

MAX_AHEAD = 8
"""As in kernels/cpu/gemm.h."""


def emit_product(writer: Writer, equation: Equation, place: Callable[[Variable], str]) -> list[str]:
    """The lines of a function of the team that computes a matrix product, with its epilogue if it has one."""
    product, epilogue = equation, None
    if equation.form == PRODUCT:
        body: Program = equation.params["body"]
        product, loops = body.equations
        epilogue = body_of(loops)
    (c,) = product.outputs
    target = place(c) if c in equation.outputs else "NULL"
    (kernel,) = (k for k in kernels(product) if k.team)
    types = [v.type for v in product.inputs]
    source = Source(kernel.file, kernel.element_types(*types, **product.kernel_params))
    name = writer.name(kernel, product, types)
    writer.called[name] = None
    writer.scratch = max(writer.scratch, value_for(kernel.scratch, *types, **product.kernel_params))
    t = c_type(source.dtypes[0])
    struct = _declare_epilogue(writer, t, source.suffix)
    numbers = [str(int(x)) for x in value_for(kernel.numbers, *types, **product.kernel_params)]
    arguments = ["const Team *", f"const {t} *", f"const {t} *", f"{t} *", *("int64_t" for _ in numbers)]
    writer.prototypes[f"void {name}({', '.join(arguments)}, const {struct} *);"] = None
    a, b = map(place, product.inputs)
    before = _epilogue(writer, epilogue, product.outputs[0], struct, place) if epilogue else []
    return [*before, f"{name}(team, {', '.join([a, b, target, *numbers, '&epilogue' if epilogue else 'NULL'])});"]


def _declare_epilogue(writer: Writer, t: str, suffix: str) -> str:
    """The name of the epilogue's type, as in kernels/cpu/gemm.h, for one element type."""
    numbers = ", ".join(["int64_t"] * 5)
    writer.prototypes[
        f"typedef struct {{ void (*function)(void *, const {t} *, {numbers}); void *context; "
        f"const {t} *ahead[{MAX_AHEAD}]; int64_t ahead_count; }} Epilogue{suffix};"
    ] = None
    return f"Epilogue{suffix}"


def _epilogue(
    writer: Writer, body: Program, product: Variable, struct: str, place: Callable[[Variable], str]
) -> list[str]:
    """The lines that define ``epilogue``, which computes `body` on a block of `product`.

    Its function takes the addresses of operands in an array, so that layers of the same shape share it.
    """
    shape = product.type.shape
    width = shape[-1]
    values: dict[Variable, str] = {product: "block[j]"}
    before, at_row = ["char *const *operands = context;"], []
    operands: list[str] = []
    whole = []
    for i, v in enumerate(body.inputs):
        if v is product:
            continue
        found = access(v.type.shape, shape, ("(row + i)", len(shape) - 1), ("column", 1))
        constant = pointer(v, const=True)
        before.append(f"{constant}x{i} = ({constant})operands[{len(operands)}];")
        operands.append(place(v))
        if found.step:
            at_row.append(f"{constant}p{i} = x{i} + {found.place};")
            values[v] = f"p{i}[j]"
        else:
            line, values[v] = read(v, f"a{i}", f"x{i}", found.place)
            (before if found.place == "0" else at_row).append(line)
        if v.type == product.type:
            whole.append(place(v))
    results = []
    for i, v in enumerate(body.outputs):
        at_row.append(f"{pointer(v)}q{i} = ({pointer(v)})operands[{len(operands)}] + (row + i) * {width} + column;")
        operands.append(place(v))
        if v.type == product.type:
            whole.append(place(v))
        results.append(f"q{i}[j]")
    t = c_type(product.type.dtype)
    parameters = (
        f"void *context, const {t} *block, int64_t ld, int64_t row, int64_t column, int64_t rows, int64_t columns"
    )
    lines = [
        *before,
        "for (int64_t i = 0; i < rows; i++, block += ld) {",
        *(f"    {line}" for line in at_row),
        "    #pragma omp simd",
        "    for (int64_t j = 0; j < columns; j++) {",
        *(f"        {line}" for line in statements(body, values, results)),
        "    }",
        "}",
    ]
    name = writer.function("epilogue", parameters, lines)
    ahead = list(dict.fromkeys(whole))[:MAX_AHEAD]
    return [
        f"char *const operands[] = {{{', '.join(f'(char *){operand}' for operand in operands)}}};",
        f"const {struct} epilogue = {{{name}, (void *)operands, {{{', '.join(ahead) or 'NULL'}}}, {len(ahead)}}};",
    ]
