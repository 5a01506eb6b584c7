"""Table and picture of time to accuracy are up to date with the committed results, and show their numbers."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("races", ROOT / "benchmarks" / "races.py")
assert spec is not None
assert spec.loader is not None
races = importlib.util.module_from_spec(spec)
spec.loader.exec_module(races)


def run(*epochs: tuple[float, float]) -> dict[str, Any]:
    return {"epochs": [{"seconds": seconds, "accuracy": accuracy} for seconds, accuracy in epochs]}


def spread(least: float, median: float, most: float, **more: float) -> dict[str, float]:
    return {"min": least, "median": median, "max": most, "mean": median, **more}


def race(config: str = "cifar-94") -> dict[str, Any]:
    own = {"runs": [run((0.5, 0.6), (1.0, 0.94)), run((0.7, 0.8), (1.2, 0.92))], "reached": 2}
    peer = {"runs": [run((1.0, 0.4), (2.0, 0.89)), run((1.0, 0.4), (2.0, 0.89))], "reached": 0, "seconds": None}
    own |= {"seconds": spread(1.0, 1.1, 1.2), "train_seconds": spread(1.0, 1.1, 1.2)}
    own |= {"accuracy": spread(0.92, 0.93, 0.94, margin=0.0123)}
    peer |= {"train_seconds": spread(2.0, 2.0, 2.0), "accuracy": spread(0.89, 0.89, 0.89)}
    return {
        "kind": "race",
        "config": config,
        "target": 0.9,
        "protocol": {"device_name": "NVIDIA H200", "commit": "abc"},
        "systems": {"adtrain": own, "torch-graph": peer},
    }


def test_table_and_picture_are_up_to_date() -> None:
    found = races.read(races.RESULTS)
    assert races.picture(found) == races.PICTURE.read_text(), "run python benchmarks/races.py"
    document = races.DOCUMENT.read_text()
    assert races.with_table(document, found) == document, "run python benchmarks/races.py"


def test_table_has_a_row_for_each_system() -> None:
    assert races.table({"a.json": race()}).splitlines()[2:] == [
        "| `a.json`, abc, H200 | adtrain | 2 of 2 | 1.10 s (1.00 s to 1.20 s) | 1.10 s (1.00 s to 1.20 s) | "
        "93.00% ± 1.23% (92.00% to 94.00%) |",
        "| the same | torch-graph | 0 of 2 |  | 2.00 s (2.00 s to 2.00 s) | 89.00% (89.00% to 89.00%) |",
    ]


def test_points_are_means_over_the_seeds_after_each_epoch() -> None:
    first, last = races.curve(race()["systems"]["adtrain"]["runs"])
    assert first == pytest.approx((0.6, 0.7, 0.6, 0.8))
    assert last == pytest.approx((1.1, 0.93, 0.92, 0.94))


def test_each_race_of_several_systems_has_a_panel_with_their_curves() -> None:
    alone = race("alone")
    del alone["systems"]["torch-graph"]
    text = races.picture({"a": race(), "alone": alone, "b": race("cifar-96")})
    root = ElementTree.fromstring(text)
    curves = [each.attrib["points"].split() for each in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(points) for points in curves] == [2, 1] * 2  # the peer's first epoch is below the panel
    assert "adtrain: 93.00% in 1.10 s" in text
    assert "torch-graph: 89.00% in 2.00 s" in text
    assert re.findall(r'class="head">([^<]*)<', text) == ["cifar-94, H200, 2 seeds", "cifar-96, H200, 2 seeds"]


def test_only_races_are_read(tmp_path: Path) -> None:
    for name, result in {"a": race(), "b": {"kind": "against"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert list(races.read(tmp_path)) == ["a.json"]
