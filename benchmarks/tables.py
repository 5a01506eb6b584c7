"""Writes what documents say of speeds compared with other systems: python benchmarks/tables.py

README.md gets a range, docs/pictures/speed.svg a picture of packaged configs, docs/performance.md their least, median
and largest ratios, and docs/comparisons.md all. They are made of the results of `adtrain bench against` in
benchmarks/results (see peers.sh); other files are ignored. Each document has its part between MARKERS.

In comparisons.md there is a table for each device, with a row for each training step, named after its file, or after
its config where a file has several steps, and with its commit where there are several. The fastest peer of the row
comes first, then all ratios, intervals and memory. Another table has the steps of many networks together. Then follow
matrix products and convolutions, and counts of operations that are faster than a peer's. CPU tables have no times,
because these vary with the CPU's other load.
"""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from adtrain.bench.peers.systems import ADTRAIN, precision_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKERS = "<!-- performance: begin -->", "<!-- performance: end -->"
LEGEND = (
    "A peer's number is its time over adtrain's: above 1 adtrain is faster; in brackets the 95% interval; MiB are the "
    "most host memory that the process needed"
)

Result = Mapping[str, Any]
Results = Mapping[str, Result]
"""From a file's path without its suffix to its content."""


def main() -> None:
    for path, write in DOCUMENTS.items():
        path.write_text(between_markers(path.read_text(), write(read(RESULTS))))


def read(folder: Path) -> Results:
    """The results of `adtrain bench against` in the folder and its subfolders."""
    found = {
        str(path.relative_to(folder).with_suffix("")): json.loads(path.read_bytes())
        for path in sorted(folder.rglob("*.json"))
    }
    return {name: result for name, result in found.items() if result.get("kind") == "against"}


def between_markers(text: str, part: str) -> str:
    """The document with this part between the markers. Raises ValueError if it has not one pair of them."""
    begin, end = MARKERS
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected one {begin} and one {end}")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{part}{end}{rest.split(end)[1]}"


def speed(results: Results) -> str:
    """One line: the range of the ratios of steps to each peer, in its fastest form, on CPUs and on GPUs."""
    parts = list[str]()
    for peer, name in PEERS.items():
        ranges = [(_ratios(found, peer), names) for names, found in _by_kind(results).items()]
        times = [f"{_digits(min(found))} to {_digits(max(found))} on {names}" for found, names in ranges if found]
        parts.append(f"{name} {', '.join(times)}")
    return (
        f"\n**Speed** of a training step, as another system's time over adtrain's: {'; '.join(parts)}. Above 1 adtrain "
        "is faster. Single operations can be slower: [Performance](docs/performance.md).\n\n"
    )


def _ratios(results: Results, peer: str) -> list[float]:
    """For each step the time of the peer's fastest form over adtrain's."""
    rows = [row for result in results.values() for row in result.get("steps", ()) if "members" not in row]
    ratios = [_of_same_precision(row).items() for row in rows]
    forms = [[ratio["median"] for system, ratio in found if system.startswith(peer)] for found in ratios]
    return [min(medians) for medians in forms if medians]


def _of_same_precision(row: Mapping[str, Any]) -> dict[str, Any]:
    """The ratios of the systems that compute in the precision of the config."""
    given = row["precision"]
    return {system: ratio for system, ratio in row["ratios"].items() if precision_of(system, given) == given}


def _by_kind(results: Results) -> dict[str, Results]:
    """The results of CPUs, then those of GPUs, each with the names of its devices."""
    devices = _by_device(results)
    kinds = [[key for key in devices if key[0] == kind] for kind in dict.fromkeys(kind for kind, _ in devices)]
    return {" and ".join(name for _, name in keys): ChainMap(*(devices[key] for key in keys)) for keys in kinds}


def _by_device(results: Results) -> dict[tuple[str, str], dict[str, Result]]:
    """The results of each device, CPUs first."""
    found: dict[tuple[str, str], dict[str, Result]] = {}
    for name, result in results.items():
        about = result["protocol"]
        found.setdefault((about["device"], about["device_name"]), {})[name] = result
    return dict(sorted(found.items()))


def tables(results: Results) -> str:
    """The tables of all devices, CPUs first."""
    return "".join(f"\n{part}" for found in _by_device(results).values() for part in _device(found))


def _device(results: Results) -> Iterator[str]:
    """Paragraphs for a device: conditions, table of steps, table of products, and counts of operations."""
    commits = {result["protocol"]["commit"] for result in results.values() if "steps" in result}
    steps = [
        (_called(name, row, result) + (f", {result['protocol']['commit']}" if len(commits) > 1 else ""), row)
        for name, result in results.items()
        for row in result.get("steps", ())
        if "members" not in row
    ]
    on_gpu = any(result["protocol"]["device"] == "gpu" for result in results.values())
    legend = f"{LEGEND}; adtrain's is the time of a step" if on_gpu else LEGEND
    yield f"{conditions([result['protocol'] for result in results.values()])}. {legend}.\n"
    if steps:
        longest_first = sorted((row for _, row in steps), key=lambda row: -len(row["times"]))
        peers = list(dict.fromkeys(system for row in longest_first for system in row["times"] if system != ADTRAIN))
        systems = [ADTRAIN, *peers]
        lines = [
            [called, _fastest(_of_same_precision(row)), *(_cell(row, system, on_gpu) for system in systems)]
            for called, row in steps
        ]
        head = [["step", "fastest peer", *systems], ["---", "---", *["--:"] * len(systems)]]
        yield "".join(f"| {' | '.join(cells)} |\n" for cells in [*head, *lines])
    if together := [row for result in results.values() for row in result.get("steps", ()) if "members" in row]:
        yield "".join(_together(together))
    operations = [row for result in results.values() for row in result.get("operations", ())]
    if on_gpu and (products := [row for row in operations if row.get("flops")]):
        yield "".join(_products(products))
    if operations:
        yield "".join(_operations(operations))


def _together(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Steps of many networks together: the time of a network and step, and peers' times over it."""
    peers = list(dict.fromkeys(system for row in rows for system in row["times"] if system != ADTRAIN))
    head = ["networks together", "adtrain, µs a network and step", *peers]
    yield f"| {' | '.join(head)} |\n| --- |{' --: |' * (len(head) - 1)}\n"
    for row in sorted(rows, key=lambda row: (row["config"], row["members"])):
        micros = row["times"][ADTRAIN]["median_ms"] * 1e3 / row["members"]
        ratios = [_interval(row["ratios"][peer]) if peer in row["ratios"] else "" for peer in peers]
        what = f"{row['members']:,} of `{row['config']}`, batch {row['batch_size']}"
        yield f"| {what} | {micros:.3g} | {' | '.join(ratios)} |\n"


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


def _fastest(ratios: Mapping[str, Any]) -> str:
    """The peer with the least ratio, and the ratio: "jax-scan 1.04"."""
    peer = min(ratios, key=lambda peer: ratios[peer]["median"], default=None)
    return "" if peer is None else f"{peer} {_digits(ratios[peer]['median'])}"


def _cell(row: Mapping[str, Any], system: str, on_gpu: bool) -> str:
    """adtrain's time on a GPU, or a peer's ratio with its interval; memory."""
    if system in row["different"]:
        return "different results"
    if system not in row["times"]:
        return ""
    parts = list[str]()
    if system != ADTRAIN:
        parts.append(_interval(row["ratios"][system]))
    elif on_gpu:
        micros = row["times"][ADTRAIN]["median_ms"] * 1e3
        parts.append(f"{micros:,.0f} µs" if micros >= 100 else f"{micros:.3g} µs")
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
        yield f"{ahead} and slower in {behind}; in {len(found) - ahead - behind} the interval contains 1.\n"


def compared_on_both(results: Results) -> dict[str, list[float | None]]:
    """Of the steps that were measured on a CPU and on a GPU: for both, the time of each peer's fastest form over
    adtrain's. None where a peer has none."""

    def ratios(name: str) -> list[float | None]:
        found = {name: results[name]}
        return [min(_ratios(found, peer), default=None) for peer in PEERS]

    names = [name.removeprefix("cpu-") for name in results if name.startswith("cpu-") and "steps" in results[name]]
    both = [name for name in names if f"gpu-{name}" in results]
    return {name: [*ratios(f"cpu-{name}"), *ratios(f"gpu-{name}")] for name in both}


def _devices(results: Results) -> list[str]:
    """The CPU and the GPU of `compared_on_both`."""
    name = next(iter(compared_on_both(results)))
    return [results[f"{kind}-{name}"]["protocol"]["device_name"].removeprefix("NVIDIA ") for kind in ("cpu", "gpu")]


def summary(results: Results) -> str:
    """For each device and peer the least, median and largest ratio of `compared_on_both`, with the steps."""
    steps = compared_on_both(results)
    lines = [["over adtrain's time", "least", "median", "most"], ["---"] * 4]
    for i, (device, peer) in enumerate((device, peer) for device in _devices(results) for peer in PEERS.values()):
        found = sorted((ratio, name) for name, ratios in steps.items() if (ratio := ratios[i]) is not None)
        least, most = (f"{_digits(ratio)} (`{name}`)" for ratio, name in (found[0], found[-1]))
        lines.append([f"{peer}, {device}", least, _digits(median(ratio for ratio, _ in found)), most])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


ROW, BAR, LEFT, PANEL, MOST = 28, 11, 120, 270, 20.0
"""Pixels of a step, of a bar, of the names, and of a device; the ratio at a panel's right end."""


def picture(results: Results) -> str:
    """Bars of `compared_on_both`, on a logarithmic scale that begins at half of adtrain's speed."""
    steps = compared_on_both(results)
    height = ROW * len(steps) + 56

    def x(panel: int, ratio: float) -> float:
        share = math.log(max(min(ratio, MOST), 0.5) / 0.5) / math.log(MOST / 0.5)
        return LEFT + panel * PANEL + share * (PANEL - 60)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + 2 * PANEL} {height}">', STYLE]
    for panel, device in enumerate(_devices(results)):
        parts.append(f'<text x="{x(panel, 0.5):.1f}" y="16" class="head">{device}</text>')
        parts.append(f'<line x1="{x(panel, 1):.1f}" x2="{x(panel, 1):.1f}" y1="26" y2="{height - 26}"/>')
        parts.append(f'<text x="{x(panel, 1):.1f}" y="{height - 12}" class="one">adtrain: 1</text>')
    for row, (name, ratios) in enumerate(steps.items()):
        top = 30 + ROW * row
        parts.append(f'<text x="{LEFT - 8}" y="{top + 15}" class="name">{name}</text>')
        for i, ratio in enumerate(ratios):
            if ratio is not None:
                panel, peer = divmod(i, len(PEERS))
                left, right, y = x(panel, 0.5), x(panel, ratio), top + peer * (BAR + 1)
                size = f'x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="{BAR}"'
                parts.append(f'<rect {size} class="{list(PEERS)[peer]}"/>')
                label = f"{list(PEERS.values())[peer]} {_digits(ratio)}"
                parts.append(f'<text x="{right + 4:.1f}" y="{y + 9}" class="value">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


STYLE = """\
<style>
  text { font: 10px sans-serif; fill: #1f2937 } .head { font-size: 13px; font-weight: bold }
  .name { text-anchor: end } .one { text-anchor: middle } .value { font-size: 9px }
  .torch { fill: #e07b39 } .jax { fill: #5b7bd5 } line { stroke: #6b7280; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) { text { fill: #e5e7eb } }
</style>"""
PEERS = {"torch": "PyTorch", "jax": "JAX"}
DOCUMENTS: dict[Path, Callable[[Results], str]] = {
    ROOT / "README.md": speed,
    ROOT / "docs" / "performance.md": summary,
    ROOT / "docs" / "pictures" / "speed.svg": picture,
    ROOT / "docs" / "comparisons.md": tables,
}


if __name__ == "__main__":
    main()
