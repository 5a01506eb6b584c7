"""The memory of each GPU that the GPUs of one host have mapped: kernels/cuda/index/peer_window.cuh."""

from __future__ import annotations

from adtrain.backends.cuda.forms.peer_exchanges_fusion import GATHERED_BYTES

THREADS = 512
"""Threads of a block."""
BLOCKS = 128
"""Maximum blocks of an exchange by peer_exchange.cu."""
CHUNK = 16 << 10
"""Bytes that a block of peer_exchange.cu reads from a peer at a time."""
SLOT_BYTES = 4 << 20
"""Bytes of a slot of vectors: the most that a rank sends to another at once in a launch with updates.

They take about 12 us at 344 GB/s. Longer exchanges gain more by running beside the kernels of the backward pass."""
EMPTY = 0xFF
"""Each byte of a slot of vectors before data arrives."""
MAX_BLOCKS = 1024
"""Maximum blocks of any grid that uses windows."""


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
    return copy_flags_at(ranks) + 2 * 4 * ranks
