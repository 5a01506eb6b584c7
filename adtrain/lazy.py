"""What takes long at the start is done at its first use: modules are imported, methods of dataclasses are generated.

A command imports only what it runs: all of the package takes half a second.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from threading import RLock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

_MISSING = object()
_generating = RLock()


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
        """`dataclasses.dataclass`, but the methods of a frozen class are generated when one of them is used.

        Python compiles the methods of each class anew in each process, in 0.3 to 0.5 ms. `adtrain train mlp` imports
        226 classes before it reads the data, and uses 48 of them. The options are those of `dataclasses.dataclass`,
        without slots.
        """
        if cls is None:
            return partial(dataclass, **options)
        if not options.get("frozen"):
            return dataclasses.dataclass(**options)(cls)
        names = ["__dataclass_fields__", "__dataclass_params__", "__match_args__"]
        names += [f"__{name}__" for name in ("init", "repr", "eq") if options.get(name, True)]
        names += ["__hash__"] if options.get("eq", True) else []
        for name in names:
            if vars(cls).get(name) is None:  # __hash__ is None in a class that defines __eq__
                setattr(cls, name, _Generated(cls, name, options))
        cls.__setattr__ = cls.__delattr__ = _refuse
        return cls


class _Generated:
    """An attribute of a dataclass that is not generated yet."""

    def __init__(self, cls: type, name: str, options: Mapping[str, bool]) -> None:
        self.cls, self.name, self.options = cls, name, options

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        with _generating:  # while one thread sets the attributes, others find each one as it was, or generated
            if vars(self.cls)[self.name] is self:
                _generate(self.cls, self.options)
        found = vars(self.cls)[self.name]
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def _generate(cls: type, options: Mapping[str, bool]) -> None:
    """Set the generated attributes of a class: those of a dataclass with the same fields and methods."""
    own = dict(vars(cls))
    left_out = "__dict__", "__weakref__", "__setattr__", "__delattr__"
    body = {name: x for name, x in own.items() if name not in left_out and not isinstance(x, _Generated)}
    if isinstance(own.get("__hash__"), _Generated) and "__eq__" in body:
        body["__hash__"] = None
    if hasattr(cls, "__post_init__"):
        body["__post_init__"] = cls.__post_init__
    fields: dict[str, Any] = {}
    for base in cls.__mro__[:0:-1]:
        fields |= getattr(base, "__dataclass_fields__", {})
    inherited = {"__dataclass_fields__": fields, "__dataclass_params__": SimpleNamespace(frozen=True)}
    body |= {"__qualname__": cls.__qualname__, "__doc__": cls.__doc__ or ""}
    twin: type = dataclasses.dataclass(**options)(
        type(cls.__name__, (type("", (), inherited if fields else {}),), body)
    )
    for name, value in own.items():
        if isinstance(value, _Generated):
            setattr(cls, name, vars(twin)[name])
        elif isinstance(value, dataclasses.Field):
            if value.default is dataclasses.MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, value.default)


def _refuse(self: object, name: str, *value: object) -> NoReturn:
    """Refuse to set a field of a frozen dataclass, or without a value to delete it."""
    raise dataclasses.FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")
