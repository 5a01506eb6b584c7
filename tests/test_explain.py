"""`adtrain explain`: each cause by a synthetic profile, predictions from costs, and the command end to end."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_samples
import numpy as np
import pytest
import training_runs
from browser import Browser, assert_fits
from command_line import command, invoke
from hypothesis import given
from hypothesis import strategies as st
from report_runs import assert_needs_no_network, one_line

from adtrain import config, ops, training
from adtrain.backends.cuda import H200
from adtrain.bench import explain, page
from adtrain.bench.explain import CAUSES, Explanation, causes, find, measure
from adtrain.bench.explain.causes import Finding, LastBatch, Observed, Operation, Pauses
from adtrain.bench.explain.measure import Measured, Steps, observe, tried
from adtrain.bench.machine import Roofline, rates
from adtrain.bench.profile import profile_steps
from adtrain.bench.result import text_lines
from adtrain.bench.view import duration
from adtrain.core.array import Placeholder
from adtrain.core.staging import stage
from adtrain.training import Mode, examples
from adtrain.training.costs import largest_batch, planned_peak

PEAK = Roofline(10.0, {"float32": 100.0, "float64": 50.0})


def operation(ms: float, flops: int = 0, nbytes: int = 0, **fields: Any) -> Operation:
    """An operation whose roofline is that of PEAK."""
    least = max(flops / 100.0, nbytes / 10.0) * 1e-6
    given = {"op": "matmul", "scope": "0.linear", "phase": "forward", "calls": 1, "share": 0.0, **fields}
    arithmetic = flops / 100.0 > nbytes / 10.0
    return Operation(**given, ms=ms, least_ms=least, arithmetic=arithmetic, **vars(rates(flops, nbytes, ms, PEAK)))


TINY = operation(0.001, 10, 16, op="add", scope="log")
PRODUCT = operation(1.0, 80_000_000, 1000)
OPTIMIZER = operation(0.5, 1000, 4_000_000, op="update", scope="", phase="update")


def observed(**changes: Any) -> Observed:
    """A healthy step of 128 examples, with changes. Every override is predicted to double the speed."""
    operations: Sequence[Operation] = changes.pop("operations", (PRODUCT, OPTIMIZER, TINY))
    fields: dict[str, Any] = {
        "device": "cpu", "mode": "fused", "precision": "float32", "batch_size": 128, "examples": 10_000, "threads": 2,
        "cores": 2, "busy": 0.0, "compiled": True, "operations": operations, "peak": PEAK, "gain_of": lambda _: 2.0,
        "step_ms": sum(x.ms for x in operations) + 0.01, **changes,
    }  # fmt: skip
    return Observed(**fields)


SLOW = operation(2.0, 1000, 1_000_000, op="softmax", scope="1.layer")
STEP_MS = observed().step_ms

SLOWDOWNS: dict[str, Observed] = {
    "small batch": observed(batch_size=7),
    "launches": observed(operations=[replace(TINY, calls=40, ms=0.04)]),
    "small last batch": observed(last_batch=LastBatch(2, 1.0, 5000.0, 1)),
    "float64": observed(precision="float64"),
    "float32 products": observed(device="gpu"),
    "unaligned width": observed(widths=[("model.layers.0", 509)], operations=[operation(4.0, 80_000_000), TINY]),
    "strided axis": observed(operations=[PRODUCT, TINY, replace(SLOW, strided=True)]),
    "own kernel": observed(operations=[PRODUCT, TINY, replace(SLOW, own=True)]),
    "too few blocks": observed(device="gpu", blocks=132, operations=[replace(SLOW, blocks=8), TINY]),
    "augmentation": observed(operations=[PRODUCT, TINY, replace(SLOW, scope="input+augment")]),
    "eager step": observed(mode="eager", fused_gain=5.0),
    "no compiler": observed(compiled=False, fused_gain=3.0),
    "few threads": observed(threads=1),
    "busy cores": observed(busy=1.5),
    "streamed data": observed(gather_ms=20.0, step_ms=20.0),
    "frequent evaluation": observed(evaluations=Pauses(5, 300, 10 * STEP_MS)),
    "frequent checkpoints": observed(checkpoints=Pauses(2, 300, 10 * STEP_MS)),
}


def test_every_cause_has_a_slowdown() -> None:
    assert list(CAUSES) == list(SLOWDOWNS)


@pytest.mark.parametrize("name", SLOWDOWNS)
def test_a_cause_is_the_first_one_named_for_its_slowdown(name: str) -> None:
    first = find(SLOWDOWNS[name])[0]
    assert first.cause == name
    assert first.predicted_gain >= causes.LEAST_GAIN
    assert first.evidence
    assert first.advice


def test_a_healthy_step_has_no_cause() -> None:
    assert find(observed()) == []


@pytest.mark.parametrize(
    ("name", "overrides", "gain"),
    [
        ("small batch", ["data.batch_size=128"], 2.0),
        ("launches", ["data.batch_size=512"], 2.0),
        ("float64", ["training.precision=float32"], 2.0),
        ("unaligned width", ["model.layers.0=512"], 4.011 / (4.011 - 2.4)),
        ("small last batch", ["data.batch_size=127"], None),
        ("augmentation", ["data.augment=null"], None),
        ("frequent evaluation", ["training.validate_every=191"], 3.0 * 0.95),
        ("frequent checkpoints", ["training.checkpoint_every=191"], 6.0 * 0.95),
        ("few threads", [], STEP_MS / (STEP_MS - 0.75)),
        ("busy cores", [], 1.75),
        ("streamed data", [], 20.0 / 1.501),
    ],
)  # fmt: skip
def test_a_proposal_has_overrides_and_a_gain(name: str, overrides: list[str], gain: float | None) -> None:
    first = find(SLOWDOWNS[name])[0]
    assert first.overrides == overrides
    if gain is not None:
        assert first.predicted_gain == pytest.approx(gain)


def test_a_change_that_the_config_does_not_accept_is_not_proposed() -> None:
    assert find(observed(batch_size=7, fits=lambda _: False)) == []


def test_a_change_is_proposed_once() -> None:
    """A small batch of tiny operations is too small for one reason or the other."""
    both = observed(batch_size=7, operations=[replace(TINY, calls=40, ms=0.04)])
    assert [x.cause for x in find(both)] == ["small batch"]


def test_threads_that_wait_are_no_launches() -> None:
    """On a busy machine every operation takes the time in which the other threads are not run."""
    waiting = observed(operations=[replace(TINY, ms=0.07)] * 40)
    assert waiting.bound(waiting.operations[0]) == "waiting threads"
    assert [x.cause for x in find(waiting)] == ["busy cores"]


def test_operations_too_short_for_the_clock_are_explained() -> None:
    found = find(observed(operations=[replace(TINY, ms=0.0)], step_ms=0.01, gather_ms=0.0))
    assert all(x.predicted_gain > 1 for x in found)


def test_a_small_gain_is_not_named() -> None:
    assert find(observed(batch_size=7, gain_of=lambda _: 1.03)) == []


def test_a_proposed_batch_size_leaves_no_small_rest() -> None:
    (size,) = (int(x.partition("=")[2]) for x in find(SLOWDOWNS["small last batch"])[0].overrides)
    assert 10_000 % size == 0 or 10_000 % size > size // 2


@pytest.mark.parametrize(
    "changes",
    [
        {"widths": [("model.layers.0", 10)], "operations": [operation(4.0, 80_000_000), TINY]},
        {"widths": [("model.layers.0", 512)], "operations": [operation(4.0, 80_000_000), TINY]},
        {"widths": [("model.layers.5", 509)], "operations": [operation(4.0, 80_000_000), TINY]},
        {"widths": [("model.layers.0", 509)]},
    ],
    ids=["narrow", "aligned", "another layer", "fast products"],
)
def test_only_wide_layers_with_slow_products_are_padded(changes: dict[str, Any]) -> None:
    assert find(observed(**changes)) == []


def test_an_operation_that_also_computes_a_layer_is_no_augmentation() -> None:
    fused = replace(SLOW, scope="input+augment+0.conv2d")
    assert find(observed(operations=[PRODUCT, TINY, fused])) == []


def test_evaluation_within_short_epochs_is_left_out() -> None:
    short = observed(evaluations=Pauses(5, 20, 10 * STEP_MS))
    assert find(short)[0].overrides == ["training.validate_every=null"]


@pytest.mark.parametrize(
    ("found", "bound"),
    [
        (TINY, "launch"),
        (PRODUCT, "arithmetic"),
        (OPTIMIZER, "memory"),
        (operation(0.1, 1000, 4_000_000), "cache"),
        (SLOW, "unknown"),
        (replace(SLOW, strided=True), "strided axis"),
        (replace(SLOW, own=True), "own kernel"),
        (replace(PRODUCT, blocks=8), "too few blocks"),
    ],
)
def test_what_binds_an_operation(found: Operation, bound: str) -> None:
    assert observed(blocks=132).bound(found) == bound


def test_shares_of_limits_add_up_to_the_step() -> None:
    assert sum(observed().bounds().values()) == pytest.approx(1.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few samples, a small roofline, and an idle machine."""
    bench_samples.shorten(monkeypatch)
    bench_samples.small_roofline(monkeypatch, "roofline of explanations")
    monkeypatch.setattr(measure, "MOST_SAMPLES", 3)
    monkeypatch.setattr(measure, "WARM_UP_S", 0.0)
    monkeypatch.setattr("adtrain.bench.explain.busy_cores", lambda: 0.0)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(training_runs.write_config(tmp_path))


def of_config(path: str, *overrides: str, mode: Mode = Mode.FUSED) -> tuple[Measured, Observed]:
    measured = Measured(lambda more: config.load(path, [*overrides, *more]), "cpu", mode)
    return measured, observe(measured, PEAK, 0.0)


def test_the_observed_step_is_that_of_the_config(quick: None, path: str) -> None:
    _, found = of_config(path, "data.validation=0.2", "training.validate_every=2", "training.checkpoint_every=3")
    assert (found.batch_size, found.examples, found.mode, found.precision) == (16, 72, "fused", "float32")
    assert found.widths == [("model.layers.0", 16)]
    assert found.wider("model.layers.0", 32) == "model.layers.0={linear: {out_features: 32}}"
    assert found.evaluations is not None
    assert found.evaluations[:2] == (2, 5)
    assert found.checkpoints is not None
    assert found.checkpoints[:2] == (3, 5)
    assert found.last_batch is not None
    assert found.last_batch.examples == 8
    assert found.gather_ms is None
    assert {x.phase for x in found.operations} == {"forward", "backward", "update"}


def test_the_prediction_for_the_same_step_is_no_gain(quick: None, path: str) -> None:
    _, found = of_config(path)
    assert found.gain_of([]) == pytest.approx(1.0)


@pytest.fixture
def known_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused step takes 3 ms and 0.5 ms for each example, an eager one three times as long."""

    def times(*compared: Steps) -> list[float]:
        factors = [3 if x.experiment.mode is Mode.EAGER else 1 for x in compared]
        return [factor * (3 + 0.5 * x.experiment.full_batch) for factor, x in zip(factors, compared, strict=True)]

    monkeypatch.setattr(measure, "fastest", times)


@pytest.mark.parametrize("mode", [Mode.FUSED, Mode.EAGER])
def test_the_gain_of_a_larger_batch_follows_the_times_of_other_sizes(
    quick: None, path: str, known_law: None, mode: Mode
) -> None:
    _, found = of_config(path, "data.batch_size=4", mode=mode)
    assert found.gain_of(["data.batch_size=32"]) == pytest.approx((3 + 2) / 4 * 32 / (3 + 16))


def test_the_gain_of_a_fused_step_follows_the_times_of_other_sizes(quick: None, path: str, known_law: None) -> None:
    _, found = of_config(path, mode=Mode.EAGER)
    assert found.fused_gain == pytest.approx(3)


def test_the_gain_of_a_batch_size_is_timed_once(quick: None, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causes that propose the same batch size have the same gain."""
    calls: list[int] = []

    def times(*compared: Steps) -> list[float]:
        calls.append(len(compared))
        return [1.0] * len(compared)

    monkeypatch.setattr(measure, "fastest", times)
    _, found = of_config(path, "data.batch_size=4")
    assert found.gain_of(["data.batch_size=32"]) == found.gain_of(["data.batch_size=32"])
    assert calls == [3]


@given(
    constant=st.floats(0, 100), each=st.floats(1e-3, 10), sizes=st.sets(st.integers(1, 4096), min_size=3, max_size=3)
)
def test_a_time_on_a_line_is_predicted_from_two_others(constant: float, each: float, sizes: set[int]) -> None:
    few, many, size = sorted(sizes)
    for known, new in (((few, many), size), ((many, size), few)):
        found = measure.on_line(known, [constant + each * n for n in known], new)
        assert found == pytest.approx(constant + each * new)


@given(ms=st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)))
def test_disturbed_times_predict_neither_a_negative_constant_nor_a_negative_slope(ms: tuple[float, float]) -> None:
    predicted = measure.on_line((32, 64), ms, 128)
    assert ms[1] <= predicted <= 2 * ms[1]


@pytest.mark.parametrize(
    ("examples", "size", "others"), [(4096, 1024, [256, 512]), (4096, 256, [512, 1024]), (512, 256, [64, 128])]
)
def test_steps_of_other_sizes_have_the_operations_of_the_new_one(
    path: str, examples: int, size: int, others: list[int]
) -> None:
    """From 256 rows on, more operations of this network are fused. Four times the batch may exceed the examples."""
    experiment = training.outline(config.load(path, [f"data.batch_size={examples}"]))
    found = measure.other_sizes(measure._resized(experiment, size), "cpu")
    assert [x.full_batch for x in found] == others


def test_the_size_of_a_step_is_a_multiple_of_its_shards(path: str) -> None:
    experiment = training.outline(config.load(path, ["data.batch_size=64", "data.shards=4"]))
    assert [measure._resized(experiment, n).full_batch for n in (1, 4, 18)] == [4, 4, 16]


def test_a_width_fits_only_where_the_layers_after_it_accept_it(quick: None, tmp_path: Path) -> None:
    layers = "[{linear: 12}, {reshape: [3, 4]}, flatten, {linear: 3}]"
    path = str(training_runs.write_config(tmp_path))
    _, found = of_config(path, f"model.layers={layers}")
    assert found.fits(["data.batch_size=8"])
    assert not found.fits(["model.layers.0.linear=13"])
    assert not found.fits(["training.precision=bfloat16"])


@pytest.mark.parametrize(
    ("function", "strided"),
    [
        (lambda x: ops.softmax(x, axis=1), True),
        (lambda x: ops.softmax(x, axis=-1), False),
        (lambda x: ops.sum(x, axis=1), True),
        (lambda x: ops.sum(x, axis=(1, 2)), False),
        (lambda x: ops.sum(x, axis=0), False),
    ],
    ids=["softmax over columns", "softmax over rows", "sum of columns", "sum of rows", "sum over the batch"],
)
def test_an_axis_with_few_elements_after_it_is_strided(function: Callable[[Any], Any], strided: bool) -> None:
    program = stage(function).program(Placeholder((2, 3, 4), np.dtype(np.float32), "cpu"))
    assert any(map(measure._is_strided, program.equations)) == strided


def test_an_axis_with_many_elements_after_it_is_not_strided() -> None:
    x = Placeholder((2, 3, 16), np.dtype(np.float32), "cpu")
    (softmax,) = stage(lambda x: ops.softmax(x, axis=1)).program(x).equations
    assert not measure._is_strided(softmax)


def test_streamed_data_have_the_time_to_read_a_batch(quick: None, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "_usable_in_place", lambda images, device: False)
    monkeypatch.setattr(examples, "_copy_limit", lambda device: 0)
    _, found = of_config(path)
    assert found.gather_ms is not None
    assert found.gather_ms > 0


def test_float32_halves_the_work_of_float64(quick: None, path: str) -> None:
    """Of operations that reach half of the roofline."""
    measured, found = of_config(path, "training.precision=float64")
    half = [replace(x, ms=2 * x.least_ms) for x in found.operations]
    step_ms = sum(x.ms for x in half)
    double = ["training.precision=float64"]
    predicted = measure.Predictor(measured, PEAK, half, step_ms)
    assert predicted.gain(double) == pytest.approx(1.0)
    assert predicted.gain(["training.precision=float32"]) == pytest.approx(2.0, rel=0.1)


def test_a_trial_measures_the_changed_step(quick: None, path: str) -> None:
    measured, _ = of_config(path)
    assert tried(measured, ["data.batch_size=64"]) > 0


def test_rows_of_a_profile_take_the_typical_time(path: str) -> None:
    experiment = training.prepare(config.load(path))
    run_steps = training.continuation(experiment, experiment.initial_state("cpu"))
    zero: Callable[[Any], float] = lambda times: 0.0  # noqa: E731
    assert {row.ms for row in profile_steps(run_steps, 1, typical=zero).rows} == {0.0}


def test_the_largest_batch_fits_and_a_larger_one_does_not(path: str) -> None:
    experiment = training.prepare(config.load(path))

    def peak(size: int) -> int:
        return planned_peak(training.prepare(config.load(path, [f"data.batch_size={size}"])), "cpu")

    limit = peak(50)
    found = largest_batch(experiment, "cpu", limit)
    assert 40 <= found <= 50
    assert peak(found) <= limit
    assert largest_batch(experiment, "cpu", limit * 100) == len(experiment.train)
    assert largest_batch(experiment, "cpu", 1) == 0


KEYS = {
    "kind", "date", "command", "config", "mode", "precision", "examples", "step", "also", "findings", "run_seconds",
    "start", "streamed", "gather_ms", "evaluation_ms", "memory", "nearly_fused", "warnings",
}  # fmt: skip
STEP_KEYS = {
    "device", "device_name", "batch_size", "step_ms", "host_ms", "examples_per_second", "bounds", "operations",
}  # fmt: skip
FINDING_KEYS = {"cause", "evidence", "advice", "overrides", "predicted_gain", "of", "measured_gain"}


def test_json_has_all_that_is_known(quick: None, path: str) -> None:
    found = json.loads(command("explain", path, "--device", "cpu", "--json", "--try").stdout)
    assert set(found) == KEYS
    assert found["findings"], "a batch of 16 on a tiny network is too small"
    assert all(set(x) <= FINDING_KEYS for x in found["findings"])
    assert any(x.get("measured_gain") for x in found["findings"])
    assert not any("measured_gain" in x for x in found["findings"] if not x["overrides"] or x["of"] == "epoch")
    assert set(found["step"]) == STEP_KEYS
    assert {"operation", "bound"} == set(found["step"]["operations"][0])


def test_an_eager_step_is_a_cause(quick: None, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.Predictor, "fused_gain", lambda predictor: 2.0)  # else it depends on measured times
    found = json.loads(command("explain", path, "--device", "cpu", "--eager", "--json").stdout)
    assert found["mode"] == "eager"
    assert "eager step" in [x["cause"] for x in found["findings"]]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_terminal(quick: None, path: str, width: int) -> None:
    lines = invoke("explain", path, "--device", "cpu", columns=width).stdout.splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for start in ("tiny on cpu", "bound by: ", "1. ", "operation ", "start: ", "data: ", "memory: "):
        assert f"\n{start}" in f"\n{text}", text


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    """A step on the CPU, and one of half its time in place of that on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        bench_samples.shorten(patch)
        bench_samples.small_roofline(patch, "roofline of explanations")
        patch.setattr(measure, "MOST_SAMPLES", 3)
        patch.setattr(measure, "WARM_UP_S", 0.0)
        path = str(training_runs.write_config(tmp_path_factory.mktemp("explained")))
        found = explain.result(path, [], [], "cpu", [], training.Mode.FUSED, False, lambda _: None)
    half = replace(found.step, device="gpu", device_name="a GPU", step_ms=found.step.step_ms / 2)
    return replace(found, also=[half], findings=[PROPOSED])


def test_a_fusion_of_a_gpu_that_nearly_applies_is_explained(explained: Explanation) -> None:
    found = measure.nearly_fused(training.outline(config.load("poisson")), H200)
    assert found == ["The fusion row_chain nearly applies: a step has 1,024 rows, expected at least 2,048."]
    assert found[0] in text_lines(replace(explained, nearly_fused=found), 120)
    assert found[0] in page.render(replace(explained, nearly_fused=found))


PROPOSED = Finding(cause="small batch", evidence="16 < 64", advice="use 128", overrides=["data.batch_size=128"],
                   predicted_gain=2.0, of="step")  # fmt: skip


def test_the_page_has_each_operation_and_proposal_and_both_devices(explained: Explanation) -> None:
    text = page.render(explained)
    for row in explained.step.operations:
        assert f"{duration(row.operation.ms)}, {row.bound}" in text
    assert "use 128: --set data.batch_size=128" in text
    assert explained.command in html.unescape(text)
    assert explained.date in text
    for step in (explained.step, *explained.also):
        assert f"{step.device}, {duration(step.step_ms)}" in text
    assert "2.00 x the speed of cpu" in text


def test_the_page_fits_wide_and_narrow_windows(explained: Explanation, tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "explain.html").write_text(page.render(explained))
    assert_fits(browser, tmp_path / "explain.html")


def test_a_page_is_written(quick: None, path: str, tmp_path: Path) -> None:
    done = command("explain", path, "--device", "cpu", "--html", tmp_path / "page.html")
    assert f"wrote {tmp_path / 'page.html'}" in done.stderr
    refused = one_line(command("explain", path, "--html", tmp_path / "page.txt", expect=2))
    assert "page.txt: found the extension .txt, expected .html" in refused
    assert_needs_no_network((tmp_path / "page.html").read_text())


def test_also_names_another_device_than_the_step_runs_on(path: str) -> None:
    assert "--also cpu" in one_line(command("explain", path, "--device", "cpu", "--also", "cpu", expect=2))


def test_a_run_is_explained_by_its_config(quick: None, path: str, tmp_path: Path) -> None:
    command("train", path, "--epochs", 1, "--output-dir", tmp_path / "run", "--device", "cpu", "-q")
    run = tmp_path / "run"
    text = command("explain", run, "--device", "cpu").stdout
    assert text.startswith("tiny on cpu")
    assert "\nrun: " in text
    assert "training" in json.loads(command("explain", run, "--device", "cpu", "--json").stdout)["run_seconds"]
    assert json.loads(command("explain", path, "--device", "cpu", "--json").stdout)["run_seconds"] == {}


def test_a_wrong_file_is_one_line(tmp_path: Path) -> None:
    assert "nowhere.yaml" in one_line(command("explain", tmp_path / "nowhere.yaml", "--device", "cpu", expect=2))


def test_a_missing_gpu_is_one_line(path: str, without_gpu: None) -> None:
    assert "device gpu" in one_line(command("explain", path, "--device", "gpu", expect=2))
