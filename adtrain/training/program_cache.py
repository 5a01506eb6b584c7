"""The Programs of a training in the user's cache, with their kernels and memory plans: a second run traces nothing.

The key of a Program holds all that it depends on: the sources of the package, the config, what the data add to the
network, the types of the arguments, and the device. A file that cannot be read is ignored.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.assets import asset_path
from adtrain.cache import digest, open_cache
from adtrain.config.family import Spec
from adtrain.core.array import Array, array
from adtrain.core.errors import AdtrainError
from adtrain.core.primitive import PRIMITIVES, Primitive

KIND, SUFFIX = "programs", ".pickle"
FUNCTION = re.compile(r"<function ([\w.]+) at 0x[0-9a-f]+>")

_log = logging.getLogger(__name__)


class PersistentProgramCache:
    """The cached Programs of one function; a `core.staging.ProgramCache`.

    Args:
        key_parts: all values that the function depends on. The sources of the package are added.

    Raises:
        ValueError: a part has no `description`.
    """

    def __init__(self, *key_parts: object) -> None:
        self.function_key = digest(source_digest(), sys.version, np.__version__, *map(description, key_parts))

    def find(self, key: str) -> Any:
        """The value stored under the key, or None. A file that cannot be read is deleted with a warning."""
        cache, name = open_cache(KIND), digest(self.function_key, key)
        if (content := cache.content(name, SUFFIX)) is None:
            return None
        try:
            return pickle.loads(content)
        except Exception as error:  # damaged content can raise any exception
            _log.warning("adtrain: a cached Program cannot be read (%s); it is traced again", error)
            cache.remove(name, SUFFIX)
            return None

    def store(self, key: str, value: object) -> None:
        """Store a value. A value that pickle refuses, such as one that contains a lambda, is not stored."""
        cache, content = open_cache(KIND), io.BytesIO()
        if not cache.lasting:
            return
        try:
            _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
            return
        with suppress(AdtrainError, OSError):  # a full disk: the next run traces again
            cache.store(digest(self.function_key, key), SUFFIX, content.getvalue())
            cache.prune()


def description(x: object) -> str:
    """The repr of a value, equal in all processes: functions are shown by name, without their addresses.

    Raises ValueError if another object in it is shown by its address.
    """
    text = FUNCTION.sub(r"\1", repr(x))
    if " at 0x" in text:
        raise ValueError(f"found {text}, expected a value whose repr has no memory address")
    return text


class _Pickler(pickle.Pickler):
    """Pickles primitives by name, and arrays by their elements and device."""

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, Primitive):
            return _primitive, (x.name,)
        if isinstance(x, Array):
            return _array, (np.array(x.numpy()), x.device)
        return NotImplemented


def _primitive(name: str) -> Primitive:
    return PRIMITIVES[name]


def _array(elements: np.ndarray, device: str) -> Array:
    return array(elements, device=device)


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
