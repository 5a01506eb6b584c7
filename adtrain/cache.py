"""The user's folder of compiled code and of what was measured: nobody else may write to it, and only files known to be
whole come out of it."""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from adtrain.files import write_atomic

UNUSED_SECONDS = 30 * 86400
# No build lasts this long: what is older was left behind by a process that was killed.
BUILD_SECONDS = 86400
BUILD_PREFIX = "build-"

_log = logging.getLogger(__name__)


def digest(*parts: str) -> str:
    """A key for these texts, in this order."""
    return _hexadecimal("\0".join(parts).encode())


def _hexadecimal(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:40]


@dataclass(frozen=True)
class Cache:
    """Files by key, in one folder that only this user can write to.

    A file's name holds its key and a digest of its content. So a file that is not what was once stored is known before
    it is loaded, a rename publishes the content together with its digest, and processes that store at once cannot
    spoil each other's files: there are no locks.
    """

    folder: Path
    lasting: bool = True

    def find(self, key: str, suffix: str) -> Path | None:
        """The whole file stored under the key. A damaged one is removed, with a warning, and counts as absent."""
        for path in self.folder.glob(f"{key}.*{suffix}"):
            try:
                if path.name == _name(key, path.read_bytes(), suffix):
                    os.utime(path)  # `prune` goes by the time of last use
                    return path
                path.unlink()
            except FileNotFoundError:  # another process was faster
                continue
            _log.warning("adtrain: %s: damaged, will be made again", path)
        return None

    def store(self, key: str, suffix: str, content: bytes) -> Path:
        """Put the content under the key. Raises AdtrainError where that fails, on a full disk for example."""
        path = self.folder / _name(key, content, suffix)
        write_atomic(path, content)
        return path

    def building_site(self) -> tempfile.TemporaryDirectory[str]:
        """A folder for the files of one build, which goes when its `with` block ends, in whatever way."""
        return tempfile.TemporaryDirectory(prefix=BUILD_PREFIX, dir=self.folder)

    def prune(self) -> None:
        """Remove what nobody has used for UNUSED_SECONDS, and what killed builds have left behind."""
        now = time.time()
        for path in self.folder.iterdir():
            limit = BUILD_SECONDS if path.name.startswith(BUILD_PREFIX) else UNUSED_SECONDS
            try:
                if path.stat().st_mtime < now - limit:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError:  # removed by another process at the same time
                continue


def _name(key: str, content: bytes, suffix: str) -> str:
    return f"{key}.{_hexadecimal(content)}{suffix}"


def open_cache(kind: str) -> Cache:
    """The user's cache for files of one kind ("cpu", "cuda", "tuning").

    Where that cannot be used it is one for this process only, with a warning that says why.
    """
    try:
        home = cache_home()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (home / "adtrain", home / "adtrain" / kind):
            folder.mkdir(mode=0o700, exist_ok=True)
            _require_private(folder)
    except (OSError, RuntimeError) as error:
        return Cache(_process_folder(reason(error)), lasting=False)
    return Cache(folder)


def cache_home() -> Path:
    """Where this user's programs keep what can be made again. RuntimeError for a user without a home."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    # The XDG specification says to ignore relative paths.
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


def _require_private(folder: Path) -> None:
    """Raise PermissionError unless this user can write to the folder and nobody else can."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(0, "belongs to another user", str(folder))
    if status.st_mode & 0o022:
        raise PermissionError(0, "others can write to it: chmod go-w would help", str(folder))
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(0, "cannot be written", str(folder))


def reason(error: OSError | RuntimeError) -> str:
    """The error without its number: what it is about, and what is wrong with it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


@functools.cache
def _process_folder(cause: str) -> Path:
    """A folder that goes when the process ends."""
    _log.warning("adtrain: compiled code is not kept for the next run (%s)", cause)
    folder = tempfile.mkdtemp(prefix="adtrain-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
