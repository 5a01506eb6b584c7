"""When a result was made, and by which command."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple


class Invocation(NamedTuple):
    """A time in UTC as ISO 8601, and a command line."""

    date: str
    command: str


def invocation() -> Invocation:
    """The time of this call, and the command line of this process."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return Invocation(datetime.now(timezone.utc).isoformat(timespec="seconds"), shlex.join([name, *sys.argv[1:]]))
