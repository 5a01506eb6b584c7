"""The statements of a network for a page: calls of a WebAssembly module, and generated functions in JavaScript.

The module `kernels/export/wasm/layers.wasm` has the functions of `kernels/export/` that statements call. It is a part
of the package, so a page needs no compiler. Generated functions depend on the network. Their C consists of loops,
numbers and elements of arrays, which are the same in JavaScript, except for types, pointers, casts and functions.

An array is its address, counted from the end of the module's own memory, where the page puts the constants.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.errors import AdtrainError
from adtrain.core.program import Variable
from adtrain.export.c import network
from adtrain.export.c.build import LAYERS
from adtrain.export.c.code import Argument, Code, Part, Struct
from adtrain.training import TrainedModel

VIEWS = {
    "float": "float32", "double": "float64", "int64_t": "float64", "int32_t": "int32", "uint8_t": "uint8",
    "bool": "uint8",
}  # fmt: skip
"""The page's view of memory for elements of each type. Integers of 64 bits are stored as float64."""

FUNCTIONS = {
    **{name: f"Math.{name}" for name in ("atan2", "ceil", "cos", "exp", "expm1", "floor", "hypot", "log", "log1p")},
    **{name: f"Math.{name}" for name in ("pow", "sin", "sqrt", "tanh", "trunc")},
    "fabs": "Math.abs", "isfinite": "Number.isFinite", "integer_power": "Math.pow",
    **{name: name for name in ("erf", "rint", "normal_cdf", "normal_pdf", "floor_divide", "floor_remainder")},
}  # fmt: skip
"""JavaScript for functions of <math.h> and of `kernels/export/`; `demo_network.js.j2` defines those without `Math`."""

ALIGNMENT = 16
"""Bytes."""


class PageProgram(NamedTuple):
    """A network as a page runs it.

    Attributes:
        calls: for each statement whether it is checked, its function and its arguments; an array is [address].
        functions: the generated functions, and the table of them.
        constants: the bytes at address 0.
        size: bytes of all memory.
        image, outputs, first: the addresses of the image, the outputs and the first layer's result.
        output_count: how many outputs there are.
        first_shape: the shape of the first layer's result.
        memory: bytes of all values.
    """

    calls: list[list[Any]]
    functions: str
    constants: bytes
    size: int
    image: int
    outputs: int
    output_count: int
    first: int
    first_shape: tuple[int, ...]
    memory: int


class _Memory:
    """Addresses of arrays, of which the constants come first."""

    def __init__(self) -> None:
        self.addresses: dict[Any, int] = {}
        self.constants: list[bytes] = []
        self.size = 0

    def add(self, key: Any, content: bytes | int) -> None:
        """Place a constant, or an array of so many bytes."""
        if key not in self.addresses:
            self.addresses[key] = self.size
            size = content if isinstance(content, int) else len(content)
            padding = -size % ALIGNMENT
            if not isinstance(content, int):
                self.constants.append(content + bytes(padding))
            self.size += size + padding


def page_program(trained: TrainedModel) -> PageProgram:
    """The network for a page. Raises AdtrainError as `network.translated` does, and for functions that no page has."""
    about = network.interface(trained)
    found = network.translated(trained, simd=True)
    code, memory = found.code, _Memory()
    code.place([found.outputs, found.first])
    generated = {name for s in code.statements if s.text is not None for name in map(code.text, s.arguments)}
    for name, x in code.arrays.items():
        memory.add(name, (x.astype(np.float64) if x.dtype == np.int64 and name in generated else x).tobytes())
    for struct in (x for s in code.statements for x in s.arguments if isinstance(x, Struct)):
        memory.add(struct, np.array(struct.members, np.int32).tobytes())
    constants = b"".join(memory.constants)
    for name, (_, size) in code.memory.items():
        memory.add(name, size)
    sizes = (network.IMAGE, about.c_type, about.image), (about.results, about.output_type, about.outputs)
    for name, c_type, shape in sizes:
        memory.add(name, prod(shape) * {"uint8_t": 1, "float": 4, "double": 8}[c_type])
    calls = []
    for s in code.statements:
        if s.text is None and s.function not in LAYERS:
            raise _missing(s.function)
        function = s.function if s.text is None else code.loops[s.text]
        calls.append([s.checked, function, *(_argument(code, memory, x) for x in s.arguments)])
    functions = [javascript(name, text) for text, name in code.loops.items()]
    return PageProgram(
        calls,
        "\n".join([*functions, f"const generated = {{{', '.join(code.loops.values())}}};"]),
        constants,
        memory.size,
        memory.addresses[network.IMAGE],
        memory.addresses[about.results],
        prod(about.outputs),
        _address(code, memory, found.first),
        found.first.type.shape[1:],
        code.bytes,
    )


def _argument(code: Code, memory: _Memory, x: Argument) -> Any:
    if isinstance(x, (int, float)):
        return x
    return 0 if x == "NULL" else [memory.addresses[x] if isinstance(x, Struct) else _address(code, memory, x)]


def _address(code: Code, memory: _Memory, x: Variable | Part | str) -> int:
    if isinstance(x, Part):
        return _address(code, memory, x.value) + x.start * x.value.type.dtype.itemsize
    if isinstance(x, str):
        return memory.addresses[x]
    name, _, offset = code.text(x).partition(" + ")
    return memory.addresses[name] + int(offset or 0) * x.type.dtype.itemsize


_TYPE = r"(?:float|double|bool|int|u?int\d+_t)"


def javascript(name: str, text: str) -> str:
    """A generated function, given by its parameters and its body in C, as JavaScript.

    A pointer becomes an index into a view of the whole memory. Raises AdtrainError for functions that no page has.
    """
    head, body = text.split(") {", 1)
    parameters = re.findall(rf"({_TYPE}) (\*?)(\w+)(?:, |$)", head.lstrip("(").replace("const ", ""))
    sizes = {"float32": 4, "float64": 8, "int32": 4, "uint8": 1}
    lines = []
    for c_type, star, parameter in parameters:
        if star:
            view = VIEWS[c_type]
            lines.append(f"    {parameter} /= {sizes[view]};")
            body = re.sub(rf"\b{parameter} \+ (\([^()]*\)(?: \* \d+)?)", rf"{sizes[view]} * ({parameter} + \1)", body)
            body = re.sub(rf"\*{parameter}\+\+", f"{view}[{parameter}++]", body)
            body = re.sub(rf"\b{parameter}\[", f"{view}[{parameter} + ", body)
    body = re.sub(rf"\b(?:const )?{_TYPE} (?=\w+ = )", "let ", body)
    body = re.sub(r"\b(i\d*) / (\d+)", r"Math.floor(\1 / \2)", body)
    for pattern, replacement in ((r"\((float|double)\)", ""), (r"\(bool\)", "!!"), (rf"\({_TYPE}\)", "~~")):
        body = re.sub(pattern, replacement, body)
    body = re.sub(r"(?<=[\d.])f\b", "", body).replace("INFINITY", "Infinity").replace("NAN", "NaN")
    body = re.sub(r"(?<![\w.])(\w+)\(", _function, body)
    return f"function {name}({', '.join(parameter for *_, parameter in parameters)}) {{\n" + "\n".join(lines) + body


def _function(found: re.Match[str]) -> str:
    name = found[1]
    if name in ("for", "if", "matmul"):
        return f"{'layers.' if name == 'matmul' else ''}{name}("
    plain = re.sub(r"_integers$", "", name)
    plain = plain if plain in FUNCTIONS else plain.removesuffix("f")
    if plain not in FUNCTIONS:
        raise _missing(name)
    return f"{FUNCTIONS[plain]}("


def _missing(function: str) -> AdtrainError:
    return AdtrainError(f"found {function}, which pages do not have; write a .c or .wasm file")
