"""CKernel and CudaKernel: descriptions of compiled kernels, which rules in `lowering` return and backends run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adtrain.core.target import Target


def first_dtype(*args: Any, **params: Any) -> tuple[np.dtype, ...]:
    return (args[0].dtype,)


def no_numbers(*args: Any, **params: Any) -> tuple[int, ...]:
    return ()


def no_bytes(*args: Any, **params: Any) -> int:
    return 0


def no_definitions(*args: Any, **params: Any) -> Mapping[str, int]:
    return {}


def always(*args: Any, **params: Any) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class CKernel:
    """A C function: ``name_T([team,] inputs..., outputs..., numbers...[, scratch][, prepared])``.

    A field that depends on the equation is a function of the types of its arguments and of its parameters; see
    `value_for`.

    Args:
        file: the source, relative to `kernels/cpu`, or an absolute path. It is compiled once for each combination of
            element types, with the headers of `kernels/cpu` to include.
        name: the function, without the suffix made of the element types: ``softmax`` is called ``softmax_float32``.
        numbers: integers (int64_t) and floats (double) passed by value: lengths, strides, options.
        dtypes: the element types that the source is compiled for, as T and U. None: that of the first argument.
        items: for a function that one thread runs. An item is an index of axis 0 of the output. For each argument: True
            where item n of the output needs item n of the argument only, False where it needs the whole argument. None
            where the output has no such items: the function then gets whole arguments. ``numbers`` are computed for
            arguments of one item.
        sums: the outputs are sums over the items; the function adds the contribution of one item to them.
        team: all threads call the function at once with the same arguments, and divide the work among themselves. It
            may return in one thread while others still write.
        scratch: bytes of memory per thread, for the function's own use.
        prepared: for a function on items: bytes per thread that ``name_prepare(shared inputs..., numbers..., char
            *prepared)`` fills once, before the items, from the arguments that are not by item (packed weights, say).
            The function gets a pointer to them as its last argument.
        each: the function is called once for each argument, with that argument and the output. ``numbers`` gets the
            argument's position first. For primitives with any number of arguments.
        checked: the function returns int: 0, or 1 where an index is out of range. The caller then raises ShapeError,
            which names the operation and its scope.
    """

    file: str
    name: str
    numbers: Sequence[int | float] | Callable[..., Sequence[int | float]] = ()
    dtypes: tuple[np.dtype, ...] | Callable[..., tuple[np.dtype, ...]] | None = None
    items: tuple[bool, ...] | Callable[..., tuple[bool, ...] | None] | None = None
    sums: bool = False
    team: bool = False
    scratch: int | Callable[..., int] = 0
    prepared: int | Callable[..., int] = 0
    each: bool = False
    checked: bool = False

    def element_types(self, *types: Any, **params: Any) -> tuple[np.dtype, ...]:
        """T, or T and U."""
        found: tuple[np.dtype, ...] | None = value_for(self.dtypes, *types, **params)
        return (types[0].dtype,) if found is None else found


def value_for(field: Any, *types: Any, **params: Any) -> Any:
    """The value of a CKernel's field for arguments of these types and parameters."""
    return field(*types, **params) if callable(field) else field


@dataclass(frozen=True)
class CudaLaunch:
    """One launch of a kernel: ``name(operands..., numbers...[, char *scratch][, int *bad])``.

    Args:
        file: the source, relative to `kernels/cuda`, or an absolute path. It is compiled once for each combination of
            ``dtypes`` and ``definitions``.
        name: the ``extern "C" __global__`` function.
        numbers: integers (int64_t) and floats (double) passed by value.
        dtypes: the element types that the source is compiled for, as T and U.
        elements: how many elements there are to compute. The kernel is a grid-stride loop, and the grid size follows
            from the occupancy. Give either ``elements`` or ``blocks``; where it is 0 nothing is launched.
        blocks: the grid, one number or up to three (x, y, z).
        threads: threads of a block, with ``blocks``. A kernel with __launch_bounds__ gets exactly this; another one may
            get fewer, a multiple of 32. None: what gives the best occupancy.
        shared: bytes of dynamic shared memory.
        definitions: macros that the source is compiled with, such as tile sizes.
        operands: which of the equation's inputs and outputs, numbered in this order, the pointers are. None: all.
        checked: the kernel stores 1 in ``*bad`` where an index is out of range.
    """

    file: str
    name: str
    numbers: tuple[int | float, ...] = ()
    dtypes: tuple[np.dtype, ...] = ()
    elements: int | None = None
    blocks: int | tuple[int, ...] | None = None
    threads: int | None = None
    shared: int = 0
    definitions: Mapping[str, int] = field(default_factory=dict)
    operands: tuple[int, ...] | None = None
    checked: bool = False

    def label(self) -> str:
        """File, definitions and launch size: "gemm/gemm.cu TILE_M=64 numbers=1,128,512,784,4 threads=256"."""
        work = {name: getattr(self, name) for name in ("numbers", "elements", "blocks", "threads", "shared")}
        words = [f"{name}={value}" for name, value in sorted(self.definitions.items())]
        for name, value in work.items():
            if value:
                words.append(f"{name}={','.join(map(str, value)) if isinstance(value, Sequence) else value}")
        return " ".join([self.file, *words])


@dataclass(frozen=True)
class CudaKernel:
    """One way to compute an equation on a GPU: its launches, in order.

    A rule returns such candidates; see `registry.register`.

    Args:
        scratch: bytes of device memory that the launches share, not cleared; each gets a pointer to it. None: they take
            no such pointer.
    """

    launches: tuple[CudaLaunch, ...]
    scratch: int | None = None

    @property
    def label(self) -> str:
        """What tells this candidate from others for the same equation: kernel names, then each launch."""
        names = "+".join(dict.fromkeys(launch.name for launch in self.launches))
        return " then ".join([f"{names} {self.launches[0].label()}", *(x.label() for x in self.launches[1:])])


@dataclass(frozen=True, eq=False)
class LegacyKernel:
    """A kernel in `kernels/cuda`: ``name(inputs..., outputs..., numbers...[, char *scratch][, int *bad])``.

    All but ``file`` and ``name`` are functions of the arguments (anything with a shape and a dtype) and the parameters.
    A primitive names one in ``implementations["cuda"]``, or candidates: a tuple, or a function of the arguments' types
    and the parameters to a sequence (the same kernel with other tunables, say). Of those that `apply` the first is
    taken where nothing has been measured. The launch follows from either ``elements`` or ``blocks``; nothing is
    launched where that is 0.

    Args:
        file: the source, compiled once for each combination of element types and definitions it is used with.
        name: the ``extern "C" __global__`` function.
        numbers: integers (int64_t) and floats (double) that are passed by value.
        dtypes: the element types that the source is compiled for, as T and U.
        elements: how many threads have work of their own. The kernel strides over it by the whole grid, whose size
            comes from its occupancy of the device.
        blocks: how many blocks have work of their own, each launched once: a number or up to three (x, y, z).
        threads: with ``blocks``: how many threads a block has work for. A kernel whose block is fixed by its tiles says
            so with __launch_bounds__ and gets exactly this; another one may get fewer, always a multiple of a warp. By
            default as many as give the best occupancy.
        shared: bytes of dynamic shared memory.
        definitions: macros that the source is compiled with: the tunables, such as tile sizes.
        scratch: bytes of device memory for the kernel's own use, not cleared; shared with the kernels after it.
        applies: whether the kernel is right for these arguments.
        then: the kernel that runs next, with the same inputs, outputs and scratch: the second pass of a reduction.
        each: the kernel is launched once for each argument, with it and the output; all functions get the argument's
            position first. For primitives with any number of arguments.
        checked: the kernel stores 1 in ``*bad`` where an index is out of range, and leaves memory safe.
    """

    file: str
    name: str
    numbers: Callable[..., Sequence[int | float]] = no_numbers
    dtypes: Callable[..., tuple[np.dtype, ...]] = first_dtype
    elements: Callable[..., int] | None = None
    blocks: Callable[..., int | tuple[int, ...]] | None = None
    threads: Callable[..., int] | None = None
    shared: Callable[..., int] = no_bytes
    definitions: Callable[..., Mapping[str, int]] = no_definitions
    scratch: Callable[..., int] = no_bytes
    applies: Callable[..., bool] = always
    then: LegacyKernel | None = None
    each: bool = False
    checked: bool = False

    def launches(self, args: Sequence[Any], params: Mapping[str, Any], operands: tuple[int, ...] | None) -> Any:
        step: LegacyKernel | None = self
        while step is not None:
            yield CudaLaunch(
                step.file,
                step.name,
                tuple(step.numbers(*args, **params)),
                tuple(step.dtypes(*args, **params)),
                elements=None if step.elements is None else step.elements(*args, **params),
                blocks=None if step.blocks is None else step.blocks(*args, **params),
                threads=None if step.threads is None else step.threads(*args, **params),
                shared=step.shared(*args, **params),
                definitions=step.definitions(*args, **params),
                operands=operands,
                checked=step.checked,
            )
            step = step.then

    def spec(self, *args: Any, **params: Any) -> CudaKernel:
        scratch, step = None, self
        if self.scratch is not no_bytes:
            scratch, step = 0, self
            while step is not None:
                scratch = max(scratch, step.scratch(*args, **params))
                step = step.then
        if not self.each:
            return CudaKernel(tuple(self.launches(args, params, None)), scratch)
        out = len(args)
        return CudaKernel(tuple(x for i in range(out) for x in self.launches([i, *args], params, (i, out))), scratch)


def legacy(named: Any) -> Callable[..., Sequence[CudaKernel]]:
    def rule(target: Target, *args: Any, **params: Any) -> Sequence[CudaKernel]:
        from adtrain.core.chip import CHIP

        before = CHIP.multiprocessors, CHIP.capability
        CHIP.multiprocessors, CHIP.capability = target.multiprocessors, target.capability
        try:
            found = named if isinstance(named, (tuple, LegacyKernel)) else named(*args, **params)
            kernels = (found,) if isinstance(found, LegacyKernel) else found
            return [k.spec(*args, **params) for k in kernels if k.applies(*([0] if k.each else []), *args, **params)]
        finally:
            CHIP.multiprocessors, CHIP.capability = before

    return rule
