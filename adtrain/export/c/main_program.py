"""The `main` of an exported C file, a program for the command line."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from adtrain.export.c.network import Interface


def main_program(name: str, about: Interface, loads: bool) -> Iterator[str]:
    """A program for the command line: images as PGM (one channel) or PPM (three) files, others as text with numbers."""
    upper = name.upper()
    channels, height, width = about.image
    image = is_image(about)
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
        variable, read, cast, refused = {
            "float": ("float", "%f", "", ""),
            "double": ("double", "%lf", "", ""),
            "uint8_t": ("unsigned", "%u", "(uint8_t)", " || number > 255"),
        }[about.c_type]
        reader = f"""/* Reads {upper}_INPUTS numbers, with spaces or lines between them. */
static int read_image(FILE *file, {about.c_type} *image) {{
    for (int i = 0; i < {upper}_INPUTS; i++) {{
        {variable} number;
        if (fscanf(file, "{read}", &number) != 1{refused}) return 0;
        image[i] = {cast}number;
    }}
    return 1;
}}"""
    unit = " / 65536" if about.gives_integers else ""
    digits = ".15" if about.output_type == "double" else ""
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
        for (int j = 0; j < {upper}_OUTPUTS; j++) printf(" %s %{digits}g", {name}_labels[j], (double)outputs[j]);
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


def is_image(about: Interface) -> bool:
    """Whether the program reads PGM or PPM files."""
    return about.c_type == "uint8_t" and about.image[0] in (1, 3)


def _what(about: Interface, kind: str) -> str:
    _, height, width = about.image
    return f"{prod(about.image)} numbers" if kind == "numbers" else f"a binary {kind} file of {width} x {height} pixels"
