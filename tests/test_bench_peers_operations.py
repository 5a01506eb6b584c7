from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from peer_marks import marked, quick

from adtrain import ops
from adtrain.backends.cpu.cpu_backend import CpuBackend
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.lower import Lowering
from adtrain.bench.op_table import OpCase, cases
from adtrain.bench.ops import PASSES
from adtrain.bench.peers import adtrain_system, comparison, jobs
from adtrain.bench.peers.jobs import OpRunner
from adtrain.bench.peers.numpy_system import BACKWARD, FORWARD
from adtrain.bench.peers.systems import Unsupported, made
from adtrain.core import devices
from adtrain.core.array import array
from adtrain.core.autodiff import vjp
from adtrain.core.staging import stage
from adtrain.samplers import integers, normal

__all__ = ["quick"]

# Each operation of the table at a small size, with an odd number of items.
SMALL = [
    OpCase("matmul", "", (normal(7, 5), normal(5, 6)), (7, 6), {}, (0,)),
    OpCase("matmul", "T", (normal(7, 5), normal(6, 5)), (7, 6), {"transpose_b": True}, (0,)),
    OpCase("conv2d", "", (normal(5, 3, 8, 7), normal(4, 3, 3, 3)), (5, 4, 8, 7), {"padding": 1}, (0,)),
    *(OpCase(op, "", (normal(33),), (33,)) for op in ("exp", "relu", "gelu", "tanh")),
    *(OpCase(op, "", (normal(33), normal(33)), (33,)) for op in ("add", "mul")),
    *(OpCase(op, f"{i}", (normal(7, 9),), out, {"axis": i}) for op in ("sum", "max") for i, out in
      {None: (), 0: (9,), 1: (7,)}.items()),
    OpCase("cumsum", "", (normal(7, 9),), (7, 9), {"axis": 1}),
    OpCase("transpose", "", (normal(7, 9),), (9, 7)),
    *(OpCase(op, "", (normal(7, 9),), (7, 9)) for op in ("softmax", "log_softmax")),
    OpCase("cross_entropy", "", (normal(7, 9), integers(9, 7)), ()),
    OpCase("layer_norm", "", (normal(7, 9),), (7, 9), {"normalized_shape": 9}),
    *(OpCase(op, "", (normal(3, 2, 6, 8),), (3, 2, 3, 4), {"kernel_size": 2}) for op in ("max_pool2d", "avg_pool2d")),
    OpCase("attention", "", (normal(3, 2, 5, 4),) * 3, (3, 2, 5, 4)),
    OpCase("embedding", "", (integers(9, 7), normal(9, 4)), (7, 4)),
    OpCase("conv2d", "groups", (normal(2, 3, 8, 7), normal(3, 1, 3, 3)), (2, 3, 8, 7), {"padding": 1, "groups": 3}),
    OpCase("conv_transpose2d", "", (normal(2, 3, 4, 4), normal(3, 2, 4, 4)), (2, 2, 8, 8), {"stride": 2, "padding": 1}),
    OpCase("take", "", (normal(7, 9), integers(9, 5)), (7, 5), {"axis": 1}),
]  # fmt: skip


def runner(system: str, case: OpCase, phase: str) -> OpRunner:
    found: OpRunner = made(system, "operation", case, phase, "cpu")
    return found


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("system", marked("adtrain", "torch-eager", "jax-jit", "numpy"))
def test_system_computes_the_float64_result(system: str, case: OpCase, phase: str) -> None:
    lacking = case.op not in (FORWARD if phase == "forward" else BACKWARD) or "groups" in case.options
    if system == "numpy" and lacking:
        with pytest.raises(Unsupported, match=r"^no counterpart of .+ in (plain )?NumPy"):
            runner(system, case, phase)
        return
    found = runner(system, case, phase)
    assert jobs.operation_error(case, phase, found) < comparison.OPERATION_TOLERANCE[case.precision]
    assert np.isfinite(found.run(2))


@pytest.mark.exhaustive
@pytest.mark.compiled
@pytest.mark.parametrize("case", SMALL[:1], ids=lambda case: case.name)
def test_unrolled_program_returns_the_result_of_one_run(case: OpCase) -> None:
    for phase in case.phases:
        found = runner("adtrain", case, phase)
        assert found.run(1) == found.results()[0].flat[0]


def test_flops_of_products_equal_a_count_by_hand() -> None:
    product, transposed, convolution, other = SMALL[:4]
    assert product.flops("forward") == transposed.flops("forward") == 2 * 7 * 6 * 5
    assert convolution.flops("forward") == 2 * (5 * 4 * 8 * 7) * (3 * 3 * 3)
    assert convolution.flops("backward") == 2 * 2 * (5 * 4 * 8 * 7) * (3 * 3 * 3)
    assert other.flops("forward") is None


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_case_is_tested_here_and_declares_its_output_shape(device: str) -> None:
    found = cases(device)
    assert {case.op for case in found} <= {case.op for case in SMALL}
    assert len({case.name for case in found}) == len(found)
    for case in cases("cpu") if device == "cpu" else ():
        (output,) = stage(case.of(ops)).program(*case.arrays()).outputs
        assert output.type.shape == case.output, case.name


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("position", [0, 1])
def test_one_wrong_element_increases_the_error(phase: str, position: int) -> None:
    case = SMALL[2]
    right = runner("numpy", case, phase)

    def wrong(*ct: np.ndarray) -> list[np.ndarray]:
        found = [x.copy() for x in right.results(*ct)]
        found[min(position, len(found) - 1)][0] += 0.1
        return found

    assert jobs.operation_error(case, phase, right) < 1e-6
    assert jobs.operation_error(case, phase, replace_results(right, wrong)) > 1e-3


def replace_results(runner: OpRunner, results: object) -> OpRunner:
    return runner._replace(results=results)  # type: ignore[arg-type]


def test_inputs_are_reproducible_and_indices_are_not_differentiated() -> None:
    case = next(case for case in SMALL if case.op == "embedding")
    first, second = case.arrays(), replace(case).arrays()
    assert [x.dtype for x in first] == [np.int64, np.float32]
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert case.floats(["indices", "table"]) == ["table"]
    assert case.with_indices(["indices", "table"], ["other"]) == ["indices", "other"]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_unrolled_program_launches_every_run_on_a_gpu(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering fails if the body of a fused equation uses variables of another Program."""
    monkeypatch.setitem(devices._loaded, "gpu", CpuBackend())
    args = [array(x, device="gpu") for x in case.arrays()]
    lowering = Lowering(H200)
    functions = {"forward": (case.of(ops), args)}
    if case.differentiable:
        _, pullback = vjp(lambda *floats: case.of(ops)(*case.with_indices(args, floats)), *case.floats(args))
        functions["backward"] = pullback, [array(case.cotangent(), device="gpu")]
    for f, given in functions.values():
        program = stage(f, PASSES).program(*given)
        equations = adtrain_system.unrolled(program, 3).program(*given).equations
        assert sum(len(lowering.launches(e)) for e in equations) >= 3 * sum(
            len(lowering.launches(e)) for e in program.equations
        )
