"""Text files: sequences of characters or bytes, with the following one as the label of each position."""

from __future__ import annotations

from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from adtrain.data.errors import DataError, DataOptionError, quoted
from adtrain.data.file_array import require_memory
from adtrain.data.part import NOTHING, Format, Known, Part, Parts
from adtrain.files import read_regular
from adtrain.option_types import Size

BYTES = tuple(f"0x{byte:02x}" for byte in range(256))
"""The names of the classes of bytes."""

BYTES_IN_MEMORY = 24
"""The memory for each byte of a text while it is read: code points, classes, inputs and labels."""


@dataclass(frozen=True)
class TextOptions:
    """The options of a text.

    Attributes:
        length: characters or bytes in an input sequence
        unit: what a class is
    """

    length: Size = 128
    unit: Literal["character", "byte"] = "character"


def read(path: Path, options: TextOptions, known: Known = NOTHING) -> Parts:
    """The text as one part of sequences of `options.length` classes, in the order of the text.

    The text is cut into sequences of length + 1 characters or bytes; a shorter rest at the end is left out. The first
    `length` of a sequence are the inputs, float32 (N, 1, 1, length), the last `length` the labels, int32 (N, length).
    The classes of characters are those that occur, by code point, or those `known`; those of bytes are all 256.

    Raises DataError for a file that cannot be read, is empty or not UTF-8, and for a character that is not `known`;
    DataOptionError for a text that is shorter than length + 1.
    """
    numbers, classes = read_classes(path, options, known.classes)
    step = options.length + 1
    if len(numbers) < step:
        found = f"found {options.length}, which needs {step:,} {options.unit}s, but {path} has {len(numbers):,}"
        raise DataOptionError("length", f"{found}: expected a smaller length, or a longer text")
    sequences = numbers[: len(numbers) // step * step].reshape(-1, step)
    inputs = sequences[:, :-1].astype(np.float32).reshape(-1, 1, 1, options.length)
    return Parts(Part(inputs, np.ascontiguousarray(sequences[:, 1:]), str(path)), classes=classes)


def read_classes(path: Path, options: TextOptions, known: tuple[str, ...] = ()) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class of each character or byte of a file, int32 (n,) with n >= 1, and the names of the classes.

    Raises DataError as `read` does.
    """
    try:
        require_memory(str(path), BYTES_IN_MEMORY * path.stat().st_size)
        content = read_regular(path).removeprefix(b"" if options.unit == "byte" else BOM_UTF8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if not content:
        raise DataError(f"{path}: found an empty file, expected text")
    if options.unit == "byte":
        return np.frombuffer(content, np.uint8).astype(np.int32), BYTES
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        start = content.rfind(b"\n", 0, error.start) + 1
        line, column = content.count(b"\n", 0, error.start) + 1, error.start - start + 1
        found = f"found 0x{content[error.start]:02x} at byte {column} of the line, which is not UTF-8"
        raise DataError(f"{path}:{line}: {found}; convert the file, or set data.unit: byte") from None
    found_classes = known or tuple(sorted(set(text)))
    numbers, unknown = classes_of(text, found_classes)
    if unknown:
        at = text.index(unknown[0])
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        raise DataError(
            f"{path}:{line}:{column}: found {quoted(unknown[0])}, expected one of the {len(found_classes)} characters "
            "of the training's text"
        )
    return numbers, found_classes


def are_classes(names: tuple[str, ...], unit: str | None) -> bool:
    """Whether these can be the names of the classes of a text: all bytes, or different characters by code point."""
    if unit == "byte":
        return names == BYTES
    return bool(names) and all(len(name) == 1 for name in names) and list(names) == sorted(set(names))


def classes_of(text: str, classes: tuple[str, ...]) -> tuple[np.ndarray, list[str]]:
    """The class of each character, int32 (n,), and the characters that have none, in the order of the text."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    names = np.array([ord(name) for name in classes], np.uint32)
    numbers = np.searchsorted(names, codes).clip(max=len(names) - 1)
    wrong = names[numbers] != codes
    unknown = [chr(code) for code in dict.fromkeys(codes[wrong].tolist())] if wrong.any() else []
    return numbers.astype(np.int32), unknown


FORMAT = Format(
    name="text",
    title="a text file",
    suffixes=(".txt",),
    options=TextOptions,
    examples="sequences",
    read=read,
)
