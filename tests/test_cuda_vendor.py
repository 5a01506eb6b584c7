"""NVIDIA's libraries as candidates, tested without the libraries and without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cuda_autotune import NORMAL, Gpu, Trial
from vendor_emulated import Lt, cublas, cudnn, package
from vendor_equations import PRODUCT, WINDOWS, convolutions, equation_of, matmul

from adtrain.backends.cuda import H200, compiler, vendor
from adtrain.backends.cuda.lower import Candidate, Lowering, problem
from adtrain.backends.cuda.runtime import libraries
from adtrain.backends.cuda.tuner.autotune import Mode, Tuner
from adtrain.backends.cuda.vendor import (
    CHOICES,
    WORKSPACE_ALIGNMENT,
    Library,
    LibraryCall,
    NotOffered,
    Plan,
    calls,
    installed,
)
from adtrain.cli.devices import gpu_rows
from adtrain.core import program as fused
from adtrain.core.kernel import CudaKernel
from adtrain.core.program import Equation, Variable
from adtrain.ops.elementwise import exp_p
from adtrain.ops.matmul import matmul_p
from adtrain.passes.plan_memory import ALIGNMENT


class Stub:
    """A library that computes matrix products, and offers one choice less than requested."""

    name = "stub 1.0"

    def problem(self, equation: Equation) -> str | None:
        return "product" if equation.primitive is matmul_p else None

    def plan(self, equation: Equation, choice: int) -> Plan:
        if choice == CHOICES - 1:
            raise NotOffered("stub has no more")
        return Plan(1000, lambda addresses, workspace, stream: None)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and no compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "version", lambda: "13.0")


def labels(lowering: Lowering, equation: Equation) -> list[str]:
    return [candidate.label for candidate in lowering.candidates(equation)]


def test_libraries_are_candidates_only_for_what_they_compute_as_precisely_as_asked() -> None:
    both: list[Library] = [cublas(Lt()), cudnn(package([]))]
    for precision, dtype in (("bfloat16", "float32"), ("full", "float64")):
        assert not any(calls(equation, both) for equation in convolutions(*WINDOWS[0], precision, dtype))
    assert [call.library.name for call in calls(PRODUCT, both)] == ["cublasLt 13.1.0"] * CHOICES
    assert not calls(matmul((64, 0), (0, 32)), both)
    assert not calls(equation_of(exp_p, [(3,)]), both)


def test_kernels_come_first_and_the_first_is_chosen_without_measurements() -> None:
    own, both = Lowering(H200), Lowering(H200, [Stub()])
    assert labels(both, PRODUCT) == [
        *labels(own, PRODUCT),
        *(f"stub 1.0 choice={choice}" for choice in range(CHOICES)),
    ]
    assert both.chosen(PRODUCT).label == own.chosen(PRODUCT).label == labels(own, PRODUCT)[0]


class Timed(Gpu):
    """A GPU on which library calls are right and take as long as the test says. A kernel takes 10 microseconds."""

    def __init__(self, library: float) -> None:
        super().__init__()
        self.library = library

    def trials(self, equation: Equation) -> Sequence[Trial]:
        return [AllRight(self, NORMAL)]

    def microseconds(self, kernel: Candidate) -> float:
        return self.library + kernel.choice if isinstance(kernel, LibraryCall) else 10.0


class AllRight(Trial):
    def results(self, kernel: Candidate) -> Sequence[np.ndarray]:
        if isinstance(kernel, LibraryCall):
            kernel.prepare()
        return self.expected()


@pytest.mark.parametrize(("microseconds", "taken"), [(5.0, True), (9.9, False), (11.0, False)])
@pytest.mark.parametrize("mode", Mode)
def test_a_library_is_chosen_only_where_it_was_measured_to_be_faster(
    microseconds: float, taken: bool, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    lowering = Lowering(H200, [Stub()])
    tuner = Tuner(lowering, Timed(microseconds))
    tuner.mode = mode
    tuner.tune([PRODUCT])
    kernel = lowering.chosen(PRODUCT)
    assert isinstance(kernel, LibraryCall) == (taken and mode is Mode.FULL)
    assert not caplog.messages  # no warning for a choice that the library does not offer
    if isinstance(kernel, LibraryCall):
        (launch,) = lowering.launches(PRODUCT)
        assert isinstance(launch, LibraryCall)
        assert launch.label == kernel.label == "stub 1.0 choice=0"
        assert lowering.scratch(PRODUCT) == 1000 + WORKSPACE_ALIGNMENT - ALIGNMENT


def test_a_product_with_an_epilogue_takes_the_fastest_of_our_kernels() -> None:
    lowering = Lowering(H200, [Stub()])
    (c,), d = PRODUCT.outputs, Variable(PRODUCT.outputs[0].type, "gpu")
    with_exp = fused.fuse(fused.PRODUCT, [PRODUCT, Equation(exp_p, (c,), {}, (d,))], [d])
    names = labels(lowering, PRODUCT)
    lowering.measured[problem(PRODUCT)] = {name: 9.0 - i for i, name in enumerate(names)}
    assert lowering.chosen(PRODUCT).label == names[-1]
    assert isinstance(lowering.chosen(with_exp), CudaKernel)
    assert lowering.chosen(with_exp).label == names[-CHOICES - 1]


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("packages", [(), ("nvmath",), ("cudnn",), ("nvmath", "cudnn")])
def test_only_libraries_installed_with_their_packages_are_offered_and_none_is_imported(
    packages: tuple[str, ...], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(libraries, "version", lambda name: "1.2.3" if found else None)
    named = {"nvmath": "cublasLt 1.2.3", "cudnn": "cudnn 1.2.3"}
    assert [library.name for library in installed()] == [named[name] for name in packages if found]
    assert not {"nvmath", "cudnn"} & set(sys.modules)


def test_the_devices_command_names_the_libraries_that_may_be_chosen() -> None:
    gpu: dict[str, Any] = {"devices": [], "runtime": None, "toolkit": None, "libraries": {}, "driver": None}
    gpu |= dict.fromkeys(("driver_cuda", "pycuda", "pycuda_cuda", "nvrtc"), "13.0")
    assert "candidates" not in dict(gpu_rows({**gpu, "candidates": []}))
    rows = dict(gpu_rows({**gpu, "candidates": ["cublasLt 13.1.0"]}))
    assert rows["candidates"] == "also cublasLt 13.1.0, where faster"


def test_the_devices_command_says_which_gpus_read_one_another_directly() -> None:
    sizes = ("memory_bytes", "shared_bytes_per_multiprocessor", "registers_per_multiprocessor", "l2_bytes")
    one: dict[str, Any] = dict.fromkeys((*sizes, "multiprocessors", "clock_mhz", "memory_clock_mhz"), 1)
    one |= {"name": "H200", "capability": "9.0", "free_bytes": None}
    gpu: dict[str, Any] = {"devices": [], "runtime": None, "toolkit": None, "libraries": {}, "driver": None}
    gpu |= {"candidates": [], **dict.fromkeys(("driver_cuda", "pycuda", "pycuda_cuda", "nvrtc"), "13.0")}

    def peers(*reached: list[int]) -> list[str]:
        rows = gpu_rows({**gpu, "devices": [{**one, "peers": numbers} for numbers in reached]})
        return [value for name, value in rows if name == "  peers"]

    assert peers([]) == []
    assert peers([1, 2], [0], []) == [
        "reads the memory of gpu 1, gpu 2 directly",
        "reads the memory of gpu 0 directly",
        "reads the memory of none directly",
    ]


def test_the_label_of_a_library_call_holds_its_version() -> None:
    """So that times of another version are ignored."""
    assert LibraryCall(cublas(Lt()), PRODUCT, 1).label == "cublasLt 13.1.0 choice=1"
