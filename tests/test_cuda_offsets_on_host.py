"""Arrays of more than 2^31 elements: no kernel computes an offset that 32 bits cannot hold.

A kernel's first and last block run on the host. Operands are address space without memory, which reads as zeros. The
compiler checks each signed operation. An offset that overflows ends the block, and names its line.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host
from cuda_samples import Shaped
from program_samples import for_gpu
from test_cuda_launch_limits import equation

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.launch_plan import LaunchPlan, WorkSize
from adtrain.cache import Cache
from adtrain.core.kernel import CudaKernel
from adtrain.core.program import Equation
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.ops.conv import Window
from adtrain.ops.pool import Windows

pytestmark = pytest.mark.exhaustive

MANY = H200._replace(multiprocessors=1 << 20)
"""So many multiprocessors that each block has little to do."""
LONG = (1 << 26) + 4
"""A length with which 64 columns are more than 2^31 elements."""
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux does not reserve memory for the mapping."""
THREADS = 128
"""Threads of a block of a grid-stride loop."""
HANDLERS = """
struct Place { const char *file; uint32_t line, column; };
extern "C" {
const Place *overflow = nullptr;
void overflowed(const Place *place)
{
    if (!overflow) overflow = place;
    end_blocks();
}
void __ubsan_handle_add_overflow(const Place *place, void *, void *) { overflowed(place); }
void __ubsan_handle_sub_overflow(const Place *place, void *, void *) { overflowed(place); }
void __ubsan_handle_mul_overflow(const Place *place, void *, void *) { overflowed(place); }
void __ubsan_handle_negate_overflow(const Place *place, void *) { overflowed(place); }
void __ubsan_handle_divrem_overflow(const Place *place, void *, void *) { overflowed(place); }
}
"""
"""What the compiler calls where a signed operation overflows."""


class Place(ctypes.Structure):
    """A line of a source."""

    _fields_ = (("file", ctypes.c_char_p), ("line", ctypes.c_uint32), ("column", ctypes.c_uint32))


class CheckedHost(Host):
    """A Host that finds signed overflow."""

    def __init__(self, folder: Path, compiled: Cache) -> None:
        super().__init__(folder, compiled, MANY, ("-fsanitize=signed-integer-overflow",))

    def overflows(self, equation: Equation, kernel: CudaKernel | None = None) -> Iterator[str]:
        """The first line that overflows in each launch of a candidate, by default the chosen one."""
        operands = [addresses(v.size * v.type.dtype.itemsize) for v in (*equation.inputs, *equation.outputs)]
        memory = addresses(self.lowering.scratch(equation, kernel))
        for task in self.lowering.launches(equation, kernel):
            assert isinstance(task, LaunchPlan)
            size = task.size
            if size.threads is None or not prod(size.blocks):
                threads = size.threads or THREADS
                size = WorkSize(blocks=(-(-size.elements // threads), 1, 1), threads=threads)
            entry = self._entry(replace(task, size=size))
            together = prod(size.blocks) if task.cooperative else 1
            library = self.library(task.source, [HANDLERS, entry], max(together, 1))
            for block in (0, prod(size.blocks) - 1):
                ctypes.c_int64.in_dll(library, "only_block").value = block
                self._run(replace(task, size=size), library, operands, memory, 1)
                found = ctypes.POINTER(Place).in_dll(library, "overflow")
                if found:
                    yield f"{task.name}, block {block}: {found[0].file.decode()}:{found[0].line}"
                    break


def addresses(size: int) -> np.ndarray:
    """So many bytes of zeros, which take memory only where they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return np.frombuffer(mmap.mmap(-1, max(size, 1), flags=flags), np.uint8)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, emulated_code: Cache) -> CheckedHost:
    return CheckedHost(tmp_path_factory.mktemp("checked"), emulated_code)


def array(*shape: int, dtype: str = "float32") -> ArrayType:
    return ArrayType(shape, np.dtype(dtype))


WINDOW, WINDOWS_2X2 = Window((1, 1), (1, 1), (1, 1), 1), Windows((2, 2), (2, 2), (0, 0))
ROWS, COLUMNS, SMALL = array(LONG, 64), array(64, LONG), array(64, 64)
IMAGES, FILTERS, POOLED = array(1 << 19, 8, 32, 32), array(8, 8, 3, 3), array(1 << 19, 8, 16, 16)
PLACES, INDICES = array(*POOLED.shape, dtype="int32"), array(LONG, dtype="int64")
FULL, PADDED = {"precision": "full"}, {"window": WINDOW, "precision": "full"}

ALONE: dict[str, tuple[str, tuple[ArrayType, ...], dict[str, Any]]] = {
    "product": ("matmul", (SMALL, COLUMNS), FULL),
    "product of rows": ("matmul", (ROWS, SMALL), FULL),
    "product of columns": ("matmul", (COLUMNS, SMALL), FULL | {"transpose_a": True}),
    "product by rows": ("matmul", (SMALL, ROWS), FULL | {"transpose_b": True}),
    "products": ("matmul", (array(1 << 22, 32, 16), array(1 << 22, 16, 32)), FULL),
    "product in tf32": ("matmul", (ROWS, SMALL), {"precision": "tf32"}),
    "product in bfloat16": ("matmul", (ROWS, SMALL), {"precision": "bfloat16"}),
    "product with a short K": ("matmul", (array(1 << 20, 8), array(8, 4096)), {"precision": "bfloat16"}),
    "matrix by vector": ("matmul", (ROWS, array(64, 1)), FULL),
    "columns by vector": ("matmul", (COLUMNS, array(64, 1)), FULL | {"transpose_a": True}),
    "conv2d": ("conv2d", (IMAGES, FILTERS), PADDED),
    "conv2d_input_grad": ("conv2d_input_grad", (IMAGES, FILTERS), PADDED | {"size": (32, 32)}),
    "max_pool2d": ("max_pool2d", (IMAGES,), {"windows": WINDOWS_2X2}),
    "max_pool2d_pick": ("max_pool2d_pick", (IMAGES, PLACES), {"windows": WINDOWS_2X2}),
    "max_pool2d_put": ("max_pool2d_put", (POOLED, PLACES), {"windows": WINDOWS_2X2, "shape": IMAGES.shape}),
    "avg_pool2d": ("avg_pool2d", (IMAGES,), {"windows": WINDOWS_2X2}),
    "avg_pool2d_put": ("avg_pool2d_put", (POOLED,), {"windows": WINDOWS_2X2, "shape": IMAGES.shape}),
    "standardize": ("standardize", (ROWS,), {"axes": (1,), "eps": 1e-5}),
    "transpose": ("transpose", (ROWS,), {"axes": (1, 0)}),
    "flip": ("flip", (ROWS,), {"axes": (0, 1)}),
    "concatenate": ("concatenate", (ROWS, ROWS), {"axis": 1}),
    "take": ("take", (ROWS, INDICES), {"axis": 0}),
    "argsort": ("argsort", (ROWS,), {"count": 64, "descending": False}),
}
for reduction in ("sum", "max", "logsumexp"):
    ALONE |= {f"{reduction}, axis {i}": (reduction, (x,), {"axes": (i,)}) for i, x in enumerate((COLUMNS, ROWS))}
for along in ("softmax", "log_softmax", "argmax"):
    ALONE |= {f"{along}, axis {i}": (along, (x,), {"axis": i}) for i, x in enumerate((COLUMNS, ROWS))}
ALONE |= {f"cumsum, axis {i}": ("cumsum", (x,), {"axis": i, "reverse": False}) for i, x in enumerate((COLUMNS, ROWS))}


def updates(a: ad.Array, b: ad.Array, v: ad.Array, w: ad.Array) -> tuple[Any, Any]:
    """The weight gradients of two layers, with their updates."""
    return v - ops.matmul(a, b, transpose_a=True), w - ops.matmul(b, a, transpose_a=True)


def loss_gradient(logits: ad.Array, labels: ad.Array) -> Any:
    return ad.grad(lambda x: ops.sum(ops.log_softmax(x, 1) * labels))(logits)


WIDE = 1 << 21
FUSED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "grouped products": (updates, ((1088, 64), (1088, WIDE), (64, WIDE), (WIDE, 64))),
    "elementwise": (lambda x, y, z: ops.exp(x) * y + z, ((LONG, 64), (64,), (LONG, 1))),
    "sums of columns": (lambda x, y: y - 2.0 * ops.sum(x, 0), ((4096, 1 << 20), (1 << 20,))),
    "rows": (loss_gradient, ((LONG, 64), (LONG, 64))),
    "long rows": (loss_gradient, ((WIDE, 2048), (WIDE, 2048))),
    "bias and activation": (lambda x, w, b: ops.relu(x @ w + b), ((LONG, 64), (64, 64), (64,))),
    "attention": (ops.attention, ((1 << 20, 64, 64),) * 3),
    "pairs": (lambda x, y: ops.max(x - ops.reshape(y, (-1,)), 1), ((LONG, 1), (64, 1))),
}


TILED = ("matmul", "conv2d", "conv2d_input_grad")
"""Primitives whose kernels are chosen by estimates, so another candidate may run elsewhere."""


def alone(name: str) -> Equation:
    primitive, types, params = ALONE[name]
    if primitive == "matmul":
        params = {"transpose_a": False, "transpose_b": False} | params
    return equation(primitive, *types, **params)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALONE)
def test_no_offset_of_a_large_array_overflows(checked: CheckedHost, name: str) -> None:
    assert [*checked.overflows(alone(name))] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, (primitive, *_) in ALONE.items() if primitive in TILED])
def test_no_offset_of_the_next_candidates_overflows(checked: CheckedHost, name: str) -> None:
    equation = alone(name)
    others = [kernel for kernel in checked.lowering.candidates(equation)[1:] if isinstance(kernel, CudaKernel)][:1]
    assert [text for kernel in others for text in checked.overflows(equation, kernel)] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FUSED)
def test_no_offset_of_a_fused_program_overflows(checked: CheckedHost, name: str) -> None:
    f, shapes = FUSED[name]
    program = for_gpu(stage(f, ()).program(*(Shaped(*shape) for shape in shapes)), MANY)
    assert [text for e in program.equations for text in checked.overflows(e)] == []
