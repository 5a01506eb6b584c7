"""Measurements as JSON documents in the user's cache."""

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
    """The document stored under the key, parsed by ``read``; None if there is none.

    Also None, with a warning, if the file cannot be read or ``read`` raises ValueError. Such a document is deleted.
    """
    cache = open_cache(kind)
    path: Path = cache.folder
    try:
        found = cache.find(key, SUFFIX)
        if found is None:
            return None
        path = found
        return read(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("adtrain: warning: %s: ignored, because it cannot be read (%s)", path, error)
        if path != cache.folder:
            path.unlink(missing_ok=True)
        return None


def any_stored(kind: str) -> bool:
    """Whether there is a document of the kind. Without one a caller need not compute the keys, which takes time."""
    return next(open_cache(kind).folder.glob(f"*{SUFFIX}"), None) is not None


def store(kind: str, key: str, document: object) -> None:
    """Store the document under the key; it replaces an older one. Raises AdtrainError if it cannot be written."""
    cache = open_cache(kind)
    path = cache.store(key, SUFFIX, json.dumps(document, indent=2, allow_nan=False).encode())
    for other in cache.folder.glob(f"{key}.*{SUFFIX}"):
        if other != path:
            other.unlink(missing_ok=True)
