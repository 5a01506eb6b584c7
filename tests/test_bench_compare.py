from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.bench.compare import compare, read, times
from adtrain.core.errors import AdtrainError

NAMES = ("a.json", "b.json")


def time_of(ms: float, width: float = 0.01) -> dict[str, float]:
    return {"median_ms": ms, "low_ms": ms * (1 - width / 2), "high_ms": ms * (1 + width / 2)}


def result(device: str = "x", kind: str = "ops", **ms: Any) -> dict[str, Any]:
    rows = [{"op": op, "phase": "forward", "n": 3, "flops": 9,
             "time": time if isinstance(time, dict) else time_of(time)} for op, time in ms.items()]  # fmt: skip
    return {"kind": kind, "protocol": {"device_name": device, "date": "today"}, "ops": rows}


def test_what_moved_is_sorted_by_how_far_in_both_directions() -> None:
    before = result(a=1.0, b=1.0, c=1.0, d=1.0, e=1.0)
    after = result(a=1.5, b=3.0, c=0.5, d=0.25, e=1.0)
    found = compare(before, after, NAMES)
    assert [move.name for move in found.slower] == ["ops b forward", "ops a forward"]
    assert [move.change for move in found.slower] == pytest.approx([2.0, 0.5])
    assert [move.name for move in found.faster] == ["ops d forward", "ops c forward"]
    assert found.same == 1


@pytest.mark.parametrize(
    ("after", "moved"),
    [
        (time_of(1.019), False),  # beyond noise, and less than 2%
        (time_of(1.021), True),
        (time_of(1.3, width=0.7), False),  # its interval meets the other
        (time_of(0.97), True),
    ],
)
def test_a_move_is_beyond_the_intervals_and_beyond_two_percent(after: dict[str, float], moved: bool) -> None:
    found = compare(result(a=1.0), result(a=after), NAMES)
    assert bool(found.slower or found.faster) == moved


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-3, 1e3), min_size=1), st.floats(0.1, 10))
def test_what_one_way_is_slower_is_the_other_way_faster(ms: dict[str, Any], factor: float) -> None:
    one, other = result(**ms), result(**{name: value * factor for name, value in ms.items()})
    there, back = compare(one, other, NAMES), compare(other, one, NAMES)
    assert {move.name for move in there.slower} - {move.name for move in back.faster} == set()
    assert there.same + len(there.slower) + len(there.faster) == len(ms)
    assert compare(one, one, NAMES)[:3] == ([], [], len(ms))


def test_times_are_found_wherever_they_are_and_have_names_of_their_own() -> None:
    document = {
        "kind": "config",
        "modes": {
            "fused": {"step": time_of(1), "layers": [{"layer": "0.linear", "forward": time_of(2), "update": None}]}
        },
        "batch_sizes": {"32": {"step": time_of(3)}},
        "ops": [{"op": "", "time": time_of(4)}, {"op": "", "time": time_of(5)}],
    }
    assert {name: record["median_ms"] for name, record in times(document)} == {
        "modes fused step": 1, "modes fused layers 0.linear forward": 2, "batch_sizes 32 step": 3,
        "ops": 4, "ops #2": 5,
    }  # fmt: skip


def test_times_that_one_result_lacks_are_named() -> None:
    found = compare(result(a=1.0, b=1.0), result(b=1.0, c=1.0), NAMES)
    assert (found.only_before, found.only_after, found.same) == (["ops a forward"], ["ops c forward"], 1)


def test_what_the_two_were_measured_with_is_told_where_it_differs() -> None:
    before, after = result(a=1.0), result(a=1.0)
    before["protocol"] |= {"driver": "1", "date": "yesterday"}
    after["protocol"] |= {"driver": "2"}
    assert compare(before, after, NAMES).protocol == {"driver": ("1", "2")}


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (result(kind="config"), "a.json is of kind ops, b.json of config; expected two results of one kind"),
        (result(device="y"), "a.json is of device x, b.json of y; expected two results of one device"),
    ],
)
def test_what_cannot_be_compared_is_refused(after: dict[str, Any], message: str) -> None:
    with pytest.raises(AdtrainError, match=message):
        compare(result(), after, NAMES)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("{", "it is no JSON"), ("[]", "found no result"), ('{"kind": "ops"}', "found no result")],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AdtrainError, match=rf"a\.json: .*{message}"):
        read(path)
    path.write_text(json.dumps(result(a=1.0)))
    assert read(path) == result(a=1.0)
