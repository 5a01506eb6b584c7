"""Rename maps, and source text without what means nothing to the compiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\w[\w.]*|\S')
IDENTIFIER = re.compile(r"[A-Za-z_]\w*$")


class Renames:
    """A map from old words to new ones, applied all at once, longest word first.

    A line of the file is "old new", or "old new PATTERN" for a name that changes only where it stands in kernel files
    like that (old file name, as in "gemm*.cu"). Lines that start with # are comments. Names of files may have
    folders and dots. Where "conv" is renamed but "conv.cu" is not, add the line "conv.cu conv.cu".
    """

    def __init__(self, path: Path | None = None) -> None:
        lines = [line.split() for line in path.read_text().splitlines()] if path else []
        self.entries = [(x[0], x[1], x[2] if len(x) > 2 else "*") for x in lines if x and not x[0].startswith("#")]
        self._of = cache(self._compiled)

    def __call__(self, text: str, file: str = "") -> str:
        """The text, which stands in a kernel file, in new words."""
        return self._of(file)(text)

    def _compiled(self, file: str) -> Callable[[str], str]:
        # a line for certain files wins over one for all
        entries = sorted(self.entries, key=lambda entry: entry[2] != "*")
        words = {old: new for old, new, pattern in entries if fnmatch(file, pattern)}
        if not words:
            return lambda text: text
        either = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
        pattern = re.compile(rf"(?<!\w)(?:{either})(?!\w)")
        return lambda text: pattern.sub(lambda match: words[match[0]], text)


def tokens(text: str) -> list[str]:
    """The tokens of C++ text without comments and #line. Preprocessor directives stand between \\n."""
    text = COMMENT.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    found: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        directive = line.lstrip().startswith("#") and not re.match(r"\s*#\s*pragma\s+unroll", line)
        if re.match(r"\s*#\s*line\b", line):
            continue
        found += ["\n", *TOKEN.findall(line), "\n"] if directive else TOKEN.findall(line)
    return found


def renamed_pairs(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Identifiers that differ, where all other tokens are equal; nothing where they are not."""
    if len(before) != len(after):
        return
    pairs = [(x, y) for x, y in zip(before, after, strict=True) if x != y]
    if all(IDENTIFIER.match(x) and IDENTIFIER.match(y) for x, y in pairs):
        yield from pairs


def suggestions(pairs: Counter[tuple[str, str]]) -> list[str]:
    """Lines for a rename map, the most frequent first; a word with several new names is marked."""
    several = Counter(old for old, _ in pairs)
    return [f"{old} {new}{'   # ambiguous' if several[old] > 1 else ''}" for (old, new), _ in pairs.most_common()]
