from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # without bytecode, each command would compile the whole package
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
os.environ.pop("COLUMNS", None)  # the width of the terminal that pytest runs in, to which commands fit their output
if "PYTEST_XDIST_WORKER" in os.environ:  # other workers have the other cores; read when NumPy is first imported
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import ctypes
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

import pytest
from browser import BROWSERS, Browser, installed, started
from forked_commands import Commands
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from adtrain.backends.cpu.compiler import NAMES, PROGRAM
from adtrain.backends.cpu.cpu_backend import CpuBackend
from adtrain.backends.cpu.numpy_program import NumpyProgram, memory
from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import CudaCompilerError, Source
from adtrain.cache import Cache, cache_home, digest
from adtrain.core import devices
from adtrain.core.program import Program

# A shell starts a background job with SIGINT ignored. The commands that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until the tests are collected: little of what that makes is garbage
# The same examples in every run, and no time limit, because machines differ.
settings.register_profile("adtrain", derandomize=True, deadline=None, max_examples=12)
settings.load_profile("adtrain")


def has_gpu_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


OF_COMPILED = {name: getattr(CpuBackend, name) for name in ("compile", "fuse", "lowering_key", "memory")}
"""What runs Programs as compiled code."""
GIVEN_CC = os.environ.get("CC", "")
QUICK = (
    "-O1 -fexpensive-optimizations -fno-asynchronous-unwind-tables -fno-dce -fno-forward-propagate"
    " -fno-guess-branch-probability -fno-if-conversion2 -fno-move-loop-invariants -fno-tree-ccp -fno-tree-ch"
    " -fno-tree-copy-prop -fno-tree-dce -fno-tree-dominator-opts -fno-tree-forwprop -fno-tree-fre"
    " -fno-tree-loop-optimize -fno-tree-pta -fno-tree-sink -fno-tree-sra"
)
"""Options of C compilers for kernels in tests. Products and sums of kernels are fused as with -O3, which -Og and -O0 do
not do. Loops stay scalar: tests with the fixture `optimised` run vector instructions."""
QUICK_CC = """\
#!/bin/sh
case "$*" in
*{program}*) exec {compiler} "$@" -O0 ;;
*) exec {compiler} "$@" {quick} ;;
esac
"""
"""The C compiler of tests. In the C of a Program nothing is fused, so it has the same results without optimization."""
MAX_WORKERS, MAX_GPU_WORKERS = 4, 16
"""Processes that run tests at most: in general, and where the tests that are asked for are those of GPUs. These mostly
compile CUDA, for which each process uses one core."""
GPU_TESTS = "test_gpu_*.py"
WHOLE_GPU = ("test_gpu_faults.py", "test_gpu_ranks.py")
"""Files whose tests take all memory of a GPU, or several GPUs, so that each waits for the one before."""
NvrtcLog: TypeAlias = "Callable[[Source, str], str]"
COMPILED = cache_home() / "adtrain-tests"
"""The folder of code that the tests compiled. All clones share it, because a key has all that the code depends on."""
UNUSED_SECONDS = 2 * 86400
"""Compiled code that is unused for so long is deleted: a changed kernel leaves its old code behind."""
NEEDS = {
    "needs_torch": ("torch",),
    "needs_onnx": ("onnx", "onnxruntime"),
    "needs_jax": ("jax",),
    "needs_mpi": ("mpi4py",),
    "needs_transformers": ("torch", "transformers"),
    "needs_sklearn": ("sklearn",),
    "needs_torchvision": ("torch", "torchvision"),
}
"""The modules without which tests with a marker are skipped."""


def pytest_configure(config: pytest.Config) -> None:
    """Exhaustive tests run only where -m names them."""
    asked = config.option.markexpr
    if "exhaustive" not in asked:
        config.option.markexpr = f"({asked}) and not exhaustive" if asked else "not exhaustive"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker per core for whole folders; none for single files, and none with -k or --lf."""
    narrowed = any(config.getoption(name, False) for name in ("keyword", "lf", "stepwise", "collectonly"))
    if narrowed or not all(os.path.isdir(argument) for argument in config.args):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_GPU_WORKERS if asks_for_gpu_tests(config) else MAX_WORKERS) if cores > 1 else 0


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return Scheduling(config, log)


class Scheduling(LoadFileScheduling):
    """A worker runs all tests of a file, in their order. Of files of GPU tests, it runs those of the same parameters.

    These mostly run the same kernels, and a file has up to two thousand of them.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if not Path(file).match(GPU_TESTS) or Path(file).name in WHOLE_GPU:
            return file
        function, _, parameters = test.partition("[")
        return f"{file}::{parameters or function}"


def asks_for_gpu_tests(config: pytest.Config) -> bool:
    return re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is not None


def leaves_out_gpu_tests(config: pytest.Config) -> bool:
    """Whether whole folders are run where there is no driver: quicker than to collect and skip each test."""
    folders = all(os.path.isdir(argument) for argument in config.args)
    return folders and not asks_for_gpu_tests(config) and not has_gpu_driver()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (collection_path.match(GPU_TESTS) and leaves_out_gpu_tests(config)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Each worker first imports a part of its own of the test files.

    In a fresh clone, pytest compiles a file when it is imported. In one order, all workers would compile all files.
    """
    worker, workers = (os.environ.get(f"PYTEST_XDIST_{name}", "") for name in ("WORKER", "WORKER_COUNT"))
    if not worker or not all(os.path.isdir(argument) for argument in session.config.args):
        return
    files = [path for path in sorted(Path(__file__).parent.glob("test_*.py")) if not path.match(GPU_TESTS)]
    for path in files[int(worker.removeprefix("gw")) :: int(workers)]:
        with suppress(Exception, pytest.skip.Exception):  # which the collection finds again, and reports
            import_module(path.stem)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked slow come first."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """What the tests are made of lives to the end: the garbage collector need not look at it again.

    With Python's own threshold, of 700 new objects, it would take a twentieth of the time of all tests.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_unconfigure() -> None:
    """Find the last garbage, which pytest warns of where it must be closed. Then pytest looks for more, five times."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if leaves_out_gpu_tests(config):
        terminalreporter.write_line(f"GPU tests ({GPU_TESTS}) left out: there is no NVIDIA driver (libcuda.so.1)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs something that is not installed."""
    for marker in item.iter_markers():
        if missing := [name for name in NEEDS.get(marker.name, ()) if find_spec(name) is None]:
            pytest.skip(f"{missing[0]} is not installed")
        if marker.name == "compiled" and not any(map(shutil.which, NAMES)):
            pytest.skip("there is no C compiler")
        if marker.name == "needs_nvrtc":
            try:
                compiler.version()
            except CudaCompilerError as error:
                pytest.skip(str(error))


@pytest.fixture(scope="session")
def compiled_code() -> Cache:
    """Code of Programs that the tests compiled. All workers share it, and the next run finds it."""
    return compiled("cpu")


@pytest.fixture(scope="session")
def emulated_code() -> Cache:
    """The same of CUDA kernels that tests run on the CPU."""
    return compiled("emulated")


@pytest.fixture(scope="session")
def nvrtc_log() -> NvrtcLog:
    """Compiles a source for an architecture. What NVRTC says of it is kept, as compiled code is."""
    cache = compiled("nvrtc")

    def log(source: Source, target: str) -> str:
        key = compiler.fingerprint(source, target)
        if known := cache.find(key, ".txt"):
            return known.read_text()
        text = compiler.compile_source(source, target).log
        cache.store(key, ".txt", text.encode())
        return text

    return log


def compiled(kind: str) -> Cache:
    """Code of one kind, without what was not used for UNUSED_SECONDS. Lookups take longer in larger folders."""
    folder = COMPILED / kind
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # deleted by another worker
            if path.stat().st_mtime < time.time() - UNUSED_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return Cache(folder)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, compiled_code: Cache) -> Iterator[None]:
    """Put all caches except compiled code into a folder of this test run, also for child processes."""
    home = tmp_path_factory.mktemp("cache")
    (home / "adtrain").mkdir(mode=0o700)
    (home / "adtrain" / "cpu").symlink_to(compiled_code.folder)
    (home / "adtrain" / "cuda").symlink_to(compiled("cuda").folder)
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(home)
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def quick_compiler(compiled_code: Cache) -> Iterator[None]:
    """Programs, also of processes that tests start, are compiled in a fraction of the time, to slower code."""
    compiler = GIVEN_CC or next(filter(None, map(shutil.which, NAMES)), None)
    text = QUICK_CC.format(compiler=compiler, program=shlex.join(PROGRAM), quick=QUICK)
    script = compiled_code.folder / f"quick-cc-{digest(text)}"
    with pytest.MonkeyPatch.context() as patch:
        if compiler is not None:
            written = script.with_suffix(f".{os.getpid()}")  # another worker sees all of it or nothing
            written.write_text(text)
            written.chmod(0o755)
            written.replace(script)
            patch.setenv("CC", str(script))
        yield


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are compiled to the same code as outside of tests."""
    monkeypatch.setenv("CC", GIVEN_CC)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that is started once. Tests are skipped where none is installed."""
    path = installed()
    if path is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)})")
    with started(path, tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="session")
def server() -> Iterator[Commands]:
    """Has imported adtrain, to run commands of all tests."""
    commands = Commands()
    yield commands
    commands.close()


@pytest.fixture
def commands(server: Commands) -> Iterator[Commands]:
    """Runs commands in processes of their own, forked to start quickly. One that still runs is killed at the end."""
    yield server
    server.kill()


@pytest.fixture(scope="session", autouse=True)
def not_synchronized() -> Iterator[None]:
    """Files of tests need not survive a loss of power. A disk takes milliseconds to write one of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def on_numpy() -> Iterator[None]:
    """Programs run by the functions that run eagerly: nothing is compiled, and results are the same to the last bit.

    Tests of compiled Programs are marked so. What fixtures of modules run is not compiled even there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "compile", lambda self, program, lowered=None: NumpyProgram(program))
        patch.setattr(CpuBackend, "memory", lambda self, program: memory(program))
        yield


@pytest.fixture(scope="module", autouse=True)
def unfused_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """In modules marked `unfused`, only Programs of a sweep's members are fused, whose equations would be those of one
    member without it. Small trainings take two thirds of their time, and have the same results."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("unfused") is not None:
            patch.setattr(CpuBackend, "fuse", fused_if_of_members)
            patch.setattr(CpuBackend, "lowering_key", key_of_unfused)
        yield


def fused_if_of_members(backend: CpuBackend, program: Program) -> Program:
    fused: Program = OF_COMPILED["fuse"](backend, program) if program.members else program
    return fused


def key_of_unfused(backend: CpuBackend) -> str | None:
    """Not the key of fused Programs, for which processes that tests start look in the same cache."""
    key = OF_COMPILED["lowering_key"](backend)
    return None if key is None else f"{key}, not fused"


@pytest.fixture(autouse=True)
def compiled_where_marked(request: pytest.FixtureRequest) -> None:
    """Tests marked `compiled` compile their Programs."""
    if request.node.get_closest_marker("compiled") is not None:
        monkeypatch = request.getfixturevalue("monkeypatch")
        for name, method in OF_COMPILED.items():
            monkeypatch.setattr(CpuBackend, name, method)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine without the libraries for GPUs."""
    monkeypatch.delitem(devices._loaded, "gpu", raising=False)
    for module in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cuda", None)


@pytest.fixture
def default_signals() -> Iterator[None]:
    """SIGINT and SIGHUP act here, and in processes that the test starts, as by default.

    A shell lets its background jobs ignore SIGINT, and nohup its command SIGHUP. Child processes inherit both.
    """
    handlers: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
