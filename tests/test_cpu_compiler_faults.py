"""What can go wrong with the compiler and the cache of compiled code, each with one line that says so."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke
from compiler_workshop import PROGRAM, Change, Workshop, entry, workshop
from waiting import PATIENCE, wait_until

from adtrain import cache
from adtrain.backends.cpu import compiler
from adtrain.backends.cpu.compiler import CompilerError, describe

__all__ = ["workshop"]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def damage_the_end(content: bytes) -> bytes:
    return content[: len(content) // 2]


def damage_the_middle(content: bytes) -> bytes:
    return content[:500] + bytes([content[500] ^ 1]) + content[501:]


def damage_everything(content: bytes) -> bytes:
    return b"not a library"


def empty(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("damage", "suffix"),
    [(damage_the_end, ".so"), (damage_the_middle, ".o"), (damage_everything, ".so"), (empty, ".o")],
)
def test_a_damaged_cache_file_is_rebuilt_with_one_warning(
    suffix: str, damage: Callable[[bytes], bytes], workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    entry()
    path = workshop.only(suffix)
    good = path.read_bytes()
    path.unlink()  # this process has the library in use
    path.write_bytes(damage(good))
    if suffix == ".o":
        workshop.only(".so").unlink()
    assert entry() == 16
    assert caplog.messages == [f"adtrain: warning: {path}: is damaged and will be rebuilt"]
    assert workshop.only(suffix).read_bytes() == good


def make_writable_by_the_group(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> str:
    workshop.cache.chmod(0o770)
    return f"{workshop.cache}: other users can write to it; run chmod go-w"


def make_parent_writable_by_all(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> str:
    workshop.cache.parent.chmod(0o707)
    return f"{workshop.cache.parent}: other users can write to it; run chmod go-w"


def give_away(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "geteuid", lambda: workshop.cache.stat().st_uid + 1)
    return f"{workshop.cache.parent}: belongs to another user"


def make_unwritable(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != workshop.cache)  # root may write everywhere
    return f"{workshop.cache}: cannot be written"


def put_a_file_there(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> str:
    workshop.cache.rmdir()
    workshop.cache.write_text("")
    return f"{workshop.cache}: File exists"


@pytest.mark.parametrize(
    "spoil", [make_writable_by_the_group, make_parent_writable_by_all, give_away, make_unwritable, put_a_file_there]
)
def test_an_untrusted_cache_folder_is_not_used_and_warned_about_once(
    spoil: Change, workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workshop.cache.mkdir(parents=True)
    cause = spoil(workshop, monkeypatch)
    assert (entry(), entry()) == (16, 16)
    assert workshop.compiled() == ["program.c", "scale.c"]  # this process keeps them
    assert caplog.messages == [f"adtrain: warning: compiled code is not cached for the next run ({cause})"]
    assert not workshop.cache.is_dir() or list(workshop.cache.iterdir()) == []


def test_a_temporary_cache_is_removed_with_its_process(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.cache.parent.mkdir(parents=True)
    workshop.cache.write_text("")
    temporary = workshop.folder / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = workshop.start()
    out, err = process.communicate()
    assert out == "16\n"
    assert err == f"adtrain: warning: compiled code is not cached for the next run ({workshop.cache}: File exists)\n"
    assert list(temporary.iterdir()) == []


def test_a_missing_compiler_is_a_one_line_error(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(workshop.folder / "empty"))
    monkeypatch.setenv("CC", "")
    with pytest.raises(CompilerError, match=r"^no C compiler \(cc, gcc or clang\) found; install one, e\.g\. apt"):
        entry()
    monkeypatch.setenv("CC", "gcc-99 -m64")
    with pytest.raises(CompilerError, match=r"^CC=gcc-99 -m64: no such program$"):
        entry()


def test_a_compile_error_in_a_program_keeps_its_source(workshop: Workshop) -> None:
    with pytest.raises(
        CompilerError, match=r"wrapper: program\.c:1:\d+: error: .* \(the source is kept in (.*)\)$"
    ) as e:
        entry("int entry(int x) { return y; }")
    kept = workshop.cache / "failed.c"
    assert str(kept) in str(e.value)
    assert kept.read_text().startswith("int entry(int x) { return y; }\n/* ")
    assert {path.suffix for path in workshop.cache.iterdir()} == {".c", ".txt"}


def test_a_compile_error_in_a_kernel_names_its_file(workshop: Workshop) -> None:
    (workshop.kernels / "scale.c").write_text("T wrong")
    with pytest.raises(CompilerError, match=r"wrapper: .*/kernels/cpu/scale\.c:1:\d+: error: [^\n]*$"):
        entry()


def test_a_missing_kernel_is_named(workshop: Workshop) -> None:
    source = PROGRAM.replace("scale_float32", "absent_float32")
    try:  # whether the linker or the loader notices depends on the system
        with pytest.raises(CompilerError, match=r"absent_float32"):
            entry(source, [])
    finally:
        assert [path for path in workshop.cache.iterdir() if path.is_dir()] == []


def test_a_killed_compiler_is_a_one_line_error(workshop: Workshop) -> None:
    workshop.set_compiler(before="echo 'cannot take any more' >&2; exit 1")
    with pytest.raises(CompilerError, match=r"^[^\n]*wrapper: cannot take any more[^\n]*$"):
        entry()
    workshop.set_compiler(before="exit 3")
    with pytest.raises(CompilerError, match=r"wrapper: ended with exit status 3"):
        entry()


def test_a_full_disk_is_a_one_line_error_and_leaves_no_files(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)

    entry("int entry(int x) { return x; }", [])
    before = sorted(workshop.cache.iterdir())
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CompilerError, match=r"^[^\n]*: cannot be written \(No space left on device\); it needs .*B$"):
        entry()
    assert sorted(workshop.cache.iterdir()) == before


def test_with_a_full_cache_the_library_is_compiled_in_a_temporary_folder(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace = os.replace

    def full(source: str, target: str) -> None:
        if Path(target).is_relative_to(workshop.cache):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert "cannot be written" not in describe()  # the version in `adtrain devices`
    assert entry() == 16
    assert entry("int entry(int x) { return x; }", []) == 5
    assert caplog.messages == [
        f"adtrain: warning: compiled code is not cached for the next run ({workshop.cache}: No space left on device)"
    ]
    assert not list(workshop.cache.iterdir())


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_partial_library(number: int, workshop: Workshop) -> None:
    # Without another process: dash may lose a signal that comes while it starts one.
    pause = f": > {workshop.folder}/started; exec sleep {PATIENCE:.0f}"
    workshop.set_compiler(before=f'case "$*" in *"-c program.c"*) {pause} ;; esac')
    process = workshop.start()
    wait_until((workshop.folder / "started").exists, process)
    os.killpg(process.pid, number)
    process.communicate()
    assert not list(workshop.cache.glob("*.so")) + list(workshop.cache.glob("*.o"))
    # After SIGKILL nobody can clean up but a later build.
    assert number == signal.SIGKILL or not list(workshop.cache.glob(f"{cache.BUILD_PREFIX}*"))
    workshop.set_compiler()
    assert entry() == 16


def cached(workshop: Workshop, source: str) -> str:
    """Compile the source into the cache in place of PROGRAM's library: a whole file with the wrong content."""
    library = workshop.folder / "other.so"
    subprocess.run(["cc", "-x", "c", "-", "-shared", "-fPIC", "-o", library], input=source.encode(), check=True)
    entry_path = workshop.only(".so")
    key = entry_path.name.partition(".")[0]
    entry_path.unlink()
    return str(cache.Cache(workshop.cache).store(key, ".so", library.read_bytes()))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("int entry(int x) { return absent(x); }", "undefined symbol: absent"),
        ("int other(int x) { return x; }", "does not have the function entry"),
    ],
)
def test_a_cached_library_that_does_not_serve_is_compiled_anew_once(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, source: str, problem: str
) -> None:
    process = workshop.start()  # another one, because this one has the library loaded from then on
    assert process.communicate() == ("16\n", "")
    workshop.compiled()
    path = cached(workshop, source)
    assert entry() == 16
    assert caplog.messages == [f"adtrain: warning: {path}: {problem}; it will be rebuilt"]
    assert workshop.compiled() == ["program.c", "scale.c"]
    assert entry() == 16
    assert workshop.compiled() == []


@pytest.mark.parametrize("source", [None, "float other(float x) { return x; }"])
def test_a_cached_kernel_with_other_code_is_compiled_anew(
    source: str | None, workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    process = workshop.start()  # another one, because this one would have the library loaded
    assert process.communicate() == ("16\n", "")
    workshop.only(".so").unlink()
    path = workshop.only(".o")
    path.unlink()
    content = b"no object file"
    if source is not None:
        (workshop.folder / "other.c").write_text(source)
        subprocess.run(["cc", "-fPIC", "-c", "other.c", "-o", "other.o"], cwd=workshop.folder, check=True)
        content = (workshop.folder / "other.o").read_bytes()
    cache.Cache(workshop.cache).store(path.name.partition(".")[0], ".o", content)
    workshop.compiled()
    assert entry() == 16
    assert "the kernels in the cache will be rebuilt" in caplog.text
    assert workshop.compiled() == ["program.c", "program.c", "scale.c"]
    assert workshop.only(".o").name == path.name


def test_a_new_library_that_does_not_serve_is_an_error_and_not_kept(workshop: Workshop) -> None:
    with pytest.raises(CompilerError, match=r"\.so: does not have the function entry$"):
        entry("int other(int x) { return x; }", [])
    assert not list(workshop.cache.glob("*.so"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiler_of_another_language_compiles_c(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "g++")
    assert entry() == 16


def test_a_program_that_is_no_compiler_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "true")
    with pytest.raises(CompilerError, match=r"^\S*/true: wrote no file; is it a C compiler\?$"):
        entry()


@pytest.mark.parametrize("home", ["home", ""])
def test_a_relative_home_is_not_used(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, home: str
) -> None:
    monkeypatch.chdir(workshop.folder)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    assert entry() == 16
    cause = f"HOME={home}: expected an absolute path"
    assert caplog.messages == [f"adtrain: warning: compiled code is not cached for the next run ({cause})"]
    assert not (workshop.folder / "home").exists()
    found = invoke("data", "fetch", "kmnist")
    assert (found.exit_code, found.stderr) == (2, f"adtrain: error: the folder of fetched data sets: {cause}\n")


def test_a_relative_cache_folder_is_ignored(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG specification says."""
    monkeypatch.chdir(workshop.folder)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(workshop.folder))
    assert cache.cache_home() == workshop.folder / ".cache"
    assert entry() == 16
    assert not Path("relative").exists()


@pytest.mark.parametrize("when", ["--version", "program.c"])
def test_a_compiler_that_prints_without_end_is_ended(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(compiler, "MAX_MESSAGES", 1 << 20)
    path = workshop.folder / "wrapper"
    path.write_text(f'#!/bin/sh\ncase "$*" in *{when}*) yes; esac\nexec cc "$@"\n')
    tracemalloc.start()
    with pytest.raises(CompilerError, match=r"wrapper: ended, as it printed more than 1 MiB"):
        entry()
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("when", ["--version", "program.c"])
def test_a_compiler_that_never_ends_is_ended_by_ctrl_c(workshop: Workshop, when: str) -> None:
    mark = workshop.folder / "pid"
    path = workshop.folder / "wrapper"
    wait = f"echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep {PATIENCE:.0f}"
    path.write_text(f'#!/bin/sh\ncase "$*" in *{when}*) {wait};; esac\nexec cc "$@"\n')
    process = workshop.start()
    wait_until(mark.exists, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert err.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: not runs(int(mark.read_text())))


def test_a_compiler_is_ended_while_another_thread_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started, popen = threading.Event(), subprocess.Popen
    monkeypatch.setattr(compiler, "START_SECONDS", PATIENCE)

    def slow(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = popen(command, **options)
        started.set()
        time.sleep(0.1)
        return process

    monkeypatch.setattr(subprocess, "Popen", slow)
    with ThreadPoolExecutor() as pool:
        done = pool.submit(compiler._run, ["sleep", f"{PATIENCE:.0f}"], ".")
        started.wait()
        compiler.end_all()
        assert done.result().returncode == -signal.SIGKILL


@pytest.mark.usefixtures("default_signals")
def test_a_compiler_is_ended_by_ctrl_c_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def interrupted(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(command, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiler._run(["sleep", f"{PATIENCE:.0f}"], ".")
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.usefixtures("default_signals")
def test_compilers_are_ended_by_ctrl_c_while_threads_for_them_start(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, submit = workshop.folder / "started", ThreadPoolExecutor.submit
    workshop.set_compiler(before=f'case "$*" in *"-c program.c"*) : > {mark}; exec sleep {PATIENCE:.0f} ;; esac')

    def interrupted(*arguments: Any) -> Any:
        future = submit(*arguments)
        wait_until(mark.exists)
        signal.raise_signal(signal.SIGINT)
        return future

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        entry()
    assert not compiler._running


def runs(process: int) -> bool:
    """Whether a process has not ended. One that has ended may wait for its parent to notice."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
