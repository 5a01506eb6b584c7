"""Digests of the machine code of the kernels that an H200 runs, to prove that renames and moves leave it as it is.

    python benchmarks/golden/machine_code.py dump OUT [--minutes 12]
    python benchmarks/golden/machine_code.py compare BEFORE AFTER [--renames FILE] [--partial]

Compiled for sm_90a: what the steps of the packaged configs launch at batch 128 and 1024, the case table, and the
random operations of samples.py; for sm_80: two sources of each kernel file. Each source is compiled once by NVRTC and
kept in the user's cache (XDG_CACHE_HOME says where). What does not fit into the minutes is left out and counted: run
again to go on. Written are

    uses.jsonl     a line each launch: Program and place, kernel, file, definitions, source
    sources.jsonl  a line each source: text, options, and digests of its kernels: instructions, constants, and bytes of
                   shared memory, without symbols
    headers.jsonl  the headers

`compare` exits with 1 if anything differs, is missing, or was not compiled on either side; --partial allows the last.
Launches are compared by Program and place, so the Programs have to be lowered alike: compare_dumps.py shows that.

NVRTC leaves the bytes of a kernel as they are when identifiers, comments and #line change, with one exception:
functions that are not inlined are compiled in the order of their mangled names, and instructions are chosen by what
came before. Where digests differ, `compare` therefore compiles the source of BEFORE again in the new names, with its
headers.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import adapter
import samples
from lowering_dump import digest, work, write
from renames import Renames

H200, A100 = (9, 0), (8, 0)
EACH_FILE = 2
"""Sources of each kernel file that are compiled for an A100."""
NOBITS = 8
"""The type of an ELF section that takes memory but no bytes of the file."""
THREADS = 2

Capability = tuple[int, int]


class Section(NamedTuple):
    """One of an ELF file."""

    name: str
    content: bytes
    size: int


class Use(NamedTuple):
    """A launch, where it stands, and for what it is compiled."""

    place: str
    launch: adapter.Launch
    capability: Capability


def sections(elf: bytes) -> list[Section]:
    """The sections of a 64-bit little-endian ELF file (System V gABI, chapter 4)."""
    assert elf[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    (start,) = struct.unpack_from("<Q", elf, 40)
    each, count, names_at = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * each) for i in range(count)]
    names = headers[names_at][4]

    def section(name: int, kind: int, flags: int, address: int, offset: int, size: int, *_: int) -> Section:
        title = elf[names + name : elf.index(b"\0", names + name)].decode()
        return Section(title, b"" if kind == NOBITS else elf[offset : offset + size], size)

    return [section(*header) for header in headers]


def kernels_of(cubin: bytes) -> dict[str, str]:
    """A digest of each kernel by name: its instructions, its constants and its shared memory."""
    found = sorted(sections(cubin))
    common = [s.content for s in found if s.name in (".nv.constant3", ".nv.constant4", ".nv.global.init")]
    digests = {}
    for section in found:
        prefix, _, kernel = section.name.partition(".text.")
        if kernel and not prefix:
            own = [
                s for s in found if s.name.startswith((".nv.constant", ".nv.shared.")) and s.name.endswith(f".{kernel}")
            ]
            sizes = ",".join(f"{s.name.removesuffix(kernel)}{s.size}" for s in own)
            content = [section.content, *(s.content for s in own), *common, sizes.encode()]
            digests[kernel] = hashlib.sha256(b"\0".join(content)).hexdigest()[:24]
    return digests


def source_id(source: adapter.Source, capability: Capability) -> str:
    return digest(repr((capability, source.options, source.text)))


def uses() -> Iterator[Use]:
    """The launches, those of configs first."""
    of_file: dict[str, set[str]] = {}
    for family, name, trace, forms in work():
        traced = trace()
        for capability in (H200, A100):
            adapter.set_target(capability, samples.TARGETS[capability])
            for form in forms:
                program = adapter.fused(traced) if form == "fused" else traced
                for i, equation in enumerate(adapter.equations(program)):
                    for k, launch in enumerate(adapter.chosen(equation).launches):
                        if capability == A100:
                            known = of_file.setdefault(launch.file, set())
                            if len(known) >= EACH_FILE and source_id(launch.source, A100) not in known:
                                continue
                            known.add(source_id(launch.source, A100))
                        arch = ".".join(map(str, capability))
                        yield Use(f"{family} | {name} | {arch} | {form} | {i} | {k}", launch, capability)


def dump(out: Path, minutes: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    os.nice(10)
    end = time.monotonic() + minutes * 60
    found = list(uses())
    distinct = {source_id(use.launch.source, use.capability): use for use in found}
    print(f"{len(found)} launches, {len(distinct)} sources", flush=True)

    def compiled(use: Use) -> Mapping[str, str] | None:
        if time.monotonic() > end:
            return None
        return kernels_of(adapter.machine_code(use.launch.source, use.capability))

    with ThreadPoolExecutor(THREADS) as threads:
        digests = dict(zip(distinct, threads.map(compiled, distinct.values()), strict=True))
    sources = (
        {
            "id": key,
            "name": s.name,
            "text": s.text,
            "options": s.options,
            "for": use.capability,
            "kernels": digests[key],
        }
        for key, use in distinct.items()
        for s in [use.launch.source]
    )
    lines = (
        {
            "place": use.place,
            "kernel": use.launch.kernel,
            "file": use.launch.file,
            "definitions": dict(sorted(use.launch.definitions.items())),
            "source": source_id(use.launch.source, use.capability),
        }
        for use in found
    )
    write(out / "sources.jsonl", sources)
    write(out / "uses.jsonl", lines)
    write(out / "headers.jsonl", ({"file": name, "text": text} for name, text in adapter.headers()))
    left = sum(kernels is None for kernels in digests.values())
    print(f"{len(digests) - left} sources compiled, {left} left out by lack of time")


def compare(before: Path, after: Path, renames: Renames, show: int, partial: bool) -> bool:
    """Whether all kernels are the same; says which ones are not."""
    old_uses, new_uses = ({r["place"]: r for r in read(folder / "uses.jsonl")} for folder in (before, after))
    old, new = ({r["id"]: r for r in read(folder / "sources.jsonl")} for folder in (before, after))
    headers = [(renames(r["file"]), renames(r["text"], r["file"])) for r in read(before / "headers.jsonl")]
    again: dict[str, Mapping[str, str]] = {}
    counts: Counter[str] = Counter()
    missing = [p for p in old_uses if renames(p) not in new_uses]
    different: dict[str, list[str]] = {}
    seen = set()
    for place, use in old_uses.items():
        other = new_uses.get(renames(place))
        if other is None or (use["source"], other["source"]) in seen:
            continue
        seen.add((use["source"], other["source"]))
        x, y = old[use["source"]], new[other["source"]]
        if x["kernels"] is None or y["kernels"] is None:
            counts["not compiled"] += 1
            continue
        if _renamed(x["kernels"], renames, x["name"]) == y["kernels"]:
            counts["the same"] += 1
            continue
        if x["id"] not in again:
            again[x["id"]] = _recompiled(x, renames, headers)
        if again[x["id"]] == y["kernels"]:
            counts["the same once compiled in the new names"] += 1
            continue
        counts["different"] += 1
        names = [
            name for name in {**again[x["id"]], **y["kernels"]} if again[x["id"]].get(name) != y["kernels"].get(name)
        ]
        different.setdefault(other["file"], []).append(f"{place}: {other['kernel']} {other['definitions']}: {names}")
    for file, lines in different.items():
        print(f"== {file}: {len(lines)} sources differ", *lines[:show], sep="\n  ")
    for place in missing[:show]:
        print(f"missing: {place}")
    print(
        ", ".join(f"{count} sources {what}" for what, count in counts.items()),
        f"{len(missing)} launches missing",
        sep=", ",
    )
    return not different and not missing and (partial or not counts["not compiled"])


def _renamed(kernels: Mapping[str, str], renames: Renames, file: str) -> dict[str, str]:
    return {renames(name, file): found for name, found in kernels.items()}


def _recompiled(source: Mapping[str, Any], renames: Renames, headers: list[tuple[str, str]]) -> Mapping[str, str]:
    """The digests of the kernels of an old source in the new names."""
    name, options = source["name"], [_renamed_option(o, renames, source["name"]) for o in source["options"]]
    renamed = adapter.Source(renames(name), renames(source["text"], name), tuple(options))
    try:
        return kernels_of(adapter.compiled_with(headers, renamed, tuple(source["for"])))
    except adapter.NOT_COMPILED as error:
        print(f"does not compile in the new names: {str(error)[:300]}")
        return {}


def _renamed_option(option: str, renames: Renames, file: str) -> str:
    return "-D" + renames(option[2:], file) if option.startswith("-D") else option


def read(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open() as lines:
        yield from map(json.loads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    dumping, comparing = commands.add_parser("dump"), commands.add_parser("compare")
    dumping.add_argument("out", type=Path)
    dumping.add_argument("--minutes", type=float, default=12)
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--renames", type=Path)
    comparing.add_argument("--show", type=int, default=3, help="differences shown of each file")
    comparing.add_argument("--partial", action="store_true", help="allow sources that were not compiled")
    given = parser.parse_args()
    if given.command == "dump":
        dump(given.out, given.minutes)
    else:
        sys.exit(not compare(given.before, given.after, Renames(given.renames), given.show, given.partial))


if __name__ == "__main__":
    main()
