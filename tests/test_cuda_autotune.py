"""The tuner's choices on an emulated GPU, whose results and times the test defines. No GPU or compiler is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import sparse_pool_samples
from sparse_pool_samples import conv_problem

from adtrain import cache
from adtrain.backends.cuda import H200, compiler, launch_plan
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.forms.product import CONVOLUTION
from adtrain.backends.cuda.lower import Candidate, Lowering, problem, problem_text
from adtrain.backends.cuda.tuner.autotune import (
    Mode,
    Tuner,
    TuningProblem,
    singles,
    store_times,
    stored_times,
    tuning_problems,
)
from adtrain.backends.cuda.tuner.measure import ROUNDS, agree, distinct, tolerance
from adtrain.core import kernel as registry
from adtrain.core.errors import DeviceError, OutOfMemory
from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.program import PRODUCT, Equation, Variable, fuse
from adtrain.core.types import ArrayType
from adtrain.ops.elementwise import exp_p
from adtrain.ops.matmul import matmul_p
from adtrain.ops.reduce import argmax_p

RIGHT, WRONG = 1.0, 2.0
NORMAL, GRADIENTS = "normal numbers", "gradients"


def kernel(name: str, **definitions: int) -> CudaKernel:
    return CudaKernel((CudaLaunch("index/random.cu", name, (7,), elements=99, definitions=definitions),))


SLOW, FAST, BROKEN, REFUSED = (kernel(name) for name in ("slow", "fast", "broken", "refused"))
INEXACT = kernel("inexact")
"""Wrong on gradients only."""
TIMES = {"slow": 9.0, "fast": 3.0, "broken": 1.0, "inexact": 1.0}


class Gpu:
    """An emulated GPU; see `autotune.Bench`. It refuses to launch REFUSED."""

    name, architecture = "a GPU", "90a"

    def __init__(self) -> None:
        self.timed: list[str] = []
        self.finished = 0

    def compile(self, sources: Sequence[Source]) -> Iterator[None]:
        yield from (None for _ in sources)

    def trials(self, equation: Equation) -> Sequence[Trial]:
        return [Trial(self, NORMAL), Trial(self, GRADIENTS)]

    def finish(self) -> None:
        self.finished += 1

    def microseconds(self, kernel: Candidate) -> float:
        assert isinstance(kernel, CudaKernel)
        return TIMES[kernel.launches[0].name]


class Trial:
    """See `measure.Trial`."""

    def __init__(self, gpu: Gpu, numbers: str) -> None:
        self.gpu, self.numbers = gpu, numbers

    def expected(self) -> Sequence[np.ndarray]:
        return [np.full(5, RIGHT)]

    def results(self, kernel: Candidate) -> Sequence[np.ndarray]:
        if kernel is REFUSED:
            raise DeviceError("too many registers")
        wrong = kernel is BROKEN or (kernel is INEXACT and self.numbers == GRADIENTS)
        return [np.full(5, WRONG if wrong else RIGHT)]

    def microseconds(self, kernel: Candidate) -> float:
        if self.numbers == NORMAL:
            self.gpu.timed.append(kernel.label.split()[0])
        return self.gpu.microseconds(kernel)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "version", lambda: "13.0")


@pytest.fixture
def equation(monkeypatch: pytest.MonkeyPatch) -> Equation:
    """An equation with the candidates above, the slow one first."""
    set_candidates(monkeypatch, SLOW, BROKEN, REFUSED, FAST)
    x = Variable(ArrayType((5, 64), np.dtype("float32")), "gpu")
    return Equation(argmax_p, (x,), {"axis": 1}, (Variable(ArrayType((5,), np.dtype("int64")), "gpu"),))


def set_candidates(monkeypatch: pytest.MonkeyPatch, *kernels: CudaKernel) -> None:
    monkeypatch.setitem(registry._CUDA_RULES, "argmax", lambda target, x, axis: kernels)


def tuner(mode: Mode = Mode.FULL, gpu: Gpu | None = None) -> Tuner:
    """The tuner of a new process, which has measured nothing."""
    made = Tuner(Lowering(H200), gpu or Gpu())
    made.mode = mode
    return made


def tune(equation: Equation, mode: Mode) -> tuple[Candidate, list[str]]:
    """What a new process chooses, and the names of the kernels that it times, in order."""
    gpu = Gpu()
    made = tuner(mode, gpu)
    made.tune([equation])
    return made.lowering.chosen(equation), gpu.timed


def key(equation: Equation) -> str:
    made = tuner()
    (found,) = tuning_problems(made.lowering, [equation])
    text = made.key(found)
    assert text is not None
    return text


def test_the_fastest_right_candidate_is_chosen_and_wrong_ones_are_named(
    equation: Equation, caplog: pytest.LogCaptureFixture
) -> None:
    chosen, timed = tune(equation, Mode.FULL)
    assert chosen is FAST
    assert set(timed) == {"slow", "fast"}
    wrong, refused = caplog.messages
    assert wrong == "adtrain: warning: broken: not used for argmax float32[5, 64], its result is wrong"
    assert refused == "adtrain: warning: refused: not used for argmax float32[5, 64] (too many registers)"


def test_a_wrong_first_candidate_is_not_used(
    equation: Equation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first candidate is not the oracle."""
    set_candidates(monkeypatch, BROKEN, SLOW, FAST)
    assert tune(equation, Mode.FULL)[0] is FAST
    assert caplog.messages == ["adtrain: warning: broken: not used for argmax float32[5, 64], its result is wrong"]


def test_a_candidate_that_is_wrong_on_gradients_only_is_not_used(
    equation: Equation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_candidates(monkeypatch, SLOW, INEXACT, FAST)
    assert tune(equation, Mode.FULL)[0] is FAST
    assert caplog.messages == ["adtrain: warning: inexact: not used for argmax float32[5, 64], its result is wrong"]


def test_without_a_right_candidate_the_first_is_chosen_and_nothing_is_stored(
    equation: Equation, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_candidates(monkeypatch, BROKEN, REFUSED)
    chosen, timed = tune(equation, Mode.FULL)
    assert chosen is BROKEN
    assert timed == []
    assert stored_times(key(equation), [BROKEN.label, REFUSED.label]) is None


def test_slow_candidates_are_timed_once_and_close_ones_in_alternating_rounds(
    equation: Equation, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_candidates(monkeypatch, SLOW, FAST, kernel("second"))
    monkeypatch.setitem(TIMES, "second", 3.5)
    assert tune(equation, Mode.FULL)[1] == ["slow", *["fast", "second"] * ROUNDS]


def test_the_first_candidate_is_chosen_where_the_difference_is_noise(
    equation: Equation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TIMES, "fast", 8.9)
    assert tune(equation, Mode.FULL)[0] is SLOW


@pytest.mark.parametrize("mode", [Mode.CACHED, Mode.FULL])
def test_a_later_process_takes_times_from_the_cache(equation: Equation, mode: Mode) -> None:
    tune(equation, Mode.FULL)
    assert tune(equation, mode) == (FAST, [])


def test_the_first_candidate_is_chosen_without_times_and_with_tuning_off(equation: Equation) -> None:
    assert tune(equation, Mode.CACHED) == (SLOW, [])
    tune(equation, Mode.FULL)
    assert tune(equation, Mode.OFF) == (SLOW, [])


@pytest.mark.parametrize("content", [b"", b"[]", b'{"microseconds": {"fast": -1.0}}', b'{"microseconds": {}}'])
@pytest.mark.parametrize("valid", [False, True], ids=["damaged", "well-formed"])
def test_an_unreadable_cache_file_is_named_and_replaced(
    equation: Equation, content: bytes, valid: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a well-formed file of the cache that holds other content."""
    tune(equation, Mode.FULL)
    (path,) = (tmp_path / "adtrain" / "tuning").iterdir()
    if valid:
        path.unlink()
        path = cache.open_cache("tuning").store(key(equation), ".json", content)
    else:
        path.write_bytes(content)
    caplog.clear()
    assert tune(equation, Mode.CACHED)[0] is SLOW
    (warning,) = caplog.messages
    assert str(path) in warning
    assert "fast" in tune(equation, Mode.FULL)[1]
    assert tune(equation, Mode.FULL)[1] == []
    assert len(list((tmp_path / "adtrain" / "tuning").iterdir())) == 1


def test_cached_times_are_ignored_if_their_fastest_kernel_is_unknown(equation: Equation) -> None:
    store_times(key(equation), "", {"gone": 1.0}, "gone")
    assert tune(equation, Mode.CACHED)[0] is SLOW


def test_the_cache_key_depends_on_problem_sources_candidates_device_and_compiler(
    equation: Equation, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    made = tuner(gpu=gpu)
    (first,) = tuning_problems(made.lowering, [equation])
    other = Equation(argmax_p, equation.inputs, {"axis": 0}, equation.outputs)
    keys = [made.key(first), made.key(first._replace(equation=other))]
    keys += [made.key(first._replace(kernels=first.kernels[:2]))]
    keys += [made.key(TuningProblem(equation, (SLOW, kernel("fast", BLOCK=64)), made.lowering))]
    gpu.name = "another GPU"
    keys.append(made.key(first))
    gpu.name = Gpu.name
    assert made.key(first) == keys[0]
    monkeypatch.setattr(launch_plan, "file_source", lambda file, dtypes, definitions, *memory: Source(file, "changed"))
    keys.append(made.key(first))
    monkeypatch.setattr(compiler, "version", lambda: "13.1")
    keys.append(made.key(first))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.01, []), (0.7, ["tuning 1 of 1: argmax float32[5, 64], 4 candidates"])]
)
def test_progress_is_reported_at_most_once_a_second(equation: Equation, seconds: float, expected: list[str]) -> None:
    ticks = iter(range(1000))
    made = Tuner(Lowering(H200), Gpu(), lambda: next(ticks) * seconds)
    made.mode = Mode.FULL
    reported: list[str] = []
    made.report = reported.append
    made.tune([equation])
    assert reported[-1:] == expected


def test_the_first_candidate_is_chosen_where_arguments_do_not_fit_in_memory(
    equation: Equation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Gpu, equation: Equation) -> Sequence[Trial]:
        raise OutOfMemory("out of memory")

    monkeypatch.setattr(Gpu, "trials", refuse)
    gpu = Gpu()
    made = tuner(gpu=gpu)
    made.tune([equation])
    assert made.lowering.chosen(equation) is SLOW
    assert gpu.finished == 1
    (message,) = caplog.messages
    assert message == "adtrain: warning: argmax float32[5, 64]: its candidates are not measured (out of memory)"


def test_a_product_with_an_epilogue_has_the_candidates_and_the_choice_of_the_product() -> None:
    a, b, c, d = (Variable(ArrayType((64, 64), np.dtype("float32")), "gpu") for _ in range(4))
    product = Equation(matmul_p, (a, b), {"transpose_a": False, "transpose_b": False, "precision": "full"}, (c,))
    fused = fuse(PRODUCT, [product, Equation(exp_p, (c,), {}, (d,))], [d])
    lowering = Lowering(H200)
    labels = [candidate.label for candidate in lowering.candidates(product)]
    assert len(labels) > 1
    assert [candidate.label for candidate in lowering.candidates(fused)] == labels
    assert problem(fused) == problem(product)
    assert lowering.chosen(fused).label == lowering.chosen(product).label == labels[0]


def test_an_equation_of_a_form_with_kernels_is_measured_as_a_whole() -> None:
    gradient = sparse_pool_samples.equation(
        "conv2d_input_grad_pooled", conv_problem((128, 32, 26, 26), 64, (3, 3), (0, 0))
    )
    (y,) = gradient.outputs
    out = Variable(y.type, "gpu")
    with_epilogue = fuse(CONVOLUTION, [gradient, Equation(exp_p, (y,), {}, (out,))], [out])
    assert [e.name for e in singles([with_epilogue])] == [gradient.name, "exp"]
    assert problem(with_epilogue) == problem(gradient)
    for precision in ("full", "tf32"):
        of_other = conv_problem((128, 32, 26, 26), 64, (3, 3), (0, 0), precision)
        other = sparse_pool_samples.equation(gradient.name, of_other)
        assert (problem_text(other) == problem_text(gradient)) is (precision == "full")


@pytest.mark.parametrize(
    ("found", "same"), [([1, 2, 3], True), ([1, 2, 3.2], False), ([1, 2, np.nan], False), ([0, 0, 0], False)]
)
def test_results_agree_within_a_fraction_of_the_largest_and_nan_never_agrees(found: list[float], same: bool) -> None:
    assert agree([np.array(found, np.float32)], [np.array([1, 2, 3.0001], np.float32)], 1e-3) is same
    assert not agree([np.array([3])], [np.array([4])], 1.0)


def test_the_tolerance_admits_other_orders_of_a_sum_but_no_missing_term() -> None:
    """Sums of 784 products of normal numbers are at most about 140, and a missing term is about 1."""
    a, b, c = (Variable(ArrayType(shape, np.dtype("float32")), "gpu") for shape in ((64, 784), (784, 64), (64, 64)))
    params = {"transpose_a": False, "transpose_b": False, "precision": "full"}
    assert 1e-5 < tolerance(Equation(matmul_p, (a, b), params, (c,))) < 1e-4


def test_short_labels_leave_out_the_words_that_all_candidates_share() -> None:
    labels = ["gemm gemm/gemm.cu BM=64 BN=32 blocks=8", "gemm gemm/gemm.cu BM=64 BN=16 blocks=16"]
    assert distinct(labels) == ["gemm BN=32 blocks=8", "gemm BN=16 blocks=16"]
    assert distinct(labels[:1]) == labels[:1]
