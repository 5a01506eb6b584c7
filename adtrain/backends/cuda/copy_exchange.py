"""The steps of an exchange by copy engines: each rank copies what it receives from the memory of its peers.

Flags in the windows order the copies. A rank waits until what a peer sends is complete, and until the peers have copied
what it sends. All flags are 0 between exchanges: who waits for a flag sets it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from adtrain.backends.cuda.peer_window import copy_flags_at

READY, DONE = 0, 1
"""The flags of a peer: what it sends is complete; it has copied what this rank sends."""
FLAG_BYTES = 4


class Copy(NamedTuple):
    """Copy bytes from one address to another."""

    to: int
    source: int
    size: int


class Write(NamedTuple):
    """Write a flag."""

    address: int
    value: int


class Wait(NamedTuple):
    """Wait until a flag is 1."""

    address: int


Step: TypeAlias = "Copy | Write | Wait"


def own_copy(name: str, sent: int, received: int, size: int, rank: int) -> Copy:
    """The copy of what this rank sends to itself. It may run beside the `steps`."""
    return Copy(received + rank * size, sent + _first(name, size, rank), size)


def steps(
    name: str, sent: Sequence[int], received: int, size: int, windows: Sequence[int], rank: int
) -> Iterator[Step]:
    """The steps of this rank, in order.

    Args:
        name: "all_gather" or "all_to_all".
        sent: where this rank sees what each rank sends.
        received: where it receives `size` bytes from each rank.
        windows: where it sees the window of each rank.
    """
    ranks, first = len(windows), _first(name, size, rank)
    peers = [(rank + i) % ranks for i in range(1, ranks)]  # at any time each rank reads the memory of another one

    def flag(owner: int, kind: int, of: int) -> int:
        return windows[owner] + copy_flags_at(ranks) + FLAG_BYTES * (2 * of + kind)

    def meet(kind: int) -> Iterator[Step]:
        yield from (Write(flag(peer, kind, rank), 1) for peer in peers)
        for peer in peers:
            yield from (Wait(flag(rank, kind, peer)), Write(flag(rank, kind, peer), 0))

    yield from meet(READY)
    yield from (Copy(received + peer * size, sent[peer] + first, size) for peer in peers)
    yield from meet(DONE)


def _first(name: str, size: int, rank: int) -> int:
    """The first byte of what each rank sends to this one."""
    return 0 if name == "all_gather" else rank * size
