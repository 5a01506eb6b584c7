"""Exchanges between GPUs by NCCL.

NVIDIA's binding nccl4py is used through its raw layer, which takes addresses and stream handles as integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.backends.cuda.nccl_library import library
from adtrain.core import communicator
from adtrain.core.errors import DeviceError

UINT8 = 1
"""ncclUint8 of `ncclDataType_t`."""


class Nccl:
    """The NCCL communicator of this rank. All ranks make it at the same time. A `Transport`.

    Raises:
        DeviceError: nccl4py or NCCL is missing, or the ranks cannot connect.
    """

    name: str = "NCCL"
    max_bytes: int | None = None

    def __init__(self) -> None:
        self.library = library()
        ranks = communicator.current()
        identifier = self.library.get_unique_id() if ranks.rank == 0 else self.library.UniqueId()
        everywhere = communicator.all_gathered(np.frombuffer(bytes(identifier), np.uint8))
        identifier = self.library.UniqueId.from_buffer(everywhere[0].tobytes())
        try:
            self.comm = self.library.comm_init_rank(ranks.size, identifier, ranks.rank)
        except Exception as error:  # the binding's own class
            raise DeviceError(f"NCCL cannot connect {ranks.size} ranks: {error}") from None

    def enqueue(self, name: str, sent: int, received: int, size: int, stream: Any) -> None:
        method = self.library.all_gather if name == "all_gather" else self.library.allto_all
        method(sent, received, size, UINT8, self.comm, stream.handle)
