from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time

import numpy as np
import pytest
from compiler_workshop import (
    BOOL,
    DOUBLE,
    FLOAT,
    HEADER,
    INT,
    PROGRAM,
    SCALE,
    SCALE_FLOAT,
    Change,
    Workshop,
    entry,
    workshop,
)  # fmt: skip

from adtrain import cache
from adtrain.backends.cpu import compiler
from adtrain.backends.cpu.compiler import Source
from adtrain.codegen.elementwise import c_type

__all__ = ["workshop"]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


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


def change_header(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    (workshop.kernels / "tiny.h").write_text(f"{HEADER}\n")


def change_version(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.set_compiler(version="tiny 1.0.1")


def change_options(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{workshop.folder}/wrapper -g0")


def change_flags(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adtrain.backends.cpu.compiler.FLAGS", ("-O1", "-fPIC"))


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


def test_cache_folders_are_private_to_the_user(workshop: Workshop) -> None:
    mask = os.umask(0)
    try:
        entry()
    finally:
        os.umask(mask)
    assert [folder.stat().st_mode & 0o777 for folder in (workshop.cache, workshop.cache.parent)] == [0o700, 0o700]


@pytest.mark.exhaustive
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


def test_another_thread_may_load_a_library_at_the_same_time(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    load = ctypes.CDLL

    def loaded(path: str) -> ctypes.CDLL:
        del os.environ["GOMP_SPINCOUNT"]  # as the other thread does when it has loaded its library
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    assert entry() == 16
    assert "GOMP_SPINCOUNT" not in os.environ
