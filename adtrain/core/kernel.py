"""Kernels as values: the functions to call, the layout of their memory, and the GPU that they are chosen for.

The registry says which kernels compute a primitive. Modules of `adtrain.lowering` register adtrain's kernels. Users
register their own in the same way, with the names that `adtrain.extend` exports. Backends run them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain.core.static_key import params_key
from adtrain.core.types import BITS

WARP = 32
"""Threads of a warp."""
TENSOR_CORES = (8, 0)
"""The first compute capability with asynchronous copies, and with tensor cores for tf32, bfloat16 and float64."""
HOPPER = (9, 0)
"""The only compute capability with matrix products of warpgroups, and the first one with clusters."""


class Target(NamedTuple):
    """The properties of a GPU that kernel rules and passes depend on.

    Args:
        capability: compute capability, major and minor.
        multiprocessors: number of streaming multiprocessors.
        shared: maximum bytes of shared memory of a block (the opt-in limit).
        by_member: whether kernels are chosen for a Program by member. Some get arrays with an axis of members. The
            choice must not depend on their number, so that a member has the same bits among any others.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    by_member: bool = False


@dataclass(frozen=True)
class Length:
    """A length, not negative: its value for Python, and its C text for a kernel that other lengths also run."""

    value: int
    text: str

    def __add__(self, other: int | Length) -> Length:
        return Length(self.value + _length(other).value, f"({self.text} + {_length(other).text})")

    def __mul__(self, other: int | Length) -> Length:
        return Length(self.value * _length(other).value, f"({self.text} * {_length(other).text})")

    def __floordiv__(self, other: int) -> Length:
        return Length(self.value // other, f"({self.text} / {other})")

    def rounded_up(self, multiple: int) -> Length:
        return (self + (multiple - 1)) // multiple * multiple


Arrays: TypeAlias = Mapping[str, tuple[int, "int | Length"]]
"""For each array, by its name, the bytes of an element and the number of elements."""


def _length(x: int | Length) -> Length:
    return x if isinstance(x, Length) else Length(x, str(x))


def lengths(**values: int) -> list[Length]:
    """Lengths that are arguments of a layout's macros, by their names."""
    return [Length(value, f"({name})") for name, value in values.items()]


class MemoryLayout(int):
    """The bytes of a kernel's shared memory or scratch, with macros that point to its arrays.

    Python and CUDA agree on the order and the lengths of the arrays, because the kernel takes pointers from the macros.
    """

    macros = ""


def memory_layout(name: str, arrays: Arrays, *arguments: Length, alignment: int = 0) -> MemoryLayout:
    """The layout in which arrays lie one after another.

    For a layout SCRATCH with an array SUMS and an argument `rows`, ``SCRATCH_SUMS(float, scratch, rows)`` points to the
    array. The kernel does not compile if a float has another size than an element. No macro has the number of all
    bytes: it would make another source of each length, also where the kernel is the same.

    Args:
        arguments: the `lengths` that the kernel gives to the macros. All other lengths are constants.
        alignment: the macros round the pointer to the memory up to a multiple of it. The layout is longer by as many
            bytes.
    """
    layout = MemoryLayout(alignment + sum(size * _length(count).value for size, count in arrays.values()))
    parameters = ", ".join(["E", "memory", *(x.text.strip("()") for x in arguments)])
    at = f"array_aligned<{alignment}>(memory)" if alignment else "memory"
    for array, (size, count) in arrays.items():
        layout.macros += f"#define {name}_{array}({parameters}) array_at<E, {size}>({at})\n"
        at = f"array_end<{size}>({at}, {_length(count).text})"
    return layout


MAX_GRID = (2**31 - 1, 65_535, 65_535)
"""Maximum of thread blocks of a CUDA grid in x, y and z."""


def within_grid(blocks: Sequence[int]) -> bool:
    """Whether a grid with these numbers of blocks in x, y and z can be launched."""
    return all(count <= most for count, most in zip(blocks, MAX_GRID, strict=False))


@dataclass(frozen=True, eq=False)
class CKernel:
    """A C function: ``name_T([team,] inputs..., outputs..., numbers...[, scratch][, prepared][, collected])``.

    A field that depends on the equation is a function of the types of its arguments and of its parameters; see
    `value_for`.

    Args:
        file: the source, relative to `kernels/cpu`, or an absolute path. It is compiled once for each combination of
            element types, with the headers of `kernels/cpu` to include.
        name: the function, without the suffix made of the element types: ``softmax`` is called ``softmax_float32``.
            A function of the types and parameters where it depends on the optional arguments.
        numbers: integers (int64_t) and floats (double) passed by value: lengths, strides, options.
        dtypes: the element types that the source is compiled for, as T and U. None: that of the first argument.
        suits: whether the function computes the equation.
        items: for a function that one thread runs: it computes one item, an index of axis 0, where the primitive's
            ``axes`` say that it works item by item. Otherwise the function gets whole arguments. ``numbers`` are
            computed for arguments of one item, or of several with ``several_items``.
        several_items: the function also computes several neighbouring items at once.
        sums: the outputs are sums over the items of arguments, as the primitive's ``axes`` say; the function adds the
            contribution of one item to them.
        team: all threads call the function at once with the same arguments, and divide the work among themselves. It
            may return in one thread while others still write.
        scratch: bytes of memory per thread, for the function's own use.
        prepared: for a function on items: bytes per thread that ``name_prepare(shared inputs..., numbers..., char
            *prepared)`` fills once, before the items, from the arguments that are not by item (packed weights, say).
            The function gets a pointer to them after scratch.
        collected: for a function with ``sums``: bytes per thread to which it adds an item's contribution, in a form of
            its own, in place of the outputs. They are zero before the first item. After the last one
            ``name_finish(outputs..., numbers..., char *collected)`` adds them to the outputs.
        each: the function is called once for each argument, with that argument and the output. ``numbers`` gets the
            argument's position first. For primitives with any number of arguments.
        checked: the function returns int: 0, or 1 where an index is out of range. The caller then raises ShapeError,
            which names the operation and its scope.
        in_place: numbers of an output and of an argument that may have the same memory, if their types are equal.
        definitions: macros that the file is compiled with, such as lengths from which sizes of memory follow. All
            functions of a file have the same.
    """

    file: str
    name: str | Callable[..., str]
    numbers: Sequence[int | float] | Callable[..., Sequence[int | float]] = ()
    dtypes: tuple[np.dtype, ...] | Callable[..., tuple[np.dtype, ...]] | None = None
    suits: bool | Callable[..., bool] = True
    items: bool | Callable[..., bool] = False
    several_items: bool = False
    sums: bool = False
    team: bool = False
    scratch: int | Callable[..., int] = 0
    prepared: int | Callable[..., int] = 0
    collected: int | Callable[..., int] = 0
    each: bool = False
    checked: bool = False
    in_place: tuple[tuple[int, int], ...] = ()
    definitions: Mapping[str, int] = field(default_factory=dict)

    def element_types(self, *types: Any, **params: Any) -> tuple[np.dtype, ...]:
        """T, or T and U."""
        found: tuple[np.dtype, ...] | None = value_for(self.dtypes, *types, **params)
        return (types[0].dtype,) if found is None else found


def value_for(field: Any, *types: Any, **params: Any) -> Any:
    """The value of a CKernel's field for arguments of these types and parameters."""
    return field(*types, **params) if callable(field) else field


@dataclass(frozen=True)
class TensorMap:
    """A tensor map of an operand (PTX ISA, "Tensors"), encoded when its address is known.

    A copy by TMA loads a box. Elements outside the array are 0. The innermost axis is first.

    Args:
        operand: the number of the operand among the equation's inputs.
        lengths: of the array, in elements: three axes, or those of images (C, W, H, N).
        box: lengths of the box. For im2col they are channels, and positions of the window.
        im2col: how the window moves over images; None: the box has neighbouring elements of all axes.
        dtype: BITS for bfloat16, or float32, which copies round to tf32.
    """

    operand: int
    lengths: tuple[int, ...]
    box: tuple[int, ...]
    im2col: Im2col | None = None
    dtype: np.dtype = BITS


class Im2col(NamedTuple):
    """The positions of a window's corner in an image, as pairs (column, row) (PTX ISA, "Bounding Box").

    Attributes:
        lower: the first position.
        upper: the last position, minus the image's last pixel.
        stride: the distance between neighbouring positions.
    """

    lower: tuple[int, int]
    upper: tuple[int, int]
    stride: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class CudaLaunch:
    """One launch of a kernel: ``name([maps, ]operands..., numbers...[, char *scratch][, int *bad])``.

    Args:
        file: the source, relative to `kernels/cuda`, or an absolute path. It is compiled once for each combination of
            ``dtypes`` and ``definitions``.
        name: the ``extern "C" __global__`` function.
        numbers: integers (int64_t) and floats (double) passed by value.
        dtypes: the element types that the source is compiled for, as T and U.
        elements: number of elements to compute. The kernel is a grid-stride loop, and the grid size follows from the
            occupancy. Give either ``elements`` or ``blocks``; if it is 0 nothing is launched.
        blocks: the grid, one number or up to three (x, y, z).
        threads: threads of a block, with ``blocks``. A kernel with __launch_bounds__ gets exactly this; another one may
            get fewer, a multiple of 32. None: the number with the best occupancy.
        shared: bytes of dynamic shared memory. A `MemoryLayout` has macros for its arrays.
        definitions: macros that the source is compiled with, such as tile sizes.
        layouts: further layouts whose macros the file needs: those of all of its kernels.
        operands: the equation's inputs and outputs that the kernel gets as pointers, numbered in this order. None: all
            but those with a tensor map.
        maps: the tensor maps that the kernel gets, one after another, as its first argument.
        checked: the kernel stores 1 in ``*bad`` where an index is out of range.
        cooperative: blocks wait for each other. The driver refuses the launch if not all of them can run at once.
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
    layouts: tuple[MemoryLayout, ...] = ()
    operands: tuple[int, ...] | None = None
    maps: tuple[TensorMap, ...] = ()
    checked: bool = False
    cooperative: bool = False

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

    A rule returns several as candidates; see `CudaRule`.

    Args:
        launches: run one after another.
        scratch: bytes of device memory that the launches share. It is not cleared. Each launch gets a pointer to it.
            None: there is no such pointer.
        cycles: estimated clock cycles on the target, for passes that compare kernels. None: no estimate.
    """

    launches: tuple[CudaLaunch, ...]
    scratch: int | None = None
    cycles: float | None = field(default=None, compare=False)

    @property
    def launchable(self) -> bool:
        """Whether the grids of all launches are within the limits."""
        grids = ((x.blocks,) if isinstance(x.blocks, int) else x.blocks or () for x in self.launches)
        return all(map(within_grid, grids))

    @property
    def label(self) -> str:
        """The kernel names, then each launch: another text for each candidate for an equation."""
        names = "+".join(dict.fromkeys(launch.name for launch in self.launches))
        return " then ".join([f"{names} {self.launches[0].label()}", *(x.label() for x in self.launches[1:])])


CudaRule: TypeAlias = Callable[..., Sequence[CudaKernel]]
"""``rule(target, *types, **params)`` returns candidates for a GPU, argument types and parameters, the preferred one
first. It returns none where no kernel fits."""

_C_KERNELS: dict[str, tuple[CKernel, ...]] = {}
_CUDA_RULES: dict[str, CudaRule] = {}
_CANDIDATES: dict[Hashable, tuple[CudaKernel, ...]] = {}
"""What rules have returned, by rule and arguments: passes ask for the same kernels many times, as for equal layers."""
MAX_CANDIDATES = 4096
"""Entries of `_CANDIDATES` at which it is emptied."""


def register(primitive: str, backend: str, kernels: CKernel | tuple[CKernel, ...] | CudaRule) -> None:
    """Register the kernels that compute ``primitive`` on ``backend``.

    Args:
        primitive: its name, or the form of fused equations.
        backend: "cpu" or "cuda".
        kernels: for "cpu" a C kernel, or several: one that works on items and one for all threads, say. For "cuda" a
            rule that returns candidates.

    Raises:
        ValueError: there is no such backend, or the primitive has kernels there already.
    """
    tables: dict[str, dict[str, Any]] = {"cpu": _C_KERNELS, "cuda": _CUDA_RULES}
    if backend not in tables:
        raise ValueError(f"register: found backend {backend!r}, expected 'cpu' or 'cuda'")
    if primitive in tables[backend]:
        raise ValueError(f"register: {primitive!r} already has kernels for {backend!r}")
    tables[backend][primitive] = (kernels,) if isinstance(kernels, CKernel) else kernels


def has_kernels(primitive: str, backend: str) -> bool:
    """Whether kernels of ``primitive`` are registered for "cpu" or "cuda"."""
    return primitive in (_C_KERNELS if backend == "cpu" else _CUDA_RULES)


def forget(primitive: str) -> None:
    """Remove the kernels of ``primitive`` on all backends."""
    _C_KERNELS.pop(primitive, None)
    _CUDA_RULES.pop(primitive, None)


def c_kernels(primitive: str) -> tuple[CKernel, ...]:
    """The C kernels of ``primitive``. Empty: it runs by its NumPy reference."""
    return _C_KERNELS.get(primitive, ())


def cuda_kernels(primitive: str, target: Target, *types: Any, **params: Any) -> Sequence[CudaKernel]:
    """The candidates for ``primitive`` with these argument types and parameters, the preferred one first.

    Those whose grids are too large for a launch are left out.
    """
    rule = _CUDA_RULES.get(primitive)
    if rule is None:
        return ()
    key = rule, target, types, params_key(params)
    found = _CANDIDATES.get(key)
    if found is None:
        if len(_CANDIDATES) >= MAX_CANDIDATES:
            _CANDIDATES.clear()
        found = _CANDIDATES[key] = tuple(each for each in rule(target, *types, **params) if each.launchable)
    return found
