"""Writes the README's tables of speed from the results in benchmarks/results: python benchmarks/tables.py

Results are files that `adtrain bench --against` wrote (see peers.sh), in any number and in folders or not; other files
are passed over. Between MARKERS stands a table for each device, with a row for each training step, named after its file
where it is alone in it and else after its config; and below, how operations compare. Of a CPU only ratios and memory
are told: its own times say little, for what else it does changes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
MARKERS = "<!-- performance: begin -->", "<!-- performance: end -->"
OURS = "adtrain"
LEGEND = "A peer's number is its time over adtrain's, with the 95% interval; above 1 adtrain is faster"

Result = Mapping[str, Any]
Results = Mapping[str, Result]
"""By a file's path without ending, what it holds."""


def main() -> None:
    README.write_text(with_tables(README.read_text(), read(RESULTS)))


def read(folder: Path) -> Results:
    """The comparisons in a folder and below it."""
    found = {
        str(path.relative_to(folder).with_suffix("")): json.loads(path.read_bytes())
        for path in sorted(folder.rglob("*.json"))
    }
    return {name: result for name, result in found.items() if result.get("kind") == "against"}


def with_tables(text: str, results: Results) -> str:
    """The text, in which the tables stand between the markers.

    Raises:
        ValueError: there are results and no markers.
    """
    begin, end = MARKERS
    if not results and begin not in text:
        return text
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"README.md: expected one {begin} and one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{tables(results)}{end}{rest.split(end)[1]}"


def tables(results: Results) -> str:
    """What stands between the markers: CPUs, then GPUs."""
    by_device: dict[tuple[str, str], dict[str, Result]] = {}
    for name, result in results.items():
        about = result["protocol"]
        by_device.setdefault((about["device"], about["device_name"]), {})[name] = result
    return "".join(f"\n{part}" for device in sorted(by_device) for part in _device(by_device[device]))


def _device(results: Results) -> Iterator[str]:
    """Paragraphs: what was measured how, the table, and a sentence on operations for each peer."""
    steps = [(_called(name, row, result), row) for name, result in results.items() for row in result.get("steps", ())]
    on_gpu = any(result["protocol"]["device"] == "gpu" for result in results.values())
    ours = "adtrain's is the time of a step" if on_gpu else "MiB are the most memory that the process needed"
    yield f"{conditions([result['protocol'] for result in results.values()])}. {LEGEND}; {ours}.\n"
    if steps:
        peers = list(dict.fromkeys(side for _, row in steps for side in row["times"] if side != OURS))
        lines = [[called, _ours(row, on_gpu), *(_ratio(row, peer, on_gpu) for peer in peers)] for called, row in steps]
        ruler = ["---", *["--:"] * (len(peers) + 1)]
        yield "".join(f"| {' | '.join(cells)} |\n" for cells in [["step", OURS, *peers], ruler, *lines])
    if operations := [row for result in results.values() for row in result.get("operations", ())]:
        yield "".join(_operations(operations))


def conditions(protocols: Sequence[Mapping[str, Any]]) -> str:
    """What the files of a device were measured with, each thing once."""
    versions = _once(f"{name} {version}" for each in protocols for name, version in each["versions"].items())
    driven = _once(f"driver {each['driver']}" if each["driver"] else f"{each['threads']} threads" for each in protocols)
    commits = _once(f"commit {each['commit']}" for each in protocols if each["commit"])
    return "; ".join(filter(None, [f"{protocols[0]['device_name']}, {driven}", versions, commits]))


def _once(found: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(found))


def _called(name: str, row: Mapping[str, Any], result: Result) -> str:
    """ "`cnn-128-adam`", after the file; "`cnn`, batch 128" of a file with several."""
    if len(result["steps"]) == 1:
        return f"`{Path(name).name.removeprefix(result['protocol']['device'] + '-')}`"
    precision = "" if row["precision"] == "float32" else f", {row['precision']}"
    return f"`{row['config']}`, batch {row['batch_size']}{precision}"


def _ours(row: Mapping[str, Any], on_gpu: bool) -> str:
    """adtrain's time; of a CPU, its memory."""
    if not on_gpu:
        return f"{row['peak_mib'][OURS]:,.0f} MiB"
    micros = row["times"][OURS]["median_ms"] * 1e3
    return f"{micros:,.0f} µs" if micros >= 100 else f"{micros:.3g} µs"


def _ratio(row: Mapping[str, Any], peer: str, on_gpu: bool) -> str:
    if peer in row["different"]:
        return "computes something else"
    if peer not in row["ratios"]:
        return ""
    median, low, high = (_digits(row["ratios"][peer][end]) for end in ("median", "low", "high"))
    return f"{median} ({low} to {high})" + ("" if on_gpu else f", {row['peak_mib'][peer]:,.0f} MiB")


def _digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def _operations(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Against how many operations' intervals 1 lies below, above, and within, by peer."""
    for peer in dict.fromkeys(peer for row in rows for peer in row["ratios"]):
        found = [row["ratios"][peer] for row in rows if peer in row["ratios"]]
        ahead, behind = sum(x["low"] > 1 for x in found), sum(x["high"] < 1 for x in found)
        yield f"- Operations one by one, forward and backward, against {peer}: of {len(found)} adtrain is faster in "
        yield f"{ahead}, slower in {behind}, and the interval holds 1 in {len(found) - ahead - behind}.\n"


if __name__ == "__main__":
    main()
