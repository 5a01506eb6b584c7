"""The launches of one equation, kernels or library calls, on a device."""

from __future__ import annotations

from adtrain.backends.cuda.lower import Candidate, Lowering
from adtrain.backends.cuda.runtime.device import Device
from adtrain.backends.cuda.runtime.launch import Launch
from adtrain.backends.cuda.vendor import LibraryCall
from adtrain.core.backend import KernelRun
from adtrain.core.program import Equation


class LibraryLaunch:
    """A library call on a device's stream; see `Launch`.

    Raises:
        DeviceError: the library does not offer the call, or cannot be loaded.
    """

    checked = empty = False

    def __init__(self, device: Device, call: LibraryCall) -> None:
        call.prepare()
        self.call, self.device = call, device
        self.ran = KernelRun(call.label, {})

    def __call__(self, addresses: list[int], scratch: int, flag: int) -> None:
        """Enqueue the call's work on the stream, which may be captured."""
        self.call.enqueue(addresses, scratch, self.device.stream.handle)

    def record(self, addresses: list[int], scratch: int, flag: int, overlap: bool = True, runs: int = 1) -> None:
        self(addresses, scratch, flag)


class Runnable:
    """An equation's launches on a device.

    Args:
        kernel: the candidate, by default the chosen one.

    Raises:
        DeviceError: there is no kernel for it.
    """

    def __init__(self, device: Device, lowering: Lowering, equation: Equation, kernel: Candidate | None = None) -> None:
        self.launches = [
            LibraryLaunch(device, plan) if isinstance(plan, LibraryCall) else Launch(device, plan)
            for plan in lowering.launches(equation, kernel)
        ]
        self.scratch = lowering.scratch(equation, kernel)
        self.checked = any(launch.checked for launch in self.launches)
        self.kernels = [launch.ran for launch in self.launches if not launch.empty]

    def __call__(self, addresses: list[int], memory: int, flag: int) -> None:
        for launch in self.launches:
            launch(addresses, memory, flag)

    def record(self, addresses: list[int], memory: int, flag: int, overlap: bool = True, runs: int = 1) -> None:
        """Launch on the stream while it is captured. Without `overlap` the first launch waits for all work before."""
        for launch in self.launches:
            launch.record(addresses, memory, flag, overlap, runs)
            overlap = True
