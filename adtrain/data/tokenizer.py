"""Tokens of a text: byte-pair encoding of its UTF-8 bytes, by the package `tokenizers`.

Every byte is a token, so every text has tokens, and the bytes of tokens are the bytes of the text, after normalisation
if a tokenizer has that. Only tokenizers of this kind are taken: those of GPT-2, Llama 3 and others, and those that
`train` makes.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from adtrain.data.errors import DataError, reading
from adtrain.files import open_regular, read_regular

FILE = "tokenizer.json"
"""The name that folders of transformers and of tokens have for it."""

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
"""Names of the token between two documents. The first one is that of `train`."""

SMALLEST_VOCABULARY = 257
"""The bytes, and the end of a text."""

LARGEST_VOCABULARY = 2**24
"""float32, in which a network gets its inputs, has all smaller integers."""

BLOCK, LONGEST_PIECE = 1 << 16, 1 << 20
"""Bytes that are read from a file at a time, and about the most characters of a piece."""

PIECES_AT_ONCE = 64
"""Pieces that are encoded at a time, by all processors."""

BETWEEN_TOKENS = re.compile(r"[^\W_](?=\s)")
"""Ends where no token goes on: white space after a letter or a digit begins a new word in tokenizers of this kind."""

END_CHARACTERS = 1 << 12
"""The last characters of a block, in which the end of a piece is looked for."""


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character stands for in the names of tokens.

    Visible characters of Latin-1 stand for themselves. The other bytes, in their order, are U+0100, U+0101, ...
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(x): x for x in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTES = _bytes_of_characters()


def shown(name: str, is_token: bool) -> str:
    """A class of a text as people read it: the text of a token, or a character, in quotes; otherwise its name."""
    if not is_token:
        return repr(name) if len(name) == 1 else name
    try:
        return repr(bytes(BYTES[x] for x in name).decode())
    except (KeyError, UnicodeDecodeError):  # a name that spells no bytes, or a part of a character
        return name


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, given by the content of a file `tokenizer.json`.

    The names of ordinary tokens spell their bytes as `BYTES` says. Special tokens, such as the end of a text, have no
    bytes: they are never found in a text, even if it spells their names.

    Raises ValueError for another content, or a tokenizer of another kind.
    """

    content: str

    def __post_init__(self) -> None:
        _ = self.tokens  # raises the errors

    @cached_property
    def _loaded(self) -> Any:
        package = _package()
        try:
            found = package.Tokenizer.from_str(self.content)
        except Exception as error:  # the package has no class of its own
            raise ValueError(f"found no tokenizer ({' '.join(str(error).split())})") from None
        found.no_truncation()
        found.no_padding()
        found.encode_special_tokens = True
        return found

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The name of each token; a number that no token has is its own name, in angle brackets."""
        names = {number: name for name, number in self._loaded.get_vocab(with_added_tokens=True).items()}
        return tuple(names.get(number, f"<{number}>") for number in range(max(names, default=-1) + 1))

    @cached_property
    def tokens(self) -> tuple[bytes, ...]:
        """The bytes of each token."""
        added = self._loaded.get_added_tokens_decoder()
        found = {number: b"" if token.special else token.content.encode() for number, token in added.items()}
        try:
            ordinary = self._loaded.get_vocab(with_added_tokens=False).items()
            found |= {number: bytes(BYTES[x] for x in name) for name, number in ordinary if number not in added}
        except KeyError:
            found = {}
        if len({x for x in found.values() if len(x) == 1}) < 256 or len(self.classes) > LARGEST_VOCABULARY:
            raise ValueError(
                "found a tokenizer without a token for each byte, expected byte-level byte-pair encoding, as that of "
                "GPT-2 or Llama 3"
            )
        return tuple(found.get(number, b"") for number in range(len(self.classes)))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the content."""
        return sha256(self.content.encode()).hexdigest()

    @property
    def end_of_text(self) -> int | None:
        """The number of the token between two documents; None if there is none."""
        added = self._loaded.get_added_tokens_decoder().items()
        numbers = {token.content: number for number, token in added if token.special}
        return next((numbers[name] for name in END_OF_TEXT if name in numbers), None)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type of files that holds the tokens."""
        return np.dtype("<u2" if len(self.classes) <= 1 << 16 else "<u4")

    def encode(self, pieces: Iterable[str]) -> np.ndarray:
        """The tokens of a text that is given in pieces, int32 (n,); no token goes from a piece to the next one."""
        return np.concatenate([np.zeros(0, np.int32), *self.encoded(pieces)])

    def encoded(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """The tokens of consecutive pieces of a text, int32 (n,) for each."""
        remaining = iter(pieces)
        while some := list(islice(remaining, PIECES_AT_ONCE)):
            for encoding in self._loaded.encode_batch_fast(some, add_special_tokens=False):
                yield np.array(encoding.ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of the tokens, a string for each; characters come when they are complete.

        Bytes that are not UTF-8 become U+FFFD. The last string has what is left.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        yield from (decoder.decode(self.tokens[number]) for number in tokens)
        yield decoder.decode(b"", final=True)


def read(path: Path) -> Tokenizer:
    """The tokenizer in a file `tokenizer.json`. Raises DataError where the file cannot be read, or has no such."""
    try:
        with reading(path):
            return Tokenizer(read_regular(path).decode())
    except UnicodeDecodeError:
        raise DataError(f"{path}: found no UTF-8, expected a tokenizer.json") from None
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def train(pieces: Iterable[str], vocabulary: int) -> Tokenizer:
    """The tokenizer with up to `vocabulary` tokens that is learnt from a text; the same text gives the same one.

    `vocabulary` is at least SMALLEST_VOCABULARY. A short text has fewer tokens.
    """
    package = _package()
    found = package.Tokenizer(package.models.BPE())
    found.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=sorted(BYTES),
        show_progress=False,
    )
    found.train_from_iterator(pieces, trainer)
    return Tokenizer(json.dumps(json.loads(found.to_str()), ensure_ascii=False, separators=(",", ":")))


def pieces_of(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file in pieces, see `pieces`. Raises DataError where the file cannot be read."""
    decoder, lines = codecs.getincrementaldecoder("utf-8-sig")(), 1

    def blocks() -> Iterator[str]:
        nonlocal lines
        with open_regular(path) as file:
            while block := file.read(BLOCK):
                yield (text := decoder.decode(block))
                lines += text.count("\n")
        yield decoder.decode(b"", final=True)

    try:
        with reading(path):
            yield from pieces(blocks())
    except UnicodeDecodeError as error:
        line = lines + error.object.count(b"\n", 0, error.start)
        found = f"found 0x{error.object[error.start]:02x}, which is not UTF-8; convert the file"
        raise DataError(f"{path}:{line}: {found}") from None


def pieces_in(text: str) -> Iterator[str]:
    """A text in memory in pieces, see `pieces`."""
    return pieces(text[begin : begin + BLOCK] for begin in range(0, len(text), BLOCK))


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """The text of consecutive blocks, divided where no token would go from one piece to the next one.

    A text without such a place, such as one without spaces, is divided after LONGEST_PIECE characters.
    """
    rest = ""
    for block in blocks:
        rest += block
        ends = [x.end() for x in BETWEEN_TOKENS.finditer(rest, max(0, len(rest) - END_CHARACTERS))]
        end = ends[-1] if ends else len(rest) // LONGEST_PIECE * LONGEST_PIECE
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def _package() -> ModuleType:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise DataError("tokens need the package tokenizers: pip install 'adtrain[text]'") from None
    return tokenizers
