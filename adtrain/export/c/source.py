"""The text of an exported C file, of its header, and the content of its file of weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.core.errors import AdtrainError
from adtrain.export.c import int8, library, network
from adtrain.export.c.memory import Memory
from adtrain.export.c.network import Interface, Translated
from adtrain.export.c.training import TrainingStep, training_step
from adtrain.export.c.writer import Argument, Buffer, Call, Part, size_text
from adtrain.training import Experiment, TrainedModel
from adtrain.version import __version__

MAX_BYTES = 2**31 - 1
"""The largest array that the indices of the C functions, which are int, can reach."""
C_TYPES = {"float32": "float", "int32": "int32_t", "int8": "int8_t"}
WIDTH = 110
"""Columns of a line of numbers."""
MARK = 8
"""Bytes at the start of a file of weights by which a program knows its own."""


class Files(NamedTuple):
    """An exported network.

    Attributes:
        source, header: the texts of NAME.c and NAME.h.
        weights: the content of the file of weights; None if the weights are in the source.
        memory: bytes of the array that holds all values.
        constants: bytes of the arrays of weights.
    """

    source: str
    header: str
    weights: bytes | None
    memory: int
    constants: int


def c_name(path: Path) -> str:
    """The prefix of the exported names: the file's name with characters that C allows."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", path.stem)
    return name if re.match(r"[A-Za-z]", name) else f"net_{name}"


def generate(
    trained: TrainedModel,
    path: Path,
    simd: bool = False,
    weights: Path | None = None,
    calibration: np.ndarray | None = None,
    keep_first: bool = False,
    experiment: Experiment | None = None,
) -> Files:
    """The files for the C file at `path`.

    Args:
        simd: use the functions of `layers_simd.c`.
        weights: the path of a file of weights of their own.
        calibration: images (N, C, H, W) of the training set; with them the network is in int8.
        keep_first: keep the first layer's result in memory until the end.
        experiment: the run's, of which the file also has the training step.

    Raises AdtrainError as `network.translated` and `int8.translated` do, for a name that C cannot include, and for
    arrays of 2 GiB.
    """
    if re.search(r'["\\\n\r?*]', path.name):
        raise AdtrainError(f"{path}: the name has characters that #include cannot hold, expected another name")
    if calibration is None:
        training = experiment is not None
        found, about = network.translated(trained, simd, training), network.interface(trained)
    else:
        found, about = int8.translated(trained, calibration), network.interface(trained, int8=True)
    memory = Memory(found.program, found.outputs, found.first if keep_first else None)
    arrays = found.program.arrays
    constants = sum(x.nbytes for x in arrays.values())
    if max(constants, memory.size) > MAX_BYTES:
        raise AdtrainError(f"the network needs arrays of {constants:,} bytes, C functions reach {MAX_BYTES:,}")
    content = None if weights is None else weights_file(arrays)
    name, header_name = c_name(path), path.with_suffix(".h").name
    step = None if experiment is None else training_step(experiment, name, about.c_type)
    notes = _notes(about, memory.size, constants, simd, name, step)
    header = _header(name, about, notes, memory, weights is not None, step)
    source = "\n".join(_source(name, header_name, found, about, memory, notes, simd, content, step))
    return Files(source, header, content, memory.size, constants)


def weights_file(arrays: dict[str, np.ndarray]) -> bytes:
    """MARK bytes of their digest, then all float arrays as little-endian float32, one after the other."""
    content = b"".join(x.astype("<f4").tobytes() for x in arrays.values() if x.dtype.kind == "f")
    return hashlib.sha256(content).digest()[:MARK] + content


def _notes(
    about: Interface, memory: int, constants: int, simd: bool, name: str, step: TrainingStep | None
) -> list[str]:
    """What a reader of the file needs to know, as lines of a comment."""
    unit = "" if about.output_type == "float" else " in units of 1 / 65536; the arithmetic is that of integers"
    kind = "bytes from 0 to 255" if about.c_type == "uint8_t" else "numbers"
    options = "-O3 -march=native -ffp-contract=fast" if simd else "-O2"
    return [
        f"A network trained by adtrain {__version__}. The file needs no other, allocates nothing and has no threads.",
        "",
        f"input    {size_text(about.image)} {kind}; they are normalised here",
        f"output   {size_text(about.outputs)} {'probabilities' if about.chooses else 'numbers'}{unit}",
        f"memory   {memory:,} bytes for all values, static; so calls from several threads must wait for each other",
        f"weights  {constants:,} bytes",
        *(_training_notes(step) if step else []),
        f"compile  cc {options} -c {name}.c; with -D{name.upper()}_MAIN and -lm a program that reads images",
    ]


def _training_notes(step: TrainingStep) -> list[str]:
    return [f"training one step on {step.batch} images: {step.memory:,} bytes more, {step.state:,} of the optimizer"]


def _header(
    name: str, about: Interface, notes: Sequence[str], memory: Memory, loads: bool, step: TrainingStep | None
) -> str:
    upper, values = name.upper(), "probabilities" if about.chooses else "values"
    returns = "the class, its index in the labels" if about.chooses else "0"
    lines = [
        *_comment(notes),
        "",
        f"#ifndef {upper}_H",
        f"#define {upper}_H",
        "",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        "#ifdef __cplusplus",
        'extern "C" {',
        "#endif",
        "",
        "enum {",
        f"    {upper}_INPUTS = {prod(about.image)},",
        f"    {upper}_OUTPUTS = {prod(about.outputs)},",
        f"    {upper}_LABELS = {len(about.labels)},",
        *([f"    {upper}_BATCH = {step.batch}, /* images of a training step */"] if step else []),
        f"    {upper}_MEMORY = {memory.size} /* bytes */",
        "};",
        "",
        f"extern const char *const {name}_labels[{upper}_LABELS];",
        "",
        *(
            [
                "/* Reads the file of weights, which must come first. Returns 0, or -1 if it is not this network's. */",
                f"int {name}_load(const char *path);",
                "",
            ]
            if loads
            else []
        ),
        f"/* Writes {upper}_OUTPUTS {values} of an image. Returns {returns}, or -1 if the input has no output. */",
        f"int {name}_predict(const {about.c_type} *image, {about.output_type} *{values});",
        "",
        "/* The same for `count` images, one after the other. Each return value is written to `classes`, unless it is",
        "   NULL. Returns 0, or -1 if one of them is -1. */",
        f"int {name}_predict_batch({_batch(about, values)});",
        "",
        *(_training_header(name, about, step) if step else []),
        "#ifdef __cplusplus",
        "}",
        "#endif",
        "",
        "#endif",
        "",
    ]
    return "\n".join(lines)


def _training_header(name: str, about: Interface, step: TrainingStep) -> list[str]:
    c_type, count = step.label
    labels = "their classes" if count == 1 and about.chooses else f"their labels, {count} of each"
    return [
        f"/* One training step on {name.upper()}_BATCH images and {labels}: the gradient of the mean loss,",
        "   and the update. The optimizer starts at step 0. The loss before the update is written to `loss`, unless it",
        "   is NULL. */",
        f"void {name}_train(const {about.c_type} *images, const {c_type} *labels, float *loss);",
        "",
    ]


def _batch(about: Interface, values: str) -> str:
    """The parameters of the function for several images."""
    return f"const {about.c_type} *images, size_t count, {about.output_type} *{values}, int *classes"


def _source(
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
    program, upper = found.program, name.upper()
    kinds = {"simd": simd, "int8": program.int8, "training": program.training}
    files = [*(f"layers_{kind}.c" for kind, chosen in kinds.items() if chosen), "layers.c"]
    functions = dict.fromkeys(call.function for call in program.calls if call.function)
    functions |= {"argmax": None} if about.chooses else {}
    functions |= dict.fromkeys(step.library) if step else {}
    texts = library.needed(functions, *files)
    yield from _comment(notes)
    yield ""
    yield f'#include "{header}"'
    yield ""
    if step:
        yield "#include <stdbool.h>"
        yield "#include <tgmath.h>"
    elif any(re.search(r"\b\w+f\(|INFINITY", text) for text in texts):
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
        yield from ("/* The training step. */", *step.arrays, "", *(f"{text}\n" for text in step.functions))
    yield from _main(name, about, content is not None)


def _weights(name: str, arrays: dict[str, np.ndarray], content: bytes | None, change: bool) -> Iterator[str]:
    """The arrays of weights, or the memory for them and the function that reads their file."""
    start = 0
    for array, x in arrays.items():
        if content is None or x.dtype.kind == "i":
            kept = "" if change else "const "
            yield f"static {kept}{C_TYPES[x.dtype.name]} {array}[{x.size}] = {{"
            yield from _numbers(x)
            yield "};"
            yield ""
    if content is None:
        return
    for array, x in arrays.items():
        if x.dtype.kind == "f":
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
            return f"\n    /* {call.comment} */"
        statement = f"{call.function}({', '.join(map(text, call.arguments))})"
        return f"    if (!{statement}) return -1;" if call.checked else f"    {statement};"

    values, upper = "probabilities" if about.chooses else "values", name.upper()
    yield f"int {name}_predict(const {about.c_type} *image, {about.output_type} *{values}) {{"
    if loads:
        yield "    if (!loaded) return -1;"
    lines = [line(call) for call in found.program.calls]
    body = "\n".join(lines).lstrip("\n")
    yield body if about.chooses else body.replace(str(network.PROBABILITIES), values)
    if about.chooses:
        start = memory.start[found.outputs] // 4 + found.outputs.size - len(about.labels)
        yield f"    return argmax(memory + {start}, {upper}_LABELS);"
    else:
        yield "    return 0;"
    yield f"""}}

int {name}_predict_batch({_batch(about, values)}) {{
    int result = 0;
    for (size_t i = 0; i < count; i++) {{
        const int found = {name}_predict(images + i * {upper}_INPUTS, {values} + i * {upper}_OUTPUTS);
        if (classes) classes[i] = found;
        if (found < 0) result = -1;
    }}
    return result;
}}
"""


def _main(name: str, about: Interface, loads: bool) -> Iterator[str]:
    """A program for the command line: images as PGM (one channel) or PPM (three) files, others as text with numbers."""
    upper = name.upper()
    channels, height, width = about.image
    image = about.c_type == "uint8_t" and channels in (1, 3)
    kind = {1: ("PGM", "P5"), 3: ("PPM", "P6")}[channels] if image else ("numbers", "")
    first = 2 if loads else 1
    usage = f"usage: %s {'WEIGHTS ' if loads else ''}FILE...\\n"
    if image:
        reader = f"""/* Reads a binary {kind[0]} file of {width} x {height} pixels; a # begins a comment. */
static int read_image(FILE *file, {about.c_type} *image) {{
    const int expected[3] = {{{width}, {height}, 255}};
    if (fgetc(file) != '{kind[1][0]}' || fgetc(file) != '{kind[1][1]}') return 0;
    for (int i = 0; i < 3; i++) {{
        int found, c;
        while ((c = fgetc(file)) == '#' || c == ' ' || c == '\\n' || c == '\\r' || c == '\\t')
            while (c == '#' && (c = fgetc(file)) != '\\n' && c != EOF) c = '#';
        ungetc(c, file);
        if (fscanf(file, "%d", &found) != 1 || found != expected[i]) return 0;
    }}
    fgetc(file);"""
        if channels == 1:
            reader += f"\n    return fread(image, 1, {upper}_INPUTS, file) == {upper}_INPUTS;\n}}"
        else:
            reader += f"""
    for (int i = 0; i < {height * width}; i++)
        for (int channel = 0; channel < 3; channel++) {{
            const int c = fgetc(file);
            if (c == EOF) return 0;
            image[channel * {height * width} + i] = (uint8_t)c;
        }}
    return 1;
}}"""
    else:
        read, cast = ("%f", "") if about.c_type == "float" else ("%u", "(uint8_t)")
        variable = "float" if about.c_type == "float" else "unsigned"
        reader = f"""/* Reads {upper}_INPUTS numbers, with spaces or lines between them. */
static int read_image(FILE *file, {about.c_type} *image) {{
    for (int i = 0; i < {upper}_INPUTS; i++) {{
        {variable} number;
        if (fscanf(file, "{read}", &number) != 1) return 0;
        image[i] = {cast}number;
    }}
    return 1;
}}"""
    unit = "" if about.output_type == "float" else " / 65536"
    load = f"""    if ({name}_load(argv[1])) {{
        fprintf(stderr, "%s: not the weights of this network\\n", argv[1]);
        return 2;
    }}
"""
    if about.chooses:
        start = prod(about.outputs) - len(about.labels)
        number = f"(double)outputs[{start} + class]{unit}"
        show = f"""        printf("%s: %s %.4f\\n", argv[i], {name}_labels[class], {number});"""
    else:
        show = f"""        printf("%s:", argv[i]);
        for (int j = 0; j < {upper}_OUTPUTS; j++) printf(" %s %g", {name}_labels[j], (double)outputs[j]);
        printf("\\n");"""
    yield f"""#ifdef {upper}_MAIN
#include <stdio.h>

{reader}

int main(int argc, char **argv) {{
    static {about.c_type} image[{upper}_INPUTS];
    static {about.output_type} outputs[{upper}_OUTPUTS];
    int result = 0;
    if (argc <= {first}) {{
        fprintf(stderr, "{usage}", argv[0]);
        return 2;
    }}
{load if loads else ""}    for (int i = {first}; i < argc; i++) {{
        FILE *file = fopen(argv[i], "rb");
        const int read = file && read_image(file, image);
        if (file) fclose(file);
        const int class = read ? {name}_predict(image, outputs) : -1;
        if (class < 0) {{
            fprintf(stderr, "%s: not {_what(about, kind[0])}\\n", argv[i]);
            result = 2;
            continue;
        }}
{show}
    }}
    return result;
}}
#endif
"""


def _what(about: Interface, kind: str) -> str:
    _, height, width = about.image
    return f"{prod(about.image)} numbers" if kind == "numbers" else f"a binary {kind} file of {width} x {height} pixels"


def _numbers(x: np.ndarray) -> Iterator[str]:
    """The elements of an array as lines; the shortest decimal numbers that are read as the same floats."""
    suffix = "f" if x.dtype.kind == "f" else ""
    line = "   "
    for number in x.reshape(-1):
        item = f" {number!s}{suffix},"
        if len(line) + len(item) > WIDTH:
            yield line
            line = "   "
        line += item
    yield line


def _comment(lines: Sequence[str]) -> list[str]:
    first, *others = lines
    return [f"/* {first}", *(f"   {line}".rstrip() for line in others[:-1]), f"   {others[-1]} */"]


def c_string(text: str) -> str:
    """A C string with the UTF-8 bytes of a text; others than letters, digits and some signs are octal numbers."""
    plain = (32, *range(44, 60), *range(64, 92), 95, *range(97, 123), 40, 41)
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'
