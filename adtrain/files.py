"""Writing files so that a reader, or a crash, meets the old content or the new and never a part."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from adtrain.core.errors import AdtrainError

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")


def write_atomic(path: str | Path, content: bytes) -> None:
    """Put `content` into the file at `path`, which is replaced as a whole.

    Raises AdtrainError, naming the file and the cause, where that cannot be done; the old file is then untouched. When
    it returns the new content outlives a loss of power.
    """
    path = Path(path)
    # Named before it is there, so that an interrupt at any point leaves nothing behind.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unwritable(path, error) from error


def remove_temporaries(path: Path) -> None:
    """Remove what `write_atomic` left beside the file at `path` when its process was killed."""
    for temporary in path.parent.glob(f".{path.name}.*"):
        if TEMPORARY.fullmatch(temporary.name):
            temporary.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    """Make sure of the names in a folder; where a system cannot open folders it sees to that by itself."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def unwritable(path: Path, error: OSError) -> AdtrainError:
    """The one-line error for a file or folder that the system does not let us write."""
    return AdtrainError(f"{path}: cannot be written ({error.strerror or error})")
