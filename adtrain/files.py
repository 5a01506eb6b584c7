"""Writing files so that a reader, or a crash, meets the old content or the new and never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from adtrain.core.errors import AdtrainError


def write_atomic(path: str | Path, content: bytes) -> None:
    """Put `content` into the file at `path`, which is replaced as a whole.

    Raises AdtrainError, naming the file and the cause, where that cannot be done; the old file is then untouched.
    """
    path = Path(path)
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> AdtrainError:
    """The one-line error for a file or folder that the system does not let us write."""
    return AdtrainError(f"{path}: cannot be written ({error.strerror or error})")


def _umask() -> int:
    """The process's mask, which `mkstemp` overrides with one that shuts everybody else out."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
