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
RESULT = "{'kind': 'ops', 'protocol': {'device_name': 'x'}"


def time_of(ms: float, width: float = 0.01) -> dict[str, float]:
    return {"median_ms": ms, "low_ms": ms * (1 - width / 2), "high_ms": ms * (1 + width / 2)}


def result(device: str = "x", kind: str = "ops", **ms: Any) -> dict[str, Any]:
    rows = [{"op": op, "phase": "forward", "n": 3, "flops": 9,
             "time": time if isinstance(time, dict) else time_of(time)} for op, time in ms.items()]  # fmt: skip
    return {"kind": kind, "protocol": {"device_name": device, "date": "today"}, "ops": rows}


def test_changes_are_sorted_by_factor() -> None:
    before = result(a=1.0, b=1.0, c=1.0, d=1.0, e=1.0)
    after = result(a=1.5, b=3.0, c=0.5, d=0.25, e=1.0)
    found = compare(before, after, NAMES)
    assert [each.name for each in found.slower] == ["ops b forward", "ops a forward"]
    assert [each.relative for each in found.slower] == pytest.approx([2.0, 0.5])
    assert [each.name for each in found.faster] == ["ops d forward", "ops c forward"]
    assert found.same == 1


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (time_of(1.019), False),  # beyond the intervals, and less than 2%
        (time_of(1.021), True),
        (time_of(1.3, width=0.7), False),  # the intervals overlap
        (time_of(0.97), True),
    ],
)
def test_change_exceeds_both_intervals_and_two_percent(after: dict[str, float], changed: bool) -> None:
    found = compare(result(a=1.0), result(a=after), NAMES)
    assert bool(found.slower or found.faster) == changed


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-3, 1e3), min_size=1), st.floats(0.1, 10))
def test_swapping_the_results_swaps_slower_and_faster(ms: dict[str, Any], factor: float) -> None:
    one, other = result(**ms), result(**{name: value * factor for name, value in ms.items()})
    there, back = compare(one, other, NAMES), compare(other, one, NAMES)
    assert {each.name for each in there.slower} - {each.name for each in back.faster} == set()
    assert there.same + len(there.slower) + len(there.faster) == len(ms)
    assert compare(one, one, NAMES)[:3] == ([], [], len(ms))


def test_times_at_any_depth_have_unique_names() -> None:
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


def test_times_of_only_one_result_are_named() -> None:
    found = compare(result(a=1.0, b=1.0), result(b=1.0, c=1.0), NAMES)
    assert (found.only_before, found.only_after, found.same) == (["ops a forward"], ["ops c forward"], 1)


def test_differences_of_the_protocols_are_listed() -> None:
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
def test_results_of_other_kinds_or_devices_are_an_error(after: dict[str, Any], message: str) -> None:
    with pytest.raises(AdtrainError, match=message):
        compare(result(), after, NAMES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "found no valid JSON"),
        ("[]", r"found \[\], expected an object"),
        ('{"kind": "ops"}', "found no protocol, expected what adtrain writes"),
        ('{"kind": "x", "protocol": {"device_name": "y"}}', "kind: found 'x', expected 'ops', 'config', 'against' or"),
        ('{"kind": "ops", "protocol": {"device_name": 7}}', "protocol.device_name: found 7, expected a valid string"),
        (f"{RESULT}, 'n': NaN}}".replace("'", '"'), "found no valid JSON"),
        (f"{RESULT}, 'n': [1e400]}}".replace("'", '"'), r"n\[0\]: found a number beyond 1\.8e308"),
        (
            f"{RESULT}, 'a': {{'median_ms': [], 'low_ms': 1, 'high_ms': 1}}}}".replace("'", '"'),
            r"'a': median_ms: found \[\], expected a number of magnitude at most 1e15",
        ),
    ],
)
def test_file_that_is_not_a_result_is_an_error(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AdtrainError, match=rf"a\.json: .*{message}"):
        read(path)
    path.write_text(json.dumps(result(a=1.0)))
    assert read(path) == result(a=1.0)
