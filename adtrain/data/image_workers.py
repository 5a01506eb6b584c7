"""Decodes many images: in processes, one for each processor, where that saves more time than it takes to start them.

Threads would not do: for small images most of the time is spent in Python.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from subprocess import Popen
from typing import NamedTuple, TypeAlias

import numpy as np

from adtrain.child_process import end, started
from adtrain.data.errors import DataError
from adtrain.data.images import OtherTypeError, read_image, resized

CHUNK = 256
"""Images that are decoded for one answer of a process."""
SECONDS_PER_FILE, SECONDS_PER_BYTE = 1.2e-4, 4e-8
"""The time to decode an image is about this for the file, and for each of its bytes."""
LEAST_SECONDS = 0.5
"""The work for which a process is started; the start takes about 0.2 s."""

SERVE = """
import sys
sys.path[:] = {path!r}
from adtrain.data.image_workers import serve
serve()
"""
"""The program of a process, whose folders of modules are those of this process."""


class ImageFile(NamedTuple):
    """A file that may be an image: its name, the number of its bytes, and its content, None if it is to be read."""

    name: str
    size: int
    content: bytes | None = None


class Wanted(NamedTuple):
    """How images are decoded: 1 or 3 channels or, by default, those that an image has; (height, width) or its own."""

    channels: int | None
    size: tuple[int, int] | None


class Unreadable(NamedTuple):
    """Why a file cannot be read, and whether it is an image at all."""

    problem: str
    is_image: bool


Decoded: TypeAlias = "np.ndarray | Unreadable"
"""The pixels, uint8 (C, H, W), if the file can be read."""


def decode(files: Sequence[ImageFile], wanted: Wanted) -> list[Decoded]:
    """The images in these files, in their order."""
    return [_decoded(file, wanted) for file in files]


def _decoded(file: ImageFile, wanted: Wanted) -> Decoded:
    try:
        image = read_image(file.name, wanted.channels, file.content)
    except DataError as error:
        return Unreadable(str(error), not isinstance(error, OtherTypeError))
    return image if wanted.size in (None, image.shape[1:]) else resized(image, *wanted.size)


def decode_all(files: Sequence[ImageFile], wanted: Wanted) -> Iterator[Decoded]:
    """`decode` in as many processes as pay off. A process that fails is replaced by this one."""
    chunks = [files[i : i + CHUNK] for i in range(0, len(files), CHUNK)]
    count = min(os.cpu_count() or 1, int(seconds(files) / LEAST_SECONDS), len(chunks))
    if count < 2:
        for chunk in chunks:
            yield from decode(chunk, wanted)
        return
    processes = [_start() for _ in range(count)]
    idle = SimpleQueue[Popen[bytes] | None]()
    for process in processes:
        idle.put(process)

    def answer(chunk: Sequence[ImageFile]) -> list[Decoded]:
        process = idle.get()
        try:
            found = None if process is None else _asked(process, chunk, wanted)
            process = process if found is not None else None
            return decode(chunk, wanted) if found is None else found
        finally:
            idle.put(process)

    try:
        with ThreadPoolExecutor(count) as threads:
            try:
                for decoded in threads.map(answer, chunks):
                    yield from decoded
            finally:  # after an error nobody needs the other answers
                threads.shutdown(wait=False, cancel_futures=True)
    finally:
        end(*(process for process in processes if process is not None))


def seconds(files: Sequence[ImageFile]) -> float:
    """An estimate of the processor time to decode the files."""
    return len(files) * SECONDS_PER_FILE + sum(file.size for file in files) * SECONDS_PER_BYTE


def _start() -> Popen[bytes] | None:
    try:
        return started([sys.executable, "-c", SERVE.format(path=sys.path)])
    except OSError:
        return None


def _asked(process: Popen[bytes], chunk: Sequence[ImageFile], wanted: Wanted) -> list[Decoded] | None:
    """What the process decodes; None if it has failed."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError, EOFError, pickle.UnpicklingError):
        pickle.dump((list(chunk), wanted), process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        found: list[Decoded] = pickle.load(process.stdout)
        return found
    return None


def serve() -> None:
    """Decode what comes from stdin, until it is closed."""
    with suppress(EOFError):
        while True:
            files, wanted = pickle.load(sys.stdin.buffer)
            pickle.dump(decode(files, wanted), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
            sys.stdout.buffer.flush()
