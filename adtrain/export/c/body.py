"""The text of an exported C file: labels, weights, the functions of layers, and those of the header."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from adtrain.export.c import library, network
from adtrain.export.c.header import batch_parameters
from adtrain.export.c.main_program import main_program
from adtrain.export.c.memory import Memory
from adtrain.export.c.network import Interface, Translated
from adtrain.export.c.text import c_string, comment, numbers, statement
from adtrain.export.c.training import TrainingStep
from adtrain.export.c.writer import Argument, Buffer, Call, Part

C_TYPES = {"float32": "float", "float64": "double", "int32": "int32_t", "int8": "int8_t"}
MARK = 8
"""Bytes at the start of a file of weights, a digest, by which `NAME_load` refuses the file of another network."""

KEEP_CALLS = """\
#if defined(__GNUC__) && !defined(__clang__)
/* gcc 12 may take a store for an access of NULL, and delete the calls of its function as without effect. */
#pragma GCC optimize("no-delete-null-pointer-checks")
#endif
"""
NO_CONTRACTION = """\
/* Equal products must cancel, so they are rounded before they are added. gcc ignores the pragma of the C standard. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif
"""


def body(
    name: str,
    header: str,
    found: Translated,
    about: Interface,
    memory: Memory,
    notes: Sequence[str],
    simd: bool,
    content: bytes | None,
    step: TrainingStep | None,
) -> Iterator[str]:
    """The parts of NAME.c, in their order; `content` is that of the file of weights, if they are in one."""
    program, upper = found.program, name.upper()
    kinds = {"simd": simd, "int8": program.int8, "training": program.training}
    files = [*(f"layers_{kind}.c" for kind, chosen in kinds.items() if chosen), "layers.c"]
    functions = dict.fromkeys(call.function for call in program.calls if call.function)
    functions |= {"argmax": None} if about.chooses else {}
    functions |= dict.fromkeys(step.library) if step else {}
    texts = library.needed(functions, *files)
    yield from comment(notes)
    yield ""
    yield KEEP_CALLS
    yield f'#include "{header}"'
    yield ""
    if step:
        yield "#include <stdbool.h>"
    if step or any(re.search(r"\b\w+f\(|INFINITY", text) for text in texts):
        yield "#include <math.h>"
    if content is not None:
        yield "#include <stdio.h>"
    if any("mem" in text for text in texts) or content is not None or step:
        yield "#include <string.h>"
    yield ""
    yield f"const char *const {name}_labels[{upper}_LABELS] = {{"
    yield from (f"    {c_string(label)}," for label in about.labels)
    yield "};"
    yield ""
    yield from _weights(name, program.arrays, content, program.training)
    yield "/* Values that are not needed at the same time share elements. */"
    yield f"static {'int32_t' if program.int8 else 'float'} memory[{max(memory.size // 4, 1)}];"
    if program.int8:
        yield "#define bytes ((int8_t *)memory)"
    yield ""
    for text in texts:
        yield text
        yield ""
    yield from _functions(name, found, about, memory, content is not None)
    if step:
        yield from ("/* The training step. */", *step.arrays, "", NO_CONTRACTION)
        yield from (f"{text}\n" for text in step.functions)
    yield from main_program(name, about, content is not None)


def _weights(name: str, arrays: dict[str, np.ndarray], content: bytes | None, trainable: bool) -> Iterator[str]:
    """The arrays of weights, or the memory for them and the function that reads their file."""
    start = 0
    for array, x in arrays.items():
        if content is None or x.dtype != np.float32:
            qualifier = "" if trainable else "const "
            yield f"static {qualifier}{C_TYPES[x.dtype.name]} {array}[{x.size}] = {{"
            yield from numbers(x)
            yield "};"
            yield ""
    if content is None:
        return
    for array, x in arrays.items():
        if x.dtype == np.float32:
            yield f"#define {array} (weights + {start})"
            start += x.size
    mark = ", ".join(str(byte) for byte in content[:MARK])
    yield from f"""
static float weights[{start}];
static int loaded;

int {name}_load(const char *path) {{
    static const unsigned char mark[{MARK}] = {{{mark}}}; /* the first bytes of the file */
    unsigned char found[{MARK}], number[4];
    FILE *file = fopen(path, "rb");
    if (!file) return -1;
    loaded = fread(found, 1, {MARK}, file) == {MARK} && memcmp(found, mark, {MARK}) == 0;
    for (int i = 0; i < {start} && loaded; i++) {{
        loaded = fread(number, 1, 4, file) == 4;
        const uint32_t bits = (uint32_t)number[0] | (uint32_t)number[1] << 8 | (uint32_t)number[2] << 16 |
                              (uint32_t)number[3] << 24;
        memcpy(weights + i, &bits, 4);
    }}
    fclose(file);
    return loaded ? 0 : -1;
}}
""".split("\n")


def _functions(name: str, found: Translated, about: Interface, memory: Memory, loads: bool) -> Iterator[str]:
    def text(x: Argument) -> str:
        if isinstance(x, (Part, Buffer)):
            buffer, start = x if isinstance(x, Part) else (x, 0)
            array = "memory" if buffer.itemsize == 4 else "bytes"
            return f"{array} + {memory.start[buffer] // buffer.itemsize + start}"
        return f"{np.float32(x)}f" if isinstance(x, float) else str(x)

    def line(call: Call) -> str:
        if not call.function:
            return f"    /* {call.comment} */"
        called = f"{call.function}({', '.join(map(text, call.arguments))})"
        return statement(f"if (!{called}) return -1;" if call.checked else f"{called};")

    values, upper = "probabilities" if about.chooses else "values", name.upper()
    yield f"int {name}_predict(const {about.c_type} *image, {about.output_type} *{values}) {{"
    if loads:
        yield "    if (!loaded) return -1;"
    calls, lines = found.program.calls, []
    for i, call in enumerate(calls):
        if i and not call.function and calls[i - 1].function:
            lines.append("")
        lines.append(line(call))
    body = "\n".join(lines)
    yield body if about.chooses else body.replace(str(network.PROBABILITIES), values)
    if about.chooses:
        start = memory.start[found.outputs] // 4 + found.outputs.size - len(about.labels)
        yield f"    return argmax(memory + {start}, {upper}_LABELS);"
    else:
        yield "    return 0;"
    yield f"""}}

int {name}_predict_batch({batch_parameters(about, values)}) {{
    int result = 0;
    for (size_t i = 0; i < count; i++) {{
        const int found = {name}_predict(images + i * {upper}_INPUTS, {values} + i * {upper}_OUTPUTS);
        if (classes) classes[i] = found;
        if (found < 0) result = -1;
    }}
    return result;
}}
"""
