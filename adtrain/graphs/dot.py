"""A picture in Graphviz's DOT language. Graphviz chooses the positions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from adtrain.graphs.picture import Picture

FONT = "Helvetica,Arial,sans-serif"
FILLS = {
    "forward": "#e3eefc", "convolution": "#e3eefc", "backward": "#fdeadb", "activation": "#fdeadb",
    "update": "#dff3e7", "linear": "#dff3e7", "normalisation": "#efe6fb", "pooling": "#fbf3cf",
}  # fmt: skip
KEPT = {"color": "#8150c8", "fontcolor": "#6b3cb3", "penwidth": "2"}


def dot_text(picture: Picture) -> str:
    """The picture in DOT. Boxes at one height have one rank, so a ladder stays one."""
    attributes = {
        "label": f"{picture.title}\n{picture.note}",
        "labelloc": "t",
        "rankdir": "LR" if picture.horizontal else "TB",
    }
    lines = [
        f"graph [{_list({**attributes, 'style': 'rounded,dashed', 'fontname': FONT})}]",
        f"node [{_list({'shape': 'box', 'style': 'filled,rounded', 'fontsize': '11', 'fontname': FONT})}]",
        f"edge [{_list({'fontsize': '9', 'arrowsize': '0.7', 'fontname': FONT})}]",
        *_inside(picture, ()),
        *_ranks(picture),
        *_edges(picture),
    ]
    return "\n".join(["digraph {", *(f"  {line}" for line in lines), "}", ""])


def _inside(picture: Picture, frames: tuple[str, ...]) -> Iterator[str]:
    """The boxes and frames directly inside a frame."""
    for box in picture.boxes:
        if box.frames == frames:
            label = "\n".join([*box.title, *box.text])
            yield f"{box.id} [{_list({'label': label, 'fillcolor': FILLS.get(box.kind, '#f3f4f6')})}]"
    for i, frame in enumerate(picture.frames):
        if frame.frames[:-1] == frames:
            yield f"subgraph cluster_{i} {{"
            yield f"  graph [{_list({'label': frame.title, 'labeljust': 'l'})}]"
            yield from (f"  {line}" for line in _inside(picture, frame.frames))
            yield "}"


def _ranks(picture: Picture) -> Iterator[str]:
    if picture.frames or picture.horizontal:
        return
    ranks: dict[float, list[str]] = {}
    for box in sorted(picture.boxes, key=lambda box: box.y):
        ranks.setdefault(box.y, []).append(box.id)
    for ids in ranks.values():
        yield f"{{rank=same; {'; '.join(ids)}}}"
    firsts = [ids[0] for ids in ranks.values()]
    yield from (f"{a} -> {b} [style=invis]" for a, b in pairwise(firsts))


def _edges(picture: Picture) -> Iterator[str]:
    """Graphviz draws the tail of an edge above its head, so an arrow that runs up is written from its head."""
    boxes = {box.id: box for box in picture.boxes}
    for arrow in picture.arrows:
        up = boxes[arrow.tail].y > boxes[arrow.head].y and not picture.horizontal
        ends = (arrow.head, arrow.tail) if up else (arrow.tail, arrow.head)
        style = {"label": arrow.label, **({"dir": "back"} if up else {}), **(KEPT if arrow.kind == "kept" else {})}
        yield f"{ends[0]} -> {ends[1]} [{_list(style)}]"


def _list(attributes: dict[str, str]) -> str:
    return ", ".join(f"{name}={_quoted(value)}" for name, value in attributes.items())


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
