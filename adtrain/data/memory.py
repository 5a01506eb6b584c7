"""The machine's memory, and which arrays it can hold."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from adtrain.data.errors import DataError

SHARE = 4
"""An array of more than this part of the memory stays in its file."""

# The limit of a container, in version 2 and version 1 of Linux' control groups.
LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory() -> int:
    """The bytes of memory of the machine, or of the container that the process runs in."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in LIMITS:
        with suppress(OSError, ValueError):  # there is no such file, or it says "max"
            memory = min(memory, int(path.read_text(encoding="ascii")))
    return memory


def stays_in_file(nbytes: int) -> bool:
    """Whether an array of this size is read as needed, and not at once."""
    return nbytes > machine_memory() // SHARE


def require_memory(place: str, nbytes: int, advice: str = "") -> None:
    """Raise DataError if `nbytes` is more than the machine's memory; call it before allocating."""
    memory = machine_memory()
    if nbytes > memory:
        found = f"{nbytes / 2**30:,.1f} GiB to hold in memory, this machine has {memory / 2**30:,.1f}"
        raise DataError(f"{place}: found {found}{advice}")
