"""Atomic file writes: readers see the old or the new content, never a part of it, even after a crash."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from adtrain.core.errors import AdtrainError

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}")


def write_atomic(path: str | Path, content: bytes) -> None:
    """Replace the file at `path` with `content`, atomically. After the return the content survives a power failure.

    Raises AdtrainError that names the file and the cause if it cannot be written; the old file is then unchanged.
    """
    path = Path(path)
    # The name is chosen before the file is created, so that an interrupt at any point leaves no file.
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


def unwritable(path: Path, error: OSError) -> AdtrainError:
    """A one-line error for a file or folder that cannot be written."""
    return AdtrainError(f"{path}: cannot be written ({error.strerror or error})")
