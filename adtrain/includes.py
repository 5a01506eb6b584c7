"""The files that C and CUDA sources include: for the keys of compiled code, and for copies of a user's kernels."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

_DIRECTIVE = re.compile(r"^.*(?:#|%:).*$", re.MULTILINE)
_NAME = re.compile(r'"([^"\n]+)"|<([^>\n]+)>|([A-Za-z_./][\w./+-]*\.\w+)')


@functools.lru_cache(1024)
def names(text: str) -> frozenset[str]:
    """What the directives of a source may include: all that they have in quotes or angle brackets, and file names.

    These are more names than the compiler looks for: also those in macros, and in branches that are left out.
    """
    spliced = text.replace("\\\r\n", "").replace("\\\n", "")
    return frozenset(next(filter(None, found)) for line in _DIRECTIVE.findall(spliced) for found in _NAME.findall(line))


class Includes:
    """Follows the includes of sources. Each file is read once.

    Args:
        folders: where the compiler looks for headers, besides the folder of the file that includes them.
    """

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self.folders = list(folders)
        self._read: dict[Path, str | None] = {}

    def files(self, text: str, folder: Path | None = None) -> list[Path]:
        """The files that a source in this folder may include, directly or indirectly, sorted.

        Each name is looked for in every folder of a file that was found, as a macro may hold it. All files of a name
        are listed: one that is made later in a folder that comes before changes the list.
        """
        folders = dict.fromkeys(self.folders if folder is None else [folder, *self.folders])
        found: dict[Path, None] = {}
        known, looked_for = set(names(text)), set[tuple[Path, str]]()
        while left := [(place, name) for place in folders for name in known if (place, name) not in looked_for]:
            looked_for.update(left)
            for place, name in left:
                content = self._content(path := place / name)
                if content is not None:
                    inner = Path(os.path.realpath(path.parent))
                    found.setdefault(inner / path.name)
                    folders.setdefault(inner)
                    known |= names(content)
        return sorted(found)

    def digests(self, text: str, folder: Path | None = None) -> list[str]:
        """A digest of the path and the content of each of `files`: what the code of the source depends on."""
        found = ((os.fsencode(path), self._content(path) or "") for path in self.files(text, folder))
        return [sha256(path + b"\0" + text.encode(errors="surrogateescape")).hexdigest() for path, text in found]

    def _content(self, path: Path) -> str | None:
        """The text of a file; None where there is none."""
        if path not in self._read:
            try:
                is_file = path.is_file()  # not a pipe, which would wait
                self._read[path] = path.read_text(encoding="utf-8", errors="surrogateescape") if is_file else None
            except (OSError, ValueError):  # a name that no file can have
                self._read[path] = None
        return self._read[path]


def search_folders(words: Sequence[str]) -> list[Path]:
    """The folders for headers that the options of a compiler and the environment name."""
    given = [re.sub(r"^-(?:I|isystem|iquote|idirafter)", "", word) for word in words]
    given += [part for name in ("CPATH", "C_INCLUDE_PATH") for part in os.environ.get(name, "").split(os.pathsep)]
    return [Path(each) for each in given if os.path.isabs(each) and os.path.isdir(each)]
