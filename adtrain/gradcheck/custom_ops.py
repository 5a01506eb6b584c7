"""Checks of the user's operations: their derivatives, and their kernels against the NumPy references."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from adtrain.cases import Case
from adtrain.core import poison
from adtrain.core.array import Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.errors import AdtrainError, OptionError
from adtrain.core.kernel import has_kernels
from adtrain.core.staging import stage
from adtrain.core.vmap import vmap
from adtrain.custom_ops import OWN_OPS, CustomOp, OwnOp
from adtrain.gradcheck.axes import AxesCheck
from adtrain.gradcheck.derivatives import Row, check_cases
from adtrain.passes import ALL

KERNEL_TOLERANCE = {"float32": 3e-5, "float64": 1e-11}
"""Largest difference from the NumPy reference in float64, relative to its largest element."""

VMAP_TOLERANCE = 1e-11
"""The same between `vmap` and calls of the members, and between results and what `axes` says about them."""


def check_own_ops(ops: Iterable[OwnOp], orders: Sequence[int], device: str) -> Iterator[Row]:
    """Rows for the derivatives of each operation, for its ``axes`` and rule ``vmap``, and for its kernels where it has
    some for the device.

    A function of public operations has the kernels of its compiled Program. Kernels run in a compiled Program in
    poisoned memory. The rows "gradient" run those of the derivative too.

    Raises:
        OptionError: an operation has no ``samples``.
        AdtrainError: a kernel wrote outside its output, or there is no compiler for it.
    """
    for op in ops:
        case = _case(op)
        yield from check_cases([case], orders, device)
        if op.custom is not None and op.custom.primitive.axes is not None:
            off = max(AxesCheck(op.custom.primitive, _drawn(op), {}).errors().values(), default=0.0)
            yield Row(op.name, "axes", 0, "", "float64", device, off, VMAP_TOLERANCE, off <= VMAP_TOLERANCE)
        if op.custom is not None and (op.custom.primitive.batch or op.custom.primitive.axes) is not None:
            off = _vmap_error(op, device)
            yield Row(op.name, "vmap", 0, "", "float64", device, off, VMAP_TOLERANCE, off <= VMAP_TOLERANCE)
        if op.custom is None or has_kernels(op.name, "cuda" if device == "gpu" else "cpu"):
            for dtype, tolerance in KERNEL_TOLERANCE.items():
                for name, f in (("kernel", case.f), ("gradient", _gradient(case)))[: 1 + bool(case.order)]:
                    error = _difference(f, case, dtype, device)
                    if error is not None:
                        passed = error <= tolerance
                        yield Row(case.op, f"{name} {dtype}", 0, "", dtype, device, error, tolerance, passed)
                    elif op.custom is not None:
                        raise AdtrainError(f"{op.place}: the kernel of {op.name} needs a C compiler to be checked")


def _drawn(op: OwnOp, seed: int = 0) -> list[np.ndarray]:
    """The samples of an operation, floats in float64."""
    if op.samples is None:
        raise OptionError(f"{op.place}: custom_op {op.name} has no samples to check it with; give samples=")
    drawn = [np.asarray(x) for x in op.samples(np.random.default_rng(seed))]
    return [x.astype(np.float64) if x.dtype.kind == "f" else x for x in drawn]


def _case(op: OwnOp) -> Case:
    """The operation as a function of the samples that have a derivative; the other samples are constants."""
    drawn = _drawn(op)
    smooth = _differentiable(op.custom, drawn)

    def f(*values: Value) -> Any:
        given = iter(values)
        device = values[0].device if values else "cpu"
        dtype = values[0].dtype if values else np.dtype(np.float64)
        return op.f(*(next(given) if i in smooth else _constant(x, dtype, device) for i, x in enumerate(drawn)))

    inputs = tuple((lambda rng, x=drawn[i]: x) for i in smooth)
    return Case(op.name, "samples", f, inputs, order=2 if smooth else 0)


def _constant(x: np.ndarray, dtype: np.dtype, device: str) -> Value:
    return array(x.astype(dtype) if x.dtype.kind == "f" else x, device=device)


def _differentiable(op: CustomOp | None, drawn: Sequence[np.ndarray]) -> list[int]:
    """The floating-point arguments; of a custom operation those for which ``vjp`` returns a cotangent."""
    if op is None:
        return [i for i, x in enumerate(drawn) if x.dtype.kind == "f"]
    rule = op.primitive.joint_vjp
    if not op.has_vjp:
        return []
    assert rule is not None
    args = [array(x) for x in drawn]
    out = op.primitive.output_types(args, {})
    values = [array(np.zeros(y.shape, y.dtype)) for y in out]
    shown = len(out) - op.residuals
    cts: list[Any] = [*values[:shown], *[None] * op.residuals]
    single = len(out) == 1
    found = rule(values[0] if single else tuple(values), *args)(cts[0] if single else tuple(cts))
    return [i for i, (x, ct) in enumerate(zip(drawn, found, strict=True)) if ct is not None and x.dtype.kind == "f"]


def _vmap_error(op: OwnOp, device: str) -> float:
    """The largest difference between `vmap` and a call for each of two members, where all arguments or one differ."""
    first = _drawn(op)
    second = [y if y.shape == x.shape else x for x, y in zip(first, _drawn(op, seed=1), strict=True)]
    every, errors = tuple(range(len(first))), [0.0]
    for differing in {every, *((i,) for i in every)} - {()}:
        members = first, [second[i] if i in differing else x for i, x in enumerate(first)]
        stacked = [np.stack([x, second[i]]) if i in differing else x for i, x in enumerate(first)]
        axes = tuple(0 if i in differing else None for i in every)
        found = _leaves(vmap(op.f, axes)(*(array(x, device=device) for x in stacked)))
        each = [_leaves(op.f(*(array(x, device=device) for x in member))) for member in members]
        errors += [_relative(x, np.stack(y)) for x, y in zip(found, zip(*each, strict=True), strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _gradient(case: Case) -> Callable[..., Any]:
    def pulled(*args: Value) -> Any:
        out, pullback = vjp(case.f, *args)
        return pullback(out)

    return pulled


def _difference(f: Callable[..., Any], case: Case, dtype: str, device: str) -> float | None:
    """The largest difference between kernels and references, relative to the largest element; None where NumPy ran in
    place of compiled code."""
    expected = _leaves(f(*case.sample()))
    try:
        with poison.poisoned():
            staged, given = stage(f, ALL), [x.to(device) for x in case.sample(dtype)]
            found = _leaves(staged(*given))
    except poison.OutOfBounds as error:
        op = OWN_OPS.get(error.primitive)
        if op is None or op.custom is None:
            raise
        on_device = [file for file in op.custom.files if (file.suffix == ".cu") == (device == "gpu")]
        file = on_device[0] if on_device else op.place.file
        raise AdtrainError(f"{op.place}: kernel {error.primitive} of {file} wrote outside its output") from None
    if any(kernel.name == "NumPy" for kernels in staged.compile(*given).kernels for kernel in kernels):
        return None
    errors = [_relative(x.astype(np.float64), y) for x, y in zip(found, expected, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    largest = float(np.abs(y).max(initial=0.0))
    return float(np.abs(x - y).max(initial=0.0)) / max(largest, 1e-30)


def _leaves(out: Any) -> list[np.ndarray]:
    return [x.numpy() for x in (out if isinstance(out, (tuple, list)) else (out,))]
