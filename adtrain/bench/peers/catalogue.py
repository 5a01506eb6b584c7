"""The peers by name: in which forms each of them works, and on which devices."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from adtrain.config.problems import known
from adtrain.core.errors import OptionError

OURS = "adtrain"
"""The side that all others are compared with."""


class Peer(NamedTuple):
    """A form in which a package works.

    Attributes:
        name: the package's name, and the form's where there are several.
        devices: where it runs.
        operations: whether it is a way to run an operation alone, too.
    """

    name: str
    package: str
    devices: Sequence[str]
    operations: bool = True


PEERS = (
    Peer("torch-eager", "torch", ("cpu", "gpu")),
    Peer("torch-compile", "torch", ("cpu", "gpu"), operations=False),
    Peer("torch-graph", "torch", ("gpu",)),
    Peer("jax-jit", "jax", ("cpu", "gpu")),
    Peer("jax-scan", "jax", ("cpu", "gpu"), operations=False),
    Peer("numpy", "numpy", ("cpu",)),
)
"""torch-compile: forward and loss, and so their gradients, by torch.compile. torch-graph: the whole step as one CUDA
graph. jax-jit: a call a step; jax-scan: many steps in one call, a lax.scan over batches."""


class Choice(NamedTuple):
    """The names of peers that can take part, and what keeps others from it, by name."""

    taking_part: Sequence[str]
    skipped: dict[str, str]


def chosen(names: Sequence[str], device: str, operations: bool) -> Choice:
    """The peers that `names`, of packages or of single forms, stand for.

    Raises:
        OptionError: there is no peer of a name.
    """
    possible = dict.fromkeys([*(peer.package for peer in PEERS), *(peer.name for peer in PEERS)])
    for name in names:
        if name not in possible:
            raise OptionError(f"--against {name}: no such peer; {known(name, list(possible))}")
    taking_part, skipped = [], {}
    for peer in PEERS:
        if peer.name not in names and peer.package not in names:
            continue
        if reason := _obstacle(peer, device, operations):
            skipped[peer.name] = reason
        else:
            taking_part.append(peer.name)
    return Choice(taking_part, skipped)


def _obstacle(peer: Peer, device: str, operations: bool) -> str | None:
    if find_spec(peer.package) is None:
        return f"{peer.package} is not installed (pip install {peer.package})"
    if device not in peer.devices:
        return f"runs on {' and '.join(peer.devices)} only"
    if operations and not peer.operations:
        return "is for whole steps"
    return None
