"""Loaded kernels, and the shapes of their launches."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import pycuda.driver as cuda
from cuda.bindings import driver

from adtrain.backends.cuda.launch_plan import WorkSize
from adtrain.backends.cuda.runtime.errors import checked, translated

WARP = 32
DEFAULT_SHARED = 48 << 10
"""Bytes of dynamic shared memory that a kernel may have without opting in."""


class Shape(NamedTuple):
    """The shape of a launch; `shared` is bytes of dynamic shared memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int


class Loaded:
    """A cubin loaded twice: by PyCUDA, for eager launches, and by the driver API, for occupancy and graph launches.

    PyCUDA does not expose the handles of its functions.
    """

    @translated()
    def __init__(self, cubin: bytes) -> None:
        self.module = cuda.module_from_buffer(cubin)
        self.queried = checked(driver.cuModuleLoadData(cubin))


class LoadedKernel:
    """A kernel of a loaded cubin, with its launch shapes on a GPU.

    Attributes:
        function, queried: the function of PyCUDA, and of the driver API.
        max_threads: threads of a block, at most.
        shared: bytes of dynamic shared memory that a block may have.
        shapes: the launch shapes found so far.
        multiprocessors, multiprocessor_shared: of the GPU, and bytes of shared memory of each.
    """

    @translated()
    def __init__(self, loaded: Loaded, name: str, multiprocessors: int, multiprocessor_shared: int) -> None:
        self.name = name
        self.multiprocessors, self.multiprocessor_shared = multiprocessors, multiprocessor_shared
        self.function = loaded.module.get_function(name)
        self.queried = checked(driver.cuModuleGetFunction(loaded.queried, name.encode()))
        self.max_threads: int = self.function.get_attribute(cuda.function_attribute.MAX_THREADS_PER_BLOCK)
        self.shared = DEFAULT_SHARED
        self.shapes: dict[WorkSize, Shape] = {}

    def shape(self, size: WorkSize) -> Shape:
        """The launch shape for an amount of work on this device."""
        found = self.shapes.get(size)
        if found is None:
            found = self.shapes[size] = self._strided(size) if size.elements else self._blocks(size)
        return found

    def at_once(self, shape: Shape) -> int:
        """Blocks that are resident on one multiprocessor at once."""
        threads = prod(shape.block)
        return int(checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.queried, threads, shape.shared)))

    def _strided(self, size: WorkSize) -> Shape:
        """The shape for a grid-stride loop: blocks of the best occupancy, at most as many as are resident at once.

        Blocks are smaller where there are too few elements for all multiprocessors.
        """
        processors = self.multiprocessors
        threads = min(self._best_threads(0), _warps(-(-size.elements // processors)))
        at_once = self.at_once(Shape((1, 1, 1), (threads, 1, 1), 0))
        blocks = min(-(-size.elements // threads), at_once * processors)
        return Shape((blocks, 1, 1), (threads, 1, 1), 0)

    def _blocks(self, size: WorkSize) -> Shape:
        self._allow(size.shared)
        wanted = self._best_threads(size.shared) if size.threads is None else _warps(size.threads)
        return Shape(size.blocks, (min(wanted, self.max_threads), 1, 1), size.shared)

    def spread(self, shape: Shape) -> Shape | None:
        """The shape for a launch that may start before the previous kernel has ended; None if it should not.

        Blocks that start early all go to the multiprocessors that are free first. If more fit there than an even share,
        others stay idle. With an even share of one or two blocks, each block gets so much dynamic shared memory that no
        more fit; with a larger one the launch does not start early.
        """
        processors, blocks, at_once = self.multiprocessors, prod(shape.grid), self.at_once(shape)
        share = -(-blocks // processors)
        if blocks == 1 or share >= at_once:
            return shape
        if share > 2:
            return None
        shared = self.multiprocessor_shared // (share + 1)
        self._allow(shared)
        return shape._replace(shared=shared)

    @translated()
    def _allow(self, shared: int) -> None:
        """Let a block have ``shared`` bytes of dynamic shared memory."""
        if shared <= self.shared:
            return
        self.function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(self.queried, attribute, shared))
        self.shared = shared

    def _best_threads(self, shared: int) -> int:
        _, threads = checked(driver.cuOccupancyMaxPotentialBlockSize(self.queried, None, shared, 0))
        return int(threads)


def _warps(threads: int) -> int:
    return max(-(-threads // WARP), 1) * WARP
