"""DLPack: arrays that share memory with other packages, without a copy.

Sources: https://dmlc.github.io/dlpack/latest/c_api.html for the structures,
https://dmlc.github.io/dlpack/latest/python_spec.html for capsules, streams and versions.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.errors import DeviceError, DTypeError, with_article
from adtrain.core.types import Shape

CPU, CUDA = 1, 2
"""DLPack's numbers of the devices: kDLCPU and kDLCUDA."""

DEVICES = {CPU: "cpu", CUDA: "gpu"}

VERSION = (1, 0)
"""The first version with a flag for read-only memory."""

KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}
"""DLPack's type codes by NumPy's kinds: kDLInt, kDLUInt, kDLFloat, kDLBool."""

READ_ONLY = 1
PLAIN, VERSIONED = b"dltensor", b"dltensor_versioned"
USED = {PLAIN: b"used_dltensor", VERSIONED: b"used_dltensor_versioned"}
"""The names of capsules, before and after their tensor is taken. The strings outlive all capsules."""


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_STRUCTURES: dict[bytes, Any] = {PLAIN: _Managed, VERSIONED: _ManagedVersioned}

# Capsules are passed as addresses: a reference to one that is being destroyed would destroy it again.
_api = ctypes.pythonapi
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(("PyCapsule_New", _api))
_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_SetName", _api))

_lent: dict[int, tuple[Any, ...]] = {}
"""What each exported tensor needs until its consumer deletes it, by the address of its structure."""


class Tensor(NamedTuple):
    """A tensor of another library, in its memory.

    Attributes:
        strides: in elements; None for C order.
        owner: keeps the memory until it is dropped.
    """

    address: int
    shape: Shape
    strides: tuple[int, ...] | None
    dtype: np.dtype
    device_id: int
    owner: object

    @property
    def in_c_order(self) -> bool:
        expected, size = [], 1
        for length in reversed(self.shape):
            expected.append(size)
            size *= length
        pairs = zip(self.shape, reversed(expected), self.strides or reversed(expected), strict=True)
        return size == 0 or all(length == 1 or stride == wanted for length, wanted, stride in pairs)


class _Owner:
    """Calls the deleter of a taken tensor when it is dropped."""

    def __init__(self, address: int, deleter: int | None) -> None:
        self.address, self.deleter = address, deleter

    def __del__(self, call: Any = _Deleter, ending: Any = sys.is_finalizing) -> None:
        if self.deleter and not ending():  # the other library may be gone
            call(self.deleter)(self.address)


# Other libraries may call these two while the interpreter ends, so they use no global variables, and are never freed.


@_Deleter
def _delete(address: int, lent: Any = _lent) -> None:
    """The deleter of exported tensors. Consumers may call it from any thread."""
    lent.pop(address, None)


@_Destructor
def _destroy(
    capsule: int, names: Any = tuple(USED), lent: Any = _lent, is_named: Any = _is_named, pointer: Any = _pointer
) -> None:
    """The destructor of capsules: a tensor that no consumer has taken is deleted."""
    for name in names:
        if is_named(capsule, name):
            lent.pop(pointer(capsule, name), None)


for _callback in (_delete, _destroy):
    _api.Py_IncRef(ctypes.py_object(_callback))


def capsule(
    address: int, shape: Shape, dtype: np.dtype, device: tuple[int, int], owner: object, versioned: bool
) -> Any:
    """A capsule of C-contiguous elements in memory that ``owner`` keeps. A versioned one says that it is read-only."""
    name = VERSIONED if versioned else PLAIN
    found = _STRUCTURES[name]()
    if versioned:
        found.major, found.minor = VERSION
        found.flags = READ_ONLY
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    strides = (ctypes.c_int64 * len(shape))(*(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))))
    found.tensor = _Tensor(address, *device, len(shape), KINDS[dtype.kind], 8 * dtype.itemsize, 1, sizes, strides, 0)
    found.deleter = ctypes.cast(_delete, ctypes.c_void_p).value
    _lent[ctypes.addressof(found)] = found, sizes, strides, owner
    return _new(ctypes.addressof(found), name, _destroy)


def taken(given: Any) -> Tensor:
    """The tensor of a capsule, which no consumer can take again.

    Raises:
        DTypeError: it has no tensor, one of another major version, or elements that NumPy does not have.
    """
    name = next((name for name in _STRUCTURES if _is_named(id(given), name)), None)
    if name is None:
        raise DTypeError("from_dlpack: found a capsule without a tensor: each one can be taken once")
    address = _pointer(id(given), name)
    found = _STRUCTURES[name].from_address(address)
    _rename(id(given), USED[name])
    owner = _Owner(address, found.deleter)
    if name == VERSIONED and found.major != VERSION[0]:
        raise DTypeError(f"from_dlpack: found version {found.major}.{found.minor} of DLPack, expected {VERSION[0]}")
    tensor = found.tensor
    kind = next((kind for kind, code in KINDS.items() if code == tensor.code), None)
    if kind is None or tensor.lanes != 1 or (kind == "f" and tensor.bits not in (16, 32, 64)):
        what = f"type code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes"
        raise DTypeError(f"from_dlpack: found elements of {what}, which NumPy does not have")
    dtype = np.dtype(bool if kind == "b" else f"{kind}{tensor.bits // 8}")
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    start = (tensor.data or 0) + tensor.byte_offset
    return Tensor(start, tuple(tensor.shape[: tensor.ndim]), strides, dtype, tensor.device_id, owner)


class _Writeable:
    """Read-only elements that NumPy exports to consumers of DLPack below 1.0, which has no flag for read-only."""

    def __init__(self, elements: np.ndarray) -> None:
        self.elements = elements  # keeps the memory alive
        address, _ = elements.__array_interface__["data"]
        self.__array_interface__ = {**elements.__array_interface__, "data": (address, False)}


def exported(elements: np.ndarray, **options: Any) -> Any:
    """The capsule of host elements; ``options`` are those of `__dlpack__`."""
    options.pop("stream", None)
    if (options.get("max_version") or (0, 0)) < VERSION:
        elements = np.asarray(_Writeable(elements))
    return elements.__dlpack__(**options)


def device_of(x: Any) -> str:
    """The device of another package's array.

    Raises:
        DTypeError: ``x`` has no ``__dlpack__``. DeviceError: it is neither on the CPU nor on an NVIDIA GPU.
    """
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise DTypeError(f"from_dlpack: found {with_article(type(x).__name__)}, expected an array with __dlpack__")
    found = int(x.__dlpack_device__()[0])
    if found not in DEVICES:
        raise DeviceError(
            f"from_dlpack: found an array on DLPack's device {found}, expected the CPU or an NVIDIA GPU; copy it first"
        )
    return DEVICES[found]


def imported(x: Any) -> np.ndarray:
    """The elements of an array on the CPU, read-only and C-contiguous, copied only to make them so.

    Raises:
        DTypeError: NumPy has no such dtype.
    """
    try:
        elements = np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        raise DTypeError(f"from_dlpack: {error}") from None
    contiguous: Any = np.ascontiguousarray(elements).reshape(elements.shape)
    return np.asarray(memoryview(contiguous).toreadonly())
