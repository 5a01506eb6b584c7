"""The C functions of `kernels/export/`, and which others each of them needs."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from adtrain.assets import asset_path

_NAME = re.compile(
    r"^(?:static|INLINE)[\w\s*]*?\b(\w+)\(|^struct (\w+) \{|^typedef .*?\b(\w+) __|^#\s*define (\w+)", re.MULTILINE
)


class Block(NamedTuple):
    """A function, a struct or a definition with the comment above it."""

    name: str
    text: str
    uses: frozenset[str]


def _uses(text: str) -> frozenset[str]:
    """The functions that a text calls, and the structs, types and macros that it names, without its comments."""
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return frozenset(re.findall(r"\w+(?=\()|(?<=struct )\w+|\bvector\b|\b[A-Z]+\b", code))


@functools.cache
def blocks(*files: str) -> dict[str, Block]:
    """The blocks of these files by name; a file's blocks replace those of the same name in later files."""
    found: dict[str, Block] = {}
    for file in files:
        text = (asset_path("kernels") / "export" / file).read_text(encoding="utf-8")
        for part in text.split("\n\n"):
            if match := _NAME.search(part):
                name = next(filter(None, match.groups()))
                found.setdefault(name, Block(name, part.strip("\n"), _uses(part)))
    return found


def needed(functions: Iterable[str], *files: str) -> list[str]:
    """The texts of these functions and of all that they use, each after those that it uses."""
    library, found = blocks(*files), dict[str, str]()

    def add(name: str) -> None:
        if name not in found:
            for other in sorted(library[name].uses & library.keys() - {name}):
                add(other)
            found[name] = library[name].text

    for name in functions:
        add(name)
    return list(found.values())
