"""The results that `adtrain bench compare` reads: the values that it needs, and their times, named as in the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from adtrain.bench.timing.sampling import NOISY
from adtrain.config.values import Duration, Milliseconds
from adtrain.option_types import Size


@dataclass(frozen=True)
class Time:
    """A median and its confidence interval."""

    median_ms: Milliseconds
    low_ms: Milliseconds
    high_ms: Milliseconds

    @property
    def noisy(self) -> bool:
        return self.high_ms - self.low_ms > NOISY * self.median_ms


class NamedTime(NamedTuple):
    """A time of a result. `whole`: the time is that of a whole training step."""

    name: str
    time: Time
    whole: bool = False


@dataclass(frozen=True)
class Conditions:
    """The part of the protocol that must be equal, or leads to a warning."""

    device_name: str
    load: Duration | None = None
    cores: Size | None = None


@dataclass(frozen=True)
class Row:
    """An operation alone."""

    op: str
    size: str
    phase: str
    time: Time
    variant: str = ""
    dtype: str = "float32"


@dataclass(frozen=True)
class Ops:
    """The result of `bench ops`."""

    kind: str
    protocol: Conditions
    ops: list[Row]

    def times(self) -> Iterator[NamedTime]:
        for row in self.ops:
            dtype = "" if row.dtype == "float32" else row.dtype
            yield NamedTime(_joined(row.op, row.variant, row.size, row.phase, dtype), row.time)


@dataclass(frozen=True)
class Layer:
    layer: str
    forward: Time | None
    backward: Time | None
    update: Time | None


@dataclass(frozen=True)
class FusedOperation:
    op: str
    scope: str
    phase: str
    time: Time


@dataclass(frozen=True)
class Step:
    step: Time


@dataclass(frozen=True)
class ModeOfStep(Step):
    layers: list[Layer]
    ops: list[FusedOperation]


@dataclass(frozen=True)
class Modes:
    eager: ModeOfStep
    staged: ModeOfStep
    fused: ModeOfStep


@dataclass(frozen=True)
class ConfigSteps:
    """The result of `bench step`."""

    kind: str
    protocol: Conditions
    modes: Modes
    batch_sizes: dict[str, Step]

    def times(self) -> Iterator[NamedTime]:
        for mode in ("fused", "staged", "eager"):
            yield NamedTime(f"{mode} step", getattr(self.modes, mode).step, whole=True)
        for size, found in self.batch_sizes.items():
            yield NamedTime(f"fused step, batch {size}", found.step, whole=True)
        for layer in self.modes.staged.layers:
            phases = {"forward": layer.forward, "backward": layer.backward, "update": layer.update}
            for phase, time in phases.items():
                if time is not None:
                    yield NamedTime(f"layer {layer.layer or '(no layer)'}, {phase}", time)
        for row in self.modes.fused.ops:
            yield NamedTime(f"{row.op}, {_joined(row.scope, row.phase)}", row.time)


@dataclass(frozen=True)
class SystemsStep:
    config: str
    overrides: list[str]
    batch_size: int
    times: dict[str, Time]
    members: int | None = None


@dataclass(frozen=True)
class SystemsOperation:
    op: str
    size: str
    phase: str
    times: dict[str, Time]


@dataclass(frozen=True)
class Against:
    """The result of `bench against`."""

    kind: str
    protocol: Conditions
    steps: list[SystemsStep] = field(default_factory=list)
    operations: list[SystemsOperation] = field(default_factory=list)

    def times(self) -> Iterator[NamedTime]:
        for step in self.steps:
            members = [f"{step.members} members"] if step.members else []
            what = ", ".join([step.config, *step.overrides, *members, f"batch {step.batch_size}"])
            for system, time in step.times.items():
                yield NamedTime(f"{what}: {system}", time, whole=True)
        for row in self.operations:
            for system, time in row.times.items():
                yield NamedTime(f"{_joined(row.op, row.size, row.phase)}: {system}", time)


@dataclass(frozen=True)
class Sized:
    """Times at a size, which is a number `n`, a batch size, or the width or depth of a network."""

    times: dict[str, Time]
    n: int | None = None
    batch: int | None = None
    width: int | None = None
    depth: int | None = None

    @property
    def size(self) -> str:
        sizes = {"n": self.n, "batch": self.batch, "width": self.width, "depth": self.depth}
        return " ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)


@dataclass(frozen=True)
class SizedOperation:
    op: str
    rows: list[Sized]


@dataclass(frozen=True)
class SizedStep:
    of: str
    rows: list[Sized]


@dataclass(frozen=True)
class DevicesStep:
    config: str
    overrides: list[str]
    times: dict[str, Time]
    batches: SizedStep


@dataclass(frozen=True)
class Launch:
    threads: int
    blocks: int
    time: Time


@dataclass(frozen=True)
class Launches:
    kernel: str
    rows: list[Launch]


@dataclass(frozen=True)
class Devices:
    """The result of `bench devices`."""

    kind: str
    protocol: Conditions
    operations: list[SizedOperation] = field(default_factory=list)
    configs: list[DevicesStep] = field(default_factory=list)
    growing: list[SizedStep] = field(default_factory=list)
    launch: Launches | None = None

    def times(self) -> Iterator[NamedTime]:
        for found in self.configs:
            for label, time in found.times.items():
                yield NamedTime(f"{', '.join([found.config, *found.overrides])}: {label}", time, whole=True)
        sized = [(found.op, found.rows) for found in self.operations]
        sized += [(found.of, found.rows) for found in (*(each.batches for each in self.configs), *self.growing)]
        for name, rows in sized:
            for row in rows:
                for label, time in row.times.items():
                    yield NamedTime(f"{name}, {row.size}: {label}", time)
        if self.launch is not None:
            for shape in self.launch.rows:
                yield NamedTime(f"{self.launch.kernel}, {shape.blocks} blocks of {shape.threads} threads", shape.time)


Result: TypeAlias = Ops | ConfigSteps | Against | Devices

KINDS: dict[str, type[Result]] = {"ops": Ops, "config": ConfigSteps, "against": Against, "analysis": Devices}


@dataclass(frozen=True)
class Kind:
    """The part of a result that tells its kind."""

    kind: Literal["ops", "config", "against", "analysis"]


def _joined(*words: str) -> str:
    return " ".join(word for word in words if word)
