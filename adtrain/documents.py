"""What was measured, kept in the user's cache as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from adtrain.cache import open_cache

SUFFIX = ".json"

T = TypeVar("T")

_log = logging.getLogger(__name__)


def find(kind: str, key: str, read: Callable[[Any], T]) -> T | None:
    """What ``read`` makes of the document stored under the key; None where there is none.

    One that cannot be read, or that ``read`` raises ValueError for, counts as absent, with a warning that names it.
    """
    cache = open_cache(kind)
    path: Path = cache.folder
    try:
        found = cache.find(key, SUFFIX)
        if found is None:
            return None
        path = found
        return read(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        _log.warning("adtrain: %s: not used, it cannot be read (%s)", path, error)
        return None


def store(kind: str, key: str, document: object) -> None:
    """Put the document under the key, in place of what was there. Raises AdtrainError where that fails."""
    cache = open_cache(kind)
    path = cache.store(key, SUFFIX, json.dumps(document, indent=2, allow_nan=False).encode())
    for other in cache.folder.glob(f"{key}.*{SUFFIX}"):
        if other != path:
            other.unlink(missing_ok=True)
