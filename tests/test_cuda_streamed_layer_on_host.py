"""The streamed first layer of a sweep's members, compiled for the CPU: against NumPy, and by the number of members."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, assert_same_in_another_order, host
from npz_files import parts, write_npz
from test_cuda_members_on_host import BY_MEMBER, results
from test_cuda_resident_steps_on_host import arguments_of, assert_near, step_program

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.batch_prefetch import prefetch_batch
from adtrain.backends.cuda.forms.streamed_layer import STREAMED_LAYER, streamed_equations
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.core.kernel import Target
from adtrain.core.program import Program
from adtrain.passes.plan_memory import plan_memory

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

SMALL_SHARED = BY_MEMBER._replace(shared=56 << 10)
"""A target on which the layers of these tests do not stay on chip."""


def streamed_program(count: int, *settings: str, order: str = "own", target: Target = SMALL_SHARED) -> Program:
    program = step_program(count, *settings, order=order, target=target)
    assert len(streamed_equations(program)) == 2
    return program


@pytest.fixture
def streaming(host: Host) -> Host:
    host.lowering = Lowering(SMALL_SHARED)
    return host


def repeated(host: Host, program: Program, known: dict[Any, np.ndarray], steps: int) -> list[np.ndarray]:
    """The outputs of several steps, as repeated runs compute them on a GPU."""
    known = dict(known)
    runs = prefetch_batch(program, host.lowering.target)
    assert runs.steady is not None
    donated = [v for v in runs.steady.inputs if v in runs.steady.donated]

    def run(equations: Any) -> None:
        for e in equations:
            arrays = [known[v] for v in e.inputs]
            if host.lowering.launches(e):
                found = host.computed(e, None, arrays)
            else:
                found = [x.reshape(v.stored.shape) for v, x in zip(e.outputs, arrays, strict=True)]  # a view
            known.update(zip(e.outputs, found, strict=True))

    run(runs.prologue)
    for _ in range(steps - 1):
        run(runs.steady.equations)
        known.update(zip(donated, [known[v] for v in runs.steady.outputs], strict=True))
    run(runs.epilogue.equations)
    return [known[v] for v in program.outputs]


def stepwise(host: Host, program: Program, known: dict[Any, np.ndarray], steps: int) -> list[np.ndarray]:
    """The same by single runs. Each launch is checked against NumPy."""
    known = dict(known)
    for _ in range(steps):
        found = results(program, [known[v] for v in program.inputs], host)
        known.update(zip((v for v in program.inputs if v in program.donated), found, strict=True))
    return found


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        pytest.param(("optimizer={sgd: {lr: 0.1}}", "data.normalize=false"), "shared", marks=pytest.mark.exhaustive),
        pytest.param(("optimizer={adam: {lr: 0.001}}", "data.batch_size=32"), "own", marks=pytest.mark.exhaustive),
        (("model.layers=[{linear: 48}, tanh, {linear: 32}, relu, {linear: 10}]",), "own"),
    ],
)
def test_repeated_runs_have_the_bytes_of_single_runs_whose_launches_match_numpy(
    settings: tuple[str, ...], order: str, streaming: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of threads."""
    program = streamed_program(2, *settings, order=order)
    known = arguments_of(program)
    expected = stepwise(streaming, program, known, 2)
    found = assert_same_in_another_order(streaming, lambda: repeated(streaming, program, known, 2), monkeypatch)
    for x, y in zip(found, expected, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.exhaustive
def test_the_bytes_of_a_member_do_not_depend_on_the_number_of_members(streaming: Host) -> None:
    three, one = streamed_program(3), streamed_program(1)
    known = arguments_of(three)
    third = {
        w: np.ascontiguousarray(known[v][2:]) if v.members else known[v]
        for v, w in zip((*three.inputs, *three.constants), (*one.inputs, *one.constants), strict=True)
    }
    together, alone = repeated(streaming, three, known, 2), repeated(streaming, one, third, 2)
    for x, y in zip(together, alone, strict=True):
        assert np.ascontiguousarray(x[2:] if x.shape != y.shape else x).tobytes() == y.tobytes()


@pytest.mark.exhaustive
def test_sums_with_weights_too_large_for_float16_are_finite(streaming: Host) -> None:
    program = streamed_program(1)
    known = arguments_of(program)
    weights = next(v for v in program.inputs if v.type.shape == (32, 784))
    known[weights][0, 5, 100:200] = 1000
    found = stepwise(streaming, program, known, 2)
    assert np.isfinite(found[0]).all()
    assert_near(repeated(streaming, program, known, 2), found, 0)


def test_repeated_steps_read_and_write_the_weights_once() -> None:
    program = streamed_program(2)
    weights, *_ = program.inputs
    runs = prefetch_batch(program, SMALL_SHARED)
    assert runs.steady is not None
    readers = [e for e in runs.steady.equations if weights in e.inputs]
    assert [e.form for e in readers] == [STREAMED_LAYER]
    assert runs.steady.outputs[0] in readers[0].outputs
    plan = plan_memory(runs.steady)
    assert plan.places[runs.steady.outputs[0]] == plan.places[weights], "the update is in place"
    assert Layout(program, Lowering(SMALL_SHARED)).repeats


@pytest.mark.parametrize(
    "settings",
    [
        ("data.batch_size=128",),  # the outputs do not fit in registers
        ("data.batch_size=24",),  # not a multiple of 16
        ("model.layers=[{linear: 40}, relu, {linear: 10}]",),  # not a multiple of 16
        ("training.clip_norm=1.0",),  # the update needs the norm of all gradients
        ("data.augment=[{crop: 2}]",),  # inputs are not bytes of the table
    ],
)
def test_other_layers_are_not_streamed(settings: tuple[str, ...]) -> None:
    assert not streamed_equations(step_program(2, *settings, target=SMALL_SHARED))


@pytest.mark.parametrize(("units", "side", "streamed"), [(48, 8, False), (48, 16, True), (96, 4, False), (96, 8, True)])
def test_a_layer_is_streamed_only_if_each_group_of_warps_has_16_inputs(
    units: int, side: int, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 16 units have 8 groups of warps, blocks of 32 units have 4. The gather of a batch of so few inputs must
    be an equation of its own."""
    monkeypatch.setattr(sys.modules["adtrain.backends.cuda.forms.gather"], "is_small", lambda equation: False)
    images = np.random.default_rng(0).integers(0, 256, (96, side, side)).astype(np.uint8)
    data = f"data={{path: {write_npz(tmp_path / 'small.npz', parts(images))}, batch_size: 16}}"
    layers = f"model={{input: [{side * side}], layers: [{{linear: {units}}}, relu, {{linear: 2}}]}}"
    program = step_program(2, data, layers, "optimizer={sgd: {lr: 0.1}}", target=BY_MEMBER)
    assert bool(streamed_equations(program)) == streamed


def test_nothing_is_streamed_on_old_gpus_or_with_little_shared_memory() -> None:
    for target in (BY_MEMBER._replace(capability=(7, 5)), BY_MEMBER._replace(shared=24 << 10)):
        assert not streamed_equations(step_program(2, target=target))


@pytest.mark.parametrize(
    ("layers", "batch", "units"),
    [
        ("[{linear: 512}, relu, {linear: 256}, relu, {linear: 10}]", 64, 32),
        ("[{linear: 1024}, tanh, {linear: 10}]", 48, 32),
        ("[{linear: 528}, layer_norm, relu, {linear: 10}]", 32, 16),
    ],
)
def test_wide_layers_are_streamed_on_an_h200(layers: str, batch: int, units: int) -> None:
    program = step_program(2, f"model.layers={layers}", f"data.batch_size={batch}", target=BY_MEMBER)
    for e in streamed_equations(program):
        (launch,) = Lowering(BY_MEMBER).launches(e)
        assert isinstance(launch, LaunchPlan)
        assert launch.size.blocks == (program.inputs[0].type.shape[0] // units, 2, 1)


@pytest.mark.needs_nvrtc
@pytest.mark.parametrize("optimizer", ["sgd: {lr: 0.1, momentum: 0.9}", "adam: {lr: 0.001}"])
def test_the_kernels_compile_without_spills(optimizer: str) -> None:
    settings = "model.layers=[{linear: 512}, relu, {linear: 10}]", "data.batch_size=64", f"optimizer={{{optimizer}}}"
    program = streamed_program(2, *settings, target=BY_MEMBER)
    steady = prefetch_batch(program, BY_MEMBER).steady
    assert steady is not None
    for e in (*streamed_equations(program), *streamed_equations(steady)):
        (launch,) = Lowering(BY_MEMBER).launches(e)
        assert isinstance(launch, LaunchPlan)
        log = compiler.compile_source(launch.source, compiler.architecture(BY_MEMBER.capability)).log
        spills = re.findall(r"(\d+) bytes spill stores", log)
        assert set(spills) == {"0"}, log
