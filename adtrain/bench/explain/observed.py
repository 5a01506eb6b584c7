"""What is measured of a training step: its operations with their times and limits, its data, its pauses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adtrain.bench.timing.roofline import Rates, Roofline

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


def is_launch(ms: float, calls: int, least_ms: float, launch_ms: float) -> bool:
    """Whether an operation is bound by its launch. `launch_ms` is the time of a run of the shortest operation."""
    return ms <= calls * max(LAUNCHES * launch_ms, SHORT_MS) and least_ms < ms / 2


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
        fits: whether the config accepts overrides.
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
        if is_launch(x.ms, x.calls, x.least_ms, self.launch_ms):
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
