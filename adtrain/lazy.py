"""What takes long at the start is done at its first use: modules are imported, methods of dataclasses are made.

A command imports only what it runs: all of the package takes half a second.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

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


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """As `dataclasses.dataclass`, without `slots`, but the methods of a frozen class are made when one is used.

        Python compiles six functions for each class, in each process anew, in 0.4 ms. A training imports 300 such
        classes, and uses a third of them.
        """
        if cls is None:
            return partial(dataclass, **options)
        if not options.get("frozen"):
            return dataclasses.dataclass(**options)(cls)
        body = {name: x for name, x in vars(cls).items() if name not in ("__dict__", "__weakref__")}

        @cache
        def made() -> Mapping[str, Any]:
            """The attributes of a class with the same body, whose methods are made."""
            twin = type(cls)(cls.__name__, cls.__bases__, {**body, "__qualname__": cls.__qualname__})
            return vars(dataclasses.dataclass(**options)(twin))

        names = ["__dataclass_fields__", "__dataclass_params__", "__match_args__"]
        for option, methods in MADE_BY.items():
            names += methods if options.get(option, True) else ()
        for name in names:
            if body.get(name) is None:  # __hash__ is None in a class that defines __eq__
                setattr(cls, name, _Unmade(cls, name, made))
        for name, x in body.items():
            if isinstance(x, dataclasses.Field):
                delattr(cls, name) if x.default is dataclasses.MISSING else setattr(cls, name, x.default)
        cls.__setattr__, cls.__delattr__ = _refuse_setting, _refuse_deleting
        return cls


MADE_BY = {"init": ["__init__"], "repr": ["__repr__"], "eq": ["__eq__", "__hash__"]}
"""The methods that each option of `dataclasses.dataclass` makes, by default."""


class _Unmade:
    """An attribute of a class until it is used."""

    def __init__(self, cls: type, name: str, made: Callable[[], Mapping[str, Any]]) -> None:
        self.cls, self.name, self.made = cls, name, made

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        found = self.made()[self.name]
        setattr(self.cls, self.name, found)
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def _refuse_setting(self: object, name: str, value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deleting(self: object, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
