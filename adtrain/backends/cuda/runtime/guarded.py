"""Memory on the GPU between guard zones; see `adtrain.core.poison`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pycuda.driver as cuda

from adtrain.backends.cuda.runtime.errors import translated
from adtrain.core import poison


class Guarded:
    """``size`` bytes of ``memory`` between two zones. `int()` is their address."""

    def __init__(self, memory: Any, size: int) -> None:
        self.memory, self.size = memory, size

    def __int__(self) -> int:
        return int(self.memory) + poison.GUARD

    @translated()
    def intact(self) -> bool:
        """Whether the zones still hold what they were filled with. The device must have finished."""
        zone = np.empty(poison.GUARD, np.uint8)
        for address in (int(self.memory), int(self) + self.size):
            cuda.memcpy_dtoh(zone, address)
            if (zone != poison.BYTE).any():
                return False
        return True
