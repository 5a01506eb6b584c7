"""The text of an exported C file: labels, weights, the functions of layers, and those of the header."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from adtrain.codegen.expressions import c_type
from adtrain.export.c import library
from adtrain.export.c.code import Code, Part
from adtrain.export.c.header import batch_parameters
from adtrain.export.c.main_program import main_program
from adtrain.export.c.network import Interface, Translated
from adtrain.export.c.text import c_string, comment, numbers, statement
from adtrain.export.c.training import TrainingStep

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
    notes: Sequence[str],
    content: bytes | None,
    step: TrainingStep | None,
) -> Iterator[str]:
    """The parts of NAME.c, in their order; `content` is that of the file of weights, if they are in one."""
    code, upper = found.code, name.upper()
    kinds = {"simd": code.simd, "int8": code.integers}
    files = [*(f"layers_{kind}.c" for kind, chosen in kinds.items() if chosen), "layers.c", "layers_training.c"]
    functions = {**code.library, **({"argmax": None} if about.chooses else {}), **(step.code.library if step else {})}
    texts = library.needed(functions, *files)
    loops = code.functions()
    yield from comment(notes)
    yield ""
    yield KEEP_CALLS
    yield f'#include "{header}"'
    yield ""
    written = [*texts, *loops]
    if step or any(re.search(r"\bbool\b", text) for text in written):
        yield "#include <stdbool.h>"
    if step or any(re.search(r"\b\w+f\(|INFINITY|NAN|\b(exp|log|sqrt|tanh)\(", text) for text in written):
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
    yield from _weights(name, code, content, trainable=step is not None)
    yield "/* Values that are not needed at the same time share elements. */"
    yield from (declaration for declaration, _ in code.memory.values())
    if code.integers:
        yield "#define bytes ((int8_t *)memory)"
    yield ""
    for text in written:
        yield text
        yield ""
    yield from _functions(name, found, about, content is not None)
    if step:
        yield "/* The training step. */"
        yield from (declaration for declaration, _ in step.code.memory.values())
        yield from step.state
        yield from _arrays(step.code.arrays)
        yield NO_CONTRACTION
        yield from step.code.functions()
        yield f"{step.function}\n"
    yield from main_program(name, about, content is not None)


def _arrays(arrays: Mapping[str, np.ndarray], qualifier: str = "const ") -> Iterator[str]:
    for name, x in arrays.items():
        yield f"static {qualifier}{c_type(x.dtype)} {name}[{x.size}] = {{"
        yield from numbers(x)
        yield "};"
        yield ""


def _weights(name: str, code: Code, content: bytes | None, trainable: bool) -> Iterator[str]:
    """The arrays of weights, or the memory for them and the function that reads their file."""
    start, arrays = 0, code.arrays
    inside = {k: x for k, x in arrays.items() if content is None or x.dtype != np.float32}
    yield from _arrays(inside, "" if trainable else "const ")
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


def _functions(name: str, found: Translated, about: Interface, loads: bool) -> Iterator[str]:
    code, values, upper = found.code, about.results, name.upper()
    yield f"int {name}_predict(const {about.c_type} *image, {about.output_type} *{values}) {{"
    if loads:
        yield "    if (!loaded) return -1;"
    for before, x in zip(["", *code.steps], code.steps, strict=False):
        if isinstance(x, str):
            yield f"{'' if isinstance(before, str) else chr(10)}    /* {x} */"
        else:
            yield statement(code.call(x))
    if about.chooses:
        start = found.outputs.size - len(about.labels)
        yield f"    return argmax({code.text(Part(found.outputs, start))}, {upper}_LABELS);"
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
