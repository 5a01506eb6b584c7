"""The user's cache of compiled code, decompressed data and measurements: a private folder of files with checksums.

A measurement is a document: a JSON value in a file. The key of compiled code has the files that its source includes.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import numpy as np

from adtrain.core.errors import AdtrainError
from adtrain.files import Content, write_atomic

UNUSED_SECONDS = 30 * 86400
# No build takes this long; an older build folder was left by a killed process.
BUILD_SECONDS = 86400
BUILD_PREFIX = "build-"

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""The content of a file."""

STORE_THREAD = "adtrain-data-cache"
"""The name of the threads of `Cache.store_later`."""

DOCUMENT = ".json"
"""The suffix of the file of a document."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def digest(*parts: str) -> str:
    """A key for these texts in this order: 40 hexadecimal digits."""
    return _hexadecimal("\0".join(parts).encode(errors="surrogatepass"))


def _hexadecimal(content: Content | Buffer) -> str:
    found = hashlib.sha256()
    for part in (content,) if isinstance(content, (bytes, bytearray, memoryview)) else content:
        found.update(part)
    return found.hexdigest()[:40]


@dataclass(frozen=True)
class Cache:
    """Files stored by key, in a folder that only this user can write to.

    A file's name contains its key and a digest of its content. A damaged file is therefore detected before it is
    loaded. A rename publishes content and digest together, so processes can store at the same time without locks.

    `lasting` is False for the folder of one process, which is deleted at exit.
    """

    folder: Path
    lasting: bool = True

    def find(self, key: str, suffix: str) -> Path | None:
        """The file stored under the key, or None. A damaged file is deleted with a warning."""
        stored = self._find(key, suffix)
        return None if stored is None else stored[0]

    def content(self, key: str, suffix: str) -> memoryview | None:
        """The content stored under the key, or None; see `find`."""
        stored = self._find(key, suffix)
        return None if stored is None else stored[1]

    def _find(self, key: str, suffix: str) -> tuple[Path, memoryview] | None:
        for path in self.folder.glob(f"{key}.*{suffix}"):
            try:
                content = _content(path)
                if path.name == _name(key, content, suffix):
                    os.utime(path)  # `prune` reads the time of last use
                    return path, content
                path.unlink()
            except FileNotFoundError:  # deleted by another process
                continue
            _log.warning("adtrain: warning: %s: is damaged and will be rebuilt", path)
        return None

    def remove(self, key: str, suffix: str) -> None:
        """Delete the file stored under the key, if there is one."""
        for path in self.folder.glob(f"{key}.*{suffix}"):
            path.unlink(missing_ok=True)

    def store(self, key: str, suffix: str, content: Content) -> Path:
        """Store the content under the key. Raises AdtrainError if it cannot be written.

        A power failure may damage the file. The checksum in its name lets `find` detect that.
        """
        path = self.folder / _name(key, content, suffix)
        write_atomic(path, content, durable=False)
        return path

    def store_later(self, key: str, suffix: str, content: Content) -> None:
        """Store the content in a thread, for which the process waits before it ends, unless the disk is full."""

        def store() -> None:
            with suppress(AdtrainError, OSError):
                self.store(key, suffix, content)
                self.prune()

        if self.lasting:
            with suppress(RuntimeError):  # the limit of threads is reached
                Thread(target=store, name=STORE_THREAD).start()

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Wait for other processes that hold the key, and hold it in a block. Does nothing on systems without fcntl."""
        try:
            import fcntl
        except ImportError:
            yield
            return
        with (self.folder / f"{key}.lock").open("ab") as file:  # `prune` deletes it
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def build_folder(self) -> tempfile.TemporaryDirectory[str]:
        """A temporary folder for the files of one build, as a context manager."""
        return tempfile.TemporaryDirectory(prefix=BUILD_PREFIX, dir=self.folder)

    def prune(self) -> None:
        """Delete files that were not used for UNUSED_SECONDS, and the build folders of killed processes."""
        now = time.time()
        for path in self.folder.iterdir():
            limit = BUILD_SECONDS if path.name.startswith(BUILD_PREFIX) else UNUSED_SECONDS
            try:
                if path.stat().st_mtime < now - limit:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError:  # deleted by another process
                continue


def _name(key: str, content: Content | Buffer, suffix: str) -> str:
    return f"{key}.{_hexadecimal(content)}{suffix}"


def _content(path: Path) -> memoryview:
    """The content of a file, in memory of NumPy. Large arrays have pages of 2 MB, into which a file is read faster."""
    with path.open("rb") as file:
        content = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data
        return content[: file.readinto(content)]


def open_cache(kind: str) -> Cache:
    """The user's cache for files of one kind ("cpu", "cuda", "data", "tuning").

    If it cannot be used, a cache for this process only, with a warning that says why.
    """
    try:
        home = cache_home()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (home / "adtrain", home / "adtrain" / kind):
            folder.mkdir(mode=0o700, exist_ok=True)
            _require_private(folder)
    except (OSError, RuntimeError) as error:
        return process_cache(reason(error))
    return Cache(folder)


def process_cache(cause: str) -> Cache:
    """A cache for this process only. Warns once that nothing is cached, because of `cause`."""
    return Cache(_process_folder(cause), lasting=False)


def cache_home() -> Path:
    """The folder of the user's caches. Raises RuntimeError for a user without a home folder, or with a relative one."""
    # The XDG specification says to ignore relative paths.
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if folder.is_absolute() and sys.platform != "darwin":
        return folder
    home = os.environ.get("HOME")
    if home is not None and not os.path.isabs(home):
        raise RuntimeError(f"HOME={home}: expected an absolute path")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def _require_private(folder: Path) -> None:
    """Raise PermissionError unless this user can write to the folder and nobody else can."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(0, "belongs to another user", str(folder))
    if status.st_mode & 0o022:
        raise PermissionError(0, "other users can write to it; run chmod go-w", str(folder))
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(0, "cannot be written", str(folder))


def reason(error: OSError | RuntimeError) -> str:
    """The message of the error, with the file name and without the errno."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


@functools.cache
def _process_folder(cause: str) -> Path:
    """A folder that is deleted when the process ends; warns that nothing is cached, because of `cause`."""
    _log.warning("adtrain: warning: compiled code is not cached for the next run (%s)", cause)
    folder = tempfile.mkdtemp(prefix="adtrain-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def find_document(kind: str, key: str, read: Callable[[Any], T]) -> T | None:
    """The document stored under the key, parsed by ``read``; None if there is none.

    Also None, with a warning, if the file cannot be read or ``read`` raises ValueError. Such a document is deleted.
    """
    cache = open_cache(kind)
    path: Path = cache.folder
    try:
        found = cache.find(key, DOCUMENT)
        if found is None:
            return None
        path = found
        return read(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("adtrain: warning: %s: ignored, because it cannot be read (%s)", path, error)
        if path != cache.folder:
            path.unlink(missing_ok=True)
        return None


def any_document(kind: str) -> bool:
    """Whether there is a document of the kind. Without one a caller need not compute the keys, which takes time."""
    return next(open_cache(kind).folder.glob(f"*{DOCUMENT}"), None) is not None


def store_document(kind: str, key: str, document: object) -> None:
    """Store the document under the key; it replaces an older one. Raises AdtrainError if it cannot be written."""
    cache = open_cache(kind)
    path = cache.store(key, DOCUMENT, json.dumps(document, indent=2, allow_nan=False).encode())
    for other in cache.folder.glob(f"{key}.*{DOCUMENT}"):
        if other != path:
            other.unlink(missing_ok=True)


_DIRECTIVE = re.compile(r"^.*(?:#|%:).*$", re.MULTILINE)
_NAME = re.compile(r'"([^"\n]+)"|<([^>\n]+)>|([A-Za-z_./][\w./+-]*\.\w+)')


@functools.lru_cache(1024)
def included_names(text: str) -> frozenset[str]:
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
        known, looked_for = set(included_names(text)), set[tuple[Path, str]]()
        while left := [(place, name) for place in folders for name in known if (place, name) not in looked_for]:
            looked_for.update(left)
            for place, name in left:
                content = self._content(path := place / name)
                if content is not None:
                    inner = Path(os.path.realpath(path.parent))
                    found.setdefault(inner / path.name)
                    folders.setdefault(inner)
                    known |= included_names(content)
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
