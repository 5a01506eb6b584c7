from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from waiting import PATIENCE, wait_until

from adtrain import assets, cache
from adtrain.backends.cpu import compiler
from adtrain.backends.cpu.compiler import CompilerError, Source
from adtrain.codegen.expressions import c_type

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

HEADER = (
    "#pragma once\n#define PASTE_(a, b) a##b\n#define PASTE(a, b) PASTE_(a, b)\n#define FN(name) PASTE(name, SUFFIX)\n"
)
SCALE = '#include "tiny.h"\nT FN(scale)(T x) { return 3 * x; }\n'
PICK = '#include <stdbool.h>\n#include <stdint.h>\n#include "tiny.h"\nT FN(pick)(T x, U i) { return x + (T)i; }\n'
PROGRAM = (
    '#include "tiny.h"\nfloat scale_float32(float);\nint entry(int x) { return (int)scale_float32((float)x) + 1; }\n'
)
FLOAT, DOUBLE, INT, BOOL = (np.dtype(name) for name in ("float32", "float64", "int64", "bool"))
SCALE_FLOAT = Source("scale.c", (FLOAT,))

# A compiler that writes down each file it is to compile, and does what `before` says first.
WRAPPER = """\
#!/bin/sh
case "$*" in
    *--version*) echo '{version}'; exit 0 ;;
    *-shared*) ;;
    *) echo "$*" >> {folder}/compiled ;;
esac
{before}
exec cc "$@"
"""


class Workshop:
    """A folder of kernels, a cache and a compiler of the test's own, and all three can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels = folder / "kernels" / "cpu"
        self.cache = folder / "home" / "adtrain" / "cpu"
        self.kernels.mkdir(parents=True)
        for name, text in {"tiny.h": HEADER, "scale.c": SCALE, "pick.c": PICK}.items():
            (self.kernels / name).write_text(text)
        self.set_compiler()

    def set_compiler(self, before: str = "", version: str = "tiny 1.0") -> None:
        path = self.folder / "wrapper"
        path.write_text(WRAPPER.format(folder=self.folder, before=before, version=version))
        path.chmod(0o755)

    def compiled(self) -> list[str]:
        """The names of the files compiled since the last call, in alphabetical order."""
        log = self.folder / "compiled"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(Path(word).name for line in lines for word in line.split() if word.endswith(".c"))

    def only(self, suffix: str) -> Path:
        (path,) = self.cache.glob(f"*{suffix}")
        return path

    def start(self) -> subprocess.Popen[str]:
        """Load the program in another process, a session of its own, which prints `entry(5)`."""
        code = (
            "import signal, sys; from pathlib import Path; import numpy as np; from adtrain import assets\n"
            "from adtrain.backends.cpu.compiler import Source, load\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
            "assets.PACKAGE = Path(sys.argv[1]) / 'adtrain'\n"
            "print(load(sys.argv[2], [Source('scale.c', (np.dtype('float32'),))]).entry(5))\n"
        )
        command = [sys.executable, "-c", code, str(self.folder), PROGRAM]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.setenv("CC", str(tmp_path / "wrapper"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", "linux")  # the cache's place is chosen by it
    monkeypatch.setattr(assets, "PACKAGE", tmp_path / "adtrain")
    return Workshop(tmp_path)


def entry(source: str = PROGRAM, kernels: Sequence[Source] = (SCALE_FLOAT,)) -> int:
    found: int = compiler.load(source, kernels).entry(5)
    return found


def test_element_types_become_macros(workshop: Workshop) -> None:
    source = (
        "#include <stdint.h>\ndouble pick_float64_int64(double, int64_t);\nfloat pick_float32_bool(float, _Bool);\n"
    )
    source += "int entry(int x) { return (int)(pick_float64_int64(x, 2) + pick_float32_bool(x, 7)); }\n"
    assert entry(source, [Source("pick.c", (DOUBLE, INT)), Source("pick.c", (FLOAT, BOOL))]) == 13


@pytest.mark.parametrize(
    ("name", "spelling"),
    [("float32", "float"), ("float64", "double"), ("uint8", "uint8_t"), ("int64", "int64_t"), ("bool", "bool")],
)
def test_c_names_of_element_types(name: str, spelling: str) -> None:
    assert c_type(np.dtype(name)) == spelling


def test_a_cached_library_is_not_compiled_again(workshop: Workshop) -> None:
    assert entry() == 16
    assert workshop.compiled() == ["program.c", "scale.c"]
    assert entry() == 16
    assert workshop.compiled() == []


def test_two_programs_share_compiled_kernels(workshop: Workshop) -> None:
    entry()
    workshop.compiled()
    assert entry(PROGRAM.replace("+ 1", "+ 2")) == 17
    assert workshop.compiled() == ["program.c"]


def test_only_a_changed_kernel_and_the_program_are_recompiled(workshop: Workshop) -> None:
    other = Source("pick.c", (FLOAT, INT))
    entry(kernels=[SCALE_FLOAT, other])
    workshop.compiled()
    (workshop.kernels / "scale.c").write_text(SCALE.replace("3", "4"))
    assert entry(kernels=[other, SCALE_FLOAT]) == 21
    assert workshop.compiled() == ["program.c", "scale.c"]


Change: TypeAlias = Callable[[Workshop, pytest.MonkeyPatch], Any]


def change_header(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    (workshop.kernels / "tiny.h").write_text(f"{HEADER}\n")


def change_version(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.set_compiler(version="tiny 1.0.1")


def change_options(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{workshop.folder}/wrapper -g0")


def change_flags(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adtrain.backends.cpu.toolchain.FLAGS", ("-O1", "-fPIC"))


def change_processor(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "processor", lambda: "another one")


@pytest.mark.parametrize("change", [change_header, change_version, change_options, change_flags, change_processor])
def test_a_change_of_anything_the_code_depends_on_recompiles_it(
    change: Change, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry()
    workshop.compiled()
    change(workshop, monkeypatch)
    assert entry() == 16
    assert workshop.compiled() == ["program.c", "scale.c"]


def damage_the_end(content: bytes) -> bytes:
    return content[: len(content) // 2]


def damage_the_middle(content: bytes) -> bytes:
    return content[:500] + bytes([content[500] ^ 1]) + content[501:]


def damage_everything(content: bytes) -> bytes:
    return b"not a library"


def empty(content: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("suffix", [".so", ".o"])
@pytest.mark.parametrize("damage", [damage_the_end, damage_the_middle, damage_everything, empty])
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
    assert caplog.messages == [f"adtrain: {path}: is damaged and will be rebuilt"]
    assert workshop.only(suffix).read_bytes() == good


def test_cache_folders_are_private_to_the_user(workshop: Workshop) -> None:
    mask = os.umask(0)
    try:
        entry()
    finally:
        os.umask(mask)
    assert [folder.stat().st_mode & 0o777 for folder in (workshop.cache, workshop.cache.parent)] == [0o700, 0o700]


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
    assert caplog.messages == [f"adtrain: compiled code is not cached for the next run ({cause})"]
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
    assert err == f"adtrain: compiled code is not cached for the next run ({workshop.cache}: File exists)\n"
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
    with pytest.raises(CompilerError, match=r"^[^\n]*: cannot be written \(No space left on device\)$"):
        entry()
    assert sorted(workshop.cache.iterdir()) == before


def test_two_processes_may_compile_at_once(workshop: Workshop) -> None:
    # Each compiler of a program waits for the other one's.
    meet = (
        f"touch {workshop.folder}/here.$$; while [ $(ls {workshop.folder}/here.* | wc -l) -lt 2 ]; do sleep 0.01; done"
    )
    workshop.set_compiler(before=f'case "$*" in *"-c program.c"*) {meet} ;; esac')
    processes = [workshop.start(), workshop.start()]
    assert [process.communicate() for process in processes] == [("16\n", ""), ("16\n", "")]
    assert workshop.compiled().count("program.c") == 2
    assert entry() == 16
    assert workshop.compiled() == []


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


def test_old_cache_entries_are_pruned_when_one_is_added(workshop: Workshop) -> None:
    entry()
    used, unused = workshop.only(".so"), workshop.cache / "0.0.so"
    abandoned = workshop.cache / f"{cache.BUILD_PREFIX}x"
    unused.write_text("")
    abandoned.mkdir()
    (abandoned / "program.c").write_text("")
    long_ago = time.time() - cache.UNUSED_SECONDS - 60
    for path in (used, unused, abandoned):
        os.utime(path, (long_ago, long_ago))
    entry()  # a use
    assert unused.exists()
    entry(PROGRAM.replace("+ 1", "+ 2"))
    assert (used.exists(), unused.exists(), abandoned.exists()) == (True, False, False)


def test_loading_a_cached_library_runs_no_compiler(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    entry()

    def forbidden(*args: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    assert entry() == 16
