"""Names of a package whose modules are imported at their first use.

A command imports only what it runs: all of the package takes half a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_MISSING = object()


def lazy_getattr(package: str) -> Callable[[str], Any]:
    """The function `__getattr__` of a package.

    The names are those that its `__init__.py` imports within `if TYPE_CHECKING`, where type checkers and editors see
    them: what a module defines, or modules in it.
    """

    @cache
    def homes() -> dict[str, str]:
        """The modules of the names."""
        import ast  # at the first use of a name

        spec = find_spec(package)
        source = spec.loader.get_source(package)  # type: ignore[union-attr]
        found: dict[str, str] = {}
        for block in ast.parse(source).body:
            for node in block.body if isinstance(block, ast.If) else ():
                if isinstance(node, ast.ImportFrom):
                    found |= {name.name: str(node.module) for name in node.names}
        return found

    def find(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes()[name]
        found = vars(import_module(home)).get(name, _MISSING)
        if found is _MISSING:
            found = import_module(f"{home}.{name}")
        setattr(sys.modules[package], name, found)
        return found

    return find
