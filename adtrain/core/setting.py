"""Setting: a value of each thread, which a block can replace."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Setting(threading.local, Generic[T]):
    """The value in this thread; outside of all blocks the one that it was made with."""

    def __init__(self, value: T) -> None:
        self.value = value

    @contextmanager
    def replaced(self, value: T) -> Iterator[None]:
        """Another value in a block."""
        outer, self.value = self.value, value
        try:
            yield
        finally:
            self.value = outer
