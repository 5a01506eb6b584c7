"""Commands in a process that may not start threads or processes: one line, exit code 2."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
from command_line import invoke
from training_runs import write_config

import adtrain.__main__ as startup
from adtrain import signals
from adtrain.backends.cpu.compiler import CompilerKilled, find_compiler
from adtrain.backends.cpu.threads import ThreadLimit, require_threads
from adtrain.cache import open_cache
from adtrain.cli.main import NO_THREADS, described


def limit_threads(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let threads start as long as no more than `most` run beside the present ones, as `ulimit -u` does."""
    start, present = threading.Thread.start, threading.active_count()

    def limited(thread: threading.Thread) -> None:
        if threading.active_count() >= present + most:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    require_threads.cache_clear()
    return write_config(tmp_path)


@pytest.mark.parametrize("most", [0, 2])
def test_threads_that_openmp_could_not_start_are_an_error(
    cfg: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    limit_threads(monkeypatch, most)
    require_threads(most)
    with pytest.raises(ThreadLimit, match=rf"^only {most} of 3 more threads can be started; raise the limit \("):
        require_threads(3)


@pytest.mark.compiled
def test_a_training_without_threads_ends_with_one_line(cfg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", str(cfg), "--steps", "1", "--output-dir", "run"]
    limit_threads(monkeypatch, 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cfg.parent / "cold"))
    cold = invoke(*arguments)
    assert (cold.exit_code, cold.stderr) == (2, f"adtrain: error: {NO_THREADS}\n")


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_a_compiler_that_cannot_be_started_for_lack_of_processes_or_descriptors_is_no_reason_for_numpy(
    cfg: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def forbidden(*arguments: Any, **options: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    compiler = find_compiler(open_cache("cpu"))
    monkeypatch.setattr(subprocess, "Popen", forbidden)
    with pytest.raises(CompilerKilled, match=rf"cannot be run \({os.strerror(number)}\); end other"):
        compiler.run([], ".")


def test_a_compiler_without_processes_or_memory_is_no_reason_for_numpy(
    cfg: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cfg.parent / "cc"
    path.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) exit;; esac\necho "cc: fatal error: cannot execute cc1: $WHY"; exit 1\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    compiler = find_compiler(open_cache("cpu"))
    for why in (
        "vfork: Resource temporarily unavailable",
        "Cannot allocate memory",
        "Too many open files",
        "Segmentation fault signal terminated program cc1",  # a small stack
    ):
        monkeypatch.setenv("WHY", why)
        with pytest.raises(CompilerKilled, match=f"cc1: {why}; end other processes or raise their limit"):
            compiler.run([], ".")


@pytest.mark.usefixtures("default_signals")
def test_numpy_without_threads_is_an_error_and_no_ctrl_c() -> None:
    """OpenBLAS raises SIGINT where it cannot start a thread."""
    code = """
import os, signal, sys, threading
def forbidden(thread):
    raise RuntimeError("can't start new thread")
class RaiseAtImport:
    def find_spec(self, name, *_):
        if name == "numpy":
            threading.Thread.start = forbidden
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, RaiseAtImport())
from adtrain.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, "schema"], capture_output=True)
    assert (done.returncode, done.stderr) == (2, signals.NO_THREADS)


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        ("OSError(24, 'Too many open files', 'numpy')", startup.NO_FILES),
        ("MemoryError()", startup.NO_MEMORY),
        ("ImportError('libx.so: failed to map segment from shared object')", startup.NO_MEMORY),
    ],
)
def test_a_lack_of_descriptors_or_memory_during_the_imports_is_one_line(raised: str, line: bytes) -> None:
    code = f"""
import sys
class RaiseAtImport:
    def find_spec(self, name, *_):
        if name == "numpy":
            raise {raised}
sys.meta_path.insert(0, RaiseAtImport())
from adtrain.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, "schema"], capture_output=True)
    assert (done.returncode, done.stderr) == (2, line)


def test_too_little_address_space_is_one_line() -> None:
    started = [
        "sh",
        "-c",
        'ulimit -v 100000 && exec "$0" -c "from adtrain.__main__ import main; main()"',
        sys.executable,
    ]
    done = subprocess.run(started, capture_output=True)
    assert (done.returncode, done.stderr) == (2, startup.NO_MEMORY)


def test_a_library_without_memory_for_it_is_an_error_of_one_line() -> None:
    what = "_generator.so: failed to map segment from shared object"
    assert described(ImportError(what)) == ([f"adtrain: error: not enough memory; {what}"], 2)


def test_a_checkpoint_of_another_user_is_refused_in_one_line(cfg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", str(cfg), "--eager", "--steps", "1", "--output-dir", "run"]
    assert invoke(*arguments).exit_code == 0
    open_file = os.open

    def refused(path: Any, *options: Any, **more: Any) -> int:  # root may read every file
        if str(path).endswith("last.safetensors"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_file(path, *options, **more)

    monkeypatch.setattr(os, "open", refused)
    found = invoke("train", "--resume", "run")
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr == "adtrain: error: run/last.safetensors: cannot be read (Permission denied)\n"
