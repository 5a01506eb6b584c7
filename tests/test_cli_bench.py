from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_samples
import pytest
import training_runs
from click.testing import Result
from command_line import invoke

from adtrain.bench import compare, machine, ops, step
from adtrain.bench.machine import Roofline, rates
from adtrain.bench.op_table import BENCHES
from adtrain.bench.result import outliers, timings, warnings
from adtrain.bench.sampling import Time
from adtrain.bench.view import cache_note, milliseconds, of_peak
from adtrain.bench.view import time as time_text
from adtrain.config.records import plain

LAYERS = ["input", "0.linear", "1.relu", "2.linear", "loss", "optimizer", "accuracy", "log"]
PEAK = Roofline(1.0, {"float32": 1.0})
TIME = {"median_ms", "low_ms", "high_ms", "p20_ms", "p80_ms", "samples", "repeats", "outliers", "noisy"}


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bench_samples.shorten(monkeypatch)
    bench_samples.small_roofline(monkeypatch, "roofline")


def bench(*arguments: str, columns: int = 180) -> Result:
    return invoke("bench", *arguments, "--device", "cpu", columns=columns)


def tables(result: Result) -> list[list[str]]:
    """Heading and rows of each table; empty lines separate tables.

    Without the note below a table on bytes from a cache: whether there are such bytes depends on the machine.
    """
    assert result.exit_code == 0, result.output
    found = [part.splitlines() for part in result.stdout.split("\n\n")[1:-1]]
    return [rows[:-1] if rows[-1].startswith("cached: ") else rows for rows in found]


def test_operations_are_timed_in_all_phases_and_the_protocol_is_shown() -> None:
    result = bench("--op", "mul", "--op", "argmax", "--sizes", "8,16")
    ((heading, *rows),) = tables(result)
    assert heading.split() == [
        "operation", "size", "phase", "ms", "95%", "interval", "p20-p80", "GFLOP/s", "GB/s", "of", "peak", "kernel",
        "launch",
    ]  # fmt: skip
    found = [re.split(r"  +", row)[:3] for row in rows]
    assert found == [
        *(["mul", f"{n} {n}", phase] for n in (8, 16) for phase in ("forward", "backward a", "backward b")),
        *([f"argmax axis {axis}", f"{n}x{n}", "forward"] for axis in (0, 1) for n in (8, 16)),
    ]
    text = " ".join(result.stdout.split())
    assert "clock of operations: read by the compiled program; of steps: the host's" in text
    assert re.search(r"an empty run takes \d+ ns", text)
    assert re.search(r"\d+ of 90 samples are outliers \(beyond 1.5 interquartile ranges\); none is removed", text)
    assert "bench: timing 6 operations and sizes in float32, forward and backward\n" in result.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("columns", "arguments"), [(120, ("--op", "cross_entropy")), (60, ("CONFIG", "--batch-sizes", "8,16"))]
)
def test_tables_fit_the_terminal(tmp_path: Path, columns: int, arguments: tuple[str, ...]) -> None:
    given = [str(training_runs.write_config(tmp_path)) if a == "CONFIG" else a for a in arguments]
    result = bench(*given, columns=columns)
    assert all("ms" in heading for heading, *_ in tables(result))
    assert max(map(len, result.stdout.splitlines())) <= columns


def test_config_is_timed_by_layer_mode_and_batch_size(tmp_path: Path) -> None:
    result = bench(str(training_runs.write_config(tmp_path)), "--batch-sizes", "8,32")
    layers, operations, steps, batches = tables(result)
    assert [row.split()[0] for row in layers] == ["layer", *LAYERS, "sum"]
    assert operations[0].startswith("fused operation")
    assert [row.split()[0] for row in steps] == ["step", "eager", "staged", "fused", "memory"]
    assert re.fullmatch(r"memory of the fused step: [\d.]+ MiB planned, [\d.]+ MiB measured", steps[-1])
    assert [row.split()[0] for row in batches] == ["batch", "8", "32"]


def test_json_on_stdout_replaces_the_tables_and_has_intervals(tmp_path: Path) -> None:
    config = str(training_runs.write_config(tmp_path))
    for arguments, kind in ((("--op", "nll_loss"), "ops"), ((config, "--batch-sizes", "8"), "step")):
        found = json.loads(bench(*arguments, "--json").stdout)
        assert found["kind"] == kind
        assert found["protocol"]["versions"].keys() == {"adtrain", "python", "numpy"}
        assert found["protocol"]["roofline"]["gbytes_per_s"] > 0
        times = list(timings(compare.parse(found, "")))
        assert times
        assert all(time.low_ms <= time.median_ms <= time.high_ms for time in times)
        assert plain(times[0], sparse=True).keys() == TIME
    assert [row["layer"] for row in found["modes"]["staged"]["layers"]] == LAYERS


def test_results_are_written_and_compared(tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    ((_, *rows),) = tables(bench("--op", "nll_loss", "--sizes", "8", "--json-file", str(before)))
    found = json.loads(before.read_text())
    found["protocol"]["commit"] = "earlier"
    before.write_text(json.dumps(found))
    assert len(found["ops"]) == len(rows) == 4
    for field in ("median_ms", "low_ms", "high_ms"):
        found["ops"][0]["time"][field] *= 1000
    found["protocol"] |= {"commit": "later", "load": 99.0}  # with a warning of a busy machine
    after.write_text(json.dumps(found))
    narrow, result = (compared(before, after, columns=n) for n in (60, 140))
    assert max(map(len, narrow.stdout.replace(str(tmp_path), "").splitlines())) <= 60
    assert re.search(
        r"\nslower +before ms +after ms +change\nnll_loss 10 classes 8x10 8 forward .* \+\d+\.\d%\n", result.stdout
    )
    assert re.search(rf"^NOISY: {after}: busy machine: other work took 99.0", result.stdout, re.MULTILINE)
    assert re.search(r"^commit +earlier +later$", result.stdout, re.MULTILINE)
    assert "times: 1 slower, 0 faster, 3 without a clear change" in result.stdout
    changes = json.loads(compared(after, before, "--json").stdout)
    assert [(each["name"], each["change"] < 0) for each in changes["faster"]] == [
        ("nll_loss 10 classes 8x10 8 forward", True)
    ]


def compared(*arguments: object, columns: int = 100) -> Result:
    """`bench compare`, which takes no device."""
    return invoke("bench", "compare", *arguments, columns=columns)


def test_the_whole_step_is_the_headline_of_a_comparison(tmp_path: Path) -> None:
    """A slower step whose layers are all faster."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    found = json.loads((Path(__file__).parents[1] / "benchmarks/results/cpu-step-smoke.json").read_text())
    before.write_text(json.dumps(found))
    layers = [row["forward"] for row in found["modes"]["staged"]["layers"] if row["forward"]]
    for time, factor in ((found["modes"]["fused"]["step"], 1.29), *((time, 0.5) for time in layers)):
        for field in ("median_ms", "low_ms", "high_ms"):
            time[field] *= factor
    after.write_text(json.dumps(found))
    (banners, steps, *others) = compared(before, after).stdout.split("\n\n")
    assert banners.startswith("NOISY: ")
    heading, fused, *_ = steps.splitlines()
    assert heading.startswith("whole step")
    assert re.match(r"fused step .* \+29\.0%  slower", fused)
    assert "layer 0.linear, forward" in others[1]
    assert not any(text in "".join([steps, *others]) for text in ("modes", "{", "}"))


@pytest.mark.parametrize(("option", "start"), [("--json", "{"), ("--html=-", "<!DOCTYPE html>")])
def test_json_or_a_page_on_stdout_replaces_the_tables(option: str, start: str) -> None:
    result = bench("ops", "--op", "relu", "--sizes", "4", option)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(start)
    assert "95% interval" not in result.stdout.splitlines()


def test_a_busy_machine_is_said_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy_cores", lambda: 2.0**16)
    first, *others = bench("--op", "relu", "--sizes", "4").stderr.splitlines()
    assert re.fullmatch(r"bench: busy machine: other work takes 65536\.0 of \d+ cores, so times will be noisy", first)
    assert any("timing" in line for line in others)


@pytest.mark.exhaustive
def test_trace_holds_a_process_for_each_mode(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert bench(str(training_runs.write_config(tmp_path)), "--trace", str(path)).exit_code == 0
    found = json.loads(path.read_text())
    processes = {e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert processes == {1: "eager step", 2: "staged step", 3: "fused step"}
    assert found["otherData"]["device"] == "cpu"


def test_operations_that_do_not_take_the_dtype_are_left_out_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [each for each in BENCHES if each.op in ("add", "softplus", "relu", "exp")]
    monkeypatch.setattr("adtrain.cli.bench.BENCHES", few)
    result = bench("--dtype", "int32", "--sizes", "4")
    ((_, *rows),) = tables(result)
    assert {row.split()[0] for row in rows} == {"add"}
    assert "bench: 3 operations do not take int32 and are left out: exp, softplus, relu" in result.stderr
    named = bench("--dtype", "int32", "--op", "exp")
    assert (named.exit_code, named.stdout) == (2, "")
    assert "adtrain: error: exp: " in named.stderr


@pytest.mark.parametrize("module", [ops, step])
def test_interrupt_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    def interrupted(*args: Any, **given: Any) -> Callable[..., Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "alternate", interrupted)
    given = ["--op", "relu"] if module is ops else [str(training_runs.write_config(tmp_path))]
    before = set(tmp_path.iterdir())
    result = bench(*given, "--json-file", str(tmp_path / "out.json"))
    assert (result.exit_code, result.stdout) == (130, "")
    assert "adtrain: interrupted" in result.stderr
    assert set(tmp_path.iterdir()) - before == {tmp_path / "cache"} - before


def test_noisy_and_busy_machines_are_warnings() -> None:
    quiet = Time(1.0, 1.0, 1.0, 1.0, 1.0, 9, 1, [], False)
    noisy = replace(quiet, noisy=True, outliers=[1.0])

    def result(load: float, *times: Time) -> ops.Ops:
        shared: dict[str, Any] = {
            "op": "neg",
            "variant": "",
            "n": 1,
            "size": "1",
            "phase": "forward",
            "dtype": "float32",
        }
        rows = [ops.OpTime(time=time, kernels=[], **shared, **vars(rates(1, 1, 1.0, PEAK))) for time in times]
        return ops.Ops(protocol=replace(machine.protocol("cpu", load), cores=2), ops=rows)

    assert warnings(result(0.3, quiet)) == []
    found = result(1.5, quiet, noisy)
    assert outliers(found).startswith("1 of 18 samples are outliers")
    assert warnings(found) == [
        "noisy machine: 1 of 2 times, marked ~, have an interval wider than 5% of the median; end other work and "
        "repeat",
        "busy machine: other work took 1.5 of 2 cores before anything was timed",
    ]
    assert time_text(noisy) == "~1.000"


@pytest.mark.parametrize(
    ("bytes", "flops", "shown"),
    [
        (50, 0, "50.0%"),
        (306, 0, "cached"),  # three times what the memory delivers
        (306, 10_000, "cached"),
        (90, 103_000, "103.0%"),  # bound by arithmetic: a measured peak can be exceeded a little
    ],
)
def test_bytes_faster_than_the_memory_are_said_to_be_cached(bytes: int, flops: int, shown: str) -> None:
    peak = Roofline(100.0, {"float32": 100_000.0})
    row = rates(flops, bytes, 1e-6, peak)
    assert of_peak(row) == shown
    assert bool(cache_note([row])) == (shown == "cached")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (1e-9, "0.000000"),
        (0.0012345, "0.001234"),
        (0.12345, "0.1235"),
        (12.345, "12.35"),
        (12345.0, "12345"),
        (-2.0, "-2.000"),
        (0.0, "0"),
    ],
)
def test_milliseconds_have_four_digits(ms: float, text: str) -> None:
    assert milliseconds(ms) == text
