"""Writes graphs of nodes in nested frames in Graphviz's DOT language, and converts DOT to SVG."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field

from adtrain.core.errors import AdtrainError

FONT = {"fontname": "Helvetica,Arial,sans-serif"}


class Html(str):
    """A label in Graphviz's subset of HTML."""


@dataclass
class _Frame:
    """The contents of a titled frame: DOT lines of its nodes, and inner frames by title."""

    nodes: list[str] = field(default_factory=list)
    inner: dict[str, _Frame] = field(default_factory=dict)


class Dot:
    """A directed graph under construction. The text has the order of the calls, so it is deterministic."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._root = _Frame()
        self._edges: list[str] = []
        self._count = itertools.count()

    def node(self, label: str, *path: str, **attributes: str) -> str:
        """Add a node inside the nested frames with the titles `path`, outermost first, and return its name."""
        frame = self._root
        for title in path:
            frame = frame.inner.setdefault(title, _Frame())
        name = f"n{next(self._count)}"
        frame.nodes.append(f"{name} [{_list(label=label, **attributes)}]")
        return name

    def edge(self, tail: str, head: str, label: str = "", **attributes: str) -> None:
        """Add an arrow from the node `tail` to the node `head`."""
        self._edges.append(f"{tail} -> {head} [{_list(label=label, **attributes)}]")

    def text(self) -> str:
        """The graph in DOT."""
        numbers = itertools.count()

        def body(frame: _Frame) -> Iterator[str]:
            yield from frame.nodes
            for title, inner in frame.inner.items():
                yield f"subgraph cluster_{next(numbers)} {{"
                yield f"  graph [{_list(label=title, labeljust='l')}]"
                yield from (f"  {line}" for line in body(inner))
                yield "}"

        frames = {"style": "rounded", "color": "gray50", "fontsize": "14", **FONT}
        lines = [
            # nslimit bounds Graphviz's layout optimisation, which takes minutes for a thousand nodes.
            f"graph [{_list(label=self._title, labelloc='t', ranksep='0.3', nslimit='4', **frames)}]",
            f"node [{_list(shape='box', style='filled', fillcolor='white', fontsize='11', height='0.3', **FONT)}]",
            f"edge [{_list(fontsize='9', arrowsize='0.7', **FONT)}]",
            *body(self._root),
            *self._edges,
        ]
        return "\n".join(["digraph {", *(f"  {line}" for line in lines), "}", ""])


def _list(**attributes: str) -> str:
    return ", ".join(f"{name}={_quoted(value)}" for name, value in attributes.items())


def _quoted(text: str) -> str:
    if isinstance(text, Html):
        return f"<{text}>"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def svg(text: str) -> bytes:
    """Convert DOT to SVG by Graphviz. Raises AdtrainError where Graphviz is not installed or fails."""
    try:
        done = subprocess.run(["dot", "-Tsvg"], input=text.encode(), capture_output=True)
    except FileNotFoundError:
        raise AdtrainError(
            "an SVG needs the program dot, which is not installed: apt install graphviz (or brew install graphviz); "
            "a .dot file needs nothing"
        ) from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise AdtrainError(f"dot: {reason or f'ended with exit status {done.returncode}'}")
    return done.stdout
