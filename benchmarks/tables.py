"""Writes the tables of speed from the results in benchmarks/results: python benchmarks/tables.py

The README's have ratios, those of docs/performance.md intervals and memory as well. Results are files that `adtrain
bench --against` wrote (see peers.sh), in any number and in folders or not; other files are passed over. Between
MARKERS stands a table for each device, with a row for each training step, named after its file where it is alone in
it and else after its config, and with its commit where there are several; below it one for products and convolutions,
where texts tell all; and how many operations are faster than a peer's. Of a CPU no times are told: they say little,
for what else it does changes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WHOLE = {ROOT / "README.md": False, ROOT / "docs" / "performance.md": True}
"""The texts with tables, and whether these tell intervals and memory."""
MARKERS = "<!-- performance: begin -->", "<!-- performance: end -->"
OURS = "adtrain"
LEGEND = "A peer's number is its time over adtrain's: above 1 adtrain is faster"

Result = Mapping[str, Any]
Results = Mapping[str, Result]
"""By a file's path without ending, what it holds."""


def main() -> None:
    for path, whole in WHOLE.items():
        path.write_text(with_tables(path.read_text(), read(RESULTS), whole))


def read(folder: Path) -> Results:
    """The comparisons in a folder and below it."""
    found = {
        str(path.relative_to(folder).with_suffix("")): json.loads(path.read_bytes())
        for path in sorted(folder.rglob("*.json"))
    }
    return {name: result for name, result in found.items() if result.get("kind") == "against"}


def with_tables(text: str, results: Results, whole: bool) -> str:
    """The text, in which the tables stand between the markers, with intervals and memory if `whole`.

    Raises:
        ValueError: there are results and no markers.
    """
    begin, end = MARKERS
    if not results and begin not in text:
        return text
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected one {begin} and one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{tables(results, whole)}{end}{rest.split(end)[1]}"


def tables(results: Results, whole: bool) -> str:
    """What stands between the markers: CPUs, then GPUs."""
    by_device: dict[tuple[str, str], dict[str, Result]] = {}
    for name, result in results.items():
        about = result["protocol"]
        by_device.setdefault((about["device"], about["device_name"]), {})[name] = result
    return "".join(f"\n{part}" for device in sorted(by_device) for part in _device(by_device[device], whole))


def _device(results: Results, whole: bool) -> Iterator[str]:
    """Paragraphs: what was measured how, the table, and a sentence on operations for each peer."""
    commits = {result["protocol"]["commit"] for result in results.values() if "steps" in result}
    steps = [
        (_called(name, row, result) + (f", {result['protocol']['commit']}" if len(commits) > 1 else ""), row)
        for name, result in results.items()
        for row in result.get("steps", ())
    ]
    on_gpu = any(result["protocol"]["device"] == "gpu" for result in results.values())
    legend = [LEGEND]
    if whole:
        legend += ["in brackets the 95% interval", "MiB are the most host memory that the process needed"]
    if on_gpu:
        legend.append("adtrain's is the time of a step")
    yield f"{conditions([result['protocol'] for result in results.values()])}. {'; '.join(legend)}.\n"
    if steps:
        fullest_first = sorted((row for _, row in steps), key=lambda row: -len(row["times"]))
        peers = list(dict.fromkeys(side for row in fullest_first for side in row["times"] if side != OURS))
        sides = [OURS, *peers] if whole or on_gpu else peers
        lines = [[called, *(_cell(row, side, whole, on_gpu) for side in sides)] for called, row in steps]
        ruler = ["---", *["--:"] * len(sides)]
        yield "".join(f"| {' | '.join(cells)} |\n" for cells in [["step", *sides], ruler, *lines])
    operations = [row for result in results.values() for row in result.get("operations", ())]
    if whole and on_gpu and (products := [row for row in operations if row.get("flops")]):
        yield "".join(_products(products))
    if operations:
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


def _cell(row: Mapping[str, Any], side: str, whole: bool, on_gpu: bool) -> str:
    """adtrain's time on a GPU; a peer's ratio, with its interval if `whole`; then memory."""
    if side in row["different"]:
        return "computes something else"
    if side not in row["times"]:
        return ""
    parts = []
    if side != OURS:
        ratio = row["ratios"][side]
        parts.append(_interval(ratio) if whole else _digits(ratio["median"]))
    elif on_gpu:
        micros = row["times"][OURS]["median_ms"] * 1e3
        parts.append(f"{micros:,.0f} µs" if micros >= 100 else f"{micros:.3g} µs")
    if whole:
        parts.append(f"{row['peak_mib'][side]:,.0f} MiB")
    return ", ".join(parts)


def _interval(ratio: Mapping[str, float]) -> str:
    median, low, high = (_digits(ratio[end]) for end in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def _digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def _products(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Products and convolutions: speed, peers' times over adtrain's, and each side's error to float64."""
    peers = list(dict.fromkeys(side for row in rows for side in row["times"] if side != OURS))
    head = ["operation", "phase", "adtrain, TFLOP/s", *peers, "errors"]
    yield f"| {' | '.join(head)} |\n| --- | --- |{' --: |' * (len(head) - 2)}\n"
    for row in rows:
        tflops = row["flops"] / row["times"][OURS]["median_ms"] * 1e-9
        ratios = [_interval(row["ratios"][peer]) if peer in row["ratios"] else "" for peer in peers]
        errors = ", ".join(f"{row['off'][side]:.1e}" for side in row["off"])
        yield f"| {row['op']} {row['size']} | {row['phase']} | {tflops:.3g} | {' | '.join([*ratios, errors])} |\n"


def _operations(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Against how many operations' intervals 1 lies below, above, and within, by peer."""
    for peer in dict.fromkeys(peer for row in rows for peer in row["ratios"]):
        found = [row["ratios"][peer] for row in rows if peer in row["ratios"]]
        ahead, behind = sum(x["low"] > 1 for x in found), sum(x["high"] < 1 for x in found)
        yield f"- Operations one by one, forward and backward, against {peer}: of {len(found)} adtrain is faster in "
        yield f"{ahead}, slower in {behind}, and the interval holds 1 in {len(found) - ahead - behind}.\n"


if __name__ == "__main__":
    main()
