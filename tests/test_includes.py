"""The keys of compiled code follow every file that a source includes, as compilers find it; so do copies of kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from adtrain.backends.cpu import compiler as c_compiler
from adtrain.backends.cpu.compiler import Source as CSource
from adtrain.backends.cuda import compiler as cuda_compiler
from adtrain.backends.cuda.compiler import Source
from adtrain.cache import Includes, included_names, search_folders
from adtrain.files import asset_path

# For each case the kernel, the other files, and the files that an edit changes or makes.
CASES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "beside": ('#include "w.h"', {"k/w.h": "1"}, {"k/w.h": "2"}),
    "subfolder": ('#include "sub/w.h"', {"k/sub/w.h": "1"}, {"k/sub/w.h": "2"}),
    "parent folder": ('#include "../w.h"', {"w.h": "1"}, {"w.h": "2"}),
    "another suffix": ('#include "w.inc"', {"k/w.inc": "1"}, {"k/w.inc": "2"}),
    "no suffix": ('#include "weights"', {"k/weights": "1"}, {"k/weights": "2"}),
    "in a header": ('#include "sub/a.h"', {"k/sub/a.h": '#include "b.h"', "k/sub/b.h": "1"}, {"k/sub/b.h": "2"}),
    "back to the parent": ('#include "sub/a.h"', {"k/sub/a.h": '#include "../b.h"', "k/b.h": "1"}, {"k/b.h": "2"}),
    "angle brackets": ("#include <w.h>", {"k/w.h": "1"}, {"k/w.h": "2"}),
    "spaces": ('  #  include   "w.h"', {"k/w.h": "1"}, {"k/w.h": "2"}),
    "after a comment": ('/* the weights */ #include "w.h"', {"k/w.h": "1"}, {"k/w.h": "2"}),
    "a spliced line": ('#include \\\n"w.h"', {"k/w.h": "1"}, {"k/w.h": "2"}),
    "a spliced word": ('#inc\\\nlude "w.h"', {"k/w.h": "1"}, {"k/w.h": "2"}),
    "a macro": ('#define FILE "w.h"\n#include FILE', {"k/w.h": "1"}, {"k/w.h": "2"}),
    "a word that becomes a string": (
        "#define TEXT(x) #x\n#define FILE(x) TEXT(x)\n#include FILE(w.h)",
        {"k/w.h": "1"},
        {"k/w.h": "2"},
    ),
    "a macro of a header": (
        '#include "sub/names.h"\n#include FILE',
        {"k/sub/names.h": '#define FILE "w.h"', "k/w.h": "1"},
        {"k/w.h": "2"},
    ),
    "a macro for a header": (
        '#define FILE "b.h"\n#include "sub/a.h"',
        {"k/sub/a.h": "#include FILE", "k/sub/b.h": "1"},
        {"k/sub/b.h": "2"},
    ),
    "a file that may be there": ('#if __has_include("w.h")\n#include "w.h"\n#endif', {}, {"k/w.h": "1"}),
    "a file that comes before": (
        '#include "sub/a.h"',
        {"k/sub/a.h": '#include "common.h"'},
        {"k/sub/common.h": "1"},
    ),
    "a circle": (
        '#include "a.h"',
        {"k/a.h": '#pragma once\n#include "sub/../b.h"', "k/b.h": '#include "a.h"', "k/sub/x": ""},
        {"k/b.h": '#include "a.h"\n'},
    ),
    "bytes that are no UTF-8": ('#include "w.h"', {"k/w.h": "\udcff"}, {"k/w.h": "\udcfe"}),
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="surrogateescape")


def c_key(path: Path) -> str:
    kernel = CSource(str(path), (np.dtype("float32"),))
    return c_compiler._object_key("", path, kernel, Includes([asset_path("kernels") / "cpu"]))


def cuda_key(path: Path) -> str:
    return cuda_compiler.fingerprint(Source(str(path), path.read_text()), "90a")


KEYS: dict[str, Callable[[Path], str]] = {"c": c_key, "cuda": cuda_key}


@pytest.fixture(autouse=True)
def nvrtc_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compiler, "version", lambda: "13.0")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("case", CASES)
def test_an_edit_of_an_included_file_changes_the_key(case: str, key: str, tmp_path: Path) -> None:
    kernel, files, edited = CASES[case]
    write(tmp_path, {"k/kernel": kernel, "k/unrelated.h": "1", **files})
    path = tmp_path / "k" / "kernel"
    before = KEYS[key](path)
    write(tmp_path, {"k/unrelated.h": "2"})
    assert KEYS[key](path) == before
    write(tmp_path, edited)
    assert KEYS[key](path) != before


@pytest.mark.parametrize("key", KEYS)
def test_links_are_followed(key: str, tmp_path: Path) -> None:
    write(
        tmp_path, {"k/kernel": '#include "w.h"\n#include "linked/v.h"', "other/w.h": '#include "x.h"', "far/v.h": "1"}
    )
    write(tmp_path, {"k/x.h": "1"})
    os.symlink(tmp_path / "other" / "w.h", tmp_path / "k" / "w.h")
    os.symlink(tmp_path / "far", tmp_path / "k" / "linked")
    found = [KEYS[key](tmp_path / "k" / "kernel")]
    for name in ("other/w.h", "far/v.h", "k/x.h"):
        write(tmp_path, {name: '#include "x.h"\n// edited'})
        found.append(KEYS[key](tmp_path / "k" / "kernel"))
    assert len(set(found)) == 4


def test_a_folder_and_a_pipe_are_no_included_files(tmp_path: Path) -> None:
    (tmp_path / "folder.h").mkdir()
    os.mkfifo(tmp_path / "pipe.h")
    assert Includes().files('#include "folder.h"\n#include "pipe.h"\n#include "a\0b"', tmp_path) == []


def test_the_folders_of_the_compiler_and_of_the_environment_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("CPATH", f"{tmp_path}/c:")
    monkeypatch.setenv("C_INCLUDE_PATH", f"{tmp_path}/d")
    found = search_folders([f"-I{tmp_path}/a", "-isystem", f"{tmp_path}/b", "-O3", "-Irelative"])
    assert found == [tmp_path / name for name in ("a", "b", "c", "d")]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("case", CASES)
def test_every_file_that_a_compiler_reads_is_found(case: str, tmp_path: Path) -> None:
    kernel, files, edited = CASES[case]
    write(tmp_path, {"k/kernel.c": kernel, **files, **edited})
    folder = asset_path("kernels") / "cpu"
    command = ["cc", "-M", "-DT=float", "-DSUFFIX=_float32", f"-I{folder}", f"-I{tmp_path}/k", "kernel.c"]
    run = subprocess.run(command, cwd=tmp_path / "k", capture_output=True, text=True, check=True)
    read = {Path(os.path.realpath(tmp_path / "k" / word)) for word in run.stdout.replace("\\\n", "").split()[2:]}
    read = {path for path in read if not path.is_relative_to("/usr")}
    found = Includes([folder, tmp_path / "k"]).files(kernel, tmp_path / "k")
    assert read <= set(map(Path.resolve, found))


@pytest.mark.needs_nvrtc
def test_nvrtc_reads_headers_of_a_user_as_a_c_compiler_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    write(tmp_path, {"k/sub/a.h": '#include "b.h"\n#include "../../up.inc"', "k/sub/b.h": "#define B 1"})
    write(tmp_path, {"k/b.h": "#error the wrong file", "up.inc": '#include "common/common.cuh"\n#define UP 2'})
    text = '#include <sub/a.h>\nextern "C" __global__ void f(int *x) { x[0] = B + UP; }\n'
    source = Source(str(tmp_path / "k" / "f.cu"), text)
    assert "common/common.cuh" in dict(cuda_compiler.included(source))
    assert cuda_compiler.compile_source(source, "80").cubin


def test_only_directives_give_names() -> None:
    assert included_names('#include "a.h"\n// "b.h"\nconst char *c = "c.h";\n#if X // <d.h>\n') == {"a.h", "d.h"}
