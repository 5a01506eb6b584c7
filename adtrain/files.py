"""Writing files so that a reader, or a crash, meets the old content or the new and never a part."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from adtrain.core.errors import AdtrainError


def write_atomic(path: str | Path, content: bytes) -> None:
    """Put `content` into the file at `path`, which is replaced as a whole.

    Raises AdtrainError, naming the file and the cause, where that cannot be done; the old file is then untouched.
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
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> AdtrainError:
    """The one-line error for a file or folder that the system does not let us write."""
    return AdtrainError(f"{path}: cannot be written ({error.strerror or error})")
