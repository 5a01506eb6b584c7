"""Runs commands in processes forked from one that has imported everything, which takes much less time than starting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CLOSED, FULL = "closed", "full"
"""A pipe that nobody reads, and a full disk."""

HELPER = """\
import gc, importlib, json, os, sys
from adtrain.cli import main

for name in main.COMMANDS:
    importlib.import_module(f"adtrain.cli.{name}")

def stream(what):
    if what == "closed":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return os.open("/dev/full" if what == "full" else what, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def signalled(function, number):
    module, _, name = function.rpartition(".")
    inner = getattr(importlib.import_module(module), name)
    def run(*arguments, **options):
        os.kill(os.getpid(), number)
        return inner(*arguments, **options)
    setattr(sys.modules[module], name, run)

gc.freeze()  # or each child would copy the memory of all objects
codes = []
for arguments, streams, function, number in json.load(sys.stdin):
    child = os.fork()
    if not child:
        for i, what in enumerate(streams):
            os.dup2(stream(what), i + 1)
        if function:
            signalled(function, number)
        sys.argv = ["adtrain", *arguments]
        main.main()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


class Case(NamedTuple):
    """A command, where its outputs go (CLOSED, FULL or a file), and a signal that comes when a function is called."""

    arguments: str
    out: str
    err: str
    function: str = ""
    number: int = 0


def exit_codes(cases: Sequence[Case], folder: Path) -> list[int]:
    """The exit code of each command, run in the folder; negative for one that a signal ended."""
    given = json.dumps([[case.arguments.split(), [case.out, case.err], case.function, case.number] for case in cases])
    done = subprocess.run(
        [sys.executable, "-c", HELPER], input=given, stdout=subprocess.PIPE, text=True, cwd=folder, check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    codes: list[int] = json.loads(done.stdout)
    return codes
