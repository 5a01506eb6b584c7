"""The kernels of a sweep's step, compiled for the CPU: against NumPy, and by the number of members."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from test_cuda_steps_on_host import TOLERANCE, computed, drawn

from adtrain import config, passes
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.backends.cuda.lower import Lowering
from adtrain.core import tree
from adtrain.core.array import Placeholder
from adtrain.core.kernel import cuda_kernels
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.ops.conv import Window
from adtrain.sweeps.members import groups_of, members_of
from adtrain.sweeps.session import step_arguments
from adtrain.sweeps.step import DONATED, sweep_evaluation, sweep_step, zero_member_totals
from adtrain.training.experiment import TOTALS

__all__ = ["host"]

BY_MEMBER = H200._replace(by_member=True)
FLOAT = np.dtype("float32")
LAYERS = "model.layers=[{linear: 40}, relu, {linear: 10}]"


def step_program(count: int, order: str) -> Program:
    """The step of `count` members after all passes for a GPU."""
    sweep = f"sweep={{order: {order}, training.seed: {{range: {count}}}}}"
    cfg = config.load("mlp-small", [LAYERS, "data.batch_size=32", sweep])
    (group,) = groups_of(cfg, members_of(cfg))
    arguments = tree.map(lambda x: Placeholder(x.shape, x.dtype, "cpu"), step_arguments(group, count))
    improve = (passes.by_member, *passes.SIMPLIFY, *gpu_fusions(BY_MEMBER))
    return stage(sweep_step(group.experiment), improve, donate=DONATED).program(*arguments)


def results(program: Program, given: list[np.ndarray], host: Host) -> list[np.ndarray]:
    """The outputs of a step, each launch checked against NumPy."""
    known: dict[Any, Any] = {v: x.numpy() for v, x in program.constants.items()}
    known |= dict(zip(program.inputs, given, strict=True))
    for e in program.equations:
        arrays = [known[v] for v in e.inputs]
        outcome = computed(e, arrays)
        expected = [np.asarray(x).reshape(v.stored.shape) for v, x in zip(e.outputs, outcome, strict=True)]
        found = host.computed(e, None, arrays) if host.lowering.launches(e) else expected
        for v, x, wanted in zip(e.outputs, found, expected, strict=True):
            known[v] = x
            error = np.linalg.norm(np.subtract(x, wanted, dtype=np.float64))
            assert error <= TOLERANCE * np.linalg.norm(wanted.astype(np.float64)), f"{e.name} {v.type}"
    return [known[v] for v in program.outputs]


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ["own", "shared"])
def test_the_bytes_of_a_member_do_not_depend_on_the_number_of_members(order: str, host: Host) -> None:
    host.lowering = Lowering(BY_MEMBER)
    rng = np.random.default_rng(0)
    three, one = step_program(3, order), step_program(1, order)
    assert [e.primitive for e in three.equations] == [e.primitive for e in one.equations]
    assert sum(e.members == 3 for e in three.equations) >= 3
    assert len(three.equations) <= 8
    given = [drawn(v, rng) for v in three.inputs]
    given = [np.zeros_like(x) if v.stored.shape == () else x for v, x in zip(three.inputs, given, strict=True)]
    third = [np.ascontiguousarray(x[2:]) if v.members else x for v, x in zip(three.inputs, given, strict=True)]
    together, alone = results(three, given, host), results(one, third, host)
    for x, y in zip(together, alone, strict=True):
        assert np.ascontiguousarray(x[2:] if x.shape != y.shape else x).tobytes() == y.tobytes()


@pytest.mark.parametrize("own_images", [True, False])
def test_the_kernels_of_convolutions_do_not_depend_on_the_number_of_members(own_images: bool) -> None:
    """Members are groups of channels of one convolution. If they share the images, one convolution has all filters."""

    def kernels(members: int) -> list[Any]:
        groups = members if own_images else 1
        window = Window((1, 1), (1, 1), (1, 1), groups)
        x, w = ArrayType((64, 3 * groups, 28, 28), FLOAT), ArrayType((6 * members, 3, 5, 5), FLOAT)
        y = ArrayType((64, 6 * members, 26, 26), FLOAT)
        found = [
            cuda_kernels("conv2d", BY_MEMBER, x, w, window=window),
            cuda_kernels("conv2d_input_grad", BY_MEMBER, y, w, window=window, size=(28, 28)),
            cuda_kernels("conv2d_weight_grad", BY_MEMBER, x, y, window=window, size=(5, 5)),
        ]
        assert all(len(each) == 1 for each in found)
        splits = found[2][0].launches[0].numbers[-1]
        return [splits, *((k.launches[0].file, k.launches[0].definitions) for (k,) in found)]

    expected = kernels(1)
    assert all(kernels(members) == expected for members in (2, 3, 40, 1000))


def test_the_evaluation_of_members_matches_numpy(host: Host) -> None:
    host.lowering = Lowering(BY_MEMBER)
    cfg = config.load("smoke", [LAYERS, "sweep={training.seed: {range: 2}}"])
    (group,) = groups_of(cfg, members_of(cfg))
    improve = (passes.by_member, *passes.SIMPLIFY, *gpu_fusions(BY_MEMBER))
    network, rng = group.experiment.network, np.random.default_rng(0)
    state, _, _, images, labels, _ = step_arguments(group, 2)
    arguments = zero_member_totals(network.task, 2, "cpu"), state.params, state.statistics, images, labels
    rows = Placeholder((2, 32), np.dtype("int64"), "cpu")
    given = *tree.map(lambda x: Placeholder(x.shape, x.dtype, "cpu"), arguments), rows
    program = stage(sweep_evaluation(network), improve, donate=TOTALS).program(*given)
    assert program.members == 2
    known = [np.zeros_like(x) if v.stored.shape == () else x for v in program.inputs for x in [drawn(v, rng)]]
    found = results(program, known, host)
    assert [x.shape for x in found] == [v.stored.shape for v in program.outputs]
