"""Where all text of the commands is printed: results to stdout; progress, notes, warnings and errors to stderr.

Every line passes `visible`, because it can contain names and messages from files and from other programs.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from adtrain import plugins
from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.text import visible

if TYPE_CHECKING:
    from adtrain.config import Config

QUIET = "adtrain.quiet"
"""The key in the meta data of click's context."""

ON_STDOUT = "adtrain.on_stdout"
"""The key in click's meta data of the option whose result standard output gets: "--json", or one with a file `-`."""

STDOUT = Path("-")
"""Standard output, in place of a file that a command writes."""

SUBSTITUTE = "adtrain.substitute"
"""The error handler of a stream's encoding: characters that the encoding lacks are printed in ASCII."""


class _Ranks:
    silent = False


def silence() -> None:
    """Print nothing from here on: this process is a rank other than 0."""
    _Ranks.silent = True


def is_silent() -> bool:
    """Whether this process prints nothing."""
    return _Ranks.silent


def show(*lines: object) -> None:
    """Print lines of a result to stdout, or to stderr where stdout gets a file."""
    context = click.get_current_context(silent=True)
    if is_silent():
        return
    if context is not None and ON_STDOUT in context.meta:
        for line in lines:
            message(line)
    else:
        print(*map(visible, lines), sep="\n", flush=True)


def stream(chunks: Iterable[str]) -> None:
    """Print a text to stdout chunk by chunk, and a line feed after it."""
    for chunk in chunks:
        if not is_silent():
            print(*map(visible, chunk.split("\n")), sep="\n", end="", flush=True)
    show("")


def write_file(path: Path, content: bytes) -> None:
    """Write a file of a result, atomically; at STDOUT to stdout."""
    if path != STDOUT:
        write_atomic(path, content)
    elif not is_silent():
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.flush()


def print_json(value: object) -> None:
    """Print the result as JSON in ASCII. Raises AdtrainError for NaN and infinity, which JSON does not have."""
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
    except ValueError:
        raise AdtrainError("the result contains NaN or infinity, which JSON does not have; omit --json") from None
    print_text(f"{text}\n")


def print_text(text: str) -> None:
    """Print the result as it is, in a form for other programs."""
    if not is_silent():
        print(text, end="", flush=True)


def progress(text: object) -> None:
    """Print a line of progress, or a note, to stderr; nothing if the command is quiet."""
    if not is_quiet():
        message(text)


def is_quiet() -> bool:
    """Whether the running command was called with --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def message(text: object) -> None:
    """Print an error, a warning, or what to do next to stderr, above a progress bar if there is one."""
    if not is_silent():
        message_of_rank(text)


def message_of_rank(text: object) -> None:
    """Print a line that any rank may have to print: which rank died or hung."""
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        tqdm.write(visible(text), file=sys.stderr)
    else:  # there is no bar
        print(visible(text), file=sys.stderr, flush=True)


def print_warnings() -> None:
    """Print log records, Python's warnings, and errors that a plug-in's threads and `atexit` raise: one line each.

    Of equal lines there is one.
    """
    printed = set[str]()

    def show(line: str) -> None:
        if line not in printed:
            printed.add(line)
            message(line)

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            show(record.getMessage())

    def show_warning(text: Warning | str, *_: Any, **__: Any) -> None:
        show(f"adtrain: warning: {text}")

    def is_reported(error: BaseException | None) -> bool:
        """Report the error if a plug-in has raised it."""
        named = None if error is None else plugins.named(error)
        if named is not None:
            show(f"adtrain: warning: {named} (ignored)")
        return named is not None

    def show_unraisable(found: sys.UnraisableHookArgs) -> None:
        if not is_reported(found.exc_value):
            sys.__unraisablehook__(found)

    def show_of_thread(found: threading.ExceptHookArgs) -> None:
        if not is_reported(found.exc_value):
            threading.__excepthook__(found)

    sys.unraisablehook, threading.excepthook = show_unraisable, show_of_thread
    logging.getLogger("adtrain").addHandler(Lines(logging.WARNING))
    warnings.showwarning = show_warning  # type: ignore[assignment]


def _substitute(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    texts = ("..." if x == "…" else x.encode("ascii", "backslashreplace").decode()
             for x in error.object[error.start : error.end])  # fmt: skip
    return "".join(texts), error.end


codecs.register_error(SUBSTITUTE, _substitute)


BROKEN_PIPE = 141


class _Output(io.FileIO):
    """A file descriptor for results, whose errors say where they came from."""

    def write(self, content: Any) -> Any:
        try:
            return super().write(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


class _Forgiving(io.FileIO):
    """A file descriptor for messages: what cannot be written, because a reader is gone or a disk is full, is lost."""

    def write(self, content: Any) -> int:
        with suppress(OSError):
            written = super().write(content)
            if written is not None:  # None: the descriptor does not block, and is full
                return written
        return len(content)


class _Lasting(io.TextIOWrapper):
    """A stream that stays open until the end of the process."""

    def close(self) -> None:
        self.flush()


def open_streams() -> None:
    """Open the standard streams such that no message can end a run.

    Descriptors that the caller closed (`>&-`) become the null device; otherwise the next file would get their number,
    and the messages. Standard error drops what it cannot write. Characters that the terminal lacks become ASCII.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    encoding = "utf-8" if sys.stdout is None else sys.stdout.encoding
    output = io.BufferedWriter(_Output(os.dup(1), "w"))
    sys.stdout = _Lasting(output, encoding, errors=SUBSTITUTE, line_buffering=os.isatty(1))
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    raw = _Forgiving(os.dup(2), "w")
    sys.stderr = _Lasting(io.BufferedWriter(raw), encoding, errors=SUBSTITUTE, line_buffering=True)


@contextmanager
def broken_pipes() -> Iterator[None]:
    """Exit with BROKEN_PIPE if the reader of stdout has closed it (`| head`)."""
    try:
        yield
    except BrokenPipeError:
        close_stdout()
        raise SystemExit(BROKEN_PIPE) from None


def close_stdout() -> None:
    """Redirect stdout, so that Python's final flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note_precision(cfg: Config, device: str) -> None:
    """Print a note if the evaluation has another precision than the training; see `model_file.load`."""
    from adtrain.core.precision import PRECISIONS

    if device == "cpu" and cfg.training.precision in PRECISIONS:
        progress(f"trained in {cfg.training.precision}, evaluated in float32: the cpu has no {cfg.training.precision}")


def note_epoch(run: Path) -> int | None:
    """Print which epoch's weights the model of a run has, where there was a choice, or the run is not finished.

    Returns the epoch, if it is known.
    """
    from adtrain.training.summary import SUMMARY, model_text, read_summary

    try:
        summary = read_summary(run)
    except AdtrainError as error:
        progress(f"adtrain: warning: {error}")
        return None
    if summary is None:
        weights = "its weights are of the last complete epoch, in the first epoch of the last checkpoint"
        progress(f"{run}: found no {SUMMARY}, so the run is not finished; {weights}")
        return None
    if (chosen := model_text(summary)) is not None:
        progress(f"{run}: the weights are {chosen}")
    return summary.model_epoch
