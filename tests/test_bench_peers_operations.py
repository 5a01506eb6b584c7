from __future__ import annotations

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

from adtrain import ops
from adtrain.backends.cpu import CpuBackend
from adtrain.backends.cuda.lower import Lowering
from adtrain.bench.ops.sweep import PASSES
from adtrain.bench.peers import comparison, op_cases, operations, ours
from adtrain.bench.peers.numpy_operations import BACKWARD, FORWARD
from adtrain.bench.peers.op_cases import OpCase, OpWork
from adtrain.bench.peers.sides import SideSkips
from adtrain.cases import integers, normal
from adtrain.core import devices
from adtrain.core.array import array
from adtrain.core.autodiff import vjp
from adtrain.core.staging import stage
from adtrain.core.target import H200

# Small ones, with an odd number of items; each kind of operation that is compared.
SMALL = [
    OpCase("matmul", "", (normal(7, 5), normal(5, 6)), (7, 6), {}, (0,)),
    OpCase("matmul", "T", (normal(7, 5), normal(6, 5)), (7, 6), {"transpose_b": True}, (0,)),
    OpCase("conv2d", "", (normal(5, 3, 8, 7), normal(4, 3, 3, 3)), (5, 4, 8, 7), {"padding": 1}, (0,)),
    *(OpCase(op, "", (normal(33),), (33,)) for op in op_cases.UNARY),
    *(OpCase(op, "", (normal(33), normal(33)), (33,)) for op in ("add", "mul")),
    *(OpCase(op, f"{i}", (normal(7, 9),), out, {"axis": i}) for op in ("sum", "max") for i, out in
      {None: (), 0: (9,), 1: (7,)}.items()),
    OpCase("cumsum", "", (normal(7, 9),), (7, 9), {"axis": 1}),
    OpCase("transpose", "", (normal(7, 9),), (9, 7)),
    *(OpCase(op, "", (normal(7, 9),), (7, 9)) for op in ("softmax", "log_softmax")),
    OpCase("cross_entropy", "", (normal(7, 9), integers(9, 7)), ()),
    OpCase("layer_norm", "", (normal(7, 9),), (7, 9), {"normalized_shape": 9}),
    *(OpCase(op, "", (normal(3, 2, 6, 8),), (3, 2, 3, 4), {"kernel_size": 2}) for op in ("max_pool2d", "avg_pool2d")),
    OpCase("embedding", "", (integers(9, 7), normal(9, 4)), (7, 4)),
]  # fmt: skip


def work(side: str, case: OpCase, phase: str) -> OpWork:
    if not importlib.util.find_spec(package := side.partition("-")[0]):
        pytest.skip(f"{package} is not installed")
    return operations.work(side, case, phase, "cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # read when it is first imported


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("side", ["adtrain", "torch-eager", "jax-jit", "numpy"])
def test_a_side_computes_what_float64_does(side: str, case: OpCase, phase: str) -> None:
    if side == "numpy" and case.op not in (FORWARD if phase == "forward" else BACKWARD):
        with pytest.raises(SideSkips, match=r"^no counterpart of .+ in (plain )?NumPy"):
            work(side, case, phase)
        return
    found = work(side, case, phase)
    assert operations.error(case, phase, found) < comparison.OPERATION_TOLERANCE[case.precision]
    assert np.isfinite(found.run(2))


@pytest.mark.compiled
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_many_runs_in_one_compiled_program_leave_the_result_of_one(case: OpCase) -> None:
    for phase in case.phases:
        found = work("adtrain", case, phase)
        assert found.run(1) == found.results()[0].flat[0]


def test_flops_of_products_are_those_counted_by_hand() -> None:
    product, transposed, convolution, other = SMALL[:4]
    assert product.flops("forward") == transposed.flops("forward") == 2 * 7 * 6 * 5
    assert convolution.flops("forward") == 2 * (5 * 4 * 8 * 7) * (3 * 3 * 3)
    assert convolution.flops("backward") == 2 * 2 * (5 * 4 * 8 * 7) * (3 * 3 * 3)
    assert other.flops("forward") is None


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_case_of_the_table_is_tested_here_and_says_its_shape(device: str) -> None:
    cases = op_cases.cases(device)
    assert {case.op for case in cases} <= {case.op for case in SMALL}
    assert len({case.name for case in cases}) == len(cases)
    for case in op_cases.cases("cpu") if device == "cpu" else ():
        assert case.of(ops)(*map(array, case.arrays())).shape == case.output, case.name


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("position", [0, 1])
def test_one_wrong_element_of_a_result_is_an_error(phase: str, position: int) -> None:
    case = SMALL[2]
    right = work("numpy", case, phase)

    def wrong(*ct: np.ndarray) -> list[np.ndarray]:
        found = [x.copy() for x in right.results(*ct)]
        found[min(position, len(found) - 1)][0] += 0.1
        return found

    assert operations.error(case, phase, right) < 1e-6
    assert operations.error(case, phase, replace_results(right, wrong)) > 1e-3


def replace_results(work: OpWork, results: object) -> OpWork:
    return work._replace(results=results)  # type: ignore[arg-type]


def test_inputs_are_always_the_same_and_indices_are_not_differentiated() -> None:
    case = SMALL[-1]
    first, second = case.arrays(), replace(case).arrays()
    assert [x.dtype for x in first] == [np.int64, np.float32]
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert case.floats(["indices", "table"]) == ["table"]
    assert case.with_indices(["indices", "table"], ["other"]) == ["indices", "other"]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_many_runs_are_launches_on_a_gpu(case: OpCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of fused equations are over the variables of their own Program, or no kernel could be made."""
    monkeypatch.setitem(devices._loaded, "gpu", CpuBackend())
    args = [array(x, device="gpu") for x in case.arrays()]
    lowering = Lowering(H200)
    works = {"forward": (case.of(ops), args)}
    if case.differentiable:
        _, pullback = vjp(lambda *floats: case.of(ops)(*case.with_indices(args, floats)), *case.floats(args))
        works["backward"] = pullback, [array(case.cotangent(), device="gpu")]
    for f, given in works.values():
        program = stage(f, PASSES).program(*given)
        equations = ours.many(program, 3).program(*given).equations
        assert sum(len(lowering.launches(e)) for e in equations) >= 3 * sum(
            len(lowering.launches(e)) for e in program.equations
        )
