"""custom_op: an operation with the user's own kernels in C and CUDA C++.

A kernel computes whole arrays. Each element type has a compiled copy, in which ``T`` is the type of the first
floating-point argument, or of the first argument where none is:

    #include "common.h"  // C, of kernels/cpu. All threads call the function; `my_share` divides the work among them.
    void FN(triple)(const Team *team, const T *x, T *out, int64_t size) {
        int64_t begin, end;
        my_share(team, size, &begin, &end);
        for (int64_t i = begin; i < end; i++) out[i] = 3 * x[i];
    }

    #include "common/common.cuh"  // CUDA C++, of kernels/cuda
    KERNEL triple(const T *x, T *out, int64_t size) {
        wait_for_inputs();
        for (int64_t i = grid_index(); i < size; i += grid_size()) out[i] = 3 * x[i];
    }

The arguments are pointers to the inputs and to the outputs, then the numbers. Memory of outputs is not cleared.
`adtrain.extend` has what other forms need: several launches, candidates for the tuner, scratch memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from adtrain.cache import Includes, digest, open_cache
from adtrain.core.array import Value, type_with_article
from adtrain.core.autodiff import fill_zeros
from adtrain.core.errors import Definition, OptionError, ShapeError, TraceError, caller
from adtrain.core.kernel import CKernel, CudaKernel, CudaLaunch, Target, forget, register
from adtrain.core.options import shown
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.common import as_value
from adtrain.plugins import watched

__all__ = ["OWN_OPS", "CustomOp", "OwnOp", "custom_op"]

F = TypeVar("F")


@dataclass(frozen=True, eq=False)
class CustomOp:
    """What `custom_op` returns: a function of arrays and static options.

    Attributes:
        primitive: the operation in Programs and timings.
        place: the file and line that defined it.
        has_vjp: whether it has a derivative.
        residuals: the last outputs of the primitive, which only its derivative gets.
        files: the files of its kernels. The text of a kernel in the Python file is none.
    """

    primitive: Primitive
    place: Definition
    has_vjp: bool
    residuals: int
    files: tuple[Path, ...]

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The output; a tuple where the shape rule returns one. Options are hashable, and reach all functions."""
        out = bind(self.primitive, *map(as_value, args), **options)
        if self.residuals:
            out = out[: -self.residuals]
            return out[0] if len(out) == 1 else out
        return out


@dataclass(frozen=True, eq=False)
class OwnOp:
    """An operation of the user, for `adtrain gradcheck --plugin` and `adtrain bench --plugin`.

    Attributes:
        f: the operation as a function of arrays.
        place: the file and line that defined it.
        samples: from a NumPy generator to arguments. With a second parameter, a size, `bench` times several sizes.
        custom: `f`, if `custom_op` has made it.
    """

    name: str
    f: Callable[..., Any]
    place: Definition
    samples: Callable[..., Sequence[Any]] | None
    custom: CustomOp | None = None


OWN_OPS: dict[str, OwnOp] = {}
"""The operations that `custom_op` and `register.op` have registered, by name."""


def custom_op(
    name: str,
    *,
    shape: Callable[..., Any],
    numpy: Callable[..., Any],
    c: str | Path | None = None,
    cuda: str | Path | None = None,
    vjp: Callable[..., Sequence[Value | None]] | None = None,
    numbers: Callable[..., Sequence[int | float]] | None = None,
    launch: Callable[..., Mapping[str, Any]] | None = None,
    residuals: int = 0,
    flops: Callable[..., int] | None = None,
    samples: Callable[..., Sequence[Any]] | None = None,
    vmap: Callable[..., Any] | None = None,
    axes: str | Callable[..., str] | None = None,
) -> CustomOp:
    """Define an operation. Every function gets the arguments first, and the options of the call as keywords.

    Args:
        name: unique; also the name of the functions in ``c`` and ``cuda``.
        shape: from arguments (with ``shape``, ``dtype``, ``size``) to the output's `ArrayType`, or a tuple of them.
        numpy: the operation on NumPy arrays. Eager code on the CPU runs it, and kernels are tested against it.
        c: the kernel for compiled code on the CPU: a file beside the calling one, or its text. Files may include
            headers of their folder. Without it, a Program that contains the operation runs on NumPy.
        cuda: the kernel for GPUs, likewise.
        vjp: ``(ct, out, *args) -> (ct_arg, ...)``: one cotangent, or None, for each argument. ``ct`` and ``out`` are
            tuples where there are several outputs. It computes with public operations and other custom operations, so
            that it can be differentiated again. Without it, differentiating the operation is an error, unless no
            output is of floating point.
        numbers: the integers (int64_t) and floats (double) after the pointers. By default the size of the first output.
            Compiling fails where a kernel's parameters are of other types.
        launch: the fields of the `CudaLaunch`, such as ``blocks``, ``threads``, ``shared``, ``definitions``. By default
            a grid-stride loop over the elements of the first output.
        residuals: the number of last outputs that are not returned; only ``vjp`` gets them.
        flops: floating-point operations, for timings. By default one for each element of the outputs.
        samples: from a NumPy generator to arguments, for ``adtrain gradcheck --plugin`` and ``bench --plugin``. See
            `OwnOp`.
        vmap: ``(op, mapped, *args, **options)``: how `adtrain.vmap` runs it once for all members. ``op`` runs the
            operation, and returns the residuals too. ``mapped`` has a bool for each argument: a mapped one has the
            members along axis 0, as the outputs must. By default it follows from ``axes``; where it does not, the
            members run one after another.
        axes: how the axes of the outputs relate to those of the arguments, such as "*mk,*kn->*mn" for a matrix product,
            or a function that returns such a text. A letter marks axes that move together: an output at index m is the
            same function of the arguments at index m. Over a letter of arguments alone the output is a sum. "." is an
            axis that is used in another way. "*" stands for all leading axes, of which there may then be any number;
            options ``axis`` and ``axes`` count from the first of these, or, if negative, from the last axis.

    Raises:
        OptionError: there is an operation of that name, a source file is missing, or ``axes`` is neither a text nor a
            function.
    """
    place = caller(1)

    def own(role: str, function: F) -> F:
        return watched(function, f"{place}: custom_op {name}: {role}") if callable(function) else function

    shape, numpy, vjp, vmap = own("shape", shape), own("numpy", numpy), own("vjp", vjp), own("vmap", vmap)
    numbers, launch, flops = own("numbers", numbers), own("launch", launch), own("flops", flops)
    samples, axes = own("samples", samples), own("axes", axes)
    earlier = OWN_OPS.get(name)
    if earlier is not None and earlier.custom is not None and place.replaces(earlier.place):
        del PRIMITIVES[name], OWN_OPS[name]
        forget(name)
    if name in PRIMITIVES or name in OWN_OPS:
        known = f" at {OWN_OPS[name].place}" if name in OWN_OPS else " in adtrain.ops"
        raise OptionError(f"custom_op: {name!r} is defined already{known}; choose another name")
    if not (isinstance(name, str) and name.isidentifier()):
        raise OptionError(f"custom_op: found the name {name!r}, expected an identifier: it names a C function")
    files = {kind: _file(name, kind, source, place.file) for kind, source in (("c", c), ("cu", cuda)) if source}

    rule = _rule(f"{place}: custom_op {name}", vjp, residuals) if vjp else _no_rule(name, place)
    if not (axes is None or isinstance(axes, str) or callable(axes)):
        raise OptionError(f"custom_op {name}: axes is {shown(axes)}, expected a text such as '*->*', or a function")
    primitive = Primitive(
        name, _checked(f"{place}: custom_op {name}", shape), numpy, joint_vjp=rule, flops=flops, batch=vmap, axes=axes
    )

    def values(*types: Any, **options: Any) -> tuple[int | float, ...]:
        if numbers is None:
            return (primitive.output_types(types, options)[0].size,)
        found = numbers(*types, **options)
        if not isinstance(found, (tuple, list)) or not all(isinstance(x, Real) for x in found):
            what = f"{place}: custom_op {name}: numbers returned {shown(found)}"
            raise OptionError(f"{what}, expected a tuple of integers and floats")
        return tuple(int(x) if isinstance(x, Integral) else float(x) for x in found)

    def launches(target: Target, *types: Any, **options: Any) -> list[CudaKernel]:
        work = launch(*types, **options) if launch else {"elements": primitive.output_types(types, options)[0].size}
        given = values(*types, **options)
        return [CudaKernel((CudaLaunch(files["cu"], name, given, _element_type(*types), **work),))]

    if "c" in files:
        register(name, "cpu", CKernel(files["c"], name, values, lambda *types, **_: _element_type(*types), team=True))
    if "cu" in files:
        register(name, "cuda", launches)
    paths = tuple(Path(files[kind]) for kind, source in (("c", c), ("cu", cuda)) if source and _is_path(source))
    op = CustomOp(primitive, place, vjp is not None, residuals, paths)
    OWN_OPS[name] = OwnOp(name, op, place, samples, op)
    return op


def kernel_files(module: str) -> list[Path]:
    """The files of kernels that the operations of a Python module read, with the files beside them that they include,
    directly or indirectly."""
    own = [op.custom for op in OWN_OPS.values() if op.custom is not None and op.place.module == module]
    kernels = {path for op in own for path in op.files if path.is_file()}
    includes = Includes()
    return sorted(kernels.union(*(includes.files(path.read_text(errors="replace"), path.parent) for path in kernels)))


def _is_path(source: str | Path) -> bool:
    """Whether the source of a kernel is the path of a file, and not its text."""
    return isinstance(source, Path) or "\n" not in source


def _element_type(*types: Any) -> tuple[np.dtype, ...]:
    return (next((x.dtype for x in types if x.dtype.kind == "f"), types[0].dtype),)


def _file(name: str, kind: str, source: str | Path, caller: str) -> str:
    """The absolute path of a kernel's source; a text is written to the user's cache first.

    Compilers then report errors of a text at the lines of the Python file that contains it.
    """
    if not isinstance(source, (str, Path)):
        raise OptionError(f"custom_op {name}: found {shown(source)} for a kernel, expected its text or its path")
    if _is_path(source):
        path = Path(caller).parent / source
        if not path.is_file():
            raise OptionError(
                f"custom_op {name}: {path}: there is no such file; give a path, or the text of the kernel"
            )
        return str(path.resolve())
    source, line = str(source), 1
    if Path(caller).is_file():
        before, found, _ = Path(caller).read_text(errors="replace").partition(source)
        line += before.count("\n") if found else 0
    text = f'#line {line} "{caller}"\n{source}'
    cache = open_cache("sources")
    key, content = digest(text), text.encode()
    stored = cache.find(key, f".{kind}")
    if stored is None or stored.read_bytes() != content:
        cache.remove(key, f".{kind}")
        stored = cache.store(key, f".{kind}", content)
        cache.prune()
    return str(stored.resolve())


def _checked(what: str, shape: Callable[..., Any]) -> Callable[..., Any]:
    """The shape rule, which raises ShapeError if it does not return a type or a tuple of types."""

    @functools.wraps(shape)
    def types(*args: Any, **options: Any) -> Any:
        found = shape(*args, **options)
        several = isinstance(found, (tuple, list)) and all(isinstance(x, ArrayType) for x in found)
        if not isinstance(found, ArrayType) and not several:
            expected = "ad.ArrayType(shape, dtype), or a tuple of them"
            raise ShapeError(f"{what}: shape returned {shown(found)}, expected {expected}")
        return found

    return types


def _no_rule(name: str, place: Definition) -> Callable[..., Any]:
    """The joint rule of an operation without ``vjp``."""

    def rule(out: Any, *args: Value, **options: Any) -> Callable[[Any], Sequence[None]]:
        if any(x.dtype.kind == "f" for x in ((out,) if isinstance(out, Value) else out)):
            raise TraceError(
                f"{place}: custom_op {name} has no vjp, and is differentiated; give vjp=, which returns None for each "
                "argument without a derivative"
            )
        return lambda ct: (None,) * len(args)

    return rule


def _rule(what: str, vjp: Callable[..., Sequence[Value | None]], residuals: int) -> Callable[..., Any]:
    """The joint rule of a primitive. It checks what ``vjp`` returns."""

    def rule(out: Any, *args: Value, **options: Any) -> Callable[[Any], Sequence[Value | None]]:
        outputs = (out,) if isinstance(out, Value) else tuple(out)

        def pullback(ct: Any) -> Sequence[Value | None]:
            given = [ct] if isinstance(out, Value) else list(ct)
            shown = len(given) - residuals
            if any(x is not None for x in given[shown:]):
                raise TraceError(
                    f"{what}: a second derivative goes through a residual, which has no derivative; "
                    "return it as an output, and use its cotangent in vjp"
                )
            cts = [fill_zeros(x, (y.shape, y.dtype, y.device)) for x, y in zip(given[:shown], outputs, strict=False)]
            found = vjp(cts[0] if shown == 1 else tuple(cts), out, *args, **options)
            if not isinstance(found, (tuple, list)) or len(found) != len(args):
                count = len(found) if isinstance(found, (tuple, list)) else type_with_article(found)
                raise ShapeError(
                    f"{what}: vjp returned {count}, expected a tuple of {len(args)}, one for each argument"
                )
            for i, x in enumerate(found):
                if not (x is None or isinstance(x, Value)):
                    raise ShapeError(f"{what}: vjp returned {type_with_article(x)} for argument {i}, expected an array")
            return found

        return pullback

    return rule
