"""NVIDIA's libraries as candidates, as far as it needs neither them nor a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cuda_autotune import Gpu
from vendor_emulated import Lt, cublas, cudnn, package
from vendor_equations import PRODUCT, WINDOWS, convolutions, equation_of, matmul

from adtrain.backends.cuda import compiler, vendor
from adtrain.backends.cuda import lower as tasks
from adtrain.backends.cuda.lower import MEASURED, Candidate, candidates, chosen, label, scratch
from adtrain.backends.cuda.runtime import libraries
from adtrain.backends.cuda.tuner.autotune import Mode, Tuner
from adtrain.backends.cuda.vendor import LibraryCall, NotOffered, call, calls, installed
from adtrain.backends.cuda.vendor.call import CHOICES, WORKSPACE_ALIGNMENT, Plan
from adtrain.cli.devices import gpu_rows
from adtrain.core.fused import fuse, product_p
from adtrain.core.kernel import CudaKernel
from adtrain.core.program import Equation, Variable
from adtrain.ops.elementwise import exp_p
from adtrain.ops.matmul import matmul_p
from adtrain.passes.arena import ALIGNMENT


class Stub:
    """A library that computes matrix products, in one way less than there are candidates."""

    name = "stub 1.0"

    def problem(self, equation: Equation) -> str | None:
        return "product" if equation.primitive is matmul_p else None

    def plan(self, equation: Equation, choice: int) -> Plan:
        if choice == CHOICES - 1:
            raise NotOffered("stub has no more")
        return Plan(1000, lambda addresses, workspace, stream: None)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is measured, and there is no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "version", lambda: "13.0")
    MEASURED.clear()
    yield
    MEASURED.clear()


def test_what_a_library_does_not_compute_as_asked_is_left_to_kernels() -> None:
    call.LIBRARIES[:] = [cublas(Lt()), cudnn(package([]))]
    for precision, dtype in (("bfloat16", "float32"), ("full", "float64")):
        assert not any(calls(equation) for equation in convolutions(*WINDOWS[0], precision, dtype))
    assert [each.library.name for each in calls(PRODUCT)] == ["cublasLt 13.1.0"] * CHOICES
    assert not calls(matmul((64, 0), (0, 32)))
    assert not calls(equation_of(exp_p, [(3,)]))


def test_kernels_come_first_and_without_measurements_the_rule_holds() -> None:
    own = [label(kernel, PRODUCT) for kernel in candidates(PRODUCT)]
    rule = label(chosen(PRODUCT), PRODUCT)
    call.LIBRARIES[:] = [Stub()]
    names = [label(kernel, PRODUCT) for kernel in candidates(PRODUCT)]
    assert names == [*own, *(f"stub 1.0 choice={choice}" for choice in range(CHOICES))]
    assert label(chosen(PRODUCT), PRODUCT) == rule == own[0]


class Timed(Gpu):
    """A GPU on which a library's calls take as long as the test says, and are right."""

    def __init__(self, microseconds: float) -> None:
        super().__init__()
        self.library = microseconds

    def results(self, kernel: Candidate) -> Sequence[np.ndarray]:
        if isinstance(kernel, LibraryCall):
            kernel.prepare()
        return [np.ones(5)]

    def microseconds(self, kernel: Candidate) -> float:
        return self.library + kernel.choice if isinstance(kernel, LibraryCall) else 10.0


@pytest.mark.parametrize(("microseconds", "taken"), [(5.0, True), (9.9, False), (11.0, False)])
@pytest.mark.parametrize("mode", Mode)
def test_a_library_is_taken_only_where_it_was_measured_to_be_faster(
    microseconds: float, taken: bool, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    call.LIBRARIES[:] = [Stub()]
    gpu = Timed(microseconds)
    tuner = Tuner(gpu)
    tuner.mode = mode
    tuner.tune([PRODUCT])
    kernel = chosen(PRODUCT)
    assert isinstance(kernel, LibraryCall) == (taken and mode is Mode.FULL)
    assert not caplog.messages  # that there is one way less is nothing to tell
    if isinstance(kernel, LibraryCall):
        (task,) = tasks.tasks(PRODUCT)
        assert isinstance(task, LibraryCall)
        assert task.label == kernel.label == "stub 1.0 choice=0"
        assert scratch(PRODUCT) == 1000 + WORKSPACE_ALIGNMENT - ALIGNMENT


def test_a_product_with_what_reads_it_takes_the_fastest_of_our_kernels() -> None:
    call.LIBRARIES[:] = [Stub()]
    (c,), d = PRODUCT.outputs, Variable(PRODUCT.outputs[0].type, "gpu")
    fused = fuse(product_p, [PRODUCT, Equation(exp_p, (c,), {}, (d,))], [d])
    names = [label(kernel, PRODUCT) for kernel in candidates(PRODUCT)]
    times = {name: 9.0 - i for i, name in enumerate(names)}
    MEASURED[tasks.problem(PRODUCT)] = times
    assert label(chosen(PRODUCT), PRODUCT) == names[-1]
    assert isinstance(chosen(fused), CudaKernel)
    assert label(chosen(fused), fused) == names[-CHOICES - 1]


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("packages", [(), ("nvmath",), ("cudnn",), ("nvmath", "cudnn")])
def test_only_libraries_that_are_there_with_their_packages_are_named_and_none_is_imported(
    packages: tuple[str, ...], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(libraries, "version", lambda name: "1.2.3" if found else None)
    named = {"nvmath": "cublasLt 1.2.3", "cudnn": "cudnn 1.2.3"}
    assert [library.name for library in installed()] == [named[name] for name in packages if found]
    assert not {"nvmath", "cudnn"} & set(sys.modules)


def test_devices_names_the_libraries_that_may_be_taken() -> None:
    gpu: dict[str, Any] = {"devices": [], "runtime": None, "toolkit": None, "libraries": {}, "driver": None}
    gpu |= dict.fromkeys(("driver_cuda", "pycuda", "pycuda_cuda", "nvrtc"), "13.0")
    assert "candidates" not in dict(gpu_rows({**gpu, "candidates": []}))
    rows = dict(gpu_rows({**gpu, "candidates": ["cublasLt 13.1.0"]}))
    assert rows["candidates"] == "also cublasLt 13.1.0, where faster"


def test_the_label_holds_the_version_so_that_times_of_another_one_do_not_count() -> None:
    assert label(LibraryCall(cublas(Lt()), PRODUCT, 1), PRODUCT) == "cublasLt 13.1.0 choice=1"
