"""Names of a package whose modules are imported at their first use.

A command imports only what it runs: all of the package takes half a second. A package that uses this imports the same
names within `if TYPE_CHECKING`, for type checkers and editors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_MISSING = object()


def lazy_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The function `__getattr__` of a package.

    Args:
        homes: modules, and the names, separated by spaces, that the package takes from each: what the module defines,
            or modules in it.
    """

    def find(name: str) -> Any:
        home = next((home for home, names in homes.items() if name in names.split()), None)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = vars(import_module(home)).get(name, _MISSING)
        if found is _MISSING:
            found = import_module(f"{home}.{name}")
        setattr(sys.modules[package], name, found)
        return found

    return find
