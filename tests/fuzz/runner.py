"""The common part of the fuzzers: a reader reads files that atheris generates.

    python tests/fuzz/fuzz_idx.py -max_total_time=600

Needs `pip install atheris`; the options are libFuzzer's. The reader must return or raise a one-line DataError.
Anything else, and memory above MEMORY_MB, stops the run and prints the input.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris

from adtrain.data import DataError

MEMORY_MB = 1024


def fuzz(suffix: str, seeds: Sequence[bytes], read: Callable[[Path], object]) -> None:
    """Read files with the given suffix and mutations of `seeds` as content, until a limit of the options is reached."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for i, seed in enumerate(seeds):
            (corpus / str(i)).write_bytes(seed)
        path = Path(folder) / f"input{suffix}"

        def read_content(content: bytes) -> None:
            path.write_bytes(content)
            try:
                read(path)
            except DataError as error:
                if "\n" in str(error):
                    raise AssertionError("a message of several lines") from error

        limits = [f"-rss_limit_mb={MEMORY_MB}", f"-malloc_limit_mb={MEMORY_MB // 2}", "-max_len=4096"]
        atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], str(corpus)], read_content)
        atheris.Fuzz()
