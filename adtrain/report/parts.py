"""Building blocks of pages: the macros of `parts.html.j2` as functions."""

from __future__ import annotations

from adtrain.templates import macro

bar, breakable, facts, key, note, notice, section, table, tiles = (
    macro("parts.html.j2", name)
    for name in ("bar", "breakable", "facts", "key", "note", "notice", "section", "table", "tiles")
)
