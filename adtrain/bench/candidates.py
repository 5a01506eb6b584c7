"""Times every kernel candidate that a GPU has for the operations of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from adtrain.backends.cuda.lower import fastest
from adtrain.backends.cuda.tuner.autotune import Mode, Tuner, tuning_problems
from adtrain.backends.cuda.tuner.measure import described, distinct
from adtrain.bench.op_table import TimedOp
from adtrain.bench.ops import phases, sample
from adtrain.bench.result import NamedTime, TimedResult
from adtrain.bench.timing.protocol import observed_load, protocol
from adtrain.bench.timing.sampling import rate
from adtrain.bench.view import RATE, TEXT, CellFormat, Column, Section, Table, View
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError
from adtrain.core.program import Equation
from adtrain.core.staging import stage


@dataclass(frozen=True)
class Candidate:
    """A kernel for a problem.

    Attributes:
        us: microseconds.
        rule: whether it is the choice without measurements.
        chosen: whether it is the tuner's choice.
    """

    kernel: str
    us: float
    gflops_per_s: float | None
    gbytes_per_s: float | None
    rule: bool
    chosen: bool


@dataclass(frozen=True)
class Problem:
    """An equation and its candidates, the fastest first."""

    problem: str
    params: dict[str, str]
    candidates: list[Candidate]

    @property
    def name(self) -> str:
        return ", ".join([self.problem, *(f"{name} {value}" for name, value in self.params.items())])

    def table(self) -> Table[tuple[str, Candidate]]:
        """Kernels are named without what all of the problem have in common."""
        names = distinct([each.kernel for each in self.candidates])
        fastest_us = self.candidates[0].us if self.candidates else 0.0
        columns: list[Column[tuple[str, Candidate]]] = [
            Column("kernel", lambda row: row[0], TEXT),
            Column("us", lambda row: row[1].us, CellFormat("{:.2f}".format), bar=lambda row: (row[1].us, "")),
            Column("GFLOP/s", lambda row: row[1].gflops_per_s, RATE, rank=3),
            Column("GB/s", lambda row: row[1].gbytes_per_s, RATE, rank=4),
            Column("of fastest", lambda row: fastest_us / row[1].us, CellFormat("{:.0%}".format), rank=5),
            Column("", lambda row: ", ".join(mark for mark in ("chosen", "rule") if getattr(row[1], mark)), TEXT),
        ]
        rows = list(zip(names, self.candidates, strict=True))
        return Table(columns, rows, title=self.name, kind="operations")


@dataclass(frozen=True, kw_only=True)
class Candidates(TimedResult):
    """The result of `adtrain bench ops --candidates`."""

    kind = "candidates"
    candidates: list[Problem]

    def times(self) -> Iterator[NamedTime]:
        for problem in self.candidates:
            for each in problem.candidates:
                yield NamedTime(f"{problem.name}: {each.kernel}", each.us * 1e-3, None, None)

    def view(self) -> View:
        return View("Kernel candidates", [Section(each.name, [each.table()]) for each in self.candidates])


def result(benches: Sequence[TimedOp], sizes: Sequence[int] | None, progress: Callable[[str], object]) -> Candidates:
    """The result of `adtrain bench ops --candidates`; see `measured`."""
    conditions = protocol("gpu", observed_load(progress))
    return Candidates(protocol=conditions, candidates=measured(benches, sizes, progress))


def measured(
    benches: Sequence[TimedOp], sizes: Sequence[int] | None = None, progress: Callable[[str], object] = str
) -> list[Problem]:
    """For each distinct problem of the benches its candidates, the fastest first.

    Args:
        sizes: of the arrays, by default each bench's own.
        progress: called with a line for the user.

    Raises:
        AdtrainError: every problem has a single kernel.
    """
    equations: list[Equation] = []
    for each in benches:
        for n in sizes or each.sizes["gpu"]:
            for f, args in phases(each, sample(each, n, device="gpu")).values():
                equations += stage(f).program(*args).equations
    return of_equations(equations, progress)


def of_equations(equations: Sequence[Equation], progress: Callable[[str], object] = str) -> list[Problem]:
    """As `measured`, for equations."""
    tuner: Tuner = cast(Any, backend("gpu")).tuner
    problems = list(tuning_problems(tuner.lowering, equations))
    if not problems:
        raise AdtrainError("--candidates: each of these operations has only one kernel")
    progress(f"bench: measuring the candidates of {len(problems)} problems")
    rows = []
    for problem, times in tuner.times(problems, measured=True):
        equation, rule = problem.equation, problem.labels[0]
        cost = equation.cost
        chosen = rule if tuner.mode is Mode.OFF else fastest(problem.labels, times)
        found = [
            Candidate(name, us, rate(cost.flops, us * 1e-3), rate(cost.bytes, us * 1e-3), name == rule, name == chosen)
            for name, us in sorted(times.items(), key=lambda item: item[1])
        ]
        params = {name: str(value) for name, value in equation.params.items()}
        rows.append(Problem(described(equation), params, found))
    return rows
