"""What is measured of a training step, and the causes of slow training that it shows, each a function in `CAUSES`.

`benchmarks/explain.py` compares the predictions with measured gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from adtrain.bench.machine import Rates, Roofline
from adtrain.bench.view import duration
from adtrain.text import counted

NEAR = 0.4
"""An operation that reaches this share of the roofline is bound by arithmetic or memory."""

LAUNCHES, SHORT_MS = 5.0, 0.005
"""An operation with little work is bound by its launch if it takes at most this many times as long as the shortest one,
or at most this time. On a CPU the fixed cost includes a barrier of the threads, which the shortest operation may not
need."""


@dataclass(frozen=True, kw_only=True)
class Operation(Rates):
    """All runs of an operation in a step.

    Attributes:
        ms: of the fastest steps.
        least_ms: the minimum time for its FLOPs and bytes at the device's peak rates.
        arithmetic: whether that is the time of its FLOPs, not of its bytes.
        strided: whether it works along an axis with few elements after it, which do not fill a vector.
        own: whether a plug-in defines it.
        blocks: on a GPU, those of its largest launch; None on a CPU.
    """

    op: str
    scope: str
    phase: str
    calls: int
    ms: float
    share: float
    least_ms: float
    arithmetic: bool
    strided: bool = False
    own: bool = False
    blocks: int | None = None


WAITING_MS = 0.02
"""If the shortest operation of compiled code on a CPU takes longer, its threads wait for one another."""


class Pauses(NamedTuple):
    """What is done between the steps of an epoch: evaluations on the validation examples, or checkpoints."""

    every: int  # steps between two of them
    steps_per_epoch: int
    ms: float  # of one


class LastBatch(NamedTuple):
    """The last step of an epoch, on the examples that are left."""

    examples: int
    step_ms: float  # predicted
    compile_ms: float  # of a step for another batch size
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A training step as it was measured, and what surrounds it.

    Attributes:
        mode: "fused", "staged" or "eager".
        examples: the number of training examples.
        threads, cores: of compiled code, and those that this process may use.
        busy: the number of cores that other work kept busy.
        blocks: the number of multiprocessors of a GPU: fewer blocks leave some idle. None on a CPU.
        compiled: whether a compiler made the step's code.
        gather_ms: the time to read a batch of streamed data; None for data in memory.
        fused_gain: how much faster a compiled fused step is predicted to be; None where the step is one.
        widths: the widths of layers by their paths, such as ("model.layers.0", 512), without that of the last layer.
        wider: from the path of a layer and a width to the override that sets it.
        fits: whether the config accepts overrides, and the step fits in memory.
        gain_of: from overrides to the predicted factor of examples a second.
    """

    device: str
    mode: str
    precision: str
    batch_size: int
    examples: int
    threads: int
    cores: int
    busy: float
    compiled: bool
    step_ms: float
    operations: Sequence[Operation]
    peak: Roofline
    gain_of: Callable[[Sequence[str]], float]
    blocks: int | None = None
    gather_ms: float | None = None
    evaluations: Pauses | None = None
    checkpoints: Pauses | None = None
    last_batch: LastBatch | None = None
    fused_gain: float | None = None
    widths: Sequence[tuple[str, int]] = ()
    wider: Callable[[str, int], str] = "{}={}".format
    fits: Callable[[Sequence[str]], bool] = lambda overrides: True

    @property
    def operations_ms(self) -> float:
        return sum(x.ms for x in self.operations)

    @property
    def total_ms(self) -> float:
        """The step, or its operations where these take longer, as they do if they overlap."""
        return max(self.step_ms, self.operations_ms)

    @property
    def host_ms(self) -> float:
        """The part of the step outside of its operations."""
        return max(0.0, self.step_ms - self.operations_ms)

    @property
    def launch_ms(self) -> float:
        """The time of a run of the shortest operation, which has little work: the fixed cost of an operation."""
        return min((x.ms / x.calls for x in self.operations), default=0.0)

    @property
    def waiting(self) -> bool:
        """Whether threads wait for others that the system does not run, because other work has the cores."""
        return self.device == "cpu" and self.compiled and self.mode == "fused" and self.launch_ms > WAITING_MS

    def bound(self, x: Operation) -> str:
        """What binds an operation."""
        if x.ms <= x.calls * max(LAUNCHES * self.launch_ms, SHORT_MS) and x.least_ms < x.ms / 2:
            return "waiting threads" if self.waiting else "launch"
        if self.blocks is not None and x.blocks is not None and x.blocks < self.blocks:
            return "too few blocks"
        if x.strided and (x.of_roofline or 0.0) < NEAR:
            return "strided axis"
        if (x.of_roofline or 0.0) >= NEAR:
            return "arithmetic" if x.arithmetic else "cache" if x.from_cache else "memory"
        return "own kernel" if x.own else "unknown"

    def bounds(self) -> dict[str, float]:
        """The share of the step that each limit binds; "host" is the time outside of operations."""
        found: dict[str, float] = {}
        for x in self.operations:
            found[self.bound(x)] = found.get(self.bound(x), 0.0) + x.ms / self.total_ms
        found["host"] = self.host_ms / self.total_ms
        return dict(sorted(found.items(), key=lambda row: -row[1]))

    def saved(self, chosen: Callable[[Operation], bool], to_share: float) -> float:
        """The gain if the chosen operations reached this share of the roofline."""
        saved = sum(max(0.0, x.ms - max(x.least_ms / to_share, self.launch_ms)) for x in self.operations if chosen(x))
        return self.total_ms / max(self.total_ms - saved, 1e-9)


LEAST_GAIN = 1.04
"""A cause with a smaller predicted gain is not named."""

SMALL_BATCH, USUAL_BATCH = 64, 128
"""A batch below the first size may be too small; the second size is proposed."""

ALIGNED = 8
"""Rows whose length is a multiple of this number begin at addresses where vector loads are fast."""

NARROW = 64
"""Padding a narrower layer adds more work than it saves."""

REACHABLE = 0.5
"""The assumed share of the roofline of a fused step, a product of a padded width, or a better kernel."""

LARGE_SHARE = 0.25
"""Operations with a smaller share of the step are not named as the cause of a slow step."""

PAUSES_SHARE = 0.05
"""The share of an epoch that evaluations, or checkpoints, within it may take."""

AUGMENTATION_SHARE = 0.5
"""Augmentation is a cause if its operations take at least this share of the step. Operations that also compute a layer
do not count."""

CLOCK_MS = 1e-4
"""A clock may measure 0 for very short operations. Their sum then counts as this time."""

THREAD_MS = 0.05
"""More threads do not speed up a shorter operation."""

Scope: TypeAlias = Literal["step", "epoch"]
"""What a cause slows down: the step, or what an epoch does besides full steps."""


class Found(NamedTuple):
    """A cause that applies.

    Attributes:
        evidence: the numbers that show it.
        advice: what to change.
        overrides: the change, if it is one of the config.
        gain: the predicted factor of examples per second; None: that of the overrides, by `Observed.gain_of`.
    """

    evidence: str
    advice: str
    overrides: Sequence[str] = ()
    gain: float | None = None


Finder: TypeAlias = Callable[[Observed], Iterator[Found]]
"""Yields what shows a cause, or nothing where it does not apply."""

CAUSES: dict[str, tuple[Finder, Scope]] = {}
"""All causes by name, in the order in which equal gains are shown."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause that applies. `measured_gain` is that of `--try`; None where it was not measured."""

    cause: str
    evidence: str
    advice: str
    overrides: list[str]
    predicted_gain: float
    of: Scope
    measured_gain: float | None = None


def find(observed: Observed) -> list[Finding]:
    """The causes that apply, the largest predicted gain first.

    A change that the config does not accept is left out. A change is proposed once, for the first of its causes.
    """
    found: list[Finding] = []
    for each in sorted(_applying(observed), key=lambda x: -x.predicted_gain):
        if not each.overrides or each.overrides not in [x.overrides for x in found]:
            found.append(each)
    return found


def _applying(observed: Observed) -> Iterator[Finding]:
    for cause, (finder, of) in CAUSES.items():
        for evidence, advice, overrides, gain in finder(observed):
            if not observed.fits(overrides):
                continue
            predicted = observed.gain_of(overrides) if gain is None else gain
            if predicted >= LEAST_GAIN:
                yield Finding(
                    cause=cause, evidence=evidence, advice=advice, overrides=list(overrides), predicted_gain=predicted,
                    of=of,
                )  # fmt: skip


def _cause(name: str, of: Scope = "step") -> Callable[[Finder], Finder]:
    """Adds a function to CAUSES."""

    def added(finder: Finder) -> Finder:
        CAUSES[name] = finder, of
        return finder

    return added


def _share(o: Observed, chosen: Callable[[Operation], bool]) -> float:
    return sum(x.ms for x in o.operations if chosen(x)) / o.total_ms


def _worst(o: Observed, chosen: Callable[[Operation], bool]) -> str:
    """The slowest of the chosen operations, in words."""
    x = _slowest(o, chosen)
    return f"{x.op} of {x.scope or 'no layer'}, {x.phase}: {duration(x.ms)}, {x.ms / o.total_ms:.0%} of the step"


def _slowest(o: Observed, chosen: Callable[[Operation], bool]) -> Operation:
    return max(filter(chosen, o.operations), key=lambda x: x.ms)


def _larger_batch(o: Observed, evidence: str) -> Found:
    """Proposes a usual batch size, or four times a usual one, at most all examples."""
    size = min(USUAL_BATCH if o.batch_size < SMALL_BATCH else 4 * o.batch_size, o.examples)
    advice = f"use batches of {size} examples; the learning rate may need a change"
    return Found(evidence, advice, [f"data.batch_size={size}"])


@_cause("small batch")
def _small_batch(o: Observed) -> Iterator[Found]:
    if o.batch_size < min(SMALL_BATCH, o.examples):
        about = f"a step on {o.batch_size} examples takes {duration(o.step_ms)}"
        yield _larger_batch(o, f"{about}, much of it independent of their number")


@_cause("launches")
def _many_launches(o: Observed) -> Iterator[Found]:
    found = [x for x in o.operations if o.bound(x) == "launch"]
    share = sum(x.ms for x in found) / max(o.operations_ms, CLOCK_MS)
    if share >= 0.4 and o.batch_size < o.examples and o.mode != "eager" and o.compiled:
        evidence = (
            f"{counted(sum(x.calls for x in found), 'operations')} with little work take {share:.0%} of "
            f"{duration(o.operations_ms)}; the shortest takes {duration(o.launch_ms)}"
        )
        yield _larger_batch(o, evidence)


@_cause("small last batch", "epoch")
def _last_batch(o: Observed) -> Iterator[Found]:
    """Proposes the nearest batch size that divides the number of examples, or leaves more than half a batch."""
    if (last := o.last_batch) is None or last.examples > o.batch_size // 8:
        return
    sizes = sorted(range(1, min(o.examples, 2 * o.batch_size) + 1), key=lambda n: abs(n - o.batch_size))
    size = next(n for n in sizes if not o.examples % n or o.examples % n > n // 2)
    steps = last.epochs * (o.examples // o.batch_size) * o.step_ms + last.compile_ms
    yield Found(
        f"each epoch ends with a step on {counted(last.examples, 'examples')}, for which a second step is compiled in "
        f"{duration(last.compile_ms)}",
        f"use a batch size of {size}, which leaves no small last batch",
        [f"data.batch_size={size}"],
        (steps + last.epochs * last.step_ms + last.compile_ms) / steps,
    )


@_cause("float64")
def _float64(o: Observed) -> Iterator[Found]:
    if o.precision == "float64":
        rates = o.peak.gflops_per_s
        peaks = f"{rates.get('float64', rates['float32']):,.0f} GFLOP/s in float64, {rates['float32']:,.0f} in float32"
        yield Found(f"numbers of 8 bytes; the peak is {peaks}", "train in float32", ["training.precision=float32"])


@_cause("float32 products")
def _arithmetic_in_float32(o: Observed) -> Iterator[Found]:
    share = _share(o, lambda x: o.bound(x) == "arithmetic")
    if o.device == "gpu" and o.precision == "float32" and share >= 0.5:
        advice = "round the operands of products to bfloat16"
        yield Found(f"arithmetic in float32 binds {share:.0%} of the step", advice, ["training.precision=bfloat16"])


@_cause("unaligned width")
def _unaligned_width(o: Observed) -> Iterator[Found]:
    """Layers whose rows begin at unaligned addresses, where the products of these and of the next layers are slow."""
    odd = [(path, n, -(-n // ALIGNED) * ALIGNED) for path, n in o.widths if n >= NARROW and n % ALIGNED]
    indices = {path.rpartition(".")[2] for path, _, _ in odd}
    near = indices | {str(int(i) + n) for i in indices for n in (1, 2)}

    def slow(x: Operation) -> bool:
        of_layers = any(part.partition(".")[0] in near for part in x.scope.split("+"))
        return of_layers and x.arithmetic and (x.of_roofline or 0.0) < REACHABLE

    if o.batch_size >= min(SMALL_BATCH, o.examples) and _share(o, slow) >= LARGE_SHARE:
        names = ", ".join(f"{n:,} at {path}" for path, n, _ in odd)
        yield Found(
            f"widths that are not multiples of {ALIGNED}: {names}; {_worst(o, slow)}",
            f"increase widths to {', '.join(f'{to:,}' for _, _, to in odd)}",
            [o.wider(path, to) for path, _, to in odd],
            o.saved(slow, REACHABLE),
        )


@_cause("strided axis")
def _strided(o: Observed) -> Iterator[Found]:
    def slow(x: Operation) -> bool:
        return x.strided and (x.of_roofline or 0.0) < REACHABLE

    if _share(o, slow) >= LARGE_SHARE:
        evidence = f"{_worst(o, slow)}; it works along an axis that has few elements after it"
        advice = "transpose the values, so that the operation works along the last axis"
        yield Found(evidence, advice, gain=o.saved(slow, REACHABLE))


@_cause("own kernel")
def _own_kernel(o: Observed) -> Iterator[Found]:
    def slow(x: Operation) -> bool:
        return x.own and (x.of_roofline or 0.0) < REACHABLE

    if _share(o, slow) >= LARGE_SHARE:
        share = _slowest(o, slow).of_roofline or 0.0
        evidence = f"{_worst(o, slow)}, at {share:.1%} of the roofline; a plug-in defines it"
        advice = "write a faster kernel: consecutive iterations read consecutive elements, and all threads work"
        yield Found(evidence, advice, gain=o.saved(slow, REACHABLE))


@_cause("too few blocks")
def _few_blocks(o: Observed) -> Iterator[Found]:
    def small(x: Operation) -> bool:
        return o.bound(x) == "too few blocks"

    if _share(o, small) >= LARGE_SHARE:
        yield _larger_batch(o, f"{_worst(o, small)}; its blocks are fewer than the {o.blocks} multiprocessors")


@_cause("augmentation")
def _augmentation(o: Observed) -> Iterator[Found]:
    def augments(x: Operation) -> bool:
        return {"augment"} <= set(x.scope.split("+")) <= {"input", "augment"}

    if (share := _share(o, augments)) >= AUGMENTATION_SHARE:
        evidence = f"augmentation takes {share:.0%} of the step; {_worst(o, augments)}"
        advice = "remove augmentations, the slowest first"
        yield Found(evidence, advice, ["data.augment=null"], 1 / (1 - min(0.99, share)))


@_cause("eager step")
def _eager(o: Observed) -> Iterator[Found]:
    if o.mode == "eager":
        runs = sum(x.calls for x in o.operations)
        evidence = f"{runs:,} operations run one by one: the host takes {o.host_ms / o.step_ms:.0%} of the step"
        yield Found(evidence, "train without --eager", gain=o.fused_gain)


@_cause("no compiler")
def _no_compiler(o: Observed) -> Iterator[Found]:
    if not o.compiled and o.mode != "eager":
        evidence = "no C compiler was found, so NumPy runs the step"
        yield Found(evidence, "install gcc, or clang with libomp", gain=o.fused_gain)


@_cause("few threads")
def _few_threads(o: Observed) -> Iterator[Found]:
    if o.device == "cpu" and o.threads < o.cores and o.compiled:
        saved = sum(x.ms for x in o.operations if x.ms > THREAD_MS * x.calls) * (1 - o.threads / o.cores)
        used = counted(o.threads, "threads")
        yield Found(
            f"compiled code uses {used}, and this process may use {o.cores} cores",
            f"unset OMP_NUM_THREADS, or set it to {o.cores}",
            gain=o.total_ms / (o.total_ms - saved),
        )


@_cause("busy cores")
def _busy(o: Observed) -> Iterator[Found]:
    """Without the other work the step has all of each core's time, and its threads do not wait."""
    if o.device == "cpu" and (o.busy > 0.2 * o.cores or o.waiting):
        waits = sum(x.calls * o.launch_ms for x in o.operations) if o.waiting else 0.0
        waiting = f"; each operation waits at least {duration(o.launch_ms)} for its threads" if o.waiting else ""
        yield Found(
            f"other work kept {o.busy:.1f} of {o.cores} cores busy before the step was timed{waiting}",
            "stop other programs",
            gain=max(1 + o.busy / o.cores, o.total_ms / max(o.total_ms - waits, o.total_ms / 10)),
        )


@_cause("streamed data", "epoch")
def _slow_data(o: Observed) -> Iterator[Found]:
    if o.gather_ms is not None and o.gather_ms >= 0.5 * o.operations_ms:
        times = f"a batch takes {duration(o.gather_ms)}, the operations of a step take {duration(o.operations_ms)}"
        yield Found(
            f"reading {times}; the data are streamed, because they do not fit in memory",
            "use data that fit in memory (fewer or smaller examples, uint8 images), or a faster disk",
            gain=max(o.step_ms, o.gather_ms) / max(o.operations_ms, CLOCK_MS),
        )


@_cause("frequent evaluation", "epoch")
def _evaluations(o: Observed) -> Iterator[Found]:
    return _frequent(o, o.evaluations, "evaluation", "training.validate_every")


@_cause("frequent checkpoints", "epoch")
def _checkpoints(o: Observed) -> Iterator[Found]:
    return _frequent(o, o.checkpoints, "checkpoints", "training.checkpoint_every")


def _frequent(o: Observed, pauses: Pauses | None, what: str, setting: str) -> Iterator[Found]:
    """Pauses that take too large a share of an epoch. `setting` has the steps between them."""
    if pauses is None:
        return
    steps_ms = pauses.every * o.step_ms
    share = pauses.ms / (pauses.ms + steps_ms)
    if share >= 2 * PAUSES_SHARE:
        evidence = f"{what} every {counted(pauses.every, 'steps')}: {duration(pauses.ms)}, {share:.0%} of the time"
        every = int(pauses.ms * (1 / PAUSES_SHARE - 1) / o.step_ms) + 1
        in_epoch = every < pauses.steps_per_epoch
        advice = f"{what} every {every:,} steps" if in_epoch else f"{what} after each epoch only"
        overrides = [f"{setting}={every if in_epoch else 'null'}"]
        yield Found(evidence, advice, overrides, (1 + pauses.ms / steps_ms) * (1 - PAUSES_SHARE))
