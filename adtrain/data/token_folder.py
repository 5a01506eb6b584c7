"""Folders of token files, which are made once and are read while training: texts may be larger than memory.

`tokens.json` is the header: the number of tokens, of documents and of bytes of text, and the files with their sizes and
checksums. A file has tokens only, as uint16 or uint32, little endian. `tokenizer.json` is the tokenizer that made them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from adtrain.core.errors import AdtrainError
from adtrain.data import tokenizer
from adtrain.data.errors import DataError, DataOptionError, reading
from adtrain.data.file_array import DataFile, FileStream, cut
from adtrain.data.idx import file_sha256
from adtrain.data.part import NOTHING, Format, Known, Part, Parts
from adtrain.data.text_file import SequenceOptions, TextOptions, require_length
from adtrain.data.tokenizer import Tokenizer
from adtrain.files import expect_writable, open_regular, read_regular, unwritable

HEADER, SUFFIX = "tokens.json", ".txt"
FORMAT_NUMBER = 1
SHARD_TOKENS = 100_000_000
"""The most tokens in a file."""

ADVICE = "adtrain data tokenize makes such a folder"


@dataclass(frozen=True)
class Shard:
    """A file of tokens."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Header:
    """The content of `tokens.json`.

    Attributes:
        format: of the folder.
        dtype: of the tokens, as NumPy names it.
        vocabulary: the number of different tokens.
        tokens, documents, bytes: the totals; the bytes are those of the texts in UTF-8.
        tokenizer: the SHA-256 of `tokenizer.json`.
    """

    format: int
    dtype: str
    vocabulary: int
    tokens: int
    documents: int
    bytes: int
    tokenizer: str
    shards: Sequence[Shard]


def is_token_folder(folder: Path) -> bool:
    return (folder / HEADER).is_file()


def read(folder: Path, options: TextOptions, known: Known = NOTHING) -> Parts:
    """The tokens as one part of sequences, which are read when they are used; see `text_file.read`.

    Raises DataError for files that are missing, damaged or do not fit together, or tokens of another tokenizer than the
    `known` one; DataOptionError for fewer tokens than length + 1.
    """
    if options.unit != "token":
        raise DataOptionError("unit", f"found {options.unit}, expected token: {folder} has tokens")
    header = _header(folder)
    own = tokenizer.read(folder / tokenizer.FILE)
    if own.digest != header.tokenizer:
        raise DataError(
            f"{folder / tokenizer.FILE}: has changed since the tokens were made; restore it, or make them again"
        )
    if len(own.classes) != header.vocabulary:
        found = f"found a vocabulary of {header.vocabulary:,}, but that of {tokenizer.FILE} is {len(own.classes):,}"
        raise DataError(f"{folder / HEADER}: {found}; expected the same")
    if known.tokenizer is not None and known.tokenizer.digest != own.digest:
        raise DataError(f"{folder}: found tokens of another tokenizer than the run's, expected those of the run's")
    require_length(header.tokens, options, folder)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    files = [_opened(folder / shard.file, shard.tokens * dtype.itemsize) for shard in header.shards]
    digest = sha256(json.dumps([shard.sha256 for shard in header.shards]).encode()).hexdigest()
    counts = [shard.tokens for shard in header.shards]
    stream = FileStream(files, counts, dtype, header.vocabulary, digest)
    inputs, labels = cut(stream, options.length)
    part = Part(inputs, labels, str(folder))
    return Parts(part, classes=own.classes, tokenizer=own, validation_rows=options.validation_rows)


def verify(folder: Path) -> None:
    """Raise DataError for a file whose checksum is not that of the header, or that is missing or truncated."""
    header = _header(folder)
    for shard in header.shards:
        path = folder / shard.file
        _opened(path, shard.tokens * np.dtype(header.dtype).itemsize)
        with open_regular(path) as file:
            found = file_sha256(file.fileno())
        if found != shard.sha256:
            raise DataError(f"{path}: found SHA-256 {found}, expected {shard.sha256}: is damaged")


def _header(folder: Path) -> Header:
    path = folder / HEADER
    try:
        with reading(path):
            values = json.loads(read_regular(path))
        shards = [Shard(**shard) for shard in values.pop("shards")]
        header = Header(shards=shards, **values)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise DataError(f"{path}: is damaged: found no header of tokens; {ADVICE}") from None
    counts = [header.vocabulary, header.tokens, header.documents, *(shard.tokens for shard in shards)]
    texts = [header.tokenizer, *(text for shard in shards for text in (shard.file, shard.sha256))]
    if header.format != FORMAT_NUMBER:
        raise DataError(f"{path}: found format {str(header.format)[:40]}, expected {FORMAT_NUMBER}")
    if not (
        header.dtype in ("uint16", "uint32")
        and all(type(x) is int and x > 0 for x in counts)
        and type(header.bytes) is int
        and all(type(text) is str for text in texts)
        and all(Path(shard.file).name == shard.file for shard in shards)
        and sum(shard.tokens for shard in shards) == header.tokens
    ):
        raise DataError(f"{path}: is damaged: its numbers do not fit together; {ADVICE}")
    return header


def _opened(path: Path, size: int) -> DataFile:
    """A file of this size in bytes. Raises DataError where it is missing, or has another size."""
    with reading(path), open_regular(path) as file:
        if (found := os.fstat(file.fileno()).st_size) != size:
            what = "is truncated" if found < size else "has more than its tokens"
            raise DataError(f"{path}: {what}: found {found:,} bytes, expected {size:,}")
        return DataFile(path, file)


def documents_of(paths: Iterable[Path]) -> list[Path]:
    """The files among `paths`, and all .txt files below the folders among them, sorted, without hidden ones.

    Raises DataError for a path where there is nothing, and a folder without such files.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            if not path.exists():
                raise DataError(f"{path}: found nothing, expected a text file, or a folder of {SUFFIX} files")
            found.append(path)
            continue
        below = (x for x in path.rglob("*") if x.suffix.lower() == SUFFIX and x.is_file())
        files = sorted(x for x in below if not any(part.startswith(".") for part in x.relative_to(path).parts))
        if not files:
            raise DataError(f"{path}: found a folder without {SUFFIX} files, expected text files")
        found += files
    return found


def write(documents: Sequence[Path], folder: Path, used: Tokenizer, shard_tokens: int = SHARD_TOKENS) -> Header:
    """Write the tokens of text files to a new folder; the end of a text follows each of them.

    The folder appears when it is complete. Raises DataError for a text that cannot be read, for texts that are all
    empty, and for a tokenizer without an end of a text; AdtrainError where the folder cannot be written, or exists.
    """
    if used.end_of_text is None:
        expected = f"expected one of {', '.join(tokenizer.END_OF_TEXT)} among its added tokens"
        raise DataError(f"the tokenizer has no token for the end of a text, {expected}")
    expect_nothing(folder)
    lengths, text_bytes = np.array([len(x) for x in used.tokens]), 0

    def tokens() -> Iterator[np.ndarray]:
        nonlocal text_bytes
        for document in documents:
            for found in used.encoded(tokenizer.pieces_of(document)):
                text_bytes += int(lengths[found].sum())
                yield found.astype(used.dtype)
            yield np.array([used.end_of_text], used.dtype)

    temporary = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
    try:
        temporary.mkdir(parents=True)
        shards = _write_shards(temporary, tokens(), shard_tokens)
        if not text_bytes:
            raise DataError(f"{', '.join(map(str, documents[:3]))}: found no characters, expected text")
        header = Header(
            format=FORMAT_NUMBER,
            dtype=used.dtype.name,
            vocabulary=len(used.classes),
            tokens=sum(shard.tokens for shard in shards),
            documents=len(documents),
            bytes=text_bytes,
            tokenizer=used.digest,
            shards=shards,
        )
        (temporary / tokenizer.FILE).write_text(used.content, encoding="utf-8")
        (temporary / HEADER).write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")
        temporary.rename(folder)
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return header


def expect_nothing(folder: Path) -> None:
    """Raise AdtrainError where `folder` exists, or cannot be made."""
    if os.path.lexists(folder):
        raise AdtrainError(f"{folder}: already exists; give another folder, or remove it first")
    there = next(parent for parent in folder.parents if parent.exists())
    expect_writable(there / folder.relative_to(there).parts[0])


def _write_shards(folder: Path, tokens: Iterator[np.ndarray], most: int) -> list[Shard]:
    """Write consecutive tokens to files of `most` tokens each; the last one can have fewer."""
    shards: list[Shard] = []
    waiting = next(tokens, None)
    while waiting is not None:
        name, digest, count = f"tokens-{len(shards):05}.bin", sha256(), 0
        with (folder / name).open("wb") as file:
            while waiting is not None and count < most:
                part, rest = waiting[: most - count], waiting[most - count :]
                file.write(part.data)
                digest.update(part.data)
                count += len(part)
                waiting = rest if len(rest) else next(tokens, None)
        shards.append(Shard(name, count, digest.hexdigest()))
    return shards


FORMAT = Format(
    name="tokens",
    title="a folder of tokens",
    content=f"the tokens of texts ({HEADER}, which adtrain data tokenize writes)",
    is_content=is_token_folder,
    options=SequenceOptions,
    examples="sequences",
    read=read,
)
