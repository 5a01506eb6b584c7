"""Building blocks of these pages: the macros of `bench_parts.html.j2` as functions."""

from __future__ import annotations

from adtrain.templates import macro

axis, columns, details, figure, figures, hint, keys, lane, listed, matrix, named, rows, stack, timeline, two_lines = (
    macro("bench_parts.html.j2", name)
    for name in (
        "axis", "columns", "details", "figure", "figures", "hint", "keys", "lane", "listed", "matrix", "named", "rows",
        "stack", "timeline", "two_lines",
    )
)  # fmt: skip
