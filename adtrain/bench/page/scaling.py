"""The page of the scaling of a config over the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from adtrain.bench.page import blocks
from adtrain.bench.page.curves import Line, figure
from adtrain.bench.peers.systems import ADTRAIN
from adtrain.bench.scaling import GPUS_PER_NODE, MOST_GPUS, fitted_start_us, weak_efficiency
from adtrain.bench.text.scaling import NUMBERS, cells
from adtrain.report import parts

POINTS = {"system": "text", "scaling": "text", **dict.fromkeys((name.replace(" us", " µs") for name in NUMBERS), "")}
COUNTS = [2**i for i in range(MOST_GPUS.bit_length())]


def title(result: Mapping[str, Any]) -> str:
    return f"Scaling of {result['config']}"


def body(result: Mapping[str, Any]) -> Iterable[Markup]:
    points = result["points"]
    own, others = ([p for p in points if (p["system"] == ADTRAIN) is which] for which in (True, False))
    weak, strong = ([p for p in own if p["weak"] is which] for which in (True, False))
    last = weak[-1]
    tiles = [("ranks", f"{last['ranks']}"), ("weak efficiency", f"{last['efficiency']:.1%}")]
    tiles.append(("strong efficiency", f"{strong[-1]['efficiency']:.1%}"))
    if last["hidden"] is not None:
        tiles.append(("exchanges hidden", f"{_hidden(last):.0%}"))
    yield parts.tiles(tiles)
    yield parts.note(
        "Weak scaling: the batch grows with the ranks. Strong scaling: it stays. Hidden is the part of the exchanges "
        "that other work covers."
    )
    drawn = [
        _times(title, own, [p for p in others if p["weak"] is own[0]["weak"]])
        for title, own in (("Weak scaling", weak), ("Strong scaling", strong))
    ]
    yield parts.section("Measured", blocks.figures(drawn) + parts.table(POINTS, [cells(p) for p in points]))
    if result["protocol"]["device"] == "gpu" and len(weak) > 1:
        yield parts.section("Arithmetic, not measured", _predicted(result, weak))


def _times(title: str, points: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> Markup:
    """Times of steps, of exchanges alone, of a step that scales ideally, and of other systems."""
    first = points[0]
    growth = [1.0 if p["weak"] else first["ranks"] / p["ranks"] for p in points]
    ideal = [(p["ranks"], first["step_us"] * x) for p, x in zip(points, growth, strict=True)]
    lines = [
        Line("step", "series-2", [(p["ranks"], p["step_us"]) for p in points]),
        Line("ideal step", "series-1", ideal),
    ]
    if exchanges := [(p["ranks"], p["exchange_us"]) for p in points if p["exchange_us"]]:
        lines.append(Line("exchanges alone", "series-3", exchanges))
    for number, system in enumerate(dict.fromkeys(p["system"] for p in others), 4):
        times = [(p["ranks"], p["step_us"]) for p in others if p["system"] == system]
        lines.append(Line(system, f"series-{number}", times))
    return figure(title, "ranks", "µs", lines)


def _predicted(result: Mapping[str, Any], weak: Sequence[Mapping[str, Any]]) -> Markup:
    """The efficiency of weak scaling by the alpha-beta model, beside the measured points."""
    size, last = result["gradient_bytes"], weak[-1]
    start = fitted_start_us(size, last["ranks"], last["exchange_us"])
    percent = {
        hidden: [(n, 100 * weak_efficiency(weak[0]["step_us"], size, n, start, hidden)) for n in COUNTS]
        for hidden in (0.0, _hidden(last))
    }
    lines = [
        Line("model, nothing hidden", "series-1", percent[0.0]),
        Line(f"model, {_hidden(last):.0%} hidden as measured", "series-3", percent[_hidden(last)]),
        Line("measured", "series-2", [(p["ranks"], 100 * p["efficiency"]) for p in weak]),
    ]
    note = (
        f"The alpha-beta model with {GPUS_PER_NODE} GPUs a node. Its start-up time of {start:.1f} µs fits the measured "
        "exchange; 344 GB/s inside a node, 47 GB/s and 14 µs between nodes are published figures."
    )
    return blocks.figures([figure("Weak scaling by a model", "GPUs", "% efficiency", lines, note=note)])


def _hidden(point: Mapping[str, Any]) -> float:
    return float(max(0.0, min(1.0, point["hidden"])))
