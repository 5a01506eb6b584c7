"""The table of systems that are compared, adtrain and its peers, and which of them can run here."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

from adtrain.config.problems import known
from adtrain.core.errors import OptionError

ADTRAIN = "adtrain"
"""The system that all others are compared with."""


Work: TypeAlias = Literal["steps", "operation", "race", "members"]
"""What is compared: training steps, single operations, whole trainings, or steps of many networks together."""


class System(NamedTuple):
    """A package, in one of the forms in which it runs.

    Attributes:
        name: package and form; unique.
        package: what must be installed.
        devices: where it runs.
        works: the work that the form does. The module PACKAGE_system in this package has a function for each:
            `steps(job, form)` takes training steps; `members(job, form)` those of all networks of a `MembersJob`;
            `operation(case, phase, device, form)` runs a single operation; `race(job, form)` makes a function that
            trains such jobs to the end.
        in_place_of_float32: the precision in which it computes a config in float32.
    """

    name: str
    package: str
    devices: Sequence[str]
    works: Sequence[Work]
    in_place_of_float32: str = "float32"

    @property
    def form(self) -> str:
        return self.name.partition("-")[2]

    def obstacle(self, device: str, work: Work) -> str | None:
        """Why it cannot do the work on the device; None if it can."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if work == "race" and work not in self.works:
            return "takes steps and runs operations, but no whole training"
        if find_spec(self.package) is None:
            return f"{self.package} is not installed (pip install {self.package})"
        if work == "operation" and work not in self.works:
            return "runs whole steps only"
        if work == "steps" and work not in self.works:
            return "trains many networks together; give --members N"
        if work == "members" and work not in self.works:
            return "trains one network at a time"
        return None


SYSTEMS = {
    system.name: system
    for system in (
        System(ADTRAIN, "adtrain", ("cpu", "gpu"), ("steps", "operation", "race", "members")),
        System("torch-eager", "torch", ("cpu", "gpu"), ("steps", "operation", "race")),
        System("torch-compile", "torch", ("cpu", "gpu"), ("steps", "race")),
        System("torch-graph", "torch", ("gpu",), ("steps", "operation", "race")),
        System("torch-max", "torch", ("cpu", "gpu"), ("steps", "race")),
        System("torch-max-tf32", "torch", ("gpu",), ("steps", "race"), "tf32"),
        System("torch-vmap", "torch", ("cpu", "gpu"), ("members",)),
        System("torch-vmap-compile", "torch", ("cpu", "gpu"), ("members",)),
        System("jax-jit", "jax", ("cpu", "gpu"), ("steps", "operation")),
        System("jax-scan", "jax", ("cpu", "gpu"), ("steps",)),
        System("jax-vmap", "jax", ("cpu", "gpu"), ("members",)),
        System("numpy", "numpy", ("cpu",), ("steps", "operation")),
    )
}
"""torch-compile: forward pass and loss, and so their gradients, by torch.compile. torch-graph: the whole step as one
CUDA graph of eager kernels. torch-max: forward pass and loss compiled in one piece (fullgraph), for this batch size;
images and filters channels last; clipping compiled too, and the optimizer where PyTorch has no fused one; on a GPU the
whole step is one CUDA graph. torch-max-tf32: the same with TF32, for a config in float32. jax-jit: one call a step.
jax-scan: many steps in one call, a lax.scan over batches. The forms "vmap" train many networks. torch-vmap maps the
gradients of one network; on a GPU the whole step is one CUDA graph. torch-vmap-compile also compiles the gradients.
jax-vmap maps the step, in a lax.scan."""


def precision_of(name: str, given: str) -> str:
    """The precision in which a system computes a config of the given precision."""
    return SYSTEMS[name].in_place_of_float32 if given == "float32" and name in SYSTEMS else given


PEERS = [system for system in SYSTEMS.values() if system.name != ADTRAIN]


class Choice(NamedTuple):
    """The peers that can run, and why others cannot, by name."""

    runnable: Sequence[System]
    skipped: dict[str, str]


def chosen(names: Sequence[str], device: str, work: Work) -> Choice:
    """The peers with these names that can do the work. The name of a package selects its forms for one network, or
    those for many if the work is "members".

    Raises:
        OptionError: no peer has the name, or none of them can run.
    """
    possible = dict.fromkeys([*(peer.package for peer in PEERS), *(peer.name for peer in PEERS)])
    for name in names:
        if name not in possible:
            raise OptionError(f"{name}: no such peer; {known(name, list(possible))}")
    forms = [peer for peer in PEERS if ("members" in peer.works) == (work == "members")]
    selected = [peer for peer in PEERS if peer.name in names or (peer.package in names and peer in forms)]
    skipped = {peer.name: reason for peer in selected if (reason := peer.obstacle(device, work))}
    runnable = [peer for peer in selected if peer.name not in skipped]
    if not runnable:
        by_reason = {reason: [name for name in skipped if skipped[name] == reason] for reason in skipped.values()}
        raise OptionError("; ".join(f"{', '.join(found)}: {reason}" for reason, found in by_reason.items()))
    return Choice(runnable, skipped)


def load(system: System) -> ModuleType:
    """The module of the system's package. It is imported only when used, because it may need an optional package."""
    return import_module(f"adtrain.bench.peers.{system.package}_system")


def made(name: str, work: Work, *given: Any) -> Any:
    """The work in a system, ready to run; see `System.works`. Raises Unsupported where the system lacks something."""
    return getattr(load(SYSTEMS[name]), work)(*given, SYSTEMS[name].form)
