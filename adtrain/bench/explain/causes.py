"""The causes of slow training. Each is a record of `CAUSES`.

`benchmarks/explain.py` compares the predictions with measured gains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from adtrain.bench.explain.observed import Observed, Operation, Pauses
from adtrain.bench.view import duration
from adtrain.text import counted

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

AUGMENTATION_SHARE = 0.6
"""Augmentation is a cause if it takes at least this share of the step."""

CLOCK_MS = 1e-4
"""A clock may measure 0 for very short operations. Their sum then counts as this time."""

Scope: TypeAlias = Literal["step", "epoch"]


class Proposal(NamedTuple):
    """What to change: in words, and as overrides if it is a change of the config."""

    advice: str
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Cause:
    """A cause of slow training.

    Attributes:
        name: as it is shown.
        evidence: the numbers that show it, None where it does not apply.
        proposal: what to change.
        gain: the predicted factor of examples per second.
        of: whether it slows down the step, or what an epoch does besides full steps.
    """

    name: str
    evidence: Callable[[Observed], str | None]
    proposal: Callable[[Observed], Proposal]
    gain: Callable[[Observed], float]
    of: Scope = "step"


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
    for cause in CAUSES:
        if (evidence := cause.evidence(observed)) is None:
            continue
        advice, overrides = cause.proposal(observed)
        if not observed.fits(overrides) or (gain := cause.gain(observed)) < LEAST_GAIN:
            continue
        yield Finding(
            cause=cause.name,
            evidence=evidence,
            advice=advice,
            overrides=list(overrides),
            predicted_gain=gain,
            of=cause.of,
        )


def _share(o: Observed, chosen: Callable[[Operation], bool]) -> float:
    return sum(x.ms for x in o.operations if chosen(x)) / o.total_ms


def _worst(o: Observed, chosen: Callable[[Operation], bool]) -> str:
    """The slowest of the chosen operations, in words."""
    x = max(filter(chosen, o.operations), key=lambda x: x.ms)
    return f"{x.op} of {x.scope or 'no layer'}, {x.phase}: {duration(x.ms)}, {x.ms / o.total_ms:.0%} of the step"


# Batch size.


def _larger(o: Observed) -> int:
    """A usual batch size, or four times a usual one, at most all examples."""
    size = USUAL_BATCH if o.batch_size < SMALL_BATCH else 4 * o.batch_size
    return min(size, o.examples)


def _small_batch(o: Observed) -> str | None:
    if o.batch_size >= min(SMALL_BATCH, o.examples):
        return None
    return f"a step on {o.batch_size} examples takes {duration(o.step_ms)}, much of it independent of their number"


def _many_launches(o: Observed) -> str | None:
    found = [x for x in o.operations if o.bound(x) == "launch"]
    share = sum(x.ms for x in found) / max(o.operations_ms, CLOCK_MS)
    if share < 0.4 or o.batch_size >= o.examples or o.mode == "eager" or not o.compiled:
        return None
    return (
        f"{counted(sum(x.calls for x in found), 'operations')} with little work take {share:.0%} of "
        f"{duration(o.operations_ms)}; the shortest takes {duration(o.launch_ms)}"
    )


def _batch(o: Observed) -> Proposal:
    size = _larger(o)
    return Proposal(f"use batches of {size} examples; the learning rate may need a change", [f"data.batch_size={size}"])


def _batch_gain(o: Observed) -> float:
    return o.gain_of(_batch(o).overrides)


def _last_batch(o: Observed) -> str | None:
    last = o.last_batch
    if last is None or last.examples > o.batch_size // 8:
        return None
    return (
        f"each epoch ends with a step on {counted(last.examples, 'examples')}, for which a second step is compiled in "
        f"{duration(last.compile_ms)}"
    )


def _without_rest(o: Observed) -> Proposal:
    """The nearest batch size that divides the number of examples, or leaves more than half a batch."""
    sizes = sorted(range(1, min(o.examples, 2 * o.batch_size) + 1), key=lambda n: abs(n - o.batch_size))
    size = next(n for n in sizes if not o.examples % n or o.examples % n > n // 2)
    return Proposal(f"use a batch size of {size}, which leaves no small last batch", [f"data.batch_size={size}"])


def _last_batch_gain(o: Observed) -> float:
    assert o.last_batch is not None
    last, full = o.last_batch, o.examples // o.batch_size
    steps = last.epochs * full * o.step_ms + last.compile_ms
    return (steps + last.epochs * last.step_ms + last.compile_ms) / steps


# Precision, widths, layout, kernels.


def _double(o: Observed) -> str | None:
    if o.precision != "float64":
        return None
    rates = o.peak.gflops_per_s
    return (
        f"numbers of 8 bytes; the peak is {rates.get('float64', rates['float32']):,.0f} GFLOP/s in float64, "
        f"{rates['float32']:,.0f} in float32"
    )


def _arithmetic_in_float32(o: Observed) -> str | None:
    share = _share(o, lambda x: o.bound(x) == "arithmetic")
    if o.device != "gpu" or o.precision != "float32" or share < 0.5:
        return None
    return f"arithmetic in float32 binds {share:.0%} of the step"


def _odd_widths(o: Observed) -> Sequence[tuple[str, int, int]]:
    """Path, width and padded width of the layers whose rows begin at unaligned addresses."""
    return [(path, n, -(-n // ALIGNED) * ALIGNED) for path, n in o.widths if n >= NARROW and n % ALIGNED]


def _is_slow_product(o: Observed) -> Callable[[Operation], bool]:
    """Whether an operation is a slow product of a layer with an unaligned width, or of a layer after it."""
    indices = {path.rpartition(".")[2] for path, _, _ in _odd_widths(o)}
    near = indices | {str(int(i) + n) for i in indices for n in (1, 2)}

    def chosen(x: Operation) -> bool:
        of_layers = any(part.partition(".")[0] in near for part in x.scope.split("+"))
        return of_layers and x.arithmetic and (x.of_roofline or 0.0) < REACHABLE

    return chosen


def _odd_width(o: Observed) -> str | None:
    chosen, small = _is_slow_product(o), o.batch_size < min(SMALL_BATCH, o.examples)
    if small or _share(o, chosen) < LARGE_SHARE:
        return None
    names = ", ".join(f"{n:,} at {path}" for path, n, _ in _odd_widths(o))
    return f"widths that are not multiples of {ALIGNED}: {names}; {_worst(o, chosen)}"


def _pad(o: Observed) -> Proposal:
    found = _odd_widths(o)
    return Proposal(
        f"increase widths to {', '.join(f'{to:,}' for _, _, to in found)}", [o.wider(path, to) for path, _, to in found]
    )


def _is_strided(o: Observed) -> Callable[[Operation], bool]:
    return lambda x: x.strided and (x.of_roofline or 0.0) < REACHABLE


def _strided(o: Observed) -> str | None:
    chosen = _is_strided(o)
    if _share(o, chosen) < LARGE_SHARE:
        return None
    return f"{_worst(o, chosen)}; it works along an axis that has few elements after it"


def _is_slow_own(x: Operation) -> bool:
    return x.own and (x.of_roofline or 0.0) < REACHABLE


def _slow_own(o: Observed) -> str | None:
    if _share(o, _is_slow_own) < LARGE_SHARE:
        return None
    share = max((x for x in o.operations if _is_slow_own(x)), key=lambda x: x.ms).of_roofline or 0.0
    return f"{_worst(o, _is_slow_own)}, at {share:.1%} of the roofline; a plug-in defines it"


def _few_blocks(o: Observed) -> str | None:
    def chosen(x: Operation) -> bool:
        return o.bound(x) == "too few blocks"

    if _share(o, chosen) < LARGE_SHARE:
        return None
    return f"{_worst(o, chosen)}; its blocks are fewer than the {o.blocks} multiprocessors"


def _is_augmentation(x: Operation) -> bool:
    return "augment" in x.scope.split("+")


def _augmentation(o: Observed) -> str | None:
    share = _share(o, _is_augmentation)
    if share < AUGMENTATION_SHARE:
        return None
    return f"augmentation takes {share:.0%} of the step; {_worst(o, _is_augmentation)}"


# How the step runs: mode, compiler, threads, other work.


def _eager(o: Observed) -> str | None:
    if o.mode != "eager":
        return None
    runs = sum(x.calls for x in o.operations)
    return f"{runs:,} operations run one by one: the host takes {o.host_ms / o.step_ms:.0%} of the step"


def _no_compiler(o: Observed) -> str | None:
    return None if o.compiled or o.mode == "eager" else "no C compiler was found, so NumPy runs the step"


def _fused_gain(o: Observed) -> float:
    assert o.fused_gain is not None
    return o.fused_gain


def _few_threads(o: Observed) -> str | None:
    if o.device != "cpu" or o.threads >= o.cores or not o.compiled:
        return None
    return f"compiled code uses {counted(o.threads, 'threads')}, and this process may use {o.cores} cores"


THREAD_MS = 0.05
"""More threads do not speed up a shorter operation."""


def _threads_gain(o: Observed) -> float:
    saved = sum(x.ms for x in o.operations if x.ms > THREAD_MS * x.calls) * (1 - o.threads / o.cores)
    return o.total_ms / (o.total_ms - saved)


def _busy(o: Observed) -> str | None:
    if o.device != "cpu" or (o.busy <= 0.2 * o.cores and not o.waiting):
        return None
    waiting = f"; each operation waits at least {duration(o.launch_ms)} for its threads" if o.waiting else ""
    return f"other work kept {o.busy:.1f} of {o.cores} cores busy before the step was timed{waiting}"


def _busy_gain(o: Observed) -> float:
    """Without the other work the step has all of each core's time, and its threads do not wait."""
    waits = sum(x.calls * o.launch_ms for x in o.operations) if o.waiting else 0.0
    return max(1 + o.busy / o.cores, o.total_ms / max(o.total_ms - waits, o.total_ms / 10))


# Data and evaluation.


def _slow_data(o: Observed) -> str | None:
    if o.gather_ms is None or o.gather_ms < 0.5 * o.operations_ms:
        return None
    return (
        f"reading a batch takes {duration(o.gather_ms)}, the operations of a step take {duration(o.operations_ms)}; "
        "the data are streamed, because they do not fit in memory"
    )


def _data_gain(o: Observed) -> float:
    assert o.gather_ms is not None
    return max(o.step_ms, o.gather_ms) / max(o.operations_ms, CLOCK_MS)


def _pauses(of: Callable[[Observed], Pauses | None], what: str, setting: str) -> Cause:
    """The cause for pauses that take too large a share of an epoch. `setting` has the steps between them."""

    def found(o: Observed) -> Pauses:
        pauses = of(o)
        assert pauses is not None
        return pauses

    def evidence(o: Observed) -> str | None:
        if (pauses := of(o)) is None:
            return None
        share = pauses.ms / (pauses.ms + pauses.every * o.step_ms)
        if share < 2 * PAUSES_SHARE:
            return None
        return f"{what} every {counted(pauses.every, 'steps')}: {duration(pauses.ms)}, {share:.0%} of the time"

    def proposal(o: Observed) -> Proposal:
        every = int(found(o).ms * (1 / PAUSES_SHARE - 1) / o.step_ms) + 1
        if every >= found(o).steps_per_epoch:
            return Proposal(f"{what} after each epoch only", [f"{setting}=null"])
        return Proposal(f"{what} every {every:,} steps", [f"{setting}={every}"])

    def gain(o: Observed) -> float:
        return (1 + found(o).ms / (found(o).every * o.step_ms)) * (1 - PAUSES_SHARE)

    return Cause(f"frequent {what}", evidence, proposal, gain, "epoch")


def _advice(text: str, *overrides: str) -> Callable[[Observed], Proposal]:
    return lambda o: Proposal(text, overrides)


def _gain_of(*overrides: str) -> Callable[[Observed], float]:
    return lambda o: o.gain_of(overrides)


CAUSES: tuple[Cause, ...] = (
    Cause("small batch", _small_batch, _batch, _batch_gain),
    Cause("launches", _many_launches, _batch, _batch_gain),
    Cause("small last batch", _last_batch, _without_rest, _last_batch_gain, "epoch"),
    Cause(
        "float64",
        _double,
        _advice("train in float32", "training.precision=float32"),
        _gain_of("training.precision=float32"),
    ),
    Cause(
        "float32 products",
        _arithmetic_in_float32,
        _advice("round the operands of products to bfloat16", "training.precision=bfloat16"),
        _gain_of("training.precision=bfloat16"),
    ),
    Cause("unaligned width", _odd_width, _pad, lambda o: o.saved(_is_slow_product(o), REACHABLE)),
    Cause(
        "strided axis",
        _strided,
        _advice("transpose the values, so that the operation works along the last axis"),
        lambda o: o.saved(_is_strided(o), REACHABLE),
    ),
    Cause(
        "own kernel",
        _slow_own,
        _advice("write a faster kernel: consecutive iterations read consecutive elements, and all threads work"),
        lambda o: o.saved(_is_slow_own, REACHABLE),
    ),
    Cause("too few blocks", _few_blocks, _batch, _batch_gain),
    Cause(
        "augmentation",
        _augmentation,
        _advice("remove augmentations, the slowest first", "data.augment=null"),
        lambda o: 1 / (1 - min(0.99, _share(o, _is_augmentation))),
    ),
    Cause("eager step", _eager, _advice("train without --eager"), _fused_gain),
    Cause("no compiler", _no_compiler, _advice("install gcc, or clang with libomp"), _fused_gain),
    Cause(
        "few threads",
        _few_threads,
        lambda o: Proposal(f"unset OMP_NUM_THREADS, or set it to {o.cores}"),
        _threads_gain,
    ),
    Cause("busy cores", _busy, _advice("stop other programs"), _busy_gain),
    Cause(
        "streamed data",
        _slow_data,
        _advice("use data that fit in memory (fewer or smaller examples, uint8 images), or a faster disk"),
        _data_gain,
        "epoch",
    ),
    _pauses(lambda o: o.evaluations, "evaluation", "training.validate_every"),
    _pauses(lambda o: o.checkpoints, "checkpoints", "training.checkpoint_every"),
)
"""All causes, in the order in which equal gains are shown."""
