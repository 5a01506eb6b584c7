"""Text files: sequences of characters, bytes or tokens, with the following one as the label of each position."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import numpy as np

from adtrain.core.options import Bounds
from adtrain.data import tokenizer
from adtrain.data.errors import DataError, DataOptionError, quoted, reading
from adtrain.data.file_array import MemoryStream, cut, require_memory
from adtrain.data.part import NOTHING, Format, Known, Part, Parts
from adtrain.data.tokenizer import LARGEST_VOCABULARY, SMALLEST_VOCABULARY, Tokenizer
from adtrain.files import read_regular
from adtrain.option_types import Size, Text

BYTES = tuple(f"0x{byte:02x}" for byte in range(256))
"""The names of the classes of bytes."""

BYTES_IN_MEMORY = 24
"""The memory for each byte of a text while it is read: code points, classes, inputs and labels."""


Order: TypeAlias = Literal["shuffled", "in_order", "random_offsets"]


@dataclass(frozen=True)
class SequenceOptions:
    """The options of sequences.

    Attributes:
        length: characters, bytes or tokens in an input sequence
        unit: what a class is; token: a part of a word, by byte-pair encoding
        documents: joined: a sequence is a part of the text, whatever documents it has; separate: of tokens, attention
            and positions stay within a document, which begins with the token for the end of a text
        order: the sequences of an epoch: shuffled, or in_order, that of the text, each once; or random_offsets, as many
            that begin anywhere
        validation_tokens: instead of validation, how many characters, bytes or tokens at the end are held out for it
    """

    length: Size = 128
    unit: Literal["character", "byte", "token"] = "character"
    documents: Literal["joined", "separate"] = "joined"
    order: Order = "shuffled"
    validation_tokens: Size | None = None

    @property
    def validation_rows(self) -> int:
        """The number of sequences at the end that are held out for validation."""
        return -(-(self.validation_tokens or 0) // self.length)


@dataclass(frozen=True)
class TextOptions(SequenceOptions):
    """The options of a text.

    Attributes:
        vocabulary: the number of tokens that are learnt from the text at path
        tokenizer: instead of vocabulary, a file tokenizer.json of byte-level byte-pair encoding
    """

    vocabulary: Annotated[Size, Bounds(ge=SMALLEST_VOCABULARY, le=LARGEST_VOCABULARY)] | None = None
    tokenizer: Text | None = None


def read(path: Path, options: TextOptions, known: Known = NOTHING) -> Parts:
    """The text as one part of sequences of `options.length` classes, in the order of the text.

    `cut` says how. The classes of characters are those that occur, by code point, or those `known`; those of
    bytes are all 256; those of tokens are those of the tokenizer.

    Raises DataError for a file that cannot be read, is empty or not UTF-8, and for a character that is not `known`;
    DataOptionError for a text that is shorter than length + 1, and options that do not fit together.
    """
    found = read_classes(path, options, known)
    require_length(len(found.numbers), options, path)
    inputs, labels = (np.asarray(x) for x in cut(MemoryStream(found.numbers, ""), options.length))
    part = Part(inputs, labels, str(path))
    return Parts(part, classes=found.names, tokenizer=found.tokenizer, validation_rows=options.validation_rows)


def require_length(count: int, options: SequenceOptions, path: Path) -> None:
    """Raise DataOptionError if `count` classes are fewer than a sequence and its last label."""
    if count < (step := options.length + 1):
        found = f"found {options.length}, which needs {step:,} {options.unit}s, but {path} has {count:,}"
        raise DataOptionError("length", f"{found}: expected a smaller length, or a longer text")


class Classes(NamedTuple):
    """The class of each character, byte or token of a text, int32 (n,), and the names of all classes."""

    numbers: np.ndarray
    names: tuple[str, ...]
    tokenizer: Tokenizer | None = None


def read_classes(path: Path, options: TextOptions, known: Known) -> Classes:
    """The classes of a text file; there is at least one. Raises DataError and DataOptionError as `read` does."""
    for name in ("vocabulary", "tokenizer") if options.unit != "token" else ():
        if (value := getattr(options, name)) is not None:
            raise DataOptionError(name, f"found {value} for {options.unit}s, expected data.unit: token")
    with reading(path):
        advice = "; adtrain data tokenize writes its tokens to files" if options.unit == "token" else ""
        require_memory(str(path), BYTES_IN_MEMORY * path.stat().st_size, advice)
        if options.unit == "token":
            return _tokens(path, options, known)
        content = read_regular(path).removeprefix(b"" if options.unit == "byte" else BOM_UTF8)
    if not content:
        raise DataError(f"{path}: found an empty file, expected text")
    if options.unit == "byte":
        return Classes(np.frombuffer(content, np.uint8).astype(np.int32), BYTES)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        start = content.rfind(b"\n", 0, error.start) + 1
        line, column = content.count(b"\n", 0, error.start) + 1, error.start - start + 1
        found = f"found 0x{content[error.start]:02x} at byte {column} of the line, which is not UTF-8"
        raise DataError(f"{path}:{line}: {found}; convert the file, or set data.unit: byte") from None
    names = known.classes or tuple(sorted(set(text)))
    numbers, unknown = classes_of(text, names)
    if unknown:
        at = text.index(unknown[0])
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        raise DataError(
            f"{path}:{line}:{column}: found {quoted(unknown[0])}, expected one of the {len(names)} characters "
            "of the training's text"
        )
    return Classes(numbers, names)


def _tokens(path: Path, options: TextOptions, known: Known) -> Classes:
    used = known.tokenizer
    if used is None:
        if options.vocabulary is not None and options.tokenizer is not None:
            found = f"found {options.tokenizer}, but data.vocabulary is set"
            raise DataOptionError("tokenizer", f"{found}; remove one of them (with --set: null)")
        if options.vocabulary is None and options.tokenizer is None:
            sources = "vocabulary, the number of tokens to learn from the text, or tokenizer, a file tokenizer.json"
            raise DataOptionError("unit", f"found token, expected one of {sources}")
        if options.tokenizer is not None:
            used = tokenizer.read(Path(os.path.expanduser(options.tokenizer)))
        elif options.vocabulary is not None:
            used = tokenizer.train(tokenizer.pieces_of(path), options.vocabulary)
    assert used is not None
    numbers = used.encode(tokenizer.pieces_of(path))
    if not len(numbers):
        raise DataError(f"{path}: found an empty file, expected text")
    return Classes(numbers, used.classes, used)


def are_classes(names: tuple[str, ...], unit: str, used: Tokenizer | None) -> bool:
    """Whether these can be the names of the classes of a text.

    They are all bytes, different characters by code point, or those of the tokenizer.
    """
    if unit == "byte":
        return names == BYTES
    if unit == "token":
        return used is not None and names == used.classes
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
