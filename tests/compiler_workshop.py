"""A folder of kernels, a cache and a compiler of a test's own, for the tests of the C compiler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from adtrain import files
from adtrain.backends.cpu import compiler
from adtrain.backends.cpu.compiler import Source

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
        path, text = self.folder / "wrapper", WRAPPER.format(folder=self.folder, before=before, version=version)
        # Linux starts no file that is open for writing, and opens no file for writing while it is started. So the file
        # is written under another name, by another process: a process forked by another thread would keep it open.
        script = 'cat > "$0.new" && chmod +x "$0.new" && mv "$0.new" "$0"'
        subprocess.run(["sh", "-c", script, path], input=text, text=True, check=True)

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
            "import sys; from pathlib import Path; import numpy as np; from adtrain import files\n"
            "from adtrain.backends.cpu.compiler import Source, load\n"
            "files.PACKAGE = Path(sys.argv[1]) / 'adtrain'\n"
            "print(load(sys.argv[2], [Source('scale.c', (np.dtype('float32'),))], ['entry']).entry(5))\n"
        )
        command = [sys.executable, "-c", code, str(self.folder), PROGRAM]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )


def open_workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """A workshop in this folder, which the compiler of the package uses from then on."""
    monkeypatch.setenv("CC", str(tmp_path / "wrapper"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "platform", "linux")  # the cache's place is chosen by it
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "adtrain")
    return Workshop(tmp_path)


def entry(source: str = PROGRAM, kernels: Sequence[Source] = (SCALE_FLOAT,)) -> int:
    found: int = compiler.load(source, kernels, ["entry"]).entry(5)
    return found


Change: TypeAlias = Callable[[Workshop, pytest.MonkeyPatch], Any]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return open_workshop(tmp_path, monkeypatch)
