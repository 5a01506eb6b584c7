"""Processes that take turns: each answers a line of its input with a line of JSON, and is stopped meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click


class Side:
    """A Python process. It may work on from its start to its first answer; after that only while it is asked."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, question: object) -> Any:
        """The answer to a line. Raises ClickException where the process ends instead."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.write(f"{question}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `answer` says so
        return self.answer()

    def answer(self) -> Any:
        """What the process says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("a side ended early; its error stands above")
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def tell(value: object) -> None:
    """In a side's process: say an answer."""
    print(json.dumps(value), flush=True)


def serve(answer: Callable[[str], object]) -> None:
    """In a side's process: answer each line until there are no more."""
    for line in sys.stdin:
        tell(answer(line))
