"""The text of an exported header file."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from adtrain.export.c.network import Interface
from adtrain.export.c.text import comment
from adtrain.export.c.training import TrainingStep


def header(
    name: str, about: Interface, notes: Sequence[str], memory: int, loads: bool, step: TrainingStep | None
) -> str:
    """The header of the functions NAME_predict and others, for a program with `memory` bytes of values."""
    upper, values = name.upper(), "probabilities" if about.chooses else "values"
    returns = "the class, its index in the labels" if about.chooses else "0"
    lines = [
        *comment(notes),
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
        f"    {upper}_MEMORY = {memory} /* bytes */",
        "};",
        "",
        f"extern const char *const {name}_labels[{upper}_LABELS];",
        "",
        *(
            [
                "/* Reads the file of weights; call it first. Returns 0, or -1 for the file of another network. */",
                f"int {name}_load(const char *path);",
                "",
            ]
            if loads
            else []
        ),
        f"/* Writes {upper}_OUTPUTS {values} of an image. Returns {returns},",
        f"   or -1 if the network refuses the image{' or its weights are not loaded' if loads else ''}. */",
        f"int {name}_predict(const {about.c_type} *image, {about.output_type} *{values});",
        "",
        "/* The same for `count` images, one after the other. Each return value is written to `classes`, unless it is",
        "   NULL. Returns 0, or -1 if one of them is -1. */",
        f"int {name}_predict_batch({batch_parameters(about, values)});",
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


def batch_parameters(about: Interface, values: str) -> str:
    """The parameters of the function for several images."""
    return f"const {about.c_type} *images, size_t count, {about.output_type} *{values}, int *classes"
