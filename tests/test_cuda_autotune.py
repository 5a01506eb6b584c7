"""The tuner's choices, with a GPU of which the test says what it computes and how fast; none is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from adtrain import cache
from adtrain.backends.cuda import compiler
from adtrain.backends.cuda import lower as tasks
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.lower import MEASURED, Candidate, candidates, chosen
from adtrain.backends.cuda.tuner import cache as tuning_cache
from adtrain.backends.cuda.tuner import race as contest
from adtrain.backends.cuda.tuner.autotune import Contest, Mode, Tuner, contests
from adtrain.core.errors import DeviceError, OutOfMemory
from adtrain.core.fused import fuse, product_p
from adtrain.core.kernel import CudaKernel
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.ops.elementwise import exp_p
from adtrain.ops.matmul import matmul_p
from adtrain.ops.reduce import argmax_p

RIGHT, WRONG = 1.0, 2.0


def kernel(name: str, **tunables: int) -> CudaKernel:
    return CudaKernel(
        "index/random.cu", name, lambda x, axis: (7,), elements=lambda x, axis: 99, definitions=lambda x, axis: tunables
    )


SLOW, FAST, BROKEN, REFUSED = (kernel(name) for name in ("slow", "fast", "broken", "refused"))
TIMES = {"slow": 9.0, "fast": 3.0, "broken": 1.0}


class Gpu:
    """A laboratory and the trial in it: BROKEN computes something else, REFUSED cannot be launched."""

    name, architecture = "a GPU", "90a"

    def __init__(self) -> None:
        self.timed: list[str] = []

    def compile(self, sources: Sequence[Source]) -> Iterator[None]:
        yield from (None for _ in sources)

    def trial(self, equation: Equation) -> Gpu:
        return self

    def finish(self) -> None:
        pass

    def results(self, kernel: Candidate) -> Sequence[np.ndarray]:
        if kernel is REFUSED:
            raise DeviceError("too many registers")
        return [np.full(5, WRONG if kernel is BROKEN else RIGHT)]

    def microseconds(self, kernel: Candidate) -> float:
        assert isinstance(kernel, CudaKernel)
        self.timed.append(kernel.name)
        return TIMES[kernel.name]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing has been measured, and there is no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "version", lambda: "13.0")
    MEASURED.clear()
    yield
    MEASURED.clear()


@pytest.fixture
def equation(monkeypatch: pytest.MonkeyPatch) -> Equation:
    """An equation with the candidates above, the slow one first."""
    set_candidates(monkeypatch, SLOW, BROKEN, REFUSED, FAST)
    x = Variable(ArrayType((5, 64), np.dtype("float32")), "gpu")
    return Equation(argmax_p, (x,), {"axis": 1}, (Variable(ArrayType((5,), np.dtype("int64")), "gpu"),))


def set_candidates(monkeypatch: pytest.MonkeyPatch, *kernels: CudaKernel) -> None:
    monkeypatch.setitem(argmax_p.implementations, "cuda", kernels)


def tuner(mode: Mode = Mode.FULL) -> tuple[Tuner, Gpu]:
    gpu = Gpu()
    made = Tuner(gpu)
    made.mode = mode
    return made, gpu


def tune(equation: Equation, mode: Mode) -> Gpu:
    """As a process of its own would."""
    MEASURED.clear()
    made, gpu = tuner(mode)
    made.tune([equation])
    return gpu


def test_the_fastest_right_candidate_is_taken_and_wrong_ones_are_named(
    equation: Equation, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = tune(equation, Mode.FULL)
    assert chosen(equation) is FAST
    assert set(gpu.timed) == {"slow", "fast"}
    wrong, refused = caplog.messages
    assert wrong == "adtrain: broken: not used for argmax float32[5, 64], its result is wrong"
    assert refused == "adtrain: refused: not used for argmax float32[5, 64] (too many registers)"


def test_the_slow_are_timed_once_and_the_others_in_turn(equation: Equation, monkeypatch: pytest.MonkeyPatch) -> None:
    second = kernel("second")
    set_candidates(monkeypatch, SLOW, FAST, second)
    monkeypatch.setitem(TIMES, "second", 3.5)
    assert tune(equation, Mode.FULL).timed == ["slow", *["fast", "second"] * contest.ROUNDS]


def test_a_difference_within_the_noise_leaves_the_rules_choice(
    equation: Equation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIMES, "fast", 8.9)
    tune(equation, Mode.FULL)
    assert chosen(equation) is SLOW


@pytest.mark.parametrize("mode", [Mode.CACHED, Mode.FULL])
def test_what_was_measured_is_not_measured_again(equation: Equation, mode: Mode) -> None:
    tune(equation, Mode.FULL)
    assert tune(equation, mode).timed == []
    assert chosen(equation) is FAST


def test_the_rule_holds_without_measurements_and_where_they_are_not_asked_for(equation: Equation) -> None:
    assert tune(equation, Mode.CACHED).timed == []
    assert chosen(equation) is SLOW
    tune(equation, Mode.FULL)
    tune(equation, Mode.OFF)
    assert chosen(equation) is SLOW


@pytest.mark.parametrize("content", [b"", b"[]", b'{"microseconds": {"fast": -1.0}}', b'{"microseconds": {}}'])
@pytest.mark.parametrize("whole", [False, True])
def test_a_file_that_cannot_be_read_is_named_and_measured_again(
    equation: Equation, content: bytes, whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _ = tuner()
    (found,) = contests([equation])
    tune(equation, Mode.FULL)
    (path,) = (tmp_path / "adtrain" / "tuning").iterdir()
    if whole:  # as stored, but something else
        path.unlink()
        path = cache.open_cache("tuning").store(made.key(found), ".json", content)
    else:
        path.write_bytes(content)
    caplog.clear()
    tune(equation, Mode.CACHED)
    assert chosen(equation) is SLOW
    (warning,) = caplog.messages
    assert str(path) in warning
    assert "fast" in tune(equation, Mode.FULL).timed
    assert "slow" not in tune(equation, Mode.FULL).timed
    assert len(list((tmp_path / "adtrain" / "tuning").iterdir())) == 1


def test_a_winner_that_is_no_candidate_any_more_counts_as_not_measured(equation: Equation) -> None:
    made, _ = tuner()
    (found,) = contests([equation])
    tuning_cache.store(made.key(found), "", {"gone": 1.0}, "gone")
    tune(equation, Mode.CACHED)
    assert chosen(equation) is SLOW


def test_the_key_follows_from_problem_sources_candidates_and_device(
    equation: Equation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, gpu = tuner()
    (first,) = contests([equation])
    other = Equation(argmax_p, equation.inputs, {"axis": 0}, equation.outputs)
    keys = [made.key(first), made.key(first._replace(equation=other)), made.key(Contest(equation, first.kernels[:2]))]
    keys.append(made.key(Contest(equation, (SLOW, kernel("fast", BLOCK=64)))))
    gpu.name = "another GPU"
    keys.append(made.key(first))
    gpu.name = Gpu.name
    assert made.key(first) == keys[0]
    monkeypatch.setattr(tasks, "file_source", lambda file, dtypes, definitions: Source(file, "changed"))
    keys.append(made.key(first))
    monkeypatch.setattr(compiler, "version", lambda: "13.1")
    keys.append(made.key(first))
    assert len(set(keys)) == len(keys)


def test_progress_is_told_when_it_takes_long(equation: Equation) -> None:
    for seconds, expected in ((0.01, []), (0.7, ["tuning 1 of 1: argmax float32[5, 64], 4 candidates"])):
        ticks = iter(range(1000))
        made = Tuner(Gpu(), lambda ticks=ticks, seconds=seconds: next(ticks) * seconds)  # type: ignore[misc]
        made.mode = Mode.FULL
        said: list[str] = []
        made.report = said.append
        made.tune([equation])
        assert said[-1:] == expected
        MEASURED.clear()
        (path,) = cache.open_cache("tuning").folder.iterdir()
        path.unlink()


def test_a_problem_without_memory_runs_by_the_rule(
    equation: Equation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Gpu, equation: Equation) -> Gpu:
        raise OutOfMemory("out of memory")

    monkeypatch.setattr(Gpu, "trial", refuse)
    tune(equation, Mode.FULL)
    assert chosen(equation) is SLOW
    assert caplog.messages == ["adtrain: argmax float32[5, 64]: its candidates are not measured (out of memory)"]


def test_a_product_with_what_reads_it_has_the_candidates_and_the_choice_of_the_product() -> None:
    a, b, c, d = (Variable(ArrayType((64, 64), np.dtype("float32")), "gpu") for _ in range(4))
    product = Equation(matmul_p, (a, b), {"transpose_a": False, "transpose_b": False, "precision": "full"}, (c,))
    fused = fuse(product_p, [product, Equation(exp_p, (c,), {}, (d,))], [d])
    labels = [tasks.label(kernel, product) for kernel in candidates(product)]
    assert len(labels) > 1
    assert [tasks.label(kernel, fused) for kernel in candidates(fused)] == labels
    assert tasks.problem(fused) == tasks.problem(product)
    assert tasks.label(chosen(fused), fused) == tasks.label(chosen(product), product) == labels[0]


@pytest.mark.parametrize(
    ("found", "same"), [([1, 2, 3], True), ([1, 2, 3.2], False), ([1, 2, np.nan], False), ([0, 0, 0], False)]
)
def test_results_agree_to_a_share_of_the_largest_and_nan_never(found: list[float], same: bool) -> None:
    assert contest.agree([np.array(found, np.float32)], [np.array([1, 2, 3.0001], np.float32)], 1e-3) is same
    assert not contest.agree([np.array([3])], [np.array([4])], 1.0)


def test_the_tolerance_admits_other_orders_of_a_sum_and_no_missing_term() -> None:
    """Of normal numbers, a product of 784 terms is at most about 140, and a missing term is about 1."""
    a, b, c = (Variable(ArrayType(shape, np.dtype("float32")), "gpu") for shape in ((64, 784), (784, 64), (64, 64)))
    found = contest.tolerance(
        Equation(matmul_p, (a, b), {"transpose_a": False, "transpose_b": False, "precision": "full"}, (c,))
    )
    assert 1e-5 < found < 1e-4


def test_candidates_are_told_apart_by_what_they_do_not_share() -> None:
    labels = ["gemm gemm/gemm.cu BM=64 BN=32 blocks=8", "gemm gemm/gemm.cu BM=64 BN=16 blocks=16"]
    assert contest.distinct(labels) == ["gemm BN=32 blocks=8", "gemm BN=16 blocks=16"]
    assert contest.distinct(labels[:1]) == labels[:1]
