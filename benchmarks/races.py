"""Writes what docs/performance.md says of time to accuracy: python benchmarks/races.py

The table has each system of each result of `adtrain bench race` in benchmarks/results. docs/pictures/races.svg has a
panel for each race of several systems, and a curve for each system: after each epoch the mean, over the seeds, of the
seconds and of the accuracy, on a logarithmic scale of the errors. A vertical line is the range of the seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from adtrain.text import counted

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "races.svg"
DOCUMENT = ROOT / "docs" / "performance.md"
MARKERS = "<!-- races: begin -->\n", "<!-- races: end -->"

Races = Mapping[str, Mapping[str, Any]]
"""From a file's name to its content."""


class Point(NamedTuple):
    """The seeds of a system after an epoch: mean seconds, and the mean, least and largest accuracy."""

    seconds: float
    accuracy: float
    least: float
    most: float


def main() -> None:
    races = read(RESULTS)
    PICTURE.write_text(picture(races))
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), races))


def read(folder: Path) -> Races:
    """The races in the folder."""
    found = {path.name: json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))}
    return {name: result for name, result in found.items() if result.get("kind") == "race"}


def with_table(text: str, races: Races) -> str:
    """The document with the table between the markers."""
    begin, end = MARKERS
    before, rest = text.split(begin)
    return f"{before}{begin}{table(races)}{end}{rest.split(end)[1]}"


def table(races: Races) -> str:
    """A row for each system of each race."""
    lines = [["result, commit", "system", "reached", "until the target", "whole training", "accuracy"]]
    lines.append(["---", "---", "--:", "---", "---", "---"])
    for name, race in races.items():
        about = race["protocol"]
        result = f"`{name}`, {about['commit']}, {about['device_name'].split()[-1]}"
        for system, found in race["systems"].items():
            reached = f"{found['reached']} of {len(found['runs'])}"
            until = _times(found["seconds"]) if found["reached"] else ""
            lines.append([result, system, reached, until, _times(found["train_seconds"]), _accuracy(found["accuracy"])])
            result = "the same"
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _times(found: Mapping[str, float]) -> str:
    """The median and the range."""
    return f"{_seconds(found['median'])} ({_seconds(found['min'])} to {_seconds(found['max'])})"


def _seconds(value: float) -> str:
    return f"{value:#.3g}".rstrip(".") + " s"


def _accuracy(found: Mapping[str, float]) -> str:
    """The mean, half of its 95% interval, and the range."""
    margin = f" ± {found['margin']:.2%}" if found.get("margin") is not None else ""
    return f"{found['mean']:.2%}{margin} ({found['min']:.2%} to {found['max']:.2%})"


def curve(runs: Sequence[Mapping[str, Any]]) -> list[Point]:
    """A point for each epoch."""
    points = []
    for epochs in zip(*(run["epochs"] for run in runs), strict=True):
        accuracies = [each["accuracy"] for each in epochs]
        seconds = mean(each["seconds"] for each in epochs)
        points.append(Point(seconds, mean(accuracies), min(accuracies), max(accuracies)))
    return points


LEFT, WIDTH, TOP, HEIGHT, PANEL, BOTTOM = 46, 230, 34, 190, 330, 40
"""Pixels: of a panel the margins, the plot and the whole."""
COLUMNS = 2
"""Panels in a row."""
TICKS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.98, 0.985, 0.99, 0.995)
"""Accuracies that are written on the axis."""
LOWEST = 0.5
"""The least accuracy in a picture. Points below are left out."""


def picture(races: Races) -> str:
    """The panels, in rows."""
    panels = [race for race in races.values() if len(race["systems"]) > 1]
    row = TOP + HEIGHT + BOTTOM
    size = f'viewBox="0 0 {PANEL * min(len(panels), COLUMNS)} {row * -(-len(panels) // COLUMNS)}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE]
    for i, race in enumerate(panels):
        parts += [f'<g transform="translate({PANEL * (i % COLUMNS)} {row * (i // COLUMNS)})">', *_panel(race), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(race: Mapping[str, Any]) -> Iterator[str]:
    curves = {system: curve(found["runs"]) for system, found in race["systems"].items()}
    longest = max(points[-1].seconds for points in curves.values())
    shown = {system: [point for point in points if point.least >= LOWEST] for system, points in curves.items()}
    accuracies = [x for points in shown.values() for point in points for x in (point.least, point.most)]
    bottom, top = (1 - x(race["target"], *accuracies) for x in (min, max))
    bottom, top = bottom * 1.1, top * 0.8

    def x(seconds: float) -> float:
        return LEFT + seconds / longest * WIDTH

    def y(accuracy: float) -> float:
        return TOP + HEIGHT - math.log(bottom / (1 - accuracy)) / math.log(bottom / top) * HEIGHT

    seeds = len(next(iter(race["systems"].values()))["runs"])
    device = race["protocol"]["device_name"].split()[-1]
    yield f'<text x="{LEFT}" y="16" class="head">{race["config"]}, {device}, {counted(seeds, "seeds")}</text>'
    for accuracy in TICKS:
        if top <= 1 - accuracy <= bottom:
            yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y(accuracy):.1f}" y2="{y(accuracy):.1f}"/>'
            yield f'<text x="{LEFT - 6}" y="{y(accuracy) + 3:.1f}" class="end">{accuracy:.3g}</text>'
    for part in range(5):
        at = longest * part / 4
        yield f'<text x="{x(at):.1f}" y="{TOP + HEIGHT + 14}" class="middle">{at:.3g}</text>'
    yield f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 30}" class="middle">seconds of training</text>'
    target = f'y1="{y(race["target"]):.1f}" y2="{y(race["target"]):.1f}"'
    yield f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" {target} class="target"/>'
    for i, (system, points) in enumerate(shown.items()):
        yield f'<g class="system{i}">'
        for point in points:
            at = x(point.seconds)
            yield f'<path d="M{at:.1f} {y(point.least):.1f}V{y(point.most):.1f}"/>'
            yield f'<circle cx="{at:.1f}" cy="{y(point.accuracy):.1f}" r="2"/>'
        corners = " ".join(f"{x(point.seconds):.1f},{y(point.accuracy):.1f}" for point in points)
        yield f'<polyline points="{corners}"/>'
        last = curves[system][-1]
        label = f"{system}: {last.accuracy:.2%} in {_seconds(last.seconds)}"
        yield f'<text x="{LEFT + WIDTH - 4}" y="{TOP + HEIGHT - 10 - 14 * i}" class="end">{label}</text></g>'


STYLE = """\
<style>
  text { font: 10px sans-serif; fill: #1f2937 } .head { font-size: 12px; font-weight: bold }
  .end { text-anchor: end } .middle { text-anchor: middle }
  line { stroke: #9ca3af; stroke-width: 0.5 } .target { stroke: #6b7280; stroke-width: 1; stroke-dasharray: 4 3 }
  polyline, path { fill: none; stroke-width: 1.5 } path { stroke-width: 0.75 }
  .system0 { stroke: #2f8f5b; fill: #2f8f5b } .system1 { stroke: #e07b39; fill: #e07b39 }
  .system2 { stroke: #5b7bd5; fill: #5b7bd5 }
  g text { stroke: none } .system0 text { fill: #2f8f5b } .system1 text { fill: #e07b39 }
  .system2 text { fill: #5b7bd5 }
  @media (prefers-color-scheme: dark) { text { fill: #e5e7eb } line { stroke: #4b5563 } }
</style>"""


if __name__ == "__main__":
    main()
