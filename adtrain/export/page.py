"""A page that runs a network in a browser: on drawings and images, on the columns of a table, or on a text.

The statements of the network are calls of a WebAssembly module, and generated functions in JavaScript. The module
`kernels/export/wasm/layers.wasm` has the functions of `kernels/export/` that statements call. It is a part of the
package, so a page needs no compiler. Generated functions depend on the network. Their C consists of loops, numbers and
elements of arrays, which are the same in JavaScript, except for types, pointers, casts and functions.

An array is its address, counted from the end of the module's own memory, where the page puts the constants.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from math import floor, log10, prod
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from adtrain.core.errors import AdtrainError
from adtrain.core.program import Variable
from adtrain.data import Split
from adtrain.data.digit_image import DARK
from adtrain.data.part import Columns
from adtrain.data.table_encoder import TableEncoder
from adtrain.export.c import network
from adtrain.export.c.code import Argument, Code, Part, Struct
from adtrain.export.c.source import LAYERS, ready_layers
from adtrain.nn.module import size_text
from adtrain.templates import environment, macro
from adtrain.text import short
from adtrain.training import TrainedModel
from adtrain.training.inputs import is_of_mnist
from adtrain.training.tasks import Regression

LARGEST = 400_000_000
"""Bytes of constants of the largest page: as base 64, browsers hold about 512 MB of text."""
MOST_FIELDS = 100
"""Fields of a page for rows of numbers without names."""
DEVIATIONS = 3
"""Standard deviations on each side of the mean that a slider covers where the examples cannot be read."""
POSITIONS = 200
"""Minimum positions of a slider for numbers that are not whole."""


def encode(trained: TrainedModel, program: PageProgram, examples: Split | None) -> bytes:
    """The page with a network's `program`: one file, which loads nothing else.

    `examples` give the ranges of the sliders of a table. Raises AdtrainError for a network whose input is no image of
    bytes in grey or colour, no row of a table, and no text, or which is too large.
    """
    about = network.interface(trained)
    if len(program.constants) > LARGEST:
        size, most = short(len(program.constants), "B"), short(LARGEST, "B")
        raise AdtrainError(f"found {size} of weights, expected at most {most} for a page; export FILE.c")
    kind, own = _input(trained, about, examples)
    shown = {
        "kind": kind, "shape": about.image, "labels": about.labels, "first": program.first_shape,
        "areNumbers": isinstance(trained.network.task, Regression), **own,
    }  # fmt: skip
    sizes = f"{short(len(program.constants), 'B')} of weights, {short(program.memory, 'B')} of memory"
    return environment().get_template("demo.html.j2").render(
        title=trained.config.name,
        note=f"The network runs in this page: {sizes}. It sends nothing.",
        about=shown,
        script=script(program),
    ).encode()  # fmt: skip


def script(program: PageProgram) -> Markup:
    """The JavaScript that runs a network: `load`, then `predict`."""
    module, constants = (base64.b64encode(content).decode() for content in (ready_layers(), program.constants))
    return macro("demo.js.j2", "network")(program.known, Markup(program.functions), module, constants)


def _input(trained: TrainedModel, about: network.Interface, examples: Split | None) -> tuple[str, Mapping[str, Any]]:
    """The kind of a page, and what it needs to know of its input."""
    channels, height, width = about.image
    if about.is_text:
        return "text", _text(trained)
    if about.c_type == "uint8_t" and channels in (1, 3) and min(height, width) > 1:
        return "image", {"centred": is_of_mnist(trained), "dark": trained.network.mean[0] < DARK}
    if height == width == 1 and (trained.encoder is not None or channels <= MOST_FIELDS):
        encoder = trained.encoder or TableEncoder(Columns.named(f"feature {i}" for i in range(channels)), ())
        indexed = encoder.encoding == "index"
        return "table", {"columns": _columns(trained, encoder, examples), "indexed": indexed}
    found = f"{size_text(about.image)} {'bytes' if about.c_type == 'uint8_t' else 'numbers'}"
    kinds = f"images of bytes in grey or colour, tables, rows of up to {MOST_FIELDS} numbers, and texts"
    raise AdtrainError(f"pages are for {kinds}; this run takes {found}; write a .wasm file")


def _columns(trained: TrainedModel, encoder: TableEncoder, examples: Split | None) -> list[dict[str, Any]]:
    """The fields of a table: names, kinds, ranges, and the features of empty cells, where these are allowed."""
    found, begin = [], 0
    for column in encoder.columns.features:
        width = encoder.width(column)
        filled = encoder.fill[begin : begin + width] or None
        known: dict[str, Any] = {"name": column.title, "width": width, "fill": filled}
        if column.categories is not None:
            known |= {"kind": "category", "categories": column.categories}
        else:
            low, high, step = _range(trained, examples, begin)
            known |= {"kind": "date" if column.is_date else "number", "low": low, "high": high, "step": step}
            known["start"] = _rounded(min(max(trained.network.mean[begin], low), high), step)
        found.append(known)
        begin += width
    return found


def _range(trained: TrainedModel, examples: Split | None, feature: int) -> tuple[float, float, float]:
    """The least, the largest and the step of a feature's slider; a step of 1 where all examples have whole numbers."""
    mean, std = float(trained.network.mean[feature]), float(trained.network.std[feature])
    low, high, is_whole = mean - DEVIATIONS * std, mean + DEVIATIONS * std, False
    if examples is not None and len(examples):
        values = trained.network.original(np.asarray(examples.images))[:, feature]
        low, high, is_whole = float(values.min()), float(values.max()), bool((values == np.rint(values)).all())
    step = 1.0 if is_whole else 10.0 ** floor(log10(max(high - low, 1e-30) / POSITIONS))
    return _rounded(low, step, down=True), _rounded(high, step), step


def _rounded(x: float, step: float, down: bool = False) -> float:
    """The multiple of a step near a number, without digits beyond the step's."""
    count = floor(x / step) if down else round(x / step)
    return round(count * step, max(0, -floor(log10(step))))


def _text(trained: TrainedModel) -> dict[str, Any]:
    """What the page needs to make classes of a text, and text of classes.

    Raises AdtrainError for a tokenizer that normalises a text, or divides it otherwise than that of GPT-2.
    """
    known: dict[str, Any] = {"unit": trained.config.data.options.unit, "classes": len(trained.classes)}
    if (tokenizer := trained.tokenizer) is None:
        return known
    about = json.loads(tokenizer.content)
    divided = about.get("pre_tokenizer") or {}
    if about.get("normalizer") or divided.get("type") != "ByteLevel" or divided.get("add_prefix_space"):
        raise AdtrainError("found a tokenizer that pages do not have, expected GPT-2's or one of adtrain data tokenize")
    numbers = {name: number for number, name in enumerate(tokenizer.classes)}
    pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in about["model"]["merges"])
    merges = [(numbers[a], numbers[b], numbers[a + b]) for a, b in pairs]
    tokens = [x.decode("latin-1") for x in tokenizer.tokens]
    return known | {"tokens": tokens, "merges": merges, "end": tokenizer.end_of_text}


VIEWS = {
    "float": "float32", "double": "float64", "int64_t": "float64", "int32_t": "int32", "uint32_t": "int32",
    "uint8_t": "uint8", "bool": "uint8",
}  # fmt: skip
"""The page's view of memory for elements of each type. Integers of 64 bits are stored as float64. Those of uint32_t are
indices, below 2^31."""

FUNCTIONS = {
    **{name: f"Math.{name}" for name in ("atan2", "ceil", "cos", "exp", "expm1", "floor", "hypot", "log", "log1p")},
    **{name: f"Math.{name}" for name in ("pow", "sin", "sqrt", "tanh", "trunc")},
    "fabs": "Math.abs", "isfinite": "Number.isFinite", "integer_power": "Math.pow",
    **{name: name for name in ("erf", "rint", "normal_cdf", "normal_pdf", "floor_divide", "floor_remainder")},
}  # fmt: skip
"""JavaScript for functions of <math.h> and of `kernels/export/`; `demo.js.j2` defines those without `Math`."""

ALIGNMENT = 16
"""Bytes."""


class PageProgram(NamedTuple):
    """A network as a page runs it.

    Attributes:
        known: what `demo.js.j2` reads: "calls", for each statement whether it is checked, its function and its
            arguments, where an array is [address]; "size", bytes of all memory; addresses, counts and types.
        functions: the generated functions, and the table of them.
        constants: the bytes at address 0.
        first_shape: the shape of the first layer's result.
        memory: bytes of all values.
    """

    known: dict[str, Any]
    functions: str
    constants: bytes
    first_shape: tuple[int, ...]
    memory: int


class _Memory:
    """Addresses of arrays, of which the constants come first."""

    def __init__(self) -> None:
        self.addresses: dict[Any, int] = {}
        self.constants: list[bytes] = []
        self.size = 0

    def add(self, key: Any, content: bytes | int) -> None:
        """Place a constant, given as bytes, or an array, given as its number of bytes."""
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
    sizes = (about.example, about.c_type, about.image), (about.results, about.output_type, about.outputs)
    for name, c_type, shape in sizes:
        memory.add(name, prod(shape) * {"uint8_t": 1, "float": 4, "double": 8}[c_type])
    calls = []
    for s in code.statements:
        if s.text is None and s.function not in LAYERS:
            raise _missing(s.function)
        function = s.function if s.text is None else code.loops[s.text]
        calls.append([s.checked, function, *(_argument(code, memory, x) for x in s.arguments)])
    functions = [javascript(name, text) for text, name in code.loops.items()]
    functions.append(f"const generated = {{{', '.join(code.loops.values())}}};")
    first_shape = found.first.type.shape[1:]
    known = {
        "calls": calls, "size": memory.size, "image": memory.addresses[about.example],
        "outputs": memory.addresses[about.results], "first": _address(code, memory, found.first),
        "types": [about.c_type, about.output_type], "count": prod(about.outputs), "firstCount": prod(first_shape),
        "labels": len(about.labels),
    }  # fmt: skip
    return PageProgram(known, "\n".join(functions), constants, first_shape, code.bytes)


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
