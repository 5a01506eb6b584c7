"""Digests of the machine code of the kernels that an H200 runs, to prove that renames and moves leave it as it is.

    python benchmarks/golden/machine_code.py dump OUT [--minutes 12]
    python benchmarks/golden/machine_code.py compare BEFORE AFTER [--renames FILE]

Compiled for sm_90a: what the steps of the packaged configs launch at batch 128 and 1024, what the case table launches,
and two more sources of each kernel file; for sm_80: two sources of each kernel file. Each is compiled once by NVRTC and
kept in the user's cache; what does not fit into the minutes is left out and said, so run again to go on.

OUT/code.jsonl has a line each use: Program, place of the launch, kernel, file, definitions, and the digests of the
cubin's kernels: their instructions, constants, and bytes of shared memory, without the names of symbols. Uses are
compared by Program and place, so the Programs have to be lowered alike: compare_dumps.py shows that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from renames import Renames

H200, A100 = (9, 0), (8, 0)
EACH_FILE = 2
NOBITS = 8
"""The type of an ELF section that takes memory but no bytes of the file."""


class Section(NamedTuple):
    """One of an ELF file."""

    name: str
    kind: int
    content: bytes
    size: int


def sections(elf: bytes) -> list[Section]:
    """The sections of a 64-bit little-endian ELF file (System V gABI, chapter 4)."""
    assert elf[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    (start,) = struct.unpack_from("<Q", elf, 40)
    each, count, names_at = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * each) for i in range(count)]
    names = headers[names_at][4]

    def name(at: int) -> str:
        return elf[names + at : elf.index(b"\0", names + at)].decode()

    return [
        Section(name(h[0]), h[1], b"" if h[1] == NOBITS else elf[h[4] : h[4] + h[5]], h[5]) for h in headers
    ]


def kernels_of(cubin: bytes) -> dict[str, str]:
    """A digest of each kernel by name: its instructions, its constants and its shared memory."""
    found = {s.name: s for s in sections(cubin)}
    common = [s for s in found.values() if s.name in (".nv.constant3", ".nv.global.init", ".nv.constant4")]
    digests = {}
    for section in found.values():
        prefix, _, kernel = section.name.partition(".text.")
        if kernel and not prefix:
            own = [s for s in found.values() if s.name.startswith((".nv.constant", ".nv.shared."))]
            own = sorted((s for s in own if s.name.endswith(f".{kernel}")), key=lambda s: s.name)
            parts = [section.content, *(s.content for s in (*own, *common))]
            sizes = ",".join(f"{s.name.removesuffix(kernel)}{s.size}" for s in own)
            digests[kernel] = hashlib.sha256(b"\0".join([*parts, sizes.encode()])).hexdigest()[:24]
    return digests
