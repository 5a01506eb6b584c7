"""The tuner on a GPU: candidates are right and timed, and the chosen ones run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu

from adtrain import ops
from adtrain.bench.candidates import result
from adtrain.bench.op_table import BENCHES
from adtrain.cache import open_cache
from adtrain.core import kernel as registry
from adtrain.core.array import array
from adtrain.core.kernel import cuda_kernels
from adtrain.core.program import Equation, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.reduce import MAX, reduction
from adtrain.ops.common import sum_p

__all__ = ["gpu"]

pytestmark = pytest.mark.gpu

REST = ("max", "softmax", "transpose")
"""Operations of which the others have all kinds of candidates: of reductions, products, copies by index."""
SEVERAL = ["sum", "argmax", "matmul", "conv2d", "take"]


@pytest.fixture(autouse=True)
def fresh(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache that has no times, and full tuning."""
    from adtrain.backends.cuda.tuner.autotune import Mode

    (tmp_path / "adtrain").mkdir(mode=0o700)
    (tmp_path / "adtrain" / "cuda").symlink_to(open_cache("cuda").folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu.tuner, "mode", Mode.FULL)
    monkeypatch.setattr(gpu, "known", {})
    gpu.lowering.measured.clear()
    yield
    gpu.lowering.measured.clear()


@pytest.mark.slow
@pytest.mark.parametrize("op", [*SEVERAL, *(pytest.param(op, marks=pytest.mark.exhaustive) for op in REST)])
def test_every_candidate_of_a_benchmark_is_right(op: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = result([each for each in BENCHES if each.op == op], [1024], str).candidates
    assert caplog.messages == []
    for row in rows:
        assert len(row.candidates) > 1
        assert [each.chosen for each in row.candidates].count(True) == 1
        assert all(0.5 < each.us < 1e5 for each in row.candidates)


def test_chosen_candidates_run_eagerly_and_in_programs(gpu: Any) -> None:
    x = np.random.default_rng(0).standard_normal((300, 70)).astype(np.float32)
    given = array(x, device="gpu")
    alone = ops.matmul(given, given, transpose_b=True).numpy()
    assert gpu.lowering.measured
    (recorded,) = stage(lambda x: (ops.matmul(x, x, transpose_b=True),))(given)
    np.testing.assert_array_equal(recorded.numpy(), alone)
    exact = x.astype(float)
    np.testing.assert_allclose(alone, exact @ exact.T, rtol=1e-5, atol=1e-5)


def test_a_wrong_candidate_is_named_and_not_used(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from adtrain.backends.cuda.lower import problem

    x, out = (Variable(ArrayType(shape, np.dtype("float32")), "gpu") for shape in ((64, 100), (64,)))
    right = cuda_kernels("sum", gpu.lowering.target, x.type, axes=(1,))
    largest = reduction(gpu.lowering.target, MAX, x.type, (1,), x.type.dtype)
    monkeypatch.setitem(registry._CUDA_RULES, "sum", lambda *_, **__: [*right, *largest])
    equation = Equation(sum_p, (x,), {"axes": (1,)}, (out,))
    gpu.tuner.tune([equation])
    assert all("OPERATION=0" in name for name in gpu.lowering.measured[problem(equation)])
    assert caplog.messages
    assert all("OPERATION=1" in line and line.endswith("its result is wrong") for line in caplog.messages)
