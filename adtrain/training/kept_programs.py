"""Programs of a training in the user's cache, with their kernels and memory plans: a second run traces nothing.

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
from adtrain.config.specs import Spec
from adtrain.core.array import Array, array
from adtrain.core.errors import AdtrainError
from adtrain.core.primitive import PRIMITIVES, Primitive

KIND, SUFFIX = "programs", ".pickle"
FUNCTION = re.compile(r"<function ([\w.]+) at 0x[0-9a-f]+>")

_log = logging.getLogger(__name__)


class KeptPrograms:
    """The kept Programs of one function. `about` is what the function computes, besides the package's sources."""

    def __init__(self, *about: object) -> None:
        self.about = digest(sources(), sys.version, np.__version__, *map(description, about))

    def find(self, key: str) -> Any:
        """What was stored under the key, or None."""
        cache, name = open_cache(KIND), digest(self.about, key)
        if (content := cache.content(name, SUFFIX)) is None:
            return None
        try:
            return pickle.loads(content)
        except Exception as error:  # whatever the content makes pickle raise
            _log.warning("adtrain: a kept Program cannot be read (%s); it will be made anew", error)
            cache.remove(name, SUFFIX)
            return None

    def store(self, key: str, value: object) -> None:
        """Store a value, unless a part of it is no plain data."""
        cache, content = open_cache(KIND), io.BytesIO()
        if not cache.lasting:
            return
        try:
            _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
            return
        with suppress(AdtrainError):
            cache.store(digest(self.about, key), SUFFIX, content.getvalue())
            cache.prune()


def description(x: object) -> str:
    """The text of a value, equal in all processes. Raises ValueError for a part that shows nothing but its address."""
    found = FUNCTION.sub(r"\1", repr(x))
    if " at 0x" in found:
        raise ValueError(f"found no description of {found}")
    return found


class _Pickler(pickle.Pickler):
    """Stores primitives by name, and arrays by their elements and device."""

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
def sources() -> str:
    """The names, sizes and times of change of all files of the package and of its kernels."""
    found = []
    for root in (Path(__file__).parent.parent, asset_path("kernels")):
        for folder, _, names in os.walk(root):
            for name in names:
                if name.endswith((".py", ".c", ".h", ".cu", ".cuh")):
                    path = os.path.join(folder, name)
                    status = os.stat(path)
                    found.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return digest(*sorted(found))


def targets(value: Any) -> Iterator[Callable[..., Any]]:
    """The classes and functions that a value of a config stands for."""
    if isinstance(value, Spec):
        if hasattr(value, "target"):
            yield value.target
        value = list(value.options().values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from targets(each)
