"""The costs of a step from its Program: FLOPs against counts by hand, planned memory against measured memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from numpy.lib import tracemalloc_domain
from training_runs import load, prepare

from adtrain import config, training
from adtrain.training import LayerCost, StepCosts
from adtrain.training.costs import step_flops

BATCH = 16
CONV = (
    "[conv2d: {out_channels: 4, kernel_size: 3}, "
    "conv2d: {out_channels: 6, kernel_size: 3, stride: 2, padding: 1, groups: 2}, flatten, linear: 10, linear: 3]"
)
LARGE = (
    "[conv2d: {out_channels: 64, kernel_size: 3, padding: 1}, relu, conv2d: {out_channels: 64, kernel_size: 3}, relu, "
    "flatten, linear: 256, relu, linear: 3]"
)


@pytest.fixture
def costs(tmp_path: Path) -> StepCosts:
    cfg = load(tmp_path, "data.path=nowhere", "model.input=[1, 6, 6]", layers=CONV)
    return training.step_costs(training.outline(cfg))


def rows_of(costs: StepCosts) -> dict[str, LayerCost]:
    return {row.name: row for row in costs.layers}


def test_flops_of_convolutions_and_linear_layers_equal_a_count_by_hand(costs: StepCosts) -> None:
    """A multiply-add counts as two FLOPs, a bias as one. Backward needs two products, in the first layer one."""
    rows = rows_of(costs)
    first = BATCH * 2 * (4 * 4 * 4) * 9  # 4 channels of 4x4, windows 3x3 of 1 channel
    grouped = BATCH * 2 * (6 * 2 * 2) * 9 * 2  # 6 channels of 2x2, windows 3x3 of 2 of the 4 channels
    linear = BATCH * 2 * 24 * 10
    assert rows["0"].forward.flops == first + BATCH * 64
    assert rows["1"].forward.flops == grouped + BATCH * 24
    assert rows["3"].forward.flops == linear + BATCH * 10
    # the bias's gradient is a sum over the output gradient
    assert rows["0"].backward.flops == first + BATCH * 64
    assert rows["1"].backward.flops == 2 * grouped + BATCH * 24
    assert rows["3"].backward.flops == 2 * linear + BATCH * 10


def test_bytes_of_a_linear_layer_equal_a_count_by_hand(costs: StepCosts) -> None:
    x, w, b, y = BATCH * 24, 24 * 10, 10, BATCH * 10
    assert rows_of(costs)["3"].forward.bytes == 4 * ((x + w + y) + (y + b + y))
    assert rows_of(costs)["3"].backward.bytes == 4 * ((y + w + x) + (x + y + w) + (y + b))


def test_parts_of_a_step_that_are_not_layers_have_rows(costs: StepCosts) -> None:
    assert [row.name for row in costs.layers] == ["input", "0", "1", "2", "3", "4", "loss", "accuracy", "log"]
    rows = rows_of(costs)
    assert (rows["loss"].kind, rows["2"].kind, rows["2"].output_shape) == ("cross_entropy", "flatten", (24,))
    # the step gathers a batch, so the size of the data set does not matter
    assert rows["input"].forward.bytes < BATCH * (4 * 36 * 8 + 3 * 8)


@pytest.mark.parametrize("name", ["lenet5", "resnet"])
def test_layers_add_up_to_the_step_and_fusion_saves_bytes(name: str) -> None:
    costs = training.step_costs(training.outline(config.load(name)))
    for phase in ("forward", "backward"):
        of_layers = [getattr(row, phase) for row in costs.layers]
        for field in ("flops", "bytes"):
            assert sum(getattr(x, field) for x in of_layers) == getattr(costs.phases[phase], field)
    assert costs.fused.equations < costs.unfused.equations / 2
    assert costs.fused.flops <= costs.unfused.flops
    assert costs.fused.bytes < costs.unfused.bytes / 2


def test_the_memory_of_an_outline_includes_the_whole_data_set() -> None:
    cfg = config.load("smoke", ["data.validation=0.1"])
    assert training.step_costs(training.outline(cfg)).memory.data == 70_000 * (28 * 28 + 8)


def test_planning_and_fusion_each_reduce_the_peak() -> None:
    memory = training.step_costs(training.outline(config.load("resnet"))).memory
    assert memory.resident < memory.peak < memory.separate_peak < memory.unfused_peak


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def array_bytes() -> int:
    """The memory of all live NumPy arrays."""
    arrays = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, tracemalloc_domain)])
    return sum(trace.size for trace in arrays.traces)


def measured_peak(experiment: training.Experiment) -> int:
    """The peak memory of NumPy arrays while steps run."""
    take_steps = training.continuation(experiment, experiment.initial_state("cpu"))
    take_steps(1)
    between = array_bytes()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    take_steps(2)
    return between + tracemalloc.get_traced_memory()[1] - before


@pytest.mark.exhaustive
@pytest.mark.compiled
@pytest.mark.usefixtures("traced")
def test_the_planned_peak_is_within_five_percent_of_the_measured_peak(tmp_path: Path) -> None:
    experiment = prepare(tmp_path, "model.input=[1, 6, 6]", "data.batch_size=90", layers=LARGE)
    memory = training.step_costs(experiment).memory
    assert memory.values + memory.scratch > 0.25 * memory.peak
    assert measured_peak(experiment) == pytest.approx(memory.peak, rel=0.05)


@pytest.mark.parametrize("batch_size", [5, 12])
def test_the_flops_of_the_compiled_step_are_those_of_the_costs(tmp_path: Path, batch_size: int) -> None:
    """With batches of 12 the last batch of an epoch is smaller, and has a Program of its own."""
    experiment = prepare(tmp_path, f"data.batch_size={batch_size}", "training.epochs=1")
    assert step_flops(experiment) is None
    training.run(experiment)
    assert step_flops(experiment) == training.step_costs(experiment).fused.flops
