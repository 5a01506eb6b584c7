"""CUDA sources compile for the architectures that choose them; that takes NVRTC, and no GPU.

Plain pytest compiles a representative set for an H200. The sources of every candidate of every program in
`cuda_samples`, for the GPU of every architecture, are 13,000 and take an hour on two cores:

    pytest -m exhaustive tests/test_cuda_compiler.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event

import pytest
from conftest import NvrtcLog
from cuda_samples import TARGETS, representative, sources
from test_cuda_sources import EXCHANGES, kernel_functions
from waiting import PATIENCE

from adtrain.backends.cuda import H200, compiler
from adtrain.backends.cuda import TARGETS as BY_ARCHITECTURE
from adtrain.backends.cuda.compiler import (
    Compiled,
    CompileProcesses,
    CompileQueue,
    CudaCompilerError,
    Source,
    architecture,
    file_source,
)
from adtrain.backends.cuda.nvrtc import Nvrtc, Request
from adtrain.backends.cuda.peer_window import macros
from adtrain.core.errors import DeviceError
from adtrain.core.kernel import Target, memory_layout
from adtrain.files import asset_path

needs_nvrtc = pytest.mark.needs_nvrtc

PARTS = 16
"""Parts of the sources of one target."""
THREADS = 2
SPILLED = re.compile(r"(\d+) bytes spill stores")
MAX_SPILLED = {
    "attention/fma.cu": 64,
    "attention/mma_backward.cu": 96,
    "attention/mma_forward.cu": 96,
    "attention/wgmma_backward.cu": 96,  # its producer threads; its consumers at most 16
    "gemm/pack.cu": 64,
    "back_to_back.cu": 128,
    "grouped_products.cu": 16,
    "horizontal.cu": 1024,
    "reduce/reduce.cu": 64,
    "row_products.cu": 16,
    "tiled_product.cu": 80,  # with 512 inputs and 128 columns; with fewer inputs or more columns none
}
"""Bytes of registers that chosen kernels of a file spill at most; those of other files spill none. The ones in
horizontal.cu are GEMMs of which RESIDENT blocks must fit on a multiprocessor (`forms/horizontal.py`)."""


def problems(nvrtc_log: NvrtcLog, target: Target, found: Iterable[Source]) -> list[str]:
    """A line for each source that does not compile, and for each chosen kernel that spills more than MAX_SPILLED or
    whose wgmma instructions wait for one another.

    Other candidates may spill: they run only where they were measured to be faster.
    """

    def compiled(source: Source) -> list[str]:
        try:
            log = nvrtc_log(source, architecture(target.capability)).splitlines()
        except CudaCompilerError as error:
            return [str(error)]
        most = MAX_SPILLED.get(source.name, 0)
        slow = [x.strip() for x in log if "serializ" in x or any(int(n) > most for n in SPILLED.findall(x))]
        return [f"{source.name} {' '.join(source.options)}: {line}" for line in slow if sources(target)[source].first]

    with ThreadPoolExecutor(THREADS) as threads:
        return [line for lines in threads.map(compiled, found) for line in lines]


@pytest.mark.exhaustive
def test_the_representative_set_holds_every_file_and_every_kernel_function() -> None:
    root = asset_path("kernels") / "cuda"
    files = {path.relative_to(root).as_posix() for path in root.rglob("*.cu")} - {file for file, _ in EXCHANGES}
    chosen = representative(H200)
    assert files <= {source.name for source in chosen}
    held = {tuple(content[:2]) for source in chosen for content in sources(H200)[source].contents}
    assert kernel_functions() <= held


def test_each_target_has_the_compute_capability_of_its_name() -> None:
    assert list(BY_ARCHITECTURE) == ["sm_{}{}".format(*target.capability) for target in TARGETS]


@needs_nvrtc
def test_the_representative_set_compiles_and_chosen_kernels_hardly_spill(nvrtc_log: NvrtcLog) -> None:
    assert problems(nvrtc_log, H200, representative(H200)) == []


@needs_nvrtc
def test_the_kernel_that_exchanges_between_ranks_compiles() -> None:
    for file, _ in EXCHANGES:
        compiler.compile_source(file_source(file, (), tuple(macros(2).items())), architecture(H200.capability))


@needs_nvrtc
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"sm_{architecture(target.capability)}")
def test_every_candidate_compiles_and_chosen_kernels_hardly_spill(
    nvrtc_log: NvrtcLog, target: Target, part: int
) -> None:
    assert problems(nvrtc_log, target, list(sources(target))[part::PARTS]) == []


@needs_nvrtc
def test_an_error_in_a_source_is_reported_with_the_compilers_message() -> None:
    with pytest.raises(
        CudaCompilerError, match=r"wrong\.cu does not compile \(sm_80\): wrong\.cu\(1\): error: .*missing"
    ):
        compiler.compile_source(Source("wrong.cu", "__device__ int f() { return missing; }"), "80")


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The headers of `kernels/cuda` as a test defines them: "direct" includes "inner"; "other" is not included."""
    texts = {"a/direct.cuh": '#include "a/inner.cuh"\n', "a/inner.cuh": "// 1\n", "a/other.cuh": "// 1\n"}
    monkeypatch.setattr(compiler, "_headers", lambda: tuple(texts.items()))
    monkeypatch.setattr(compiler, "version", lambda: "13.0")
    return texts


SOURCE = Source("kernel.cu", '#include <cstdint>\n#include "a/direct.cuh"\n', ("-DTILE=1",))


def test_the_included_headers_are_direct_and_indirect_ones(headers: dict[str, str]) -> None:
    assert [name for name, _ in compiler.included(SOURCE)] == ["a/direct.cuh", "a/inner.cuh"]
    headers["a/inner.cuh"] += '  #include "a/direct.cuh"\n'
    assert [name for name, _ in compiler.included(SOURCE)] == ["a/direct.cuh", "a/inner.cuh"]


@pytest.mark.parametrize(("edited", "changes"), [("a/direct.cuh", True), ("a/inner.cuh", True), ("a/other.cuh", False)])
def test_the_fingerprint_depends_on_the_headers_that_a_source_includes(
    headers: dict[str, str], edited: str, changes: bool
) -> None:
    before = compiler.fingerprint(SOURCE, "90a")
    headers[edited] += "// edited\n"
    assert (compiler.fingerprint(SOURCE, "90a") != before) == changes


def test_the_fingerprint_depends_on_text_options_architecture_and_compiler(
    headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [compiler.fingerprint(SOURCE, "90a"), compiler.fingerprint(SOURCE, "80")]
    found.append(compiler.fingerprint(SOURCE._replace(text=SOURCE.text + "\n"), "90a"))
    found.append(compiler.fingerprint(SOURCE._replace(options=("-DTILE=2",)), "90a"))
    monkeypatch.setattr(compiler, "version", lambda: "13.1")
    found.append(compiler.fingerprint(SOURCE, "90a"))
    assert len(set(found)) == len(found)


def test_cached_code_that_does_not_load_is_compiled_anew_once(
    headers: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = [b"new", b"bad"]
    monkeypatch.setattr(compiler, "compile_source", lambda source, target: Compiled(compiled.pop(), ""))

    def load(cubin: bytes) -> bytes:
        if cubin == b"bad":
            raise DeviceError("device gpu: no kernel image is available")
        return cubin

    assert compiler.cubin(SOURCE, "90a") == b"bad"
    assert compiler.load_cubin(SOURCE, "90a", load) == b"new"
    assert compiler.load_cubin(SOURCE, "90a", load) == b"new"
    (line,) = caplog.messages
    assert "code of kernel.cu does not load (device gpu: no kernel image is available); it will be rebuilt" in line


def test_a_source_that_is_begun_twice_is_compiled_once_and_its_cubin_is_waited_for(
    headers: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    go, compiled = Event(), []

    def compile_source(source: Source, target: str) -> Compiled:
        go.wait(PATIENCE)
        compiled.append(source)
        return Compiled(b"code", "")

    monkeypatch.setattr(compiler, "compile_source", compile_source)
    other = SOURCE._replace(name="begun.cu", text=SOURCE.text + "// begun")
    (compilation,) = set(compiler.begin([other, other], "90a"))
    assert not compilation.done()
    assert list(compiler.begin([other], "90a")) == [compilation]
    go.set()
    assert compiler.cubin(other, "90a") == b"code"
    assert compiled == [other]


def test_the_source_does_not_depend_on_the_order_of_memory_layouts() -> None:
    shared, scratch = (memory_layout(name, {"SUMS": (4, 8)}) for name in ("SHARED", "SCRATCH"))
    one, other = (file_source("reduce/norm.cu", (), (), *memory) for memory in ((shared, scratch), (scratch, shared)))
    assert one == other
    assert all(layout.macros in one.text for layout in (shared, scratch))


def test_the_largest_source_that_waits_is_compiled_first() -> None:
    queue, go, done = CompileQueue(), Event(), list[int]()
    queue.most = 1

    def compile_after(event: Event) -> None:
        assert event.wait(PATIENCE)

    compilations = [queue.submit(2, partial(compile_after, go))]
    compilations += [queue.submit(size, partial(done.append, size)) for size in (1, 3, 2)]
    go.set()
    for compilation in compilations:
        compilation.result(PATIENCE)
    assert done == [3, 2, 1]


def test_every_include_of_a_kernel_file_is_a_header_of_the_folder() -> None:
    """So no included file is missing from a fingerprint."""
    root: Path = asset_path("kernels") / "cuda"
    names = {path.relative_to(root).as_posix() for path in root.rglob("*.cuh")}
    for path in root.rglob("*.cu*"):
        assert set(re.findall(r'#include "([^"]+)"', path.read_text())) <= names, path.name


@needs_nvrtc
def test_other_processes_compile_the_same_code_and_are_replaced_if_they_end() -> None:
    processes = CompileProcesses(compiler._nvrtc())
    processes.max_started = 1
    request: Request = ('extern "C" __global__ void f(float *x) { *x = 1; }', "f.cu", [], ["--gpu-architecture=sm_80"])
    wrong = ("missing", *request[1:])
    here = processes.compile(request)
    assert here[0]
    assert processes.started == 0
    with processes.here:  # as if a thread compiled in this process
        assert processes.compile(request) == here
        assert processes.compile(wrong) == Nvrtc(processes.library.path).compile(*wrong)
        (other,) = processes.idle
        other.kill()
        other.wait()
        processes.here.release()
        try:
            assert processes.compile(request) == here
        finally:
            processes.here.acquire()
    processes.close()
