"""Runs commands in processes forked from one that has imported everything, which takes much less time than starting."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from waiting import PATIENCE

CLOSED, FULL, LOST = "closed", "full", "/dev/null"
"""A pipe that nobody reads, a full disk, and where output is thrown away."""

SERVER = """\
import gc, importlib, json, os, signal, sys
from adtrain.cli import COMMANDS, main, module_of

for name in COMMANDS:
    importlib.import_module(module_of(name))

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

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would inherit that it is ignored,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and a command of nohup this one
gc.freeze()  # or each child would copy the memory of all objects
for line in sys.stdin:
    arguments, out, err, before, folder, environment = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(stream(out), 1)
        os.dup2(stream(err), 2)
        exec(before)
        sys.argv = ["adtrain", *arguments]
        main.main()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Case(NamedTuple):
    """A command, where its outputs go (CLOSED, FULL or a file), and Python code that runs before it.

    `signalled(function, number)` in that code lets a signal come when the function, a dotted name, is called.
    """

    arguments: str
    out: str = LOST
    err: str = LOST
    before: str = ""


class Commands:
    """Runs one command after another, in the current folder and environment."""

    def __init__(self) -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a process with more threads must not be forked
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            bufsize=0,  # or a line that is in a buffer would not be seen by `select`
        )  # fmt: skip
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.requests, self.answers = self.server.stdin, self.server.stdout
        self.pid = 0
        """The process of the command that runs; 0 if none does."""

    def start(self, case: Case) -> int:
        """Start the command. Returns its process id."""
        arguments, *others = case
        given = [arguments.split(), *others, str(Path.cwd()), dict(os.environ)]
        self.requests.write(json.dumps(given).encode() + b"\n")
        self.pid = int(self.answers.readline())
        return self.pid

    def wait(self) -> int:
        """Wait for the command's end. Returns its exit code, negative if a signal ended it."""
        assert self._has_ended(PATIENCE), f"waited {PATIENCE} s in vain"
        code, self.pid = int(self.answers.readline()), 0
        return code

    def poll(self) -> bool | None:
        """None while the command runs, as of a `Popen`."""
        return self._has_ended(0) or None

    def run(self, case: Case) -> int:
        """The command's exit code."""
        self.start(case)
        return self.wait()

    def kill(self) -> None:
        """Kill the command that runs, if one does."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        self.server.communicate()

    def _has_ended(self, seconds: float) -> bool:
        """Whether the command ends within the time."""
        return bool(select.select([self.answers], [], [], seconds)[0])
