"""exp, log and the others of kernels/cpu/elementary.h: close to the true values everywhere, and right at the ends."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from adtrain.backends.cpu.compiler import load

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

LOOP = """
void all_{name}_{dtype}(const {c} *x, {c} *y, int64_t n) {{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = {name}(x[i]);
}}
"""
C_TYPES = {"float32": "float", "float64": "double"}
# The function, the largest error in units in the last place, and the intervals in which it is looked for.
BOUNDS: dict[str, tuple[float, list[tuple[float, float]]]] = {
    "exp": (1.1, [(-87, 88.7), (-1, 1)]),
    "log": (0.9, [(1e-30, 4), (0.5, 2), (1, 1e30)]),
    "log1p": (0.9, [(-0.999, 4), (-1e-3, 1e-3), (1, 1e30)]),
    "expm1": (2.2, [(-20, 88.7), (-1, 1), (-1e-3, 1e-3)]),
    "tanh": (2.6, [(-11, 11), (-1, 1), (-1e-3, 1e-3)]),
}
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, -2.0, 100.0, -100.0, 800.0, -800.0, 88.72, 88.73,
           709.78, 709.79, -103.97, -744.4, -746.0, 1e-40, -1e-40, 1.4e-45, 5e-324, 3.4e38, 1.7e308)  # fmt: skip

# The normal distribution function, its density, and the largest absolute error in float.
NORMAL: dict[str, tuple[Callable[[float], float], float]] = {
    "normal_cdf": (lambda x: 0.5 * math.erfc(-x / math.sqrt(2)), 9e-8),
    "normal_pdf": (lambda x: math.exp(-x * x / 2) / math.sqrt(2 * math.pi), 4e-8),
}


def true_erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(v) for v in x.tolist()])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    loops = [LOOP.format(name=f, dtype=dtype, c=c) for f in (*BOUNDS, "erf", *NORMAL) for dtype, c in C_TYPES.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield load('#include "elementary.h"\n' + "".join(loops), [], [])


def compiled(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    function = getattr(library, f"all_{name}_{x.dtype}")
    function(x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(x.size))
    return y


def errors_in_ulp(found: np.ndarray, exact: np.ndarray) -> Any:
    """Distances in spacings of the numbers of `found`'s type in the binade of the exact value."""
    kind = np.finfo(found.dtype)
    _, exponent = np.frexp(exact)
    spacing = np.ldexp(np.longdouble(kind.eps), exponent - 1)
    return np.abs(found.astype(exact.dtype) - exact) / np.maximum(spacing, kind.smallest_subnormal)


@pytest.mark.parametrize("dtype", C_TYPES)
@pytest.mark.parametrize("name", BOUNDS)
def test_errors_are_within_the_bounds_that_the_header_states(library: ctypes.CDLL, name: str, dtype: str) -> None:
    bound, intervals = BOUNDS[name]
    wide = np.longdouble if np.finfo(np.longdouble).eps < np.finfo(np.float64).eps else np.float64
    if dtype == "float64" and wide is np.float64:
        bound += 1.0  # of the reference itself
    for low, high in intervals:
        x = np.linspace(low, high, 20_001).astype(dtype)
        if low > 0 and high / low > 1e6:
            x = np.geomspace(low, high, 20_001).astype(dtype)
        found = compiled(library, name, x)
        assert errors_in_ulp(found, getattr(np, name)(x.astype(wide))).max() <= bound


@pytest.mark.parametrize("dtype", C_TYPES)
def test_erf_is_within_its_error_bound(library: ctypes.CDLL, dtype: str) -> None:
    x = np.concatenate([np.linspace(-5, 5, 10_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(dtype)
    assert errors_in_ulp(compiled(library, "erf", x), true_erf(x)).max() <= 1.0


@pytest.mark.parametrize("dtype", C_TYPES)
@pytest.mark.parametrize("name", NORMAL)
def test_the_normal_distribution_is_within_its_error_bound(library: ctypes.CDLL, name: str, dtype: str) -> None:
    exact, bound = NORMAL[name]
    x = np.concatenate([np.linspace(-9, 9, 20_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(dtype)
    error = np.abs(compiled(library, name, x) - np.array([exact(v) for v in x.tolist()]))
    assert error.max() <= (bound if dtype == "float32" else 5e-16)
    ends = compiled(library, name, np.array([-math.inf, -1e30, 1e30, math.inf, math.nan], dtype))
    np.testing.assert_array_equal(ends, [0, 0, 1, 1, math.nan] if name == "normal_cdf" else [0, 0, 0, 0, math.nan])


@pytest.mark.parametrize("dtype", C_TYPES)
@pytest.mark.parametrize("name", [*BOUNDS, "erf"])
def test_special_values_and_range_ends_are_as_in_numpy(library: ctypes.CDLL, name: str, dtype: str) -> None:
    with np.errstate(all="ignore"):
        x = np.array(SPECIAL).astype(dtype)
        reference: Callable[[np.ndarray], np.ndarray] = true_erf if name == "erf" else getattr(np, name)
        exact = reference(x.astype(np.float64)).astype(dtype)
        found = compiled(library, name, x)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
    known = ~np.isnan(exact)
    np.testing.assert_array_equal(np.signbit(found[known]), np.signbit(exact[known]))
    tiny = float(np.finfo(dtype).smallest_subnormal)
    np.testing.assert_allclose(found, exact, rtol=4 * float(np.finfo(dtype).eps), atol=tiny)


@pytest.mark.parametrize("name", BOUNDS)
def test_results_do_not_depend_on_the_vector_lane(library: ctypes.CDLL, name: str) -> None:
    x = np.linspace(0.1, 3.0, 37, dtype=np.float32)
    whole = compiled(library, name, x)
    single = np.concatenate([compiled(library, name, x[i : i + 1]) for i in range(x.size)])
    np.testing.assert_array_equal(whole, single)
