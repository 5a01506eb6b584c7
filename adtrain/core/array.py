"""The values of functions: Value, the type that operations take and return; Array, with elements on a device;
Placeholder, with a type only; TracedNumber, a Python float that is an argument of a traced function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from adtrain.core import dlpack
from adtrain.core.devices import find_device
from adtrain.core.errors import DTypeError, ShapeError, TraceError, user_line, with_article
from adtrain.core.memory import copy_aligned
from adtrain.core.operators import Arithmetic, NumpyProtocols, Operators, advice
from adtrain.core.types import ArrayType, Shape, dtype_of


class Value(Operators["Value"], NumpyProtocols):
    """An array, or a tracer that stands for one. Its operators call the functions of ``adtrain.ops``."""

    __slots__ = ("__weakref__",)

    shape: Shape
    dtype: np.dtype
    device: str

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def numpy(self) -> np.ndarray:
        """The elements as a read-only, C-contiguous NumPy array on the host.

        Raises:
            TraceError: the value is a tracer, which has no elements.
        """
        raise TraceError(
            f"a traced value ({ArrayType(self.shape, self.dtype)}) has no elements yet: inside a differentiated, "
            "mapped or jitted function use adtrain.ops instead of NumPy and float(), and ops.where instead of if"
        )

    def fetch(self) -> Callable[[], np.ndarray]:
        """Start copying the elements to the host, and return a function that waits for them and returns them.

        The copy is asynchronous. Raises TraceError like `numpy`.
        """
        elements = self.numpy()
        return lambda: elements

    def to(self, device: str) -> Value:
        """The same elements on ``device``: this value itself if it is there already.

        Raises:
            TraceError: the value is a tracer, and on another device.
            DeviceError: the device is not available.
        """
        if device == self.device:
            return self
        raise TraceError("a traced value cannot change its device: move the arrays before differentiating")

    def item(self) -> Any:
        """The only element, as a Python number.

        Raises:
            ShapeError: there is not exactly one element.
            TraceError: the value is a tracer.
        """
        if self.size != 1:
            raise ShapeError(f"item: found shape {self.shape}, expected exactly one element")
        return self.numpy().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise DTypeError(f"an index must be an integer, found {self.dtype}")
        return int(self.item())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(f"bool: found shape {self.shape}, expected one element; write x.any() or x.all()")
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("len: a 0-d array has no length; its element is x.item()")
        return self.shape[0]

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self)))


def _missing(x: Value, name: str) -> NoReturn:
    """Python calls this for missing attributes only. Raises AttributeError, with what to write instead."""
    what = advice(name, x._ops)
    raise AttributeError(f"an adtrain array has no attribute {name!r}" + (f"; {what}" if what else ""))


# Not in the class, where a type checker would accept every name for it.
Value.__getattr__ = _missing  # type: ignore[attr-defined]


def bind_operators(ops: ModuleType) -> None:
    """Let the operators of values call the functions of ``ops``, a module that this one cannot import."""
    Value._ops = ops


class Array(Value):
    """Immutable elements in a device's memory. They are C-contiguous, or on the CPU a broadcast view with stride 0.

    Attributes:
        buffer: the backend's object for the memory; on the CPU a NumPy array.
    """

    __slots__ = ("buffer", "device", "dtype", "shape")

    def __init__(self, buffer: Any, shape: Shape, dtype: np.dtype, device: str) -> None:
        self.buffer = buffer
        self.shape = shape
        self.dtype = dtype
        self.device = device

    def __getattr__(self, name: str) -> Any:
        # `stage` deletes the buffer of a donated array.
        if name == "buffer":
            raise TraceError(
                f"this array ({ArrayType(self.shape, self.dtype)}) was donated to a jitted function, which may have "
                "overwritten it; use the function's result instead"
            )
        _missing(self, name)

    def numpy(self) -> np.ndarray:
        return find_device(self.device).to_numpy(self.buffer)

    def fetch(self) -> Callable[[], np.ndarray]:
        return find_device(self.device).fetch(self.buffer)

    def to(self, device: str) -> Array:
        return self if device == self.device else array(self.numpy(), device=device)

    def __reduce__(self) -> tuple[Any, ...]:
        return array, (self.numpy(), None, self.device)

    def __dlpack__(self, **options: Any) -> Any:
        """The elements as a DLPack capsule, for `torch.from_dlpack` and others: the same memory, not to be written to.

        On a GPU the work on the consumer's stream waits for that of this array.

        Raises:
            BufferError: the options ask for another device, or for a stream that DLPack does not allow.
        """
        return find_device(self.device).to_dlpack(self.buffer, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return find_device(self.device).dlpack_device

    def __repr__(self) -> str:
        where = "" if self.device == "cpu" else f", device={self.device!r}"
        text = np.array2string(self.numpy(), separator=", ", prefix="array(", threshold=64)
        return f"array({text}, {self.dtype}{where})"


class Placeholder(Value):
    """An argument that has a type and no elements, for tracing."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, shape: Shape, dtype: np.dtype, device: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device


def array(x: Any, dtype: Any = None, device: str | None = None) -> Array:
    """Make an Array from numbers, nested lists, a NumPy array or an Array.

    An Array of the right dtype and device is returned as it is; all else is copied.

    Args:
        x: the elements; nested lists of one length at each level.
        dtype: by default float32 for Python floats, int64 for Python integers, and that of an array.
        device: by default that of an Array, and "cpu" for all else.

    Raises:
        ShapeError: nested lists have different lengths.
        DTypeError: adtrain has no such dtype, or ``x`` does not fit it.
        DeviceError: the device is not available.
    """
    if isinstance(x, Array):
        device = device or x.device
        if (dtype is None or np.dtype(dtype) == x.dtype) and device == x.device:
            return x
    try:
        with np.errstate(all="ignore"):  # as in operations
            elements = _elements(x, dtype, device or "cpu")
            if dtype is None and elements.dtype == np.float64 and not isinstance(x, (np.ndarray, np.generic, Value)):
                elements = elements.astype(np.float32)
    except ValueError as error:
        raise ShapeError(f"array: {no_array(error)}") from None
    except OverflowError as error:
        raise DTypeError(f"array: {error}") from None
    except TypeError as error:
        raise DTypeError(f"array: {error}; join arrays with ops.stack or ops.concatenate") from None
    dtype_of("array", elements.dtype)
    device = device or "cpu"
    elements.flags.writeable = False
    return Array(find_device(device).from_numpy(elements), elements.shape, elements.dtype, device)


def no_array(error: Exception) -> str:
    """Why NumPy makes no array of a value; lists of different lengths in words that say what to do."""
    if "inhomogeneous" in str(error):
        return "nested lists have different lengths, expected one length at each level; pad the shorter ones"
    return " ".join(str(error).split())


def _elements(x: Any, dtype: Any, device: str) -> np.ndarray:
    """The elements of x.

    An array x of type `dtype` is copied for the CPU, C-contiguous and aligned to cache lines. For another device it is
    a view of x, because the upload copies it. Anything else becomes a new C-contiguous array.
    """
    if isinstance(x, np.ndarray) and x.dtype.kind in "bfiu" and (dtype is None or np.dtype(dtype) == x.dtype):
        return copy_aligned(x) if device == "cpu" else x.view()
    return np.array(x, dtype=dtype, order="C")


def returned_no_array(name: str, x: Any) -> DTypeError:
    """The error of a transformation, such as "vmap", whose function returned `x` instead of an array."""
    kind = "numpy.ndarray" if isinstance(x, np.ndarray) else type(x).__name__
    return DTypeError(f"{name}: the function returned a value of type {kind}, expected adtrain arrays: ad.array(...)")


def type_with_article(x: Any) -> str:
    """What `x` is, for messages: "an array", "an int", "a dict", "None"."""
    if x is None:
        return "None"
    return with_article("array" if isinstance(x, Value) else type(x).__name__)


def from_numpy(x: np.ndarray, device: str, donated: Value | None = None) -> Array:
    """A NumPy array as an Array. On the CPU nothing is copied if it is contiguous and aligned, and then ``x`` must not
    be written to afterwards.

    ``donated`` cannot be used after the call. On a GPU the result lies in its memory if the types are equal and no
    other array lies there. So a Program gets the same addresses again, and need not record its launches anew.
    """
    elements = np.require(x, requirements=("C", "A")).view()
    elements.flags.writeable = False
    buffers = []
    if isinstance(donated, Array) and donated.device == device:
        buffers.append(donated.buffer)
        del donated.buffer
    return Array(find_device(device).from_numpy(elements, buffers), elements.shape, elements.dtype, device)


def from_dlpack(x: Any) -> Array:
    """An Array in the memory of another package's array on the CPU or an NVIDIA GPU, such as a PyTorch tensor.

    Nothing is copied if the elements are C-contiguous, and on a GPU their address is a multiple of 256. Then ``x`` must
    not be written to afterwards. On a GPU, work on the array waits for that on the stream of ``x``.

    Raises:
        DTypeError: ``x`` has no ``__dlpack__``, or adtrain has no such dtype.
        DeviceError: ``x`` is on another device.
        ShapeError: ``x`` is on a GPU and not C-contiguous.
    """
    device = dlpack.device_of(x)
    buffer = find_device(device).from_dlpack(x)
    return Array(buffer, buffer.shape, dtype_of("from_dlpack", buffer.dtype), device)


class _OpsOfNumbers:
    """The operations by name, for operators of traced numbers."""

    def __getattr__(self, name: str) -> Any:
        return partial(_apply, name)


class TracedNumber(Arithmetic[Any]):
    """Stands for a Python float in a function that is traced, so that another float needs no other Program.

    It behaves like the float that it stands for. With an array it takes the array's dtype. With numbers it gives
    another TracedNumber, computed in float64; comparisons give a bool array of shape (). An operation of numbers alone,
    such as ``ops.exp(number)``, takes it as float32.

    Attributes:
        value: the number as a value of float64, shape ().
    """

    __slots__ = ("value",)
    __array_ufunc__ = None  # numpy_array * number goes to TracedNumber.__rmul__
    _ops = _OpsOfNumbers()

    def __init__(self, value: Value) -> None:
        self.value = value

    @property
    def device(self) -> str:
        return self.value.device

    def array(self, dtype: Any = np.float32) -> Value:
        """The number as a value of ``dtype``, shape ()."""
        return self.value.astype(dtype)

    def __repr__(self) -> str:
        return f"TracedNumber({self.value!r})"

    def _needed(self, *_: Any, **__: Any) -> NoReturn:
        raise TraceError(
            f"{user_line()}: the jitted function needs the value of a float argument, which is traced: use ops, or "
            "make the argument static with jit(f, static_argnums=...), which traces the function again for each value"
        )

    __bool__ = __float__ = __int__ = __index__ = __round__ = __trunc__ = __floor__ = __ceil__ = _needed
    __array__ = __iter__ = __len__ = _needed


NUMBERS = (bool, int, float, TracedNumber)
"""The types of numbers that take the dtype of the arrays beside them."""


def _apply(name: str, *args: Any) -> Any:
    """The operation ``name``: of numbers alone in float64, as a TracedNumber if it is of floating point."""
    alone = all(isinstance(x, NUMBERS) for x in args)
    given = [x.value if alone and isinstance(x, TracedNumber) else x for x in args]
    found = getattr(Value._ops, name)(*given)
    return TracedNumber(found) if alone and found.dtype.kind == "f" else found
