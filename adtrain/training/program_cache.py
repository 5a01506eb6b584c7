"""The Programs of a training in the user's cache, with their kernels and memory plans: a second run traces nothing.

The key of a Program holds all that it depends on: the sources of the package, the config, what the data add to the
network, the types of the arguments, and the device. An entry that cannot be read is deleted, and made again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.assets import asset_path
from adtrain.cache import digest, open_cache
from adtrain.config.family import Spec
from adtrain.core.errors import AdtrainError
from adtrain.core.program import Program
from adtrain.core.static_key import lasting_text
from adtrain.core.tree import TreeDef
from adtrain.training.program_format import decoded, encoded

KIND, SUFFIX = "programs", ".json"

_log = logging.getLogger(__name__)


class PersistentProgramCache:
    """The cached Programs of one function; a `core.staging.ProgramCache`.

    An entry is a digest of its key and its document, and the document (`program_format`) in a second line. So an entry
    that was stored under another key, or that something else has written, is not used.

    Args:
        key_parts: all values that the function depends on. The sources of the package are added.

    Raises:
        ValueError: a part has no `lasting_text`.
    """

    def __init__(self, *key_parts: object) -> None:
        self.function_key = digest(source_digest(), sys.version, np.__version__, lasting_text(key_parts))

    def find(self, key: Any) -> tuple[Program, TreeDef, Any] | None:
        """What is stored under the key, or None. An entry that `store` has not written is deleted with a warning."""
        if (name := self._name(key)) is None:
            return None
        cache = open_cache(KIND)
        if (content := cache.content(name, SUFFIX)) is None:
            return None
        mark, _, document = bytes(content).partition(b"\n")
        try:
            if mark != _mark(name, document):
                raise ValueError("its digest does not match")
            program, result, lowered = decoded(document)
            if not (isinstance(program, Program) and isinstance(result, TreeDef)):
                raise ValueError("it holds no Program")
        except Exception as error:  # damaged content can raise any exception
            _log.warning("adtrain: warning: a cached Program cannot be read (%s); it is traced again", error)
            cache.remove(name, SUFFIX)
            return None
        return program, result, lowered

    def store(self, key: Any, program: Program, result: TreeDef, lowered: Any) -> None:
        """Store what `find` returns. A value that the format does not have, such as a function, is not stored."""
        cache, name = open_cache(KIND), self._name(key)
        if name is None or not cache.lasting:
            return
        try:
            document = encoded((program, result, lowered))
        except (TypeError, RecursionError):
            return
        with suppress(AdtrainError, OSError):  # a full disk: the next run traces again
            cache.store(name, SUFFIX, _mark(name, document) + b"\n" + document)
            cache.prune()

    def _name(self, key: Any) -> str | None:
        """The key of the file; None for a key that is another one in another process."""
        try:
            return digest(self.function_key, lasting_text(key))
        except ValueError:
            return None


def _mark(name: str, document: bytes) -> bytes:
    return hashlib.sha256(name.encode() + document).hexdigest().encode()


@functools.cache
def source_digest() -> str:
    """A digest of the names, sizes and modification times of all files of the package and of its kernels."""
    files = []
    for root in (Path(__file__).parent.parent, asset_path("kernels")):
        for folder, _, names in os.walk(root):
            for name in names:
                if name.endswith((".py", ".c", ".h", ".cu", ".cuh")):
                    path = os.path.join(folder, name)
                    status = os.stat(path)
                    files.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return digest(*sorted(files))


def targets(value: Any) -> Iterator[Callable[..., Any]]:
    """The classes and functions that the specs in a value of a config call, also in nested specs and lists."""
    if isinstance(value, Spec):
        if hasattr(value, "target"):
            yield value.target
        value = list(value.options().values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from targets(item)
