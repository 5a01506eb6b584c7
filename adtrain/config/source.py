"""Parse YAML text, or values of Python in its place, into values that keep their line and column.

Scalars have the types of YAML 1.2's core schema, as in editors and JSON Schema: `1e-3` is a number, `no` and `on` are
strings. Size, depth and number of values are bounded. An alias shares the node of its anchor, so memory is
proportional to the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isinf
from typing import Any, NoReturn, TypeAlias

import numpy as np
import yaml

from adtrain.config.problems import ConfigError, PathParts, Problem, dotted, found, key_text, shortened

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_DIGITS = 100

Scalar: TypeAlias = bool | int | float | str | None

INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NAMED = re.compile(r"\w+: .+")
"""A mapping of one name to a value, without braces and on one line."""
CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{sign + text: float(f"{sign}inf") for sign in ("", "+", "-") for text in (".inf", ".Inf", ".INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
PLAIN = {
    "mapping values are not allowed here": "found a key in a value, expected one key on a line; check the indentation, "
    "and quote text that contains a colon",
    "found unexpected end of stream": "found the end of the text, expected a closing quote",
}
"""What to say for messages of PyYAML that say neither what was expected nor what to do."""
TAG = "tag:yaml.org,2002:"
TAGGED: dict[str, tuple[type, ...]] = {
    f"{TAG}null": (type(None),),
    f"{TAG}bool": (bool,),
    f"{TAG}int": (int,),
    f"{TAG}float": (int, float),
}


@dataclass(eq=False)
class Node:
    """A value and its position. `size` and `height` count the nodes and levels of its tree with aliases expanded."""

    where: str
    value: Scalar | list[Node] | dict[str, Node] = None
    key_where: dict[str, str] = field(default_factory=dict)
    size: int = 1
    height: int = 1

    def plain(self) -> object:
        """The value as plain lists, dicts and scalars."""
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return self.value

    def find(self, path: PathParts) -> tuple[Node, str]:
        """The node at `path`, and the position of its key or list item.

        Parts that the file does not contain are skipped: `linear: 128` has no `out_features`. So the result may be an
        enclosing node.
        """
        node, where = self, self.where
        for part in path:
            if isinstance(node.value, dict) and isinstance(part, str) and part in node.value:
                node, where = node.value[part], node.key_where[part]
            elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                where = node.where
        return node, where


def read(content: bytes, name: str) -> tuple[Node, list[Problem]]:
    """The mapping in a YAML text, and the problems that do not stop the parser: duplicate keys, non-string keys.

    `name` is the file's name in every `where`. Raises ConfigError unless the text is a YAML mapping of bounded size.
    """
    reader = _Reader(content, name)
    node = reader.document()
    if not isinstance(node.value, dict):
        reader.refuse(node.where, f"found {found(node.plain())}, expected a mapping of keys to values")
    return node, reader.problems


def read_value(text: str, where: str) -> Node:
    """The value of a setting of the command line; every node has the position `where`.

    A number, true, false, null, a quoted text, a list in brackets and a mapping in braces or of one name, `sgd: 0.1`,
    are read as YAML. Any other text is the value itself, with all of its characters.
    """
    if _is_unicode(text) and not _is_yaml_value(text):
        return Node(where, text)
    reader = _Reader(text.encode(errors="surrogateescape"), where, positions=False)
    node = reader.document()
    if reader.problems:
        raise ConfigError(reader.problems)
    is_text = isinstance(node.value, str) and text.strip()[0] not in "'\""
    return Node(where, text) if is_text else node


def _is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8. Other bytes of the command line are lone surrogates in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_yaml_value(text: str) -> bool:
    """Whether a text is a YAML value in which every character counts.

    In other texts YAML skips a comment or the name of an anchor, joins the lines of a scalar, or reads a block, a tag
    or several documents.
    """
    try:
        events: list[Any] = list(yaml.parse(text, Loader=yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, OverflowError):  # the last two as in `_Reader.parse`
        return False
    before = 0
    for event in events:
        start, end = event.start_mark, event.end_mark
        lines = isinstance(event, yaml.ScalarEvent) and (start.line != end.line or event.style in ("|", ">"))
        block = isinstance(event, yaml.CollectionStartEvent) and not (event.flow_style or NAMED.fullmatch(text))
        marked = [getattr(event, name, None) for name in ("anchor", "tag", "explicit")]
        if lines or block or any(marked) or "#" in text[before : start.index]:
            return False
        before = end.index
    return any(isinstance(event, yaml.NodeEvent) for event in events)


def of_python(value: Any, where: str, path: PathParts = ()) -> Node:
    """A value as nodes, as if it were read from a file; every node has the position `where`.

    Takes None, bools, numbers (also NumPy's), strings, paths, lists, tuples and mappings with strings as keys. A Node
    stays as it is, with its own position.
    Raises ConfigError for anything else; `path` is the key of the value, for the message.
    """

    def refuse(message: str, at: PathParts = path) -> NoReturn:
        raise ConfigError([Problem(where, dotted(at), message)])

    if isinstance(value, Node):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and not _is_unicode(value):
        refuse(f"found {found(value)}, expected text in UTF-8")
    if value is None or isinstance(value, (bool, int, float, str)):
        return Node(where, value)
    if len(path) > MAX_DEPTH:
        refuse(f"found more than {MAX_DEPTH} levels, expected fewer", path[:4])
    if isinstance(value, (list, tuple)):
        return Node(where, [of_python(item, where, (*path, i)) for i, item in enumerate(value)])
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        refuse(f"found an object of type {kind}, expected a number, string, list or mapping")
    for key in value:
        if not isinstance(key, str):
            refuse(f"found the key {found(key)}, expected a string")
    children = {key: of_python(item, where, (*path, key)) for key, item in value.items()}
    return Node(where, children, dict.fromkeys(children, where))


class _Reader:
    """Builds nodes from PyYAML's events, by recursion to a bounded depth."""

    def __init__(self, content: bytes, name: str, positions: bool = True) -> None:
        self.name = name
        self.positions = positions
        self.problems: list[Problem] = []
        self.anchors: dict[str, Node | None] = {}
        self.count = 0
        self.text = self.decode(content)
        self.events = self.parse()

    def where(self, mark: Any) -> str:
        return self.where_at(mark.line, mark.column)

    def where_at(self, line: int, column: int) -> str:
        return f"{self.name}:{line + 1}:{column + 1}" if self.positions else self.name

    def where_after(self, text: str) -> str:
        return self.where_at(text.count("\n"), len(text) - (text.rfind("\n") + 1))

    def refuse(self, where: str, message: str) -> NoReturn:
        raise ConfigError([*self.problems, Problem(where, "", message)])

    def decode(self, content: bytes) -> str:
        if len(content) > MAX_BYTES:
            self.refuse(self.name, f"found more than {MAX_BYTES:,} bytes, expected a config of at most that size")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            where = self.where_after(error.object[: error.start].decode())
            self.refuse(where, f"found the byte 0x{error.object[error.start]:02x}, expected UTF-8 text")

    def parse(self) -> Iterator[Any]:
        try:
            yield from yaml.parse(self.text, Loader=yaml.SafeLoader)
        except yaml.reader.ReaderError as error:
            where = self.where_after(self.text[: error.position])
            self.refuse(where, f"found the control character U+{error.character:04X}, expected text")
        except yaml.MarkedYAMLError as error:
            mark: Any = error.problem_mark or error.context_mark
            if "\t" in _indentation(self.text, mark) or "'\\t'" in str(error.problem):
                self.refuse(self.where(mark), "found a tab, expected spaces: YAML indents with spaces only")
            if plain := PLAIN.get(str(error.problem)):
                self.refuse(self.where(mark), plain)
            what = ", ".join(part for part in (error.context, error.problem) if part)
            self.refuse(self.where(mark), f"not valid YAML: {' '.join(what.split())}")
        except (ValueError, OverflowError):
            # PyYAML raises these for an escape beyond Unicode ("\UFFFFFFFF") and a %YAML version of 5,000 digits.
            self.refuse(self.name, "not valid YAML: an escape or a version number is out of range")

    def document(self) -> Node:
        next(self.events)
        if isinstance(event := next(self.events), yaml.StreamEndEvent):
            self.refuse(self.where(event.start_mark), "found nothing, expected a mapping of keys to values")
        node = self.node(next(self.events), 1)
        next(self.events)
        if not isinstance(event := next(self.events), yaml.StreamEndEvent):
            self.refuse(self.where(event.start_mark), "found a second document, expected one")
        return node

    def node(self, event: Any, depth: int) -> Node:
        where = self.where(event.start_mark)
        self.count += 1
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, where)
        if event.anchor:
            self.anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = Node(where, self.scalar(event, where))
        else:
            if depth > MAX_DEPTH:
                self.refuse(where, f"found more than {MAX_DEPTH} levels, expected fewer")
            is_list = isinstance(event, yaml.SequenceStartEvent)
            if event.tag not in (None, "!", TAG + ("seq" if is_list else "map")):
                self.refuse(where, f"found the tag {_tag(event.tag)}, expected plain YAML")
            node = self.sequence(where, depth) if is_list else self.mapping(where, depth)
        if event.anchor:
            self.anchors[event.anchor] = node
        if max(node.size, self.count) > MAX_NODES:
            self.refuse(where, f"found more than {MAX_NODES:,} values, expected fewer")
        return node

    def alias(self, event: Any, where: str) -> Node:
        node = self.anchors.get(event.anchor)
        if node is None:
            reason = "is inside its own anchor" if event.anchor in self.anchors else "has no anchor before it"
            self.refuse(where, f"found the alias *{key_text(event.anchor)}, which {reason}")
        return node

    def sequence(self, where: str, depth: int) -> Node:
        items: list[Node] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, depth + 1))
        return self.sized(Node(where, items), items)

    def mapping(self, where: str, depth: int) -> Node:
        entries: dict[str, Node] = {}
        key_where: dict[str, str] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.node(event, depth + 1)
            here = self.where(event.start_mark)
            child = self.node(next(self.events), depth + 1)
            if not isinstance(key.value, str):
                self.problems.append(Problem(here, "", f"found the key {found(key.plain())}, expected a string"))
            elif key.value in entries:
                message = (
                    f"found the key {key_text(key.value)} twice, first at {key_where[key.value]}; expected it once"
                )
                self.problems.append(Problem(here, "", message))
            else:
                entries[key.value], key_where[key.value] = child, here
        return self.sized(Node(where, entries, key_where), list(entries.values()))

    def sized(self, node: Node, children: list[Node]) -> Node:
        node.size += sum(child.size for child in children)
        node.height += max((child.height for child in children), default=0)
        if node.height > MAX_DEPTH + 1:
            self.refuse(node.where, f"found more than {MAX_DEPTH} levels, expected fewer")
        return node

    def scalar(self, event: Any, where: str) -> Scalar:
        text, tag = event.value, event.tag
        if not _is_unicode(text):
            self.refuse(where, "found half of a surrogate pair, expected text")
        if tag in ("!", TAG + "str") or (tag is None and event.style is not None):
            return str(text)
        value = self.plain_scalar(text, where)
        if tag is not None and not isinstance(value, TAGGED.get(tag, ())):
            self.refuse(where, f"found the tag {_tag(tag)} on {found(text)}, expected plain YAML")
        return value

    def plain_scalar(self, text: str, where: str) -> Scalar:
        if text in CONSTANTS:
            return CONSTANTS[text]
        is_integer = INTEGER.fullmatch(text)
        if is_integer or FLOAT.fullmatch(text):
            if len(text) > MAX_DIGITS:
                self.refuse(where, f"found a number of {len(text):,} characters, expected at most {MAX_DIGITS}")
            if is_integer:
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            number = float(text)
            if isinf(number):
                self.refuse(where, f"found {shortened(text)}, expected a magnitude of at most 1.8e308")
            return number
        return text


def _tag(tag: str) -> str:
    return shortened(f"!!{tag.removeprefix(TAG)}" if tag.startswith(TAG) else tag)


def _indentation(text: str, mark: Any) -> str:
    line = text.split("\n")[mark.line] if mark.line <= text.count("\n") else ""
    return line[: len(line) - len(line.lstrip())]
