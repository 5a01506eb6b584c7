"""Dumps how Programs are lowered for CUDA on seven compute capabilities; no GPU is needed.

    python benchmarks/golden/lowering_dump.py OUT

Writes into the folder OUT, in the same order each time:

    programs.jsonl   a line each Program and capability: text after the passes, memory layout, numbers of its equations
    equations.jsonl  a line each distinct equation: its candidates in order and the one that runs, with their launches
    texts.jsonl      by digest: the text of Programs and generated sources
    files.jsonl      the kernels' files

Programs: every case of the case table and random operations, with gradients, before and after the passes; the training
step of every packaged config at batch 128 and 1024, after the passes. Compare two dumps with compare_dumps.py. Only
adapter.py knows the lowering's API. Takes about two minutes on two cores.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import adapter
import samples

from adtrain.core.program import Equation, Program

PROCESSES = 2


class Dump:
    """Records by content, so that each is written once."""

    def __init__(self) -> None:
        self.programs: list[dict[str, Any]] = []
        self.equations: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, str] = {}
        self.known: dict[tuple[Any, ...], str] = {}

    def add(self, family: str, name: str, capability: tuple[int, int], form: str, program: Program) -> None:
        record = {"family": family, "name": name, "capability": list(capability), "form": form}
        record["text"] = self.text(str(program))
        try:
            record["memory"] = self.text(json.dumps(adapter.memory(program)))
            equations = adapter.equations(program)
        except adapter.NO_KERNEL as error:
            record["error"] = str(error)
            equations = list(program.equations)
        record["equations"] = [self.equation(e, capability) for e in equations]
        self.programs.append(record)

    def equation(self, equation: Equation, capability: tuple[int, int]) -> str:
        key = (capability, canonical(equation))
        if key not in self.known:
            record = {"capability": list(capability), "equation": self.text(key[1]), **self.lowered(equation)}
            self.known[key] = digest(json.dumps(record))
            self.equations[self.known[key]] = record
        return self.known[key]

    def lowered(self, equation: Equation) -> dict[str, Any]:
        """What `adapter` says of an equation: candidates in order, the number of the chosen one among them."""
        try:
            found = [self.candidate(c) for c in adapter.candidates(equation)]
            return {"chosen": found.index(self.candidate(adapter.chosen(equation))), "candidates": found}
        except adapter.NO_KERNEL as error:
            return {"error": str(error)}

    def candidate(self, found: adapter.Candidate) -> dict[str, Any]:
        launches = [self.launch(launch) for launch in found.launches]
        return {"label": found.label, "scratch": found.scratch, "launches": launches}

    def launch(self, launch: adapter.Launch) -> dict[str, Any]:
        return {
            "kernel": launch.kernel,
            "file": launch.file,
            "generated": self.text(launch.generated),
            "definitions": dict(sorted(launch.definitions.items())),
            "options": list(launch.options),
            "operands": list(launch.operands),
            "numbers": list(launch.numbers),
            "work": json.loads(json.dumps(launch.work)),
            "flags": list(launch.flags),
        }

    def text(self, text: str) -> str:
        key = digest(text)
        self.texts.setdefault(key, text)
        return key


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def canonical(equation: Equation) -> str:
    """The equation as text, with names of its own for its variables and without its place in the network."""
    alone = Program(tuple(dict.fromkeys(equation.inputs)), {}, (equation,), equation.outputs)
    return "\n".join(line.partition("  # ")[0] for line in str(alone).splitlines())


Task = tuple[str, str, Callable[[], Program], tuple[str, ...]]


def work() -> list[Task]:
    """Family, name, what traces the Program, and the forms in which it is lowered."""
    return [
        *(("config", name, trace, ("fused",)) for name, trace in samples.steps()),
        *(("case", name, trace, ("traced", "fused")) for name, trace in samples.cases()),
        *(("random", name, trace, ("traced", "fused")) for name, trace in samples.random_operations()),
    ]


def part(number: int) -> Dump:
    """The dump of every PROCESSES-th Program."""
    dump = Dump()
    for family, name, trace, forms in work()[number::PROCESSES]:
        traced = trace()
        for capability, multiprocessors in samples.TARGETS.items():
            adapter.set_target(capability, multiprocessors)
            for form in forms:
                try:
                    program = adapter.fused(traced) if form == "fused" else traced
                except adapter.NO_KERNEL as error:
                    record = {"family": family, "name": name, "capability": list(capability), "form": form}
                    dump.programs.append({**record, "error": str(error), "equations": []})
                    continue
                dump.add(family, name, capability, form, program)
    return dump


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    os.nice(10)
    with ProcessPoolExecutor(PROCESSES) as pool:
        parts = list(pool.map(part, range(PROCESSES)))
    programs = [record for found in parts for record in found.programs]
    equations = {key: record for found in parts for key, record in found.equations.items()}
    texts = {key: text for found in parts for key, text in found.texts.items()}
    order = ("family", "name", "capability", "form")
    write(out / "programs.jsonl", sorted(programs, key=lambda record: [record[key] for key in order]))
    write(out / "equations.jsonl", ({"id": key, **equations[key]} for key in sorted(equations)))
    write(out / "texts.jsonl", ({"id": key, "text": texts[key]} for key in sorted(texts)))
    write(out / "files.jsonl", ({"file": name, "text": text} for name, text in adapter.kernel_files().items()))
    print(f"{len(programs)} programs, {len(equations)} equations, {len(texts)} texts")


if __name__ == "__main__":
    main()
