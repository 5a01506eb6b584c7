"""The memory of each GPU that the GPUs of one host have mapped, and the steps of exchanges by copy engines through it.

A window has slots and flags for kernels (kernels/cuda/index/peer_window.cuh), and flags for copy engines. Nothing here
needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

THREADS = 512
"""Threads of a block."""
BLOCKS = 128
"""Maximum blocks of an exchange by peer_exchange.cu."""
CHUNK = 16 << 10
"""Bytes that a block of peer_exchange.cu reads from a peer at a time."""
SLOT_BYTES = 4 << 20
"""Bytes of a slot of vectors: the most that a rank sends to another at once in a launch with updates.

They take about 12 us at 344 GB/s. Longer exchanges gain more by running beside the kernels of the backward pass."""
GATHERED_BYTES = 64 << 10
"""The most bytes that a rank sends in all short all-gathers of a launch with updates."""
EMPTY = 0xFF
"""Each byte of a slot of vectors before data arrives."""
MAX_BLOCKS = 1024
"""Maximum blocks of any grid that uses windows."""
READY, DONE = 0, 1
"""What a copy engine's flag of a peer says: what the peer sends is complete; the peer has copied what this rank
sends."""
FLAG_BYTES = 4


def macros(ranks: int) -> dict[str, int]:
    """The macros of the kernels, by name."""
    slots_at = 2 * BLOCKS * ranks * CHUNK
    items_at = slots_at + 4 * ranks * SLOT_BYTES
    flags_at = items_at + 2 * ranks * GATHERED_BYTES
    return {
        "RANKS": ranks,
        "BLOCKS": BLOCKS,
        "CHUNK": CHUNK,
        "SLOTS_AT": slots_at,
        "SLOT": SLOT_BYTES,
        "ITEM_SLOTS_AT": items_at,
        "ITEM_SLOT": GATHERED_BYTES,
        "FLAGS_AT": flags_at,
        "LAUNCHES_AT": flags_at + 4 * ranks * MAX_BLOCKS,
        "MAX_BLOCKS": MAX_BLOCKS,
    }


def slots_of_vectors(ranks: int) -> tuple[int, int]:
    """The bytes of a window where the slots of vectors start and end."""
    found = macros(ranks)
    return found["SLOTS_AT"], found["ITEM_SLOTS_AT"]


def copy_flags_at(ranks: int) -> int:
    """The byte of a window where the flags of copy engines start: two for each rank."""
    return macros(ranks)["LAUNCHES_AT"] + 4


def window_bytes(ranks: int) -> int:
    """The size of a window."""
    return copy_flags_at(ranks) + 2 * FLAG_BYTES * ranks


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
    """The steps of this rank, in order: it copies what it receives from the memory of its peers.

    Flags in the windows order the copies. Before its copies a rank waits until what the peers send is complete. After
    them it waits until the peers have copied what it sends. A rank that has waited for a flag sets it back to 0, so all
    flags are 0 between exchanges.

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
