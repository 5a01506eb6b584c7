"""The loops of `kernels/cpu/naive.c` in one thread: the baseline of benchmarks."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.backends.cpu.compiler import find_compiler, processor
from adtrain.cache import Includes, digest, open_cache
from adtrain.files import asset_path

LABEL = "naive loop, 1 thread"
OPTIMIZATION = "-O2"
"""Added to the flags of the other kernels; overrides -O3."""


def matmul(a: np.ndarray, b: np.ndarray, transpose_a: bool = False, transpose_b: bool = False) -> np.ndarray:
    """The product (m, n) of float32 matrices, each transposed first if its flag is set."""
    (m, k), n = a.shape[:: -1 if transpose_a else 1], b.shape[0 if transpose_b else 1]
    return call("matmul", (m, n), a, b, m, k, n, int(transpose_a), int(transpose_b))


def conv_sizes(
    image: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[int, ...]:
    """The numbers of a convolution of images (n, c, height, width) with kernels (o, c, kh, kw)."""
    (n, c, height, width), (o, _, kh, kw) = image, weight
    high, wide = (
        (size + 2 * p - k) // s + 1 for size, k, s, p in zip((height, width), (kh, kw), stride, padding, strict=True)
    )
    return n, c, height, width, o, kh, kw, high, wide, *stride, *padding


def call(name: str, output: tuple[int, ...], *args: np.ndarray | int) -> np.ndarray:
    """What `naive_NAME(arrays..., output, numbers...)` makes of an output of zeros.

    Raises:
        CompilerError: there is no C compiler that works.
    """
    arrays = [np.ascontiguousarray(x, np.float32) for x in args if isinstance(x, np.ndarray)]
    numbers = [ctypes.c_int64(x) for x in args if not isinstance(x, np.ndarray)]
    out = np.zeros(output, np.float32)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (*arrays, out)]
    getattr(_library(), f"naive_{name}")(*pointers, *numbers)
    return out


@functools.cache
def _library() -> Any:
    """The loops, compiled by the compiler of the other kernels and cached."""
    source, cache = asset_path("kernels") / "cpu" / "naive.c", open_cache("cpu")
    compiler = find_compiler(cache)
    text = source.read_text(encoding="utf-8")
    included = Includes().digests(text, source.parent)
    key = digest(compiler.identity, *compiler.flags, OPTIMIZATION, processor(), text, *included)
    library = cache.find(key, ".so")
    if library is None:
        with cache.build_folder() as site:
            compiler.run([OPTIMIZATION, "-shared", str(source), "-o", "naive.so", "-lm"], site)
            library = cache.store(key, ".so", Path(site, "naive.so").read_bytes())
    return ctypes.CDLL(str(library))
