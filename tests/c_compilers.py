"""The C compilers of this machine, and the functions that their assembly calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

OPENMP = "int omp_get_thread_num(void), omp_get_num_threads(void), omp_get_max_threads(void);\n"
"""An omp.h for a clang that is installed without one."""
_FUNCTION = re.compile(r"^static __attribute__\(\((?:noinline|noipa)\)\) void (\w+)\(", re.MULTILINE)


def installed(*kinds: str) -> list[str]:
    """The programs named gcc or clang, also those with a version in their name: each compiler once."""
    found: dict[str, str] = {}
    for name in (f"{kind}{version}" for kind in kinds for version in ("", *(f"-{n}" for n in range(8, 30)))):
        if path := shutil.which(name):
            found.setdefault(os.path.realpath(path), name)
    return list(found.values())


def is_clang(compiler: str) -> bool:
    return "clang" in os.path.realpath(shutil.which(compiler) or compiler)


def assembly(text: str, folder: Path, command: Sequence[str]) -> str:
    """The assembly of a C text."""
    (folder / "program.c").write_text(text)
    (folder / "openmp").mkdir(exist_ok=True)
    (folder / "openmp" / "omp.h").write_text(OPENMP)
    given = [*command, "-idirafter", str(folder / "openmp"), "-S", "-o", "-", "program.c"]
    done = subprocess.run(given, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    return done.stdout


def unused(functions: Sequence[str], assembly: str) -> list[str]:
    """The functions that no instruction names, neither themselves nor a clone of them (f.isra.0)."""
    instructions = "\n".join(re.findall(r"^\s+[a-z]\w*\s+[^\n]*", assembly, re.MULTILINE))
    named = {name.partition(".")[0] for name in re.findall(r"[A-Za-z_][\w.]*", instructions)}
    return [f for f in functions if f not in named]


def separate_functions(text: str) -> list[str]:
    """The functions of a C text that compilers may not inline."""
    return _FUNCTION.findall(text)


def functions_between(text: str, start: str, end: str) -> list[str]:
    """The static functions of a part of a C text."""
    return re.findall(r"^static void (\w+)\(", text[text.index(start) : text.index(end)], re.MULTILINE)


def instructions_of(assembly: str) -> dict[str, str]:
    """The assembly of each function with its clones, by its name."""
    _, *parts = re.split(r"^([A-Za-z_]\w*)(?:\.\w+)*:.*$", assembly, flags=re.MULTILINE)
    found: dict[str, str] = {}
    for name, lines in zip(parts[::2], parts[1::2], strict=True):
        found[name] = found.get(name, "") + lines
    return found
