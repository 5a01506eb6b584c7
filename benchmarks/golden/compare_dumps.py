"""Compares two dumps of lowering_dump.py and says what differs, by family; exits with 1 if anything does.

    python benchmarks/golden/compare_dumps.py BEFORE AFTER [--renames FILE] [--skip FAMILY ...] [--show 3]

The rename map (see renames.py) is applied to BEFORE: to the names of files, kernels and macros, to labels, to the text
of Programs, and to source text. Comments, #line and white space in sources are ignored. Where source text differs by
identifiers only, lines for the rename map are suggested.

Equations are compared by Program, capability and place. Families: program (which ones there are), text (of the
Program), memory, error, equation (how many), candidates (how many), chosen, label, scratch, launches (how many),
kernel, file, definitions, options, operands, numbers, work, flags, generated (source text), kernel files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from renames import Renames, renamed_pairs, suggestions, tokens

Record = Mapping[str, Any]


class Folder:
    """A dump."""

    def __init__(self, folder: Path) -> None:
        self.programs = {program_key(record): record for record in read(folder / "programs.jsonl")}
        self.equations = {record["id"]: record for record in read(folder / "equations.jsonl")}
        self.texts = {record["id"]: record["text"] for record in read(folder / "texts.jsonl")}
        self.files = {record["file"]: record["text"] for record in read(folder / "files.jsonl")}


class Comparison:
    """What differs.

    Attributes:
        found: by family: how many differences, and the first ones as text.
        pairs: identifiers that are renamed in source text.
    """

    def __init__(self, before: Folder, after: Folder, renames: Renames, show: int) -> None:
        self.before, self.after, self.renames, self.show = before, after, renames, show
        self.counts: Counter[str] = Counter()
        self.found: dict[str, list[str]] = defaultdict(list)
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.same_equations: dict[tuple[str, str], bool] = {}
        self.old_tokens = cache(lambda key, file: tokens(renames(before.texts[key], file)))
        self.new_tokens = cache(lambda key: tokens(after.texts[key]))
        self.same_source = cache(self._same_source)

    def check(self, family: str, where: str, old: Any, new: Any) -> bool:
        """Count a difference between two values, if there is one."""
        if old != new:
            self.counts[family] += 1
            if self.counts[family] <= self.show:
                self.found[family].append(f"{where}\n    before: {_short(old)}\n    after:  {_short(new)}")
        return bool(old == new)

    def run(self) -> None:
        renamed = {tuple(self.renames(word) for word in key): r for key, r in self.before.programs.items()}
        self.check("program", "all", sorted(set(renamed) - set(self.after.programs)), [])
        self.check("program", "all", [], sorted(set(self.after.programs) - set(renamed)))
        for key in sorted(set(renamed) & set(self.after.programs)):
            self.program(" | ".join(key), renamed[key], self.after.programs[key])
        self.kernel_files()

    def program(self, where: str, old: Record, new: Record) -> None:
        if "text" in old and "text" in new:
            old_lines = self.renames(self.before.texts[old["text"]]).splitlines()
            self.lines("text", where, old_lines, self.after.texts[new["text"]].splitlines())
        if "memory" in old and "memory" in new:
            old_memory, new_memory = (json.loads(f.texts[r["memory"]]) for f, r in self.sides(old, new))
            for key in sorted({*old_memory, *new_memory}):
                self.check("memory", f"{where}: {key}", old_memory.get(key), new_memory.get(key))
        self.check("error", where, "error" in old, "error" in new)
        if self.check("equation", where, len(old["equations"]), len(new["equations"])):
            for i, (x, y) in enumerate(zip(old["equations"], new["equations"], strict=True)):
                if (x, y) not in self.same_equations:
                    self.same_equations[x, y] = True
                    name = self.before.texts[self.before.equations[x]["equation"]].splitlines()
                    text = next(line for line in name if " = " in line and not line.startswith("input"))
                    self.equation(f"{where}, equation {i}: {text}", self.before.equations[x], self.after.equations[y])

    def sides(self, old: Record, new: Record) -> list[tuple[Folder, Record]]:
        return [(self.before, old), (self.after, new)]

    def equation(self, where: str, old: Record, new: Record) -> None:
        if not self.check("error", where, "error" in old, "error" in new) or "error" in old:
            return
        self.check("chosen", where, old["chosen"], new["chosen"])
        if not self.check("candidates", where, len(old["candidates"]), len(new["candidates"])):
            return
        for i, (x, y) in enumerate(zip(old["candidates"], new["candidates"], strict=True)):
            at = f"{where}\n  candidate {i}"
            self.check("label", at, sorted(self.renames(x["label"]).split()), sorted(y["label"].split()))
            self.check("scratch", at, x["scratch"], y["scratch"])
            if self.check("launches", at, len(x["launches"]), len(y["launches"])):
                for k, pair in enumerate(zip(x["launches"], y["launches"], strict=True)):
                    self.launch(f"{at}, launch {k}", *pair)

    def launch(self, where: str, old: Record, new: Record) -> None:
        file = old["file"]
        for key in ("kernel", "file"):
            self.check(key, where, self.renames(old[key], file), new[key])
        definitions = {self.renames(name, file): value for name, value in old["definitions"].items()}
        self.check("definitions", where, dict(sorted(definitions.items())), new["definitions"])
        for key in ("options", "operands", "numbers", "work", "flags"):
            self.check(key, where, old[key], new[key])
        if not self.same_source(old["generated"], new["generated"], file):
            texts = self.old_tokens(old["generated"], file), self.new_tokens(new["generated"])
            self.lines("generated", where, *map(_as_lines, texts))

    def _same_source(self, old: str, new: str, file: str) -> bool:
        before, after = self.old_tokens(old, file), self.new_tokens(new)
        self.pairs.update(renamed_pairs(before, after))
        return bool(before == after)

    def kernel_files(self) -> None:
        names = {self.renames(name): name for name in self.before.files}
        self.check("kernel files", "names", sorted(names), sorted(self.after.files))
        for new, old in names.items():
            if new in self.after.files:
                before = tokens(self.renames(self.before.files[old], old))
                after = tokens(self.after.files[new])
                self.pairs.update(renamed_pairs(before, after))
                self.lines("kernel files", new, _as_lines(before), _as_lines(after))

    def lines(self, family: str, where: str, old: list[str], new: list[str]) -> None:
        """Count a difference between texts, and show the first line that differs."""
        if old != new:
            at, pair = next((i, p) for i, p in enumerate(zip_longest(old, new)) if p[0] != p[1])
            self.check(family, f"{where}, line {at + 1}", *pair)


def program_key(record: Record) -> tuple[str, ...]:
    return record["family"], record["name"], ".".join(map(str, record["capability"])), record["form"]


def read(path: Path) -> Iterator[Record]:
    with path.open() as lines:
        yield from map(json.loads, lines)


def _as_lines(found: list[str]) -> list[str]:
    """Tokens as text, a line each statement or directive."""
    return [line for line in re.split(r"\n|(?<=[;{}]) ", " ".join(found)) if line.strip()]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 600 else f"{text[:600]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--renames", type=Path)
    parser.add_argument("--skip", nargs="*", default=[], metavar="FAMILY")
    parser.add_argument("--show", type=int, default=3, help="differences shown of each family")
    given = parser.parse_args()
    comparison = Comparison(Folder(given.before), Folder(given.after), Renames(given.renames), given.show)
    comparison.run()
    different = [family for family in comparison.counts if family not in given.skip]
    for family in different:
        print(f"== {family}: {comparison.counts[family]} differences")
        print("\n".join(comparison.found[family]))
    if comparison.pairs:
        print("== lines for the rename map", *suggestions(comparison.pairs)[:100], sep="\n")
    print(f"{len(comparison.before.programs)} programs, {len(comparison.before.equations)} equations:", end=" ")
    print("different: " + ", ".join(different) if different else "the same")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
