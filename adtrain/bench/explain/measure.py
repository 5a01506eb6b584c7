"""Measures a training step and what surrounds it, predicts the gain of changes, and tries them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from adtrain import config, training
from adtrain.backends.cpu.compiled_program import CompiledProgram
from adtrain.backends.cpu.threads import usable_cores
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.bench import step
from adtrain.bench.explain.causes import REACHABLE, LastBatch, Observed, Operation, Pauses
from adtrain.bench.machine import Roofline, rates, thread_count
from adtrain.bench.profile import Key, OpsProfile, profile_steps
from adtrain.bench.sampling import MIN_SAMPLE_MS, alternate
from adtrain.bench.step import kernels_of
from adtrain.config import Config
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError
from adtrain.core.kernel import Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, costs, label, single_equations
from adtrain.custom_ops import OWN_OPS
from adtrain.files import write_atomic
from adtrain.passes import SIMPLIFY
from adtrain.passes.fusion import declined
from adtrain.training import Checkpoint, Experiment, Mode, Progress, continuation, outline
from adtrain.training.checkpoint import encode, fetch
from adtrain.training.costs import too_large
from adtrain.training.examples import Streamed, is_streamed
from adtrain.training.loop import batches_of

MOST_SAMPLES, LEAST_SAMPLES = 100, 3
SECONDS = 4.0
"""Target for all samples of a step, or of steps that are compared."""

WARM_UP_S = 1.0
"""The time before the samples of a step, in which the scheduler spreads the CPU's threads over the cores."""

ALONG_AXIS = ("softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort", "logsumexp")
"""Primitives that combine the elements along their parameter `axis`."""

SIDE_BY_SIDE = 16
"""Fewer elements after an axis do not fill a vector."""

WIDTH_OPTIONS = ("out_features", "out_channels", "hidden_size")
"""The options of layers that set the length of an output's rows."""

LAUNCH_MS = 1e-3
"""Roughly the fixed cost of an operation in compiled code on a CPU."""

LEAST_COMPILE_MS = 1e3
"""The assumed minimum time to compile a second step. The first one may have come from the cache, in less time."""


Load: TypeAlias = Callable[[Sequence[str]], Config]
"""Loads the config with further overrides."""


class Steps:
    """The steps of an experiment on a device.

    Attributes:
        first_s: the seconds of the first step, with its compilation.
    """

    def __init__(self, experiment: Experiment, device: str) -> None:
        self.experiment, self.device = experiment, device
        self.run_steps = continuation(experiment, experiment.initial_state("cpu"), device)
        started = perf_counter()
        self.run(1)
        self.first_s = perf_counter() - started

    def run(self, times: int) -> None:
        """Take steps, and wait for the device."""
        self.run_steps(times)
        backend(self.device).synchronize()


class Measured(Steps):
    """A config's step, prepared and compiled on a device.

    Attributes:
        prepare_s: the seconds that reading the data and building the network took.
    """

    def __init__(self, load: Load, device: str, mode: Mode = Mode.FUSED, overrides: Sequence[str] = ()) -> None:
        started = perf_counter()
        self.load, experiment = load, training.prepare(load(overrides), mode, device=device)
        self.prepare_s = perf_counter() - started
        super().__init__(experiment, device)


def fastest(*compared: Steps) -> list[float]:
    """The time of a step of each in ms: the fastest of interleaved samples. All run on as many threads as the first."""
    steps = [x.experiment.compiled_step(x.device) for x in compared]
    teams = [x.team for x in steps if isinstance(x, CompiledProgram)]
    for team in teams:
        team.keep(teams[0].usual)
    workloads = {str(i): x.run for i, x in enumerate(compared)}
    pause_s = step.PAUSE_S[compared[0].device]
    times = alternate(workloads, budget_ms=SECONDS * 1e3, min_sample_ms=step.SAMPLE_MS, pause_s=pause_s)
    return [min(each.ms) for each in times.values()]


def _profile(measured: Measured) -> OpsProfile:
    """The times of the step's operations, in as many samples as fit into SECONDS."""
    started = perf_counter()
    measured.run(1)
    seconds = max(perf_counter() - started, MIN_SAMPLE_MS * 1e-3)
    samples = int(min(max(SECONDS / 2 / seconds, LEAST_SAMPLES), MOST_SAMPLES))
    while perf_counter() - started < WARM_UP_S:
        measured.run(1)
    return profile_steps(measured.run_steps, samples, device=measured.device, typical=min)


def observe(measured: Measured, peak: Roofline, busy: float) -> Observed:
    """Time the step, and collect what the causes ask for."""
    experiment, device = measured.experiment, measured.device
    cfg, precision = experiment.config, experiment.config.training.precision
    profile = _profile(measured)
    step_ms = min(profile.step.ms)
    equations = {_key(e): e for e in _equations(experiment, device)}
    kernels = kernels_of(experiment)
    shown = [row for row in profile.rows if row.flops or row.bytes]
    total_ms = max(step_ms, sum(row.ms for row in shown))
    operations = []
    for row in shown:
        key = (row.op, row.scope, row.phase)
        flops, nbytes = int(row.flops), int(row.bytes)
        launched = [np.prod(run.launch["grid"]) for run in kernels.get(key, ()) if "grid" in run.launch]
        operations.append(
            Operation(
                op=row.op,
                scope=row.scope,
                phase=row.phase,
                calls=row.calls,
                ms=row.ms,
                share=row.ms / total_ms,
                least_ms=_least_ms(flops, nbytes, peak, precision),
                arithmetic=flops / _flops_peak(peak, precision) > nbytes / peak.gbytes_per_s,
                strided=key in equations and any(map(_is_strided, single_equations(equations[key]))),
                own=not OWN_OPS.keys().isdisjoint(row.op.split("+")),
                blocks=int(max(launched)) if launched else None,
                **vars(rates(flops, nbytes, row.ms, peak, precision)),
            )
        )
    predicted = Predictor(measured, peak, operations, step_ms)
    compiled = device == "gpu" or any(run.launch for runs in kernels.values() for run in runs)
    layers = cfg.model.layers
    widths = [(f"model.layers.{i}", n) for i, layer in enumerate(layers[:-1]) if (n := _width(layer)) is not None]
    gpu: Any = backend(device) if device == "gpu" else None
    return Observed(
        device=device,
        mode=experiment.mode.value,
        precision=precision,
        batch_size=experiment.full_batch,
        examples=len(experiment.train),
        threads=thread_count(),
        cores=usable_cores() or 1,
        busy=busy,
        compiled=compiled,
        step_ms=step_ms,
        operations=operations,
        peak=peak,
        fits=predicted.fits,
        gain_of=predicted.gain,
        blocks=None if gpu is None else gpu.device.multiprocessors,
        gather_ms=_gather_ms(experiment, device),
        evaluations=_evaluations(experiment, operations),
        checkpoints=_checkpoints(experiment),
        last_batch=_last_batch(measured, predicted),
        fused_gain=None if compiled and experiment.mode is Mode.FUSED else predicted.fused_gain(),
        widths=widths,
        wider=lambda at, width: _wider(cfg, at, width),
    )


def nearly_fused(experiment: Experiment, target: Target) -> list[str]:
    """Why fusions of a GPU that nearly apply to the step are not used; see `passes.fusion.declined`."""
    passes = (*SIMPLIFY, *gpu_fusions(target))
    programs = accumulate(passes, lambda program, apply: apply(program), initial=experiment.step_program(passes=()))
    return declined(passes, list(programs))


def _key(e: Equation) -> Key:
    return label(e), e.scope, e.phase


def _equations(experiment: Experiment, device: str) -> Sequence[Equation]:
    return experiment.step_program(device).equations


def _flops_peak(peak: Roofline, precision: str) -> float:
    """The peak rate. In float64 it is at most half of that in float32, as a vector holds half as many elements."""
    single = peak.gflops_per_s["float32"]
    return min(peak.gflops_per_s.get(precision, single), single / 2 if precision == "float64" else math.inf)


def _least_ms(flops: int, nbytes: int, peak: Roofline, precision: str) -> float:
    return max(flops / _flops_peak(peak, precision), nbytes / peak.gbytes_per_s) * 1e-6


def _is_strided(e: Equation) -> bool:
    """Whether it combines elements along an axis within its rows that has 2 to SIDE_BY_SIDE - 1 elements after it."""
    shape = e.inputs[0].type.shape if e.inputs else ()
    if e.primitive.name in ALONG_AXIS:
        axes = [e.params["axis"] % len(shape)]
    elif e.has(Trait.REDUCTION) and e.params.get("axes") and min(e.params["axes"]) > 0:
        axes = e.params["axes"]
    else:
        return False
    return 1 < math.prod(shape[max(axes) + 1 :]) < SIDE_BY_SIDE


def _width(layer: Any) -> int | None:
    return next((getattr(layer, name) for name in WIDTH_OPTIONS if hasattr(layer, name)), None)


def _wider(cfg: Config, path: str, width: int) -> str:
    """The override that sets the width of the layer at this path, with its other options."""
    layer = cfg.model.layers[int(path.rpartition(".")[2])]
    option = next(name for name in WIDTH_OPTIONS if hasattr(layer, name))
    options = {name: value for name, value in layer.options().items() if name in layer.model_fields_set}
    return f"{path}={config.inline({layer.kind: {**options, option: width}})}"


class Predictor:
    """Predicts the gain of other settings, as a factor of examples per second.

    For another batch size, or a fused step in place of an eager one, two steps on other numbers of examples are timed,
    in turns with the present one. The line through their times gives the time of the new step.

    For another precision, an operation keeps its share of the roofline, besides a fixed cost. An operation that only
    the changed step has reaches the mean share, or REACHABLE if that is less. The time of the host does not change. It
    is 0 for compiled code on a CPU, where the time outside of operations is that of other programs.
    """

    def __init__(self, measured: Measured, peak: Roofline, operations: Sequence[Operation], step_ms: float) -> None:
        self.measured, self.experiment, self.device = measured, measured.experiment, measured.device
        self.peak, self.step_ms = peak, step_ms
        self.known = {(x.op, x.scope, x.phase): x for x in operations}
        total = sum(x.ms for x in operations)
        needs_host = self.device == "gpu" or self.experiment.mode is Mode.EAGER
        self.base_ms = max(step_ms, total) if needs_host else total
        self.host_ms = self.base_ms - total
        self.launch_ms = min((x.ms / x.calls for x in operations), default=0.0)
        self.mean = min(REACHABLE, sum(x.least_ms for x in operations) / total) if total else REACHABLE
        self.gains: dict[int, float] = {}  # of batch sizes

    def outline(self, overrides: Sequence[str]) -> Experiment:
        """The experiment with further overrides, without its data. Raises AdtrainError where they do not fit."""
        cfg = self.measured.load(overrides)
        training.check_precision(cfg, self.device)
        return outline(cfg.changed("model", input=self.experiment.config.model.input))

    def fits(self, overrides: Sequence[str]) -> bool:
        """Whether the config accepts these overrides, and the step fits in the device's memory."""
        try:
            changed = self.outline(overrides)
            changed.step_program(self.device)
        except AdtrainError:
            return False
        return too_large(changed, self.device) is None

    def gain(self, overrides: Sequence[str]) -> float:
        """The predicted gain of another batch size or precision."""
        changed = replace(self.outline(overrides), mode=self.experiment.mode)
        size = min(changed.config.data.batch_size, len(self.experiment.train))
        if size == self.experiment.full_batch:
            return self.base_ms / self._ms(changed.step_program(self.device), changed.config.training.precision)
        if size not in self.gains:
            self.gains[size] = self._timed_gain(_resized(self.experiment, size))
        return self.gains[size]

    def fused_gain(self) -> float:
        """The predicted gain of a compiled fused step.

        Without a compiler it cannot be timed. Then its operations are assumed to reach REACHABLE of the roofline.
        """
        fused = replace(self.experiment, mode=Mode.FUSED)
        if self.experiment.mode is Mode.EAGER:
            return self._timed_gain(fused)
        work = [cost for cost in costs(fused.step_program(self.device).equations) if cost.flops or cost.bytes]
        least = sum(_least_ms(*cost, self.peak, fused.config.training.precision) for cost in work)
        return self.step_ms / (least / REACHABLE + len(work) * LAUNCH_MS)

    def _timed_gain(self, changed: Experiment) -> float:
        """The predicted gain of a step, from the times of two others; see `other_sizes`."""
        others = other_sizes(changed, self.device)
        now_ms, *others_ms = fastest(self.measured, *(Steps(x, self.device) for x in others))
        sizes, size = [x.full_batch for x in others], changed.full_batch
        return now_ms / self.experiment.full_batch * size / on_line(sizes, others_ms, size)

    def batch_ms(self, size: int) -> float:
        """The predicted time of a step on fewer examples, whose operations keep their share of the roofline."""
        precision = self.experiment.config.training.precision
        return self._ms(_resized(self.experiment, size).step_program(self.device), precision)

    def _ms(self, program: Program, precision: str) -> float:
        sums: dict[Key, tuple[int, float]] = {}
        for e, (flops, nbytes) in zip(program.equations, costs(program.equations), strict=True):
            if flops or nbytes:
                calls, ms = sums.get(_key(e), (0, 0.0))
                sums[_key(e)] = calls + 1, ms + _least_ms(flops, nbytes, self.peak, precision)
        return self.host_ms + sum(self._operation_ms(key, calls, least) for key, (calls, least) in sums.items())

    def _operation_ms(self, key: Key, calls: int, least: float) -> float:
        fixed, x = calls * self.launch_ms, self.known.get(key)
        if x is None:
            return fixed + least / self.mean
        return fixed + max(0.0, x.ms - fixed) * least / x.least_ms


def other_sizes(experiment: Experiment, device: str) -> list[Experiment]:
    """The experiment with a quarter and a half of its batch; where only larger steps have its number of operations,
    because more of them are fused, with two and four times its batch, if examples and memory suffice.
    """
    size, operations = experiment.full_batch, len(experiment.step_program(device).equations)
    smaller, larger = ([_resized(experiment, int(size * x)) for x in factors] for factors in ((1 / 4, 1 / 2), (2, 4)))

    def has_its_operations(other: Experiment) -> bool:
        return len(other.step_program(device).equations) == operations

    if all(map(has_its_operations, smaller)) or 4 * size > len(experiment.train) or too_large(larger[-1], device):
        return smaller
    return larger if all(map(has_its_operations, larger)) else smaller


def _resized(experiment: Experiment, size: int) -> Experiment:
    """The experiment with batches of this size, rounded down to a multiple of its shards."""
    shards = experiment.config.data.shards or 1
    size = max(size - size % shards, shards)
    return replace(experiment, config=experiment.config.changed("data", batch_size=size))


def on_line(sizes: Sequence[int], ms: Sequence[float], size: int) -> float:
    """The time in ms of a step on `size` examples, by the line through the times of two other sizes.

    The smaller size comes first. The line has a constant, for the work on the weights and for launches, and a time for
    each example. Neither is negative.
    """
    (few, many), (few_ms, many_ms) = sizes, ms
    each = min(max(0.0, many_ms - few_ms) / max(1, many - few), many_ms / many)
    return many_ms + each * (size - many)


def _gather_ms(experiment: Experiment, device: str) -> float | None:
    """The time to read a batch; None for data in memory."""
    if not is_streamed(experiment.train, device):
        return None
    examples, batch = Streamed(experiment.train, device), next(batches_of(experiment, 1))
    times = []
    for _ in range(LEAST_SAMPLES):
        started = perf_counter()
        examples.batches(batch)
        times.append((perf_counter() - started) * 1e3)
    return median(times)


def evaluation_ms(experiment: Experiment, operations: Sequence[Operation]) -> float | None:
    """The predicted time to evaluate the validation examples, if there are any: that of forward operations."""
    if experiment.validation is None:
        return None
    forward = sum(x.ms for x in operations if x.phase == "forward")
    return forward * len(experiment.validation) / experiment.full_batch


def _evaluations(experiment: Experiment, operations: Sequence[Operation]) -> Pauses | None:
    """The evaluations within an epoch, if there are any."""
    every, ms = experiment.config.training.validate_every, evaluation_ms(experiment, operations)
    return None if every is None or ms is None else Pauses(every, experiment.steps_per_epoch, ms)


def _checkpoints(experiment: Experiment) -> Pauses | None:
    """The checkpoints within an epoch, if there are any. One is written to a temporary folder."""
    every = experiment.config.training.checkpoint_every
    if every is None:
        return None
    state, progress = experiment.initial_state("cpu"), Progress.start(experiment.best_start, experiment.network.task)
    with TemporaryDirectory() as folder:
        started = perf_counter()
        write_atomic(Path(folder) / "checkpoint", encode(experiment, Checkpoint(fetch(state)(), progress)))
        return Pauses(every, experiment.steps_per_epoch, (perf_counter() - started) * 1e3)


def _last_batch(measured: Measured, predicted: Predictor) -> LastBatch | None:
    experiment = measured.experiment
    rest = len(experiment.train) % experiment.full_batch
    if not rest or experiment.mode is Mode.EAGER:
        return None
    compile_ms = max(measured.first_s * 1e3 - predicted.step_ms, LEAST_COMPILE_MS)
    return LastBatch(rest, predicted.batch_ms(rest), compile_ms, experiment.epochs)


def tried(measured: Measured, overrides: Sequence[str]) -> float:
    """The measured factor of examples per second of overrides."""
    changed = Measured(measured.load, measured.device, measured.experiment.mode, overrides)
    before, after = fastest(measured, changed)
    return before / measured.experiment.full_batch * changed.experiment.full_batch / after
