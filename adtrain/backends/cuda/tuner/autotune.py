"""The tuner: finds the fastest candidate of each problem on this GPU, in the user's cache or by measuring.

Nothing here needs a GPU: a `Bench` compiles, runs and times candidates.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from time import monotonic
from typing import Any, NamedTuple, Protocol

from adtrain.backends.cuda.compiler import Source, fingerprint
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Candidate, Lowering, fastest, problem, problem_text
from adtrain.backends.cuda.tuner.measure import Trial, described, measure
from adtrain.cache import any_document, digest, find_document, store_document
from adtrain.core import communicator
from adtrain.core.errors import OutOfMemory
from adtrain.core.kernel import has_kernels
from adtrain.core.program import Equation
from adtrain.passes.order import exchanges_data

CACHED = "tuning"
"""The kind of the documents in the user's cache that hold measured times, one for each problem."""
REPORT_SECONDS = 1.0
"""Least seconds between two progress reports."""

_log = logging.getLogger(__name__)


class Mode(str, Enum):
    """Where the choice among candidates comes from."""

    OFF = "off"  # always the first candidate
    CACHED = "cached"  # the fastest if it was measured earlier, else the first
    FULL = "full"  # the fastest, measured now if it was not measured earlier


class Bench(Protocol):
    """Runs candidates on a GPU."""

    name: str
    """Device and driver, for which times are valid."""
    architecture: str

    def compile(self, sources: Sequence[Source]) -> Iterator[None]:
        """Compile the sources in parallel; one item for each, compiled or refused."""
        ...

    def trials(self, equation: Equation) -> Sequence[Trial]:
        """Arguments to measure on: normal numbers, and numbers like gradients.

        Raises:
            OutOfMemory: they do not fit on the device.
        """
        ...

    def finish(self) -> None:
        """Free the memory of the trials."""
        ...


class TuningProblem(NamedTuple):
    """An equation that represents a problem, and its candidates, at least two."""

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
        mode: where choices come from.
        report: called with a line of progress.
    """

    def __init__(self, lowering: Lowering, bench: Bench, clock: Callable[[], float] = monotonic) -> None:
        self.lowering = lowering
        self.bench = bench
        self.clock = clock
        self.mode = Mode.CACHED
        self.report: Callable[[str], object] = lambda line: None

    def tune(self, equations: Iterable[Equation]) -> None:
        """Choose candidates for the equations, before anything is compiled for them."""
        if not self.uses_times():
            return
        new = [
            tuned
            for tuned in tuning_problems(self.lowering, equations)
            if problem(tuned.equation) not in self.lowering.measured
        ]
        for tuned, times in self.times(new, self.mode is Mode.FULL):
            self.lowering.measured[problem(tuned.equation)] = times

    def uses_times(self) -> bool:
        """Whether choices depend on times, measured now or stored."""
        return self.mode is Mode.FULL or (self.mode is Mode.CACHED and any_document(CACHED))

    def times(
        self, problems: Iterable[TuningProblem], measured: bool
    ) -> Iterator[tuple[TuningProblem, Mapping[str, float]]]:
        """The microseconds of a launch of each right candidate, by label.

        Args:
            measured: measure and store times that are not in the cache; otherwise leave such problems out.
        """
        missing = []
        for tuned in problems:
            key = self.key(tuned)
            known = None if key is None else stored_times(key, tuned.labels)
            if known is not None:
                yield tuned, known
            else:
                missing.append(tuned)
        if measured and missing:
            yield from self._measured(missing)

    def key(self, tuned: TuningProblem) -> str | None:
        """The cache key: a digest of all that the times depend on. None where the problem has no text."""
        if (text := problem_text(tuned.equation)) is None:
            return None
        codes = (fingerprint(source, self.bench.architecture) for source in dict.fromkeys(tuned.sources))
        return digest(self.bench.name, text, *tuned.labels, *codes)

    def _measured(self, missing: Sequence[TuningProblem]) -> Iterator[tuple[TuningProblem, Mapping[str, float]]]:
        """Measure, store and return times. Problems without a right candidate are left out."""
        reported = self.clock()

        def report(line: str) -> None:
            nonlocal reported
            if self.clock() - reported >= REPORT_SECONDS:
                reported = self.clock()
                self.report(line)

        sources = list(dict.fromkeys(source for tuned in missing for source in tuned.sources))
        for i, _ in enumerate(self.bench.compile(sources), 1):
            report(f"tuning: {i} of {len(sources)} sources compiled")
        for i, tuned in enumerate(missing, 1):
            what = described(tuned.equation)
            report(f"tuning {i} of {len(missing)}: {what}, {len(tuned.kernels)} candidates")
            try:
                times = measure(tuned.equation, tuned.kernels, self.bench.trials(tuned.equation))
            except OutOfMemory as error:
                _log.warning("adtrain: warning: %s: its candidates are not measured (%s)", what, error)
                continue
            if times:
                if (key := self.key(tuned)) is not None:
                    params = (f" {name}={value}" for name, value in tuned.equation.kernel_params.items())
                    store_times(key, what + "".join(params), times, fastest(tuned.labels, times))
                yield tuned, times
        self.bench.finish()


def stored_times(key: str, labels: Collection[str]) -> Mapping[str, float] | None:
    """The microseconds of a launch by label, as stored under the key.

    None if there are none, if the fastest candidate is not among ``labels``, or if the file cannot be read, which gives
    a warning that names it.
    """
    times = find_document(CACHED, key, _times_in)
    return times if times and min(times, key=times.__getitem__) in labels else None


def store_times(key: str, problem: str, times: Mapping[str, float], chosen: str) -> None:
    """Store the microseconds by label under the key. ``problem`` and ``chosen`` are for people who read the file.

    Raises:
        AdtrainError: the file cannot be written.
    """
    store_document(CACHED, key, {"problem": problem, "microseconds": dict(times), "chosen": chosen})


def _times_in(document: Any) -> Mapping[str, float]:
    """The times in a document that `store_times` has written.

    Raises:
        ValueError: it is another document.
    """
    times = document.get("microseconds") if isinstance(document, dict) else None
    if not isinstance(times, dict) or not times:
        raise ValueError("it holds no times")
    for label, time in times.items():
        if not isinstance(time, float) or not 0 < time < math.inf:
            raise ValueError(f"{label} takes {time!r} microseconds")
    return times


def tuning_problems(lowering: Lowering, equations: Iterable[Equation]) -> Iterator[TuningProblem]:
    """The problems with several candidates, each once, among the equations and the members of fused ones."""
    seen = set()
    for equation in singles(equations):
        kernels = lowering.candidates(equation)
        if len(kernels) < 2 or not all(v.size for v in (*equation.inputs, *equation.outputs)):
            continue
        key = problem(equation)
        if key not in seen:
            seen.add(key)
            yield TuningProblem(equation, kernels, lowering)


def share_choices(lowering: Lowering, equations: Sequence[Equation]) -> None:
    """Take over rank 0's choice for each problem of the equations, if exchanges are among them: other candidates can
    give other bits.

    Then all ranks compile them, at the same time. Ranks whose shards of a short batch have other sizes have other
    problems, for which their own choices stay. They also stay for problems without a `problem_text`.
    """
    if communicator.current().size == 1 or not any(map(exchanges_data, equations)):
        return
    problems = list(tuning_problems(lowering, equations))
    own = [[problem_text(x.equation), lowering.chosen(x.equation).label] for x in problems]
    of_first = json.loads(communicator.gathered_texts(json.dumps(own))[0])
    chosen = dict(map(tuple, of_first))
    for tuned, (name, label) in zip(problems, own, strict=True):
        if name is not None and chosen.get(name, label) != label:
            lowering.measured[problem(tuned.equation)] = {chosen[name]: 0.0}


def singles(equations: Iterable[Equation]) -> Iterator[Equation]:
    """The equations, with fused ones replaced by their members unless they have kernels of their own."""
    for equation in equations:
        if equation.form and not has_kernels(equation.form, "cuda"):
            yield from singles(equation.params["body"].equations)
        else:
            yield equation
