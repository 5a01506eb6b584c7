"""Atomic writes, whose readers see the old or the new content, never a part of it; and reads of regular files."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Literal, TypeAlias

from adtrain.core.errors import AdtrainError
from adtrain.text import short

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, and of a limit of the user or the process."""
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")


Content: TypeAlias = bytes | bytearray | Sequence[bytes | memoryview]
"""What a file gets, as a whole or in consecutive parts."""


def write_atomic(path: str | Path, content: Content, durable: bool = True, same_as: Path | None = None) -> None:
    """Replace the file at `path` with `content`, atomically. `durable`: after the return it survives a power failure.

    A symbolic link is followed, and the file keeps its mode. A device, or a pipe that a process reads, such as
    /dev/stdout, is written to. With `same_as`, a file that holds `content` already, the new file is a hard link to it
    where that is possible.

    Raises Unwritable if it cannot be written; the old file is then unchanged.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode if path.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            with _opened_device(path) as file:
                file.writelines(_parts(content))
        else:
            _replace(Path(os.path.realpath(path)), content, mode, durable, same_as)
    except OSError as error:
        size = sum(memoryview(part).nbytes for part in _parts(content))
        raise unwritable(path, error, size) from error


def _opened_device(path: Path) -> BufferedWriter:
    """Open a device or a pipe to write to it. Raises OSError for a pipe that no process reads, instead of waiting."""
    try:
        descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a pipe that no process reads", str(path)) from None
        raise
    os.set_blocking(descriptor, True)
    return open(descriptor, "wb")


def expect_writable(path: Path) -> None:
    """Raise the AdtrainError of `write_atomic` early, where the folder of `path`, or a folder at `path`, shows it."""
    folder = Path(os.path.realpath(path)).parent
    code = 0
    if path.is_dir():
        code = errno.EISDIR
    elif not folder.is_dir():
        code = errno.ENOTDIR if folder.exists() else errno.ENOENT
    elif not (path.exists() and not path.is_file()) and not os.access(folder, os.W_OK):
        code = errno.EACCES
    if code:
        raise unwritable(path, OSError(code, os.strerror(code)))


def make_folder(path: Path) -> None:
    """Make the folder `path` where there is none. Raises AdtrainError where that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def _replace(path: Path, content: Content, mode: int | None, durable: bool, same_as: Path | None = None) -> None:
    if path.is_symlink():  # links were followed: this one leads to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    # The name is chosen before the file is created, so that an interrupt at any point leaves no file.
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        if same_as is None or not _linked(same_as, temporary, mode):
            with temporary.open("xb") as file:
                if mode is not None:
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
                file.writelines(_parts(content))
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)  # os.replace leaves it where both names are links to one file


def _parts(content: Content) -> Sequence[bytes | bytearray | memoryview]:
    return (content,) if isinstance(content, (bytes, bytearray)) else content


def _linked(source: Path, path: Path, mode: int | None) -> bool:
    """Make `path` a hard link to the file `source`.

    Returns False, and makes no link, if that is impossible or `source` has another mode than `mode`.
    """
    source = Path(os.path.realpath(source))
    try:
        if mode not in (None, source.stat().st_mode):
            return False
        os.link(source, path)
    except OSError:  # the file system has no hard links, or they are on two file systems
        return False
    return True


@contextmanager
def locked_by(path: Path, busy: str = "training into this folder; wait for it") -> Iterator[None]:
    """Lock the folder of the file `path` against other processes during a `with` block, by a lock of the file.

    Raises AdtrainError where another process holds the lock; `busy` says what that does. Does nothing on systems
    without fcntl.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        open_regular(path).close()
        file = path.open("ab")
    except OSError as error:
        raise unwritable(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AdtrainError(f"{path.parent}: another process is {busy}") from None
        yield


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file to read its bytes. Opening a pipe would wait for a writer, perhaps for ever.

    Raises OSError where it is missing, unreadable, or of another kind.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: str | Path) -> bytes:
    """The bytes of a regular file. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_file(path: str | Path) -> bytes:
    """The bytes of a regular file. Raises AdtrainError that names the file and the cause where it cannot be read."""
    try:
        return read_regular(path)
    except OSError as error:
        raise AdtrainError(f"{path}: cannot be read ({error.strerror or error})") from None


def append_line(path: Path, line: str, durable: bool) -> None:
    """Append `line` and a line feed to a text file. `durable`: after the return it survives a power failure.

    Raises AdtrainError where it cannot be written; then nothing is appended.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, size)
        raise unwritable(path, error) from error


def remove_temporaries(path: Path) -> None:
    """Delete the temporary files that killed `write_atomic` calls for `path` left in its folder."""
    for temporary in path.parent.glob(f".{path.name}.*"):
        if TEMPORARY.fullmatch(temporary.name):
            temporary.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    """Flush the folder's entries to disk, so that a rename survives; not needed on systems without O_DIRECTORY."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Unwritable(AdtrainError):
    """A file or folder cannot be written; the message is one line that names it and the cause."""


def unwritable(path: Path, error: OSError, size: int = 0) -> Unwritable:
    """The error for a file or folder. Where there is no space for its `size` bytes, it says how much that is."""
    needed = f"; it needs {short(size, 'B')}" if size and error.errno in NO_SPACE else ""
    return Unwritable(f"{path}: cannot be written ({error.strerror or error}){needed}")


PACKAGE = Path(__file__).parent

Folder = Literal["kernels", "configs", "datasets"]


def asset_path(folder: Folder) -> Path:
    """The absolute path of one of the folders. Raises AdtrainError if the installation lacks it."""
    candidates = [PACKAGE / "_assets" / folder, PACKAGE.parent / folder]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    places = " and ".join(str(candidate) for candidate in candidates)
    raise AdtrainError(f"the folder {folder}/ is missing (looked for {places}); reinstall adtrain")
