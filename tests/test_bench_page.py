"""Pages of `adtrain bench --html` against the JSON of the same result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import bench_samples
import pytest
import training_runs
from browser import Browser, assert_fits
from command_line import command
from hypothesis import given
from hypothesis import strategies as st
from report_runs import Elements, assert_needs_no_network

from adtrain.backends.cpu.naive import LABEL as NAIVE
from adtrain.bench import compare, machine, page
from adtrain.bench.against import COLOURS
from adtrain.bench.machine import Roofline
from adtrain.bench.page import HEIGHT, LETTER, LINE, WIDTH, Dot, Scale, rooflines
from adtrain.bench.result import Result, TimedResult, outliers, timings
from adtrain.bench.view import Ratio, duration, factor, milliseconds
from adtrain.config import records
from adtrain.config.records import plain
from adtrain.report.plot import Axis, Plot, log_ticks

COMMANDS = {
    "ops": ["ops", "--op", "matmul", "--op", "relu", "--op", "transpose", "--sizes", "4,8"],
    "step": ["step", "CONFIG", "--batch-sizes", "8,16"],
}
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STORED = {"against": ["cpu-mlp-small-64-sgd"], "against-ops": ["cpu-operations"],
          "devices": ["gpu-analysis", "gpu-analysis-steps"], "candidates": ["gpu-candidates"],
          "race": ["cpu-race-mnist-99-torch"]}  # fmt: skip
KINDS = [*COMMANDS, *STORED, "compare"]


@pytest.fixture(scope="module")
def short_samples() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        bench_samples.shorten(patch)
        bench_samples.small_roofline(patch, "roofline of pages")
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, short_samples: None) -> Path:
    """A folder with a result of each kind, measured here or stored, as JSON and as a page."""
    folder = tmp_path_factory.mktemp("made")
    cfg = str(training_runs.write_config(folder))
    for name, arguments in COMMANDS.items():
        given = [cfg if argument == "CONFIG" else argument for argument in arguments]
        files: list[str | Path] = ["--json-file", folder / f"{name}.json", "--html", folder / f"{name}.html"]
        command("bench", *given, "--device", "cpu", *files)
    after = read(folder, "ops")
    time = after["ops"][0]["time"]
    time.update(dict.fromkeys(("median_ms", "low_ms", "high_ms"), 1000 * time["high_ms"]))
    (folder / "after.json").write_text(json.dumps({**after, "protocol": {**after["protocol"], "commit": "a<b>&c"}}))
    files = ["--json-file", folder / "compare.json", "--html", folder / "compare.html"]
    command("bench", "compare", folder / "ops.json", folder / "after.json", *files)
    for name, stored in STORED.items():
        parts = [read(RESULTS, part) for part in stored]
        result = {key: value for part in reversed(parts) for key, value in part.items()}
        (folder / f"{name}.json").write_text(json.dumps(result))
        (folder / f"{name}.html").write_text(rendered(result))
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def rendered(values: dict[str, Any]) -> str:
    """The page of the result in JSON values."""
    return page.render(result_of(values))


def result_of(values: dict[str, Any]) -> Result:
    if values["kind"] == "compare":
        found: Result = records.check(compare.Compare, values, "")
        return found
    return compare.parse(values, "")


def shown(folder: Path, name: str) -> Elements:
    return Elements((folder / f"{name}.html").read_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_page_is_a_function_of_the_json(made: Path, name: str) -> None:
    assert rendered(read(made, name)) == (made / f"{name}.html").read_text()


@pytest.mark.parametrize("name", KINDS)
def test_page_needs_no_network(made: Path, name: str) -> None:
    assert_needs_no_network((made / f"{name}.html").read_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS[1::2])
def test_page_fits_wide_and_narrow_windows_in_light_and_dark(made: Path, browser: Browser, name: str) -> None:
    assert_fits(browser, made / f"{name}.html")


def test_page_shows_times_of_operations(made: Path) -> None:
    found, rows = shown(made, "ops"), read(made, "ops")["ops"]
    best = max(row["gflops_per_s"] for row in rows)
    assert found.by_id["operations"] == "3"
    assert found.by_id["times"] == f"{len(rows)}"
    assert found.by_id["most-GFLOP/s"] == f"{best:,.1f}"
    listed = [row for row in found.rows if len(row) == 8][-len(rows) :]
    for cells, row in zip(listed, rows, strict=True):
        assert cells[:3] == [f"{row['op']} {row['variant']}".strip(), row["size"], row["phase"]]
        assert cells[3].lstrip("~") == milliseconds(row["time"]["median_ms"])
        assert cells[3].startswith("~") == row["time"]["noisy"]


def test_page_shows_a_config_by_mode_and_layer(made: Path) -> None:
    found, result = shown(made, "step"), read(made, "step")
    modes = result["modes"]
    assert found.by_id["step-fused"] == duration(modes["fused"]["step"]["median_ms"])
    assert found.by_id["examples/s"] == f"{modes['fused']['images_per_second']:,.0f}"
    by_name = {row[0]: row for row in found.rows if row}
    for name, row in modes.items():
        assert by_name[name][1].lstrip("~") == milliseconds(row["step"]["median_ms"])
    for row in modes["staged"]["layers"]:
        cells = by_name[row["layer"] or "(no layer)"]
        for phase, cell in zip(("forward", "backward", "update"), cells[2:5], strict=True):
            assert cell.lstrip("~") == (milliseconds(row[phase]["median_ms"]) if row[phase] else "")
    for size, row in result["batch_sizes"].items():
        assert by_name[size][3] == f"{row['images_per_second']:,.0f}"


def test_a_noisy_headline_is_grey_and_has_its_interval(made: Path) -> None:
    result = read(made, "step")
    time = result["modes"]["fused"]["step"]
    for noisy in (True, False):
        time.update(median_ms=2.0, low_ms=1.0, high_ms=4.0, noisy=noisy)
        text = rendered(result)
        assert ("noisy: 1 ms to 4 ms" in text) == noisy
        assert ('<div class="noisy"><dt>step, fused</dt>' in text) == noisy


def test_a_rate_above_that_of_a_large_copy_is_marked_cached(made: Path) -> None:
    result = read(made, "ops")
    copy = result["protocol"]["roofline"]["gbytes_per_s"]
    for row, times in zip(result["ops"], (0.5, 3.0), strict=False):
        row.update(of_roofline=times, gbytes_per_s=times * copy, from_cache=times > 1)
    for row in result["ops"][2:]:
        row.update(of_roofline=None, from_cache=False)
    found = [row[7] for row in Elements(rendered(result)).rows if len(row) == 8][-len(result["ops"]) :]
    assert found == ["50.0%", "cached", *[""] * (len(found) - 2)]


def test_operations_furthest_from_the_peak_come_first(made: Path) -> None:
    result = read(made, "ops")
    count = len({(row["op"], row["variant"], row["phase"]) for row in result["ops"]})
    rows = [row for row in Elements(rendered(result)).rows if len(row) == 8][:count]
    shares = [float(row[7].rstrip("%")) for row in rows if row[7] not in ("", "cached")]
    assert shares == sorted(shares)


def test_arrows_lead_from_the_staged_operations_to_the_fused_ones(made: Path) -> None:
    result = read(made, "step")
    for mode in ("staged", "fused"):
        for row in result["modes"][mode]["ops"]:
            row["share"] = 0.1  # on a busy machine, an operation may have too small a share to be drawn
    text = rendered(result)
    assert "staged and fused" in text
    assert 0 < text.count('class="arrow"') <= len(result["modes"]["staged"]["ops"])


def ratio_of(record: dict[str, float]) -> Ratio:
    return Ratio(record["median"], record["low"], record["high"])


def test_page_shows_the_systems_of_a_step(made: Path) -> None:
    found, (step,) = shown(made, "against"), read(made, "against")["steps"]
    (cells,) = (row for row in found.rows if row[:1] == ["numpy"])
    ratio = step["ratios"]["numpy"]
    assert cells[1].lstrip("~") == milliseconds(step["times"]["numpy"]["median_ms"])
    assert cells[2:4] == [factor(ratio["median"]), str(ratio_of(ratio))]
    assert cells[6] == f"{step['peak_mib']['numpy']:,.0f}"


def test_page_shows_ratios_of_operations(made: Path) -> None:
    found, rows = shown(made, "against-ops"), read(made, "against-ops")["operations"]
    by_name = {row[0]: row for row in found.rows if row}
    assert rows
    for row in rows:
        ratio = row["ratios"].get("numpy")
        told = f"{factor(ratio['median'])}{ratio_of(ratio)}" if ratio else ""
        cells = by_name[f"{row['op']} {row['size']}, {row['phase']}"]
        assert cells[1].lstrip("~") == milliseconds(row["times"]["adtrain"]["median_ms"])
        assert told in cells[3:]


def test_page_shows_where_the_gpu_is_faster(made: Path) -> None:
    found, result = shown(made, "devices"), read(made, "devices")
    operation, config = result["operations"][0], result["configs"][-1]
    where = operation["crossover"]
    assert ["matmul", operation["what"], *(where[label]["says"] for label in ("gpu", "gpu+copies"))] in found.rows
    by_name = {row[0]: row for row in found.rows if row}
    for label in (NAIVE, "cpu", "gpu", "gpu+copies"):
        assert by_name[label][1].lstrip("~") == milliseconds(config["times"][label]["median_ms"])
    grid = [f"{row['gbytes_per_s']:,.0f}" for row in result["launch"]["rows"] if not row["rule"]]
    assert set(grid) <= {cell for row in found.rows for cell in row}


def test_page_shows_whole_steps_and_noise_first(made: Path) -> None:
    step = {"name": "fused step", "before_ms": 1.0, "after_ms": 1.29, "before_noisy": False,
            "after_noisy": True, "change": 0.29, "verdict": "slower"}  # fmt: skip
    result = {**read(made, "compare"), "steps": [step], "noise": ["a.json: busy <machine>"]}
    found = Elements(text := rendered(result))
    assert found.headings[0] == "Whole steps and trainings"
    assert ["fused step", "1.000", "~1.290", "+29.0%", "slower"] in found.rows
    assert '<p class="notice">a.json: busy &lt;machine&gt;</p>' in text


def test_page_shows_changed_times(made: Path) -> None:
    found, result = shown(made, "compare"), read(made, "compare")
    assert (found.by_id["slower"], found.by_id["faster"]) == ("1", "0")
    (change,) = result["slower"]
    marks = ["~" if change[f"{when}_noisy"] else "" for when in ("before", "after")]
    times = [mark + milliseconds(change[f"{when}_ms"]) for mark, when in zip(marks, ("before", "after"), strict=True)]
    assert [change["name"], *times, f"{change['change']:+.1%}"] in found.rows
    assert ["commit", result["protocol"]["commit"][0] or "", "a<b>&c"] in found.rows  # none outside a clone


@pytest.mark.parametrize("name", ["ops", "step", "against", "devices"])
def test_page_shows_the_protocol(made: Path, name: str) -> None:
    text, result = (made / f"{name}.html").read_text(), read(made, name)
    found = result_of(result)
    assert isinstance(found, TimedResult)
    for field in ("date", "device_name", "compiler"):
        assert result["protocol"][field] in text
    assert outliers(found) in text
    noisy = sum(time.noisy for time in timings(found))
    assert (f"noisy machine: {noisy} of" in text) == (noisy > 0)


def test_page_lists_kernel_candidates() -> None:
    kernels = [
        {"kernel": f"k<{i}>", "us": 2.0 + i, "gflops_per_s": 1.0, "gbytes_per_s": 1.0, "rule": i > 0, "chosen": i == 0}
        for i in range(2)
    ]
    problem = {"problem": "matmul 4x4", "params": {"precision": "tf32"}, "candidates": kernels}
    result = {
        "kind": "candidates",
        "protocol": plain(machine.protocol("cpu", None), sparse=True),
        "candidates": [problem],
    }
    rows = Elements(rendered(result)).rows
    assert [row for row in rows if row] == [
        ["k<0>", "2.00", "1", "1", "100%", "chosen"],
        ["k<1>", "3.00", "1", "1", "67%", "rule"],
    ]


def test_peer_with_other_losses_has_no_ratio_on_the_page(made: Path) -> None:
    result = read(made, "against")
    result["steps"][0].update(ratios={}, different=["numpy"], failed={"jax-jit": "out of <memory>"})
    text = rendered(result)
    (row,) = (row for row in Elements(text).rows if row[:1] == ["numpy"])
    assert row[2:5] == ["DIFFERENT", "", ""]
    assert "jax-jit failed: out of &lt;memory&gt;" in text


def test_peer_in_another_precision_is_described_and_is_not_the_fastest(made: Path) -> None:
    result = read(made, "against")
    (step,) = result["steps"]
    for part in ("times", "ratios", "peak_mib", "off"):
        step[part]["torch-max-tf32"] = step[part]["numpy"]
    step["ratios"]["torch-max-tf32"] = dict.fromkeys(step["ratios"]["numpy"], 0.001)
    shown = rendered(result)
    assert "torch-max-tf32 computes in tf32; its losses must be within a relative 0.02" in shown
    assert "the fastest peer: jax-scan" in shown


def test_every_peer_has_a_column_of_ratios(made: Path) -> None:
    result = read(made, "against")
    (step,) = result["steps"]
    names = [f"peer-{i}" for i in range(len(COLOURS) + 2)]
    for part in ("times", "ratios", "peak_mib", "off"):
        step[part] |= dict.fromkeys(names, step[part]["numpy"])
    result["steps"].append({**step, "config": "another"})
    heads = re.findall("<th[^>]*>(peer-[0-9]+)", rendered(result))
    assert heads == names


def test_several_configs_share_one_table_of_ratios(made: Path) -> None:
    result = read(made, "against")
    alone = Elements(rendered(result))
    (step,) = result["steps"]
    result["steps"].append({**step, "config": "another", "batch_size": 7})
    together = Elements(rendered(result))
    assert "Ratios" not in alone.headings
    assert together.headings[:3] == ["Ratios", step["config"], "another"]
    named = [row[0] for row in together.rows if row]
    assert {f"{step['config']} batch {step['batch_size']}", "another batch 7"} <= set(named)


numbers = st.floats(1e-9, 1e12)
milliseconds_taken = st.just(0.0) | st.floats(1e-6, 1e3)


@given(numbers, numbers)
def test_logarithmic_ticks_enclose_the_values(a: float, b: float) -> None:
    low, high = sorted((a, b))
    found = log_ticks(low, high)
    assert 2 <= len(found) <= 9
    assert found[0] <= low * 1.002
    assert found[-1] >= high * 0.998
    assert list(found) == sorted(set(found))
    assert (1.0 in found) == (found[0] <= 1 <= found[-1])


@given(st.tuples(numbers, numbers), numbers)
def test_equal_factors_are_equal_distances(ends: tuple[float, float], factor: float) -> None:
    low, high = sorted(ends)
    axis = Axis("", log_ticks(low, high), logarithmic=True)
    plot = Plot("", axis, axis)
    (left, top), (middle, centre), (right, bottom) = (
        plot.at(x, x) for x in (axis.ticks[0], math.sqrt(axis.ticks[0] * axis.ticks[-1]), axis.ticks[-1])
    )
    assert middle == pytest.approx((left + right) / 2)
    assert centre == pytest.approx((top + bottom) / 2)


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**9), milliseconds_taken), max_size=30))
def test_roofline_has_a_point_for_each_operation_with_flops(work: list[tuple[int, int, float]]) -> None:
    dots = [Dot("op", f"dot {i}", *each) for i, each in enumerate(work)]
    peak = Roofline(100.0, {"float32": 1000.0})
    text = rooflines({"forward": dots}, peak, "float32")
    computing = [dot for dot in dots if dot.flops and dot.bytes and dot.ms]
    assert text.count("<circle") == len(computing)
    by_memory = sum(dot.flops / dot.bytes < 10 for dot in computing)
    assert text.count('class="marker memory"') == by_memory
    circles = re.findall(r'<circle class="[^"]*" cx="([\d.-]+)" cy="([\d.-]+)"', text)
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in circles)
    if computing and len(computing) < len(dots):
        assert f"{len(dots) - len(computing)} without FLOPs are left out" in text


@given(st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9), st.floats(1e-3, 1e3)), min_size=1, max_size=20))
def test_names_in_the_roofline_do_not_overlap(work: list[tuple[int, int, float]]) -> None:
    dots = [Dot(f"operation {i}", "", *each) for i, each in enumerate(work)]
    text = rooflines({"forward": dots}, Roofline(100.0, {"float32": 1000.0}), "float32")
    places = [(float(x), float(y)) for x, y in re.findall(r'class="name" x="([\d.-]+)" y="([\d.-]+)"', text)]
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)
    shortest = len("operation 0") * LETTER
    for (x, y), (other_x, other_y) in combinations(places, 2):
        assert abs(x - other_x) > shortest - 0.2 or abs(y - other_y) > LINE - 0.2


ratios = st.tuples(st.floats(1e-6, 1e6), st.floats(1, 2), st.floats(1, 2)).map(
    lambda found: Ratio(found[0], found[0] / found[1], found[0] * found[2])
)


@given(st.lists(ratios, min_size=1))
def test_scale_covers_all_intervals_and_one(found: list[Ratio]) -> None:
    scale = Scale(found)
    assert 0 <= scale.percent(1.0) <= 100
    assert scale.axis().count("<span") == len(scale.ticks)
    for ratio in found:
        low, median, high = map(scale.percent, (ratio.low, ratio.median, ratio.high))
        assert -0.5 <= low <= median <= high <= 100.5
        assert (low > scale.percent(1.0)) == (ratio.low > 1)


def test_a_point_far_below_the_others_is_drawn_at_the_border() -> None:
    dots = [Dot("large", "large", 10**9, 10**7, 1.0), Dot("tiny", "tiny", 1, 10**9, 1.0)]
    text = rooflines({"all": dots}, Roofline(100.0, {"float32": 2000.0}), "float32")
    assert "10⁻⁶" not in text
    assert text.count("<circle") == 2
