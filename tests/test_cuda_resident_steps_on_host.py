"""Several steps of a sweep in one launch, with the first layer on chip. Compiled for the CPU, compared with NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, assert_same_in_another_order, host
from npz_files import parts, write_npz
from test_cuda_members_on_host import BY_MEMBER
from test_cuda_steps_on_host import computed

from adtrain import config, passes
from adtrain.backends.cuda.codegen.resident import fused
from adtrain.backends.cuda.forms.resident_layer import ClusterShards, cluster_shards, resident_layer
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core import tree
from adtrain.core.array import Placeholder
from adtrain.core.kernel import Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, primitive_names
from adtrain.core.staging import stage
from adtrain.sweeps.members import groups_of, members_of
from adtrain.sweeps.session import step_arguments
from adtrain.sweeps.step import DONATED, sweep_step

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

SMALL = ("model.layers=[{linear: 32}, relu, {linear: 10}]", "data.batch_size=16")
TOLERANCE = 1e-6
"""For a step: the norm of the difference, divided by the norm."""


def step_program(count: int, *settings: str, order: str = "own", target: Target = BY_MEMBER) -> Program:
    """The step of `count` members of `mlp-small` after all passes for a GPU."""
    sweep = f"sweep={{order: {order}, training.seed: {{range: {count}}}}}"
    cfg = config.load("mlp-small", [*SMALL, *settings, sweep])
    (group,) = groups_of(cfg, members_of(cfg))
    arguments = tree.map(lambda x: Placeholder(x.shape, x.dtype, "cpu"), step_arguments(group, count))
    improve = (passes.by_member, *passes.SIMPLIFY, *gpu_fusions(target))
    return stage(sweep_step(group.experiment), improve, donate=DONATED).program(*arguments)


def only(program: Program) -> Equation:
    """The equation of a Program whose steps are one launch."""
    (equation,) = program.equations
    assert launch_of(equation).name == "resident_steps"
    return equation


def launch_of(equation: Equation) -> LaunchPlan:
    (launch,) = Lowering(BY_MEMBER).launches(equation)
    assert isinstance(launch, LaunchPlan)
    return launch


def arguments_of(program: Program, weights: float = 0.05) -> dict[Any, np.ndarray]:
    """Random images and states. Counters are zero. Optimizer state is not negative, as Adam needs it."""
    rng = np.random.default_rng(0)
    shapes = set()
    found: dict[Any, np.ndarray] = {v: x.numpy() for v, x in program.constants.items()}
    for v in program.inputs:
        shape, dtype = v.stored.shape, v.type.dtype
        if dtype == np.float32:
            drawn = rng.normal(0, weights, shape).astype(dtype)
            found[v] = np.abs(drawn) if shape in shapes else drawn
            shapes.add(shape)
        elif dtype == np.float64:
            found[v] = rng.uniform(0, 0.1, shape)
        else:
            high = (256 if dtype == np.uint8 else 10) if shape else 1
            found[v] = np.asarray(rng.integers(0, high, shape, dtype), dtype)
    return found


def by_numpy(program: Program, known: dict[Any, np.ndarray], steps: int) -> list[np.ndarray]:
    """The outputs of so many steps, by NumPy."""
    e, known = only(program), dict(known)
    for _ in range(steps):
        found = dict(zip(e.outputs, computed(e, [known[v] for v in e.inputs]), strict=True))
        results = [np.asarray(found[v]) for v in program.outputs]
        known |= zip((v for v in program.inputs if v in program.donated), results, strict=True)
    return results


def launched(host: Host, program: Program, known: dict[Any, np.ndarray], *launches: int) -> list[np.ndarray]:
    """The outputs of several launches, each of so many steps."""
    e, known = only(program), dict(known)
    for steps in launches:
        found = dict(zip(e.outputs, host.computed(e, None, [known[v] for v in e.inputs], steps), strict=True))
        results = [found[v] for v in program.outputs]
        known |= zip((v for v in program.inputs if v in program.donated), results, strict=True)
    return results


def assert_near(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        error = np.linalg.norm(np.subtract(x, y, dtype=np.float64))
        assert error <= tolerance * np.linalg.norm(y.astype(np.float64)), (x.shape, error)


@pytest.fixture
def by_member(host: Host) -> Host:
    host.lowering = Lowering(BY_MEMBER)
    return host


NETWORKS = (
    (("optimizer={sgd: {lr: 0.1, momentum: 0.9}}",), "own"),
    pytest.param(("optimizer={adam: {lr: 0.001}}",), "shared", marks=pytest.mark.exhaustive),
    pytest.param(
        ("model.layers=[{linear: 64}, tanh, {linear: 32}, relu, {linear: 10}]", "data.batch_size=32"),
        "own",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        ("model.layers=[{linear: 64}, layer_norm, relu, {linear: 10}]", "data.batch_size=32"),
        "own",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(  # the partial sums of the second layer do not fit in shared memory
        ("model.layers=[{linear: 64}, relu, {linear: 128}, relu, {linear: 10}]", "data.batch_size=64"),
        "own",
        marks=pytest.mark.exhaustive,
    ),
)


@pytest.mark.parametrize(("settings", "order"), NETWORKS)
def test_steps_in_one_launch_match_numpy_in_any_order_of_threads(
    settings: tuple[str, ...], order: str, by_member: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = step_program(2, *settings, order=order)
    known = arguments_of(program)
    found = assert_same_in_another_order(by_member, lambda: launched(by_member, program, known, 2), monkeypatch)
    assert_near(found, by_numpy(program, known, 2), 2 * TOLERANCE)


def shards_of(blocks: int, *settings: str) -> ClusterShards:
    body = only(step_program(1, *settings)).params["body"]
    layer = resident_layer(body)
    assert layer is not None
    shards = cluster_shards(body, layer, blocks)
    assert shards is not None
    return shards


def test_blocks_exchange_only_the_sums_over_their_units() -> None:
    shards = shards_of(2, "model.layers=[{linear: 64}, relu, {linear: 48}, relu, {linear: 10}]")
    assert not shards.gathered
    assert [[v.type.shape for v in (partial, *of_blocks)] for partial, of_blocks in shards.partial.items()] == [
        [(16, 48)] * 3
    ]
    assert len(shards.segments) == 2
    held = {part.type.shape for part in shards.of_block.values()}
    assert {(16, 32), (32,), (48, 32)} <= held


def test_blocks_exchange_the_outputs_of_the_layer_where_another_operation_needs_all_units() -> None:
    shards = shards_of(2, "model.layers=[{linear: 64}, layer_norm, relu, {linear: 10}]", "data.batch_size=32")
    assert shards.gathered
    assert (shards.axes, shards.partial, len(shards.segments)) == ({}, {}, 2)


def test_the_loss_and_its_gradient_are_rows_without_barriers_between_them() -> None:
    shards = shards_of(2, "model.layers=[{linear: 64}, relu, {linear: 10}]", "data.batch_size=64")
    last = fused(shards.segments[-1])
    arrays = [e for e in last.equations if not e.has(Trait.RESHAPE) and max(v.size for v in e.outputs) > 1]
    assert [e.name for e in arrays] == ["row_fused", "product"]
    assert {"log_softmax", "argmax", "exp"} <= {*primitive_names(arrays[0])}
    assert [e.name for e in shards.early_gathers.equations] == ["take"]


@pytest.mark.exhaustive
def test_a_cluster_has_a_warp_for_each_k_step_of_the_gradient(by_member: Host, tmp_path: Path) -> None:
    """Two blocks could hold the layer of these small images, but have too few warps for 3 K steps of 4 tiles."""
    images = np.random.default_rng(0).integers(0, 256, (96, 16, 16)).astype(np.uint8)
    path = write_npz(tmp_path / "small.npz", parts(images))
    layers = "model={input: [256], layers: [{linear: 128}, relu, {linear: 2}]}"
    program = step_program(1, f"data={{path: {path}, batch_size: 48}}", layers, "optimizer={sgd: {lr: 0.1}}")
    assert launch_of(only(program)).size.blocks == (4, 1, 1)
    known = arguments_of(program)
    for v in program.inputs:
        if v.type.dtype == np.int64 and v.stored.shape:
            known[v] %= 2
    assert_near(launched(by_member, program, known, 2), by_numpy(program, known, 2), 2 * TOLERANCE)


def test_weights_too_large_for_float16_are_multiplied_in_float32(by_member: Host) -> None:
    program = step_program(1)
    known = arguments_of(program)
    weights = next(v for v in program.inputs if v.type.shape == (32, 784))
    known[weights][0, 5, 100:200] = 1000
    found, expected = launched(by_member, program, known, 1), by_numpy(program, known, 1)
    assert np.isfinite(found[0]).all()
    assert_near(found, expected, TOLERANCE)


@pytest.mark.exhaustive
def test_a_member_has_the_same_bytes_alone_and_with_any_number_of_steps_in_a_launch(by_member: Host) -> None:
    three, one = step_program(3), step_program(1)
    given = arguments_of(three)
    third = {
        w: np.ascontiguousarray(given[v][2:]) if v.members else given[v]
        for v, w in zip((*three.inputs, *three.constants), (*one.inputs, *one.constants), strict=True)
    }
    together, alone = launched(by_member, three, given, 3), launched(by_member, one, third, 1, 2)
    for x, y in zip(together, alone, strict=True):
        assert np.ascontiguousarray(x[2:] if x.shape != y.shape else x).tobytes() == y.tobytes()


@pytest.mark.parametrize(
    "settings",
    [
        ("data.batch_size=128",),  # the outputs do not fit in registers
        ("data.batch_size=24",),  # not a multiple of 16
        ("model.layers=[{linear: 40}, relu, {linear: 10}]",),  # not a multiple of 16
        ("model.layers=[{linear: 1024}, relu, {linear: 10}]",),  # does not fit in the shared memory of a cluster
        (
            "model.input=[1, 28, 28]",
            "model.layers=[{conv2d: {out_channels: 4, kernel_size: 3}}, flatten, {linear: 10}]",
        ),
        ("training.clip_norm=1.0",),  # the update needs the norm of all gradients
        ("data.augment=[{crop: 2}]",),  # inputs are not bytes of the table
    ],
)
def test_networks_that_cannot_stay_on_chip_take_several_launches_a_step(settings: tuple[str, ...]) -> None:
    assert len(step_program(2, *settings).equations) > 1


def test_gpus_without_clusters_take_several_launches_a_step() -> None:
    assert len(step_program(2, target=BY_MEMBER._replace(capability=(8, 9))).equations) > 1


@pytest.mark.parametrize(("units", "blocks"), [(32, 1), (64, 2), (256, 8)])
def test_the_smallest_cluster_that_holds_the_layer_is_used(units: int, blocks: int) -> None:
    program = step_program(5, f"model.layers=[{{linear: {units}}}, relu, {{linear: 10}}]", "data.batch_size=64")
    launch = launch_of(only(program))
    assert launch.size.blocks == (blocks, 5, 1)
    assert launch.size.shared <= BY_MEMBER.shared
    assert primitive_names(only(program)).count("matmul") == 5
