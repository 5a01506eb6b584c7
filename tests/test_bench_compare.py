from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adtrain.bench import compare as comparing
from adtrain.bench.machine import protocol
from adtrain.bench.sampling import NOISY, Time
from adtrain.cli.bench import command
from adtrain.config.records import plain
from adtrain.core.errors import AdtrainError

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ABOUT = plain(protocol("cpu", None), sparse=True)


def time_of(ms: float, width: float = 0.01) -> dict[str, Any]:
    low, high = ms * (1 - width / 2), ms * (1 + width / 2)
    return plain(Time(ms, low, high, low, high, 9, 1, [], high - low > NOISY * ms), sparse=True)


def result(device: str = "x", **ms: Any) -> dict[str, Any]:
    about = {"variant": "", "n": 3, "size": "3", "phase": "forward", "dtype": "float32", "kernels": [], "flops": 1,
             "bytes": 1, "gflops_per_s": 1.0, "gbytes_per_s": 1.0, "of_roofline": 0.5}  # fmt: skip
    rows = [{"op": op, **about, "time": time if isinstance(time, dict) else time_of(time)} for op, time in ms.items()]
    return {"kind": "ops", "protocol": {**ABOUT, "device_name": device, "date": "today"}, "ops": rows}


def compared(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The comparison of two results, which are written to a.json and b.json."""
    paths = []
    for name, found in (("a.json", before), ("b.json", after)):
        (folder / name).write_text(json.dumps(found))
        paths.append(str(folder / name))
    return comparing.result(*paths).to_json()


def names(changes: list[dict[str, Any]]) -> list[str]:
    return [each["name"] for each in changes]


def test_changes_are_sorted_by_factor(tmp_path: Path) -> None:
    before = result(a=1.0, b=1.0, c=1.0, d=1.0, e=1.0)
    after = result(a=1.5, b=3.0, c=0.5, d=0.25, e=1.0)
    found = compared(tmp_path, before, after)
    assert names(found["slower"]) == ["b 3 forward", "a 3 forward"]
    assert [each["change"] for each in found["slower"]] == pytest.approx([2.0, 0.5])
    assert names(found["faster"]) == ["d 3 forward", "c 3 forward"]
    assert found["same"] == 1


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (time_of(1.019), False),  # beyond the intervals, and less than 2%
        (time_of(1.021), True),
        (time_of(1.3, width=0.7), False),  # the intervals overlap
        (time_of(0.97), True),
    ],
)
def test_change_exceeds_both_intervals_and_two_percent(tmp_path: Path, after: dict[str, float], changed: bool) -> None:
    found = compared(tmp_path, result(a=1.0), result(a=after))
    assert bool(found["slower"] or found["faster"]) == changed


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-3, 1e3), min_size=1), st.floats(0.1, 10))
def test_swapping_the_results_swaps_slower_and_faster(tmp_path: Path, ms: dict[str, Any], factor: float) -> None:
    one, other = result(**ms), result(**{name: value * factor for name, value in ms.items()})
    there, back = compared(tmp_path, one, other), compared(tmp_path, other, one)
    assert set(names(there["slower"])) <= set(names(back["faster"]))
    assert there["same"] + len(there["slower"]) + len(there["faster"]) == len(ms)
    unchanged = compared(tmp_path, one, one)
    assert (unchanged["slower"], unchanged["faster"], unchanged["same"]) == ([], [], len(ms))


@pytest.mark.parametrize(
    ("name", "whole", "part"),
    [
        ("cpu-step-smoke", "fused step", "layer 0.linear, backward"),
        ("cpu-mlp-128-adam", "mlp, schedule=constant, batch 128: torch-eager", None),
        ("cpu-operations", None, "matmul 256 forward: numpy"),
        ("gpu-analysis", None, "2 hidden layers, width 64: gpu"),
        ("gpu-analysis-steps", "lenet5: gpu+copies", "mlp, batch 32: cpu"),
        ("gpu-operations", None, "neg 4096 forward"),
    ],
)
def test_times_are_named_as_in_the_tables(name: str, whole: str | None, part: str | None) -> None:
    found = comparing.read(RESULTS / f"{name}.json")
    times = comparing.times(found)
    assert whole is None or times[whole].whole
    assert part is None or not times[part].whole
    assert not any("#" in each for each in times)


def test_equal_names_are_numbered(tmp_path: Path) -> None:
    twice = result(a=1.0)
    twice["ops"] *= 2
    assert compared(tmp_path, result(a=1.0), twice)["only_after"] == ["a 3 forward #2"]


def test_times_of_only_one_result_are_named(tmp_path: Path) -> None:
    found = compared(tmp_path, result(a=1.0, b=1.0), result(b=1.0, c=1.0))
    assert (found["only_before"], found["only_after"], found["same"]) == (["a 3 forward"], ["c 3 forward"], 1)


def test_differences_of_the_conditions_are_listed_by_dotted_key(tmp_path: Path) -> None:
    before, after = result(a=1.0), result(a=1.0)
    peak = {"gbytes_per_s": 1.0, "gflops_per_s": {"float32": 1.0}}
    before["protocol"] |= {"versions": {"numpy": "1", "python": "3"}, "date": "yesterday", "roofline": peak}
    after["protocol"] |= {"versions": {"numpy": "2", "python": "3"}, "roofline": {**peak, "gbytes_per_s": 2.0}}
    assert compared(tmp_path, before, after)["protocol"] == {"versions.numpy": ["1", "2"]}


def test_noise_of_either_side_is_named(tmp_path: Path) -> None:
    before, after = result(a=time_of(1.0, width=0.2), b=1.0), result(a=1.0, b=1.0)
    after["protocol"] |= {"load": 3.0, "cores": 4}
    noisy, busy = compared(tmp_path, before, after)["noise"]
    assert noisy == f"{tmp_path}/a.json: 1 of 2 times have an interval wider than 5% of the median"
    assert busy.startswith(f"{tmp_path}/b.json: busy machine: other work took 3.0 of 4 cores")
    assert compared(tmp_path, result(a=1.0), result(a=1.0))["noise"] == []


def test_results_of_other_kinds_or_devices_are_an_error(tmp_path: Path) -> None:
    against = {**result(), "kind": "against"}
    for after, message in (
        (against, "kind ops, .*b.json of against; expected two results of one kind"),
        (result(device="y"), "device x, .*b.json of y; expected two results of one device"),
    ):
        with pytest.raises(AdtrainError, match=message):
            compared(tmp_path, result(), after)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "found no valid JSON"),
        ("[]", r"found \[\], expected an object"),
        ('{"kind": "ops"}', "found no key protocol, expected a file that adtrain wrote"),
        ('{"kind": "x", "protocol": {"device_name": "y"}}', "kind: found 'x', expected 'ops', 'candidates', 'step', "),
        (json.dumps(result()).replace('"x"', "7"), "protocol.device_name: found 7, expected a valid string"),
        (json.dumps({**result(), "n": math.nan}), "found no valid JSON"),
        (json.dumps({**result(), "n": [1]}).replace("[1]", "[1e400]"), r"n\[0\]: found a number beyond 1\.8e308"),
        (json.dumps(result(a={**time_of(1.0), "low_ms": []})), r"ops\[0\].time.low_ms: found \[\], expected a number"),
    ],
)
def test_file_that_is_not_a_result_is_an_error(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AdtrainError, match=rf"a\.json: .*{message}"):
        comparing.read(path)


STORED = [path for path in sorted(RESULTS.glob("*.json")) if b'"kind"' in path.read_bytes()[:100]]
"""Results of `adtrain bench`; the others are of scripts in benchmarks/."""


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_results_are_read_and_written_with_the_same_keys(path: Path) -> None:
    values = json.loads(path.read_text())
    found = comparing.read(path)
    assert found.to_json() == values
    same = comparing.result(str(path), str(path))
    assert (same.slower, same.faster, same.only_before) == ([], [], [])
    assert len(same.steps) + same.same == len(list(found.times())) > 0


def test_every_command_of_bench_has_a_kind_of_its_name() -> None:
    assert set(comparing.KINDS) | {"compare"} == {*command.commands, "candidates"}


def test_times_without_an_interval_are_compared_with_a_warning(tmp_path: Path) -> None:
    paths = []
    for name, us in (("a", 100.0), ("b", 103.0)):
        values = json.loads((RESULTS / "gpu-candidates.json").read_text())
        problem = values["candidates"][0]
        values["candidates"] = [{**problem, "candidates": [{**problem["candidates"][0], "us": us}]}]
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(values))
    found = comparing.result(*map(str, paths))
    assert [each.change for each in found.slower] == [pytest.approx(0.03)]
    assert f"{paths[0]}: 1 of 1 times have no interval; each change over 2% is listed" in found.noise
