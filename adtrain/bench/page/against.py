"""The page of a comparison with other systems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from adtrain.bench.page import blocks, cells
from adtrain.bench.page.intervals import Scale
from adtrain.bench.peers.systems import ADTRAIN
from adtrain.report import parts

KINDS = ("series-2", "series-3", "series-4", "series-5", "series-6", "series-1")
"""CSS classes with the colours of the peers, in the order of the result."""

SYSTEMS = {
    "system": "left",
    "ms": "",
    "ratio": "",
    "95% interval": "minor",
    "": "text",
    "MiB": "",
    "loss error": "minor",
}

Row = Mapping[str, Any]


def title(result: Mapping[str, Any]) -> str:
    packages = dict.fromkeys(peer.split("-")[0] for peer in _peers(_rows(result)))
    return f"{ADTRAIN} against {' and '.join(packages) or 'no peer'}"


def body(result: Mapping[str, Any]) -> Iterable[Markup]:
    """All ratios on one axis, if there are several rows; then a section for each config."""
    rows, steps = _rows(result), result.get("steps", ())
    scale = Scale(ratio for row in rows for ratio in row["ratios"].values())
    yield parts.tiles(_fastest(steps))
    note = "Ratio: a peer's time over adtrain's, round by round, in interleaved samples; above 1 adtrain is faster."
    yield parts.note(f"{note} The line across a point is the 95% interval of the median.")
    if len(rows) > 1 or not steps:
        yield parts.section("Ratios", _all_ratios(rows, scale))
    for row in steps:
        about = f"{_batch(row)}, {row['precision']}, {', '.join(row['overrides'])}"
        yield parts.section(row["config"], _systems(row, scale) + parts.note(about) + _absent([row]))


def _rows(result: Mapping[str, Any]) -> list[Row]:
    return [*result.get("steps", ()), *result.get("operations", ())]


def _peers(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(system for row in rows for system in row["times"] if system != ADTRAIN))


def _fastest(steps: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    for row in steps:
        if row["ratios"]:
            peer, ratio = min(row["ratios"].items(), key=lambda item: item[1]["median"])
            name = f"{row['config']}, the fastest peer: {peer}"
            yield cells.ratio_headline(name, ratio, lambda x: f"{cells.factor(x)} x")


def _all_ratios(rows: Sequence[Row], scale: Scale) -> Markup:
    """A line for each config, or each operation's phase, with a point for each peer."""
    kinds = dict(zip(_peers(rows), KINDS, strict=False))
    columns = {"": "text", f"{ADTRAIN}, ms": "", "  ": "lane-cell", **dict.fromkeys(kinds, "minor")}
    found: list[list[str]] = [
        [_name(row), cells.time(row["times"].get(ADTRAIN)),
         scale.lane((kinds.get(peer, "series-1"), peer, ratio) for peer, ratio in row["ratios"].items()),
         *(_ratio(row, peer) for peer in kinds)]
        for row in rows
    ]  # fmt: skip
    found.append(["", "", scale.axis(), *[""] * len(kinds)])
    absent = Markup() if "config" in rows[0] else _absent(rows)
    keys = blocks.keys([(kind, peer) for peer, kind in kinds.items()])
    return keys + parts.table(columns, found, "ratios") + absent


def _name(row: Row) -> Markup:
    if "config" in row:
        return blocks.named(row["config"], _batch(row))
    return blocks.named(row["op"], f"{row['size']}, {row['phase']}")


def _batch(row: Row) -> str:
    members = f", {row['members']:,} members" if "members" in row else ""
    return f"batch {row['batch_size']}{members}"


def _ratio(row: Row, peer: str) -> str:
    if peer in row["different"]:
        return "different"
    if peer not in row["ratios"]:
        return ""
    ratio = row["ratios"][peer]
    return blocks.two_lines(cells.factor(ratio["median"]), cells.range_of(ratio))


def _systems(row: Row, scale: Scale) -> Markup:
    """The systems of a config's step, a line each."""
    found = []
    for system, time in row["times"].items():
        ratio = row["ratios"].get(system)
        cols = ["", "", scale.lane([])]
        if ratio:
            kind = "ahead" if ratio["low"] > 1 else "behind" if ratio["high"] < 1 else "even"
            cols = [cells.factor(ratio["median"]), cells.range_of(ratio), scale.lane([(kind, system, ratio)])]
        elif system in row["different"]:
            cols[0] = "different results"
        error = f"{row['off'][system]:.0e}" if row["off"][system] else ""
        found.append([system, cells.time(time), *cols, f"{row['peak_mib'][system]:,.0f}", error])
    found.append(["", "", "", "", scale.axis(), "", ""])
    return parts.table(SYSTEMS, found, "systems")


def _absent(rows: Iterable[Row]) -> Markup:
    """Why systems were skipped or failed."""
    lines = dict.fromkeys(
        f"{system} {how}: {reason}"
        for row in rows
        for how in ("skipped", "failed")
        for system, reason in row[how].items()
    )
    return Markup().join(map(parts.note, lines))
