"""The tuner: which candidate of each problem is fastest on this GPU, from the user's cache or measured now.

Nothing here needs a GPU: what compiles, runs and times candidates is a `Laboratory`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from time import monotonic
from typing import NamedTuple, Protocol

from adtrain.backends.cuda.compiler import Source, fingerprint
from adtrain.backends.cuda.lower import Candidate, LaunchPlan, Lowering, fastest, problem
from adtrain.backends.cuda.tuner import cache as tuning_cache
from adtrain.backends.cuda.tuner.race import Trial, compete, described
from adtrain.cache import digest
from adtrain.core.errors import OutOfMemory
from adtrain.core.fused import FUSED, conv_pool_p
from adtrain.core.program import Equation

PATIENCE = 1.0
"""Seconds without a word while candidates are measured."""

_log = logging.getLogger(__name__)


class Mode(str, Enum):
    """Where the choice among candidates comes from."""

    OFF = "off"  # the rule: always the first
    CACHED = "cached"  # measured earlier, else the rule
    FULL = "full"  # measured earlier or now


class Laboratory(Protocol):
    """A GPU as the tuner needs it."""

    name: str
    """Device and driver: what times hold for."""
    architecture: str

    def compile(self, sources: Sequence[Source]) -> Iterator[None]:
        """Compile the sources, several at once; an item for each that is done, with or without success."""
        ...

    def trial(self, equation: Equation) -> Trial:
        """Raises OutOfMemory."""
        ...

    def finish(self) -> None:
        """Give back the memory that trials have used."""
        ...


class Contest(NamedTuple):
    """An equation that stands for a problem, and its candidates: two or more."""

    equation: Equation
    kernels: Sequence[Candidate]
    lowering: Lowering

    @property
    def labels(self) -> list[str]:
        return [kernel.label for kernel in self.kernels]

    @property
    def sources(self) -> list[Source]:
        launches = (task for kernel in self.kernels for task in self.lowering.launches(self.equation, kernel))
        return [task.source for task in launches if isinstance(task, LaunchPlan)]


class Tuner:
    """Fills `Lowering.measured`.

    Attributes:
        mode: where choices come from, for problems that are met from now on.
        report: called with a line for the person waiting.
    """

    def __init__(self, lowering: Lowering, laboratory: Laboratory, clock: Callable[[], float] = monotonic) -> None:
        self.lowering = lowering
        self.laboratory = laboratory
        self.clock = clock
        self.mode = Mode.CACHED
        self.report: Callable[[str], object] = lambda line: None

    def tune(self, equations: Iterable[Equation]) -> None:
        """Choose for all problems among the equations, before anything that computes them is made."""
        if self.mode is Mode.OFF:
            return
        new = [
            contest
            for contest in contests(self.lowering, equations)
            if problem(contest.equation) not in self.lowering.measured
        ]
        for contest, times in self.times(new, self.mode is Mode.FULL):
            self.lowering.measured[problem(contest.equation)] = times

    def times(self, contests: Iterable[Contest], measure: bool) -> Iterator[tuple[Contest, Mapping[str, float]]]:
        """The microseconds of a launch of each right candidate by label, as far as they are known; where they are not
        they are measured and stored, if ``measure``."""
        missing = []
        for contest in contests:
            known = tuning_cache.find(self.key(contest), contest.labels)
            if known is not None:
                yield contest, known
            else:
                missing.append(contest)
        if measure and missing:
            yield from self._measured(missing)

    def key(self, contest: Contest) -> str:
        """Of all that the times follow from."""
        codes = (fingerprint(source, self.laboratory.architecture) for source in dict.fromkeys(contest.sources))
        return digest(self.laboratory.name, _text(contest.equation), *contest.labels, *codes)

    def _measured(self, missing: Sequence[Contest]) -> Iterator[tuple[Contest, Mapping[str, float]]]:
        """The times of each contest, stored. Those without a right candidate are left out."""
        said = self.clock()

        def report(line: str) -> None:
            nonlocal said
            if self.clock() - said >= PATIENCE:
                said = self.clock()
                self.report(line)

        sources = list(dict.fromkeys(source for contest in missing for source in contest.sources))
        for i, _ in enumerate(self.laboratory.compile(sources), 1):
            report(f"tuning: {i} of {len(sources)} sources compiled")
        for i, contest in enumerate(missing, 1):
            what = described(contest.equation)
            report(f"tuning {i} of {len(missing)}: {what}, {len(contest.kernels)} candidates")
            try:
                times = compete(contest.equation, contest.kernels, self.laboratory.trial(contest.equation))
            except OutOfMemory as error:
                _log.warning("adtrain: %s: its candidates are not measured (%s)", what, error)
                continue
            if times:
                tuning_cache.store(self.key(contest), _text(contest.equation), times, fastest(contest.labels, times))
                yield contest, times
        self.laboratory.finish()


def contests(lowering: Lowering, equations: Iterable[Equation]) -> Iterator[Contest]:
    """The problems that have several candidates, each once, among the equations and the members of fused ones."""
    seen = set()
    for equation in singles(equations):
        kernels = lowering.candidates(equation)
        if len(kernels) < 2 or not all(v.size for v in (*equation.inputs, *equation.outputs)):
            continue
        key = problem(equation)
        if key not in seen:
            seen.add(key)
            yield Contest(equation, kernels, lowering)


def singles(equations: Iterable[Equation]) -> Iterator[Equation]:
    """The equations, with the members of fused ones in their place, but of those that have a kernel of their own."""
    for equation in equations:
        if equation.primitive in FUSED - {conv_pool_p}:
            yield from singles(equation.params["body"].equations)
        else:
            yield equation


def _text(equation: Equation) -> str:
    params = " ".join(f"{name}={value}" for name, value in equation.params.items())
    return f"{described(equation)} {params}".rstrip()
