"""The C functions of `kernels/export/`, and which others each of them needs."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from adtrain.assets import asset_path

_NAME = re.compile(
    r"^(?:static|INLINE)[\w\s*]*?\b(\w+)\(|^struct (\w+) \{|^typedef .*?\b(\w+) __|^#\s*define (\w+)", re.M
)


class Block(NamedTuple):
    """A function, a struct or a definition with the comment above it."""

    name: str
    text: str
    words: frozenset[str]


def _words(text: str) -> frozenset[str]:
    """The names in a text without its comments."""
    return frozenset(re.findall(r"\w+", re.sub(r"/\*.*?\*/", "", text, flags=re.S)))


@functools.cache
def blocks(*files: str) -> dict[str, Block]:
    """The blocks of these files by name; a file's blocks replace those of the same name in later files."""
    found: dict[str, Block] = {}
    for file in files:
        text = (asset_path("kernels") / "export" / file).read_text(encoding="utf-8")
        for part in text.split("\n\n"):
            if match := _NAME.search(part):
                name = next(filter(None, match.groups()))
                found.setdefault(name, Block(name, part.strip("\n"), _words(part)))
    return found


def needed(functions: Iterable[str], *files: str) -> list[str]:
    """The texts of these functions and of all that they use, in an order in which C can read them."""
    library, wanted = blocks(*files), set()
    rest = list(functions)
    while rest:
        name = rest.pop()
        if name in library and name not in wanted:
            wanted.add(name)
            rest += library[name].words
    found = [block.text for name, block in library.items() if name in wanted]
    return sorted(found, key=lambda text: not text.startswith("struct"))
