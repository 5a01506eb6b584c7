"""The steps of an exchange by copy engines: each rank copies what it receives from the memory of its peers.

Flags in the windows order the copies. Before its copies a rank waits until what the peers send is complete. After them
it waits until the peers have copied what it sends. A rank that has waited for a flag sets it back to 0, so all flags
are 0 between exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from adtrain.backends.cuda.peer_window import copy_flags_at

READY, DONE = 0, 1
"""What a flag of a peer says: what the peer sends is complete; the peer has copied what this rank sends."""
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
    """The copy of what this rank sends to itself. It may run at the same time as the `steps`."""
    return Copy(received + rank * size, sent + _offset(name, size, rank), size)


def steps(
    name: str, sent: Sequence[int], received: int, size: int, windows: Sequence[int], rank: int
) -> Iterator[Step]:
    """The steps of this rank, in order.

    Args:
        name: "all_gather" or "all_to_all".
        sent: for each rank, the address where this rank has mapped what that rank sends.
        received: the address where this rank receives `size` bytes from each rank.
        windows: for each rank, the address where this rank has mapped its window.
    """
    ranks, offset = len(windows), _offset(name, size, rank)
    peers = [(rank + i) % ranks for i in range(1, ranks)]  # so that at a time each rank reads from a different peer

    def flag(owner: int, kind: int, writer: int) -> int:
        """The address of the flag in the window of `owner` that `writer` sets to 1."""
        return windows[owner] + copy_flags_at(ranks) + FLAG_BYTES * (2 * writer + kind)

    def barrier(kind: int) -> Iterator[Step]:
        """Tell all peers, then wait for all of them."""
        yield from (Write(flag(peer, kind, rank), 1) for peer in peers)
        for peer in peers:
            yield from (Wait(flag(rank, kind, peer)), Write(flag(rank, kind, peer), 0))

    yield from barrier(READY)
    yield from (Copy(received + peer * size, sent[peer] + offset, size) for peer in peers)
    yield from barrier(DONE)


def _offset(name: str, size: int, rank: int) -> int:
    """The byte where the item for this rank starts in what a rank sends."""
    return 0 if name == "all_gather" else rank * size
