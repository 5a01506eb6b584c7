"""Writes the tables of speed into README.md and docs/performance.md: python benchmarks/tables.py

The tables are made of the results of `adtrain bench against` in benchmarks/results (see peers.sh); other files are
ignored. Each document has them between MARKERS. For each device there is a table with a row for each training step,
named after its file, or after its config where a file has several steps, and with its commit where there are several.
Then follow counts of operations that are faster than a peer's. The README's tables have ratios; those of
docs/performance.md also have intervals, memory, and matrix products and convolutions. CPU tables have no times, because
these vary with the CPU's other load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adtrain.bench.peers.systems import ADTRAIN

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FULL = {ROOT / "README.md": False, ROOT / "docs" / "performance.md": True}
"""The documents with tables, and whether these are full: with intervals, memory and products."""
MARKERS = "<!-- performance: begin -->", "<!-- performance: end -->"
LEGEND = "A peer's number is its time over adtrain's: above 1 adtrain is faster"

Result = Mapping[str, Any]
Results = Mapping[str, Result]
"""From a file's path without its suffix to its content."""


def main() -> None:
    for path, full in FULL.items():
        path.write_text(with_tables(path.read_text(), read(RESULTS), full))


def read(folder: Path) -> Results:
    """The results of `adtrain bench against` in the folder and its subfolders."""
    found = {
        str(path.relative_to(folder).with_suffix("")): json.loads(path.read_bytes())
        for path in sorted(folder.rglob("*.json"))
    }
    return {name: result for name, result in found.items() if result.get("kind") == "against"}


def with_tables(text: str, results: Results, full: bool) -> str:
    """The text with the tables between the markers.

    Raises:
        ValueError: there are results, but not one pair of markers.
    """
    begin, end = MARKERS
    if not results and begin not in text:
        return text
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected one {begin} and one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{tables(results, full)}{end}{rest.split(end)[1]}"


def tables(results: Results, full: bool) -> str:
    """The tables of all devices, CPUs first."""
    by_device: dict[tuple[str, str], dict[str, Result]] = {}
    for name, result in results.items():
        about = result["protocol"]
        by_device.setdefault((about["device"], about["device_name"]), {})[name] = result
    return "".join(f"\n{part}" for device in sorted(by_device) for part in _device(by_device[device], full))


def _device(results: Results, full: bool) -> Iterator[str]:
    """Paragraphs for a device: conditions, table of steps, table of products, and counts of operations."""
    commits = {result["protocol"]["commit"] for result in results.values() if "steps" in result}
    steps = [
        (_called(name, row, result) + (f", {result['protocol']['commit']}" if len(commits) > 1 else ""), row)
        for name, result in results.items()
        for row in result.get("steps", ())
    ]
    on_gpu = any(result["protocol"]["device"] == "gpu" for result in results.values())
    legend = [LEGEND]
    if full:
        legend += ["in brackets the 95% interval", "MiB are the most host memory that the process needed"]
    if on_gpu:
        legend.append("adtrain's is the time of a step")
    yield f"{conditions([result['protocol'] for result in results.values()])}. {'; '.join(legend)}.\n"
    if steps:
        longest_first = sorted((row for _, row in steps), key=lambda row: -len(row["times"]))
        peers = list(dict.fromkeys(system for row in longest_first for system in row["times"] if system != ADTRAIN))
        systems = [ADTRAIN, *peers] if full or on_gpu else peers
        lines = [[called, *(_cell(row, system, full, on_gpu) for system in systems)] for called, row in steps]
        ruler = ["---", *["--:"] * len(systems)]
        yield "".join(f"| {' | '.join(cells)} |\n" for cells in [["step", *systems], ruler, *lines])
    operations = [row for result in results.values() for row in result.get("operations", ())]
    if full and on_gpu and (products := [row for row in operations if row.get("flops")]):
        yield "".join(_products(products))
    if operations:
        yield "".join(_operations(operations))


def conditions(protocols: Sequence[Mapping[str, Any]]) -> str:
    """Device, driver or threads, versions and commits of the files of a device, each once."""
    versions = _once(f"{name} {version}" for each in protocols for name, version in each["versions"].items())
    driven = _once(f"driver {each['driver']}" if each["driver"] else f"{each['threads']} threads" for each in protocols)
    commits = _once(f"commit {each['commit']}" for each in protocols if each["commit"])
    return "; ".join(filter(None, [f"{protocols[0]['device_name']}, {driven}", versions, commits]))


def _once(found: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(found))


def _called(name: str, row: Mapping[str, Any], result: Result) -> str:
    """A row's name: "`cnn-128-adam`" after the file, or "`cnn`, batch 128" in a file with several rows."""
    if len(result["steps"]) == 1:
        return f"`{Path(name).name.removeprefix(result['protocol']['device'] + '-')}`"
    precision = "" if row["precision"] == "float32" else f", {row['precision']}"
    return f"`{row['config']}`, batch {row['batch_size']}{precision}"


def _cell(row: Mapping[str, Any], system: str, full: bool, on_gpu: bool) -> str:
    """adtrain's time on a GPU, or a peer's ratio; if `full`, with interval and memory."""
    if system in row["different"]:
        return "different results"
    if system not in row["times"]:
        return ""
    parts = []
    if system != ADTRAIN:
        ratio = row["ratios"][system]
        parts.append(_interval(ratio) if full else _digits(ratio["median"]))
    elif on_gpu:
        micros = row["times"][ADTRAIN]["median_ms"] * 1e3
        parts.append(f"{micros:,.0f} µs" if micros >= 100 else f"{micros:.3g} µs")
    if full:
        parts.append(f"{row['peak_mib'][system]:,.0f} MiB")
    return ", ".join(parts)


def _interval(ratio: Mapping[str, float]) -> str:
    median, low, high = (_digits(ratio[end]) for end in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def _digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def _products(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Matrix products and convolutions: speed, peers' times over adtrain's, and each system's error against float64."""
    peers = list(dict.fromkeys(system for row in rows for system in row["times"] if system != ADTRAIN))
    head = ["operation", "phase", "adtrain, TFLOP/s", *peers, "errors"]
    yield f"| {' | '.join(head)} |\n| --- | --- |{' --: |' * (len(head) - 2)}\n"
    for row in rows:
        tflops = row["flops"] / row["times"][ADTRAIN]["median_ms"] * 1e-9
        ratios = [_interval(row["ratios"][peer]) if peer in row["ratios"] else "" for peer in peers]
        errors = ", ".join(f"{row['off'][system]:.1e}" for system in row["off"])
        yield f"| {row['op']} {row['size']} | {row['phase']} | {tflops:.3g} | {' | '.join([*ratios, errors])} |\n"


def _operations(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """By peer, the numbers of operations whose ratio's interval is above 1, below 1, or contains 1."""
    for peer in dict.fromkeys(peer for row in rows for peer in row["ratios"]):
        found = [row["ratios"][peer] for row in rows if peer in row["ratios"]]
        ahead, behind = sum(x["low"] > 1 for x in found), sum(x["high"] < 1 for x in found)
        yield f"- Operations one by one, forward and backward, against {peer}: of {len(found)} adtrain is faster in "
        yield f"{ahead}, slower in {behind}, and the interval holds 1 in {len(found) - ahead - behind}.\n"


if __name__ == "__main__":
    main()
