"""The epilogue of a product or convolution: a struct whose functions its kernel calls for the elements of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import indented
from adtrain.codegen.elementwise import access, held, lane, loaded, pointer, read, vector_results
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, arguments_of, body_of
from adtrain.lowering.cuda.gemm.bfloat16 import EpilogueBytes

GROUPED_BFLOAT16 = "grouped_bfloat16"
"""Independent products of bfloat16 with equal epilogues, whose tiles share the blocks of a launch."""

MAXIMUM = "Maximum largest;", "#pragma unroll", "for (int k = 0; k < WIDE; k++) largest.take(k, r0.lane[k]);"
"""Statements that reduce a pooling window to its maximum."""


class Epilogue(NamedTuple):
    """A struct in CUDA C++ that holds pointers to `inputs`, then to `outputs`; see `common/epilogue.cuh`."""

    text: str
    inputs: Sequence[Variable]
    outputs: Sequence[Variable]


def matmul_of(equation: Equation) -> Equation:
    """The product or convolution before an epilogue, or `equation` itself."""
    return body_of(equation).equations[0]


def factors_of(equation: Equation) -> Sequence[Variable]:
    """The arguments of the product or convolution before an epilogue; of all products where several share a launch."""
    products = body_of(equation).equations if equation.form == GROUPED_BFLOAT16 else [equation]
    return [v for e in products for v in matmul_of(e).inputs]


def epilogue_bytes(equation: Equation) -> EpilogueBytes:
    """What the epilogue of a product moves."""
    product = matmul_of(equation)
    shape = product.outputs[0].type.shape

    def size(variables: Sequence[Variable], axes: int) -> int:
        """The bytes for an element of the arrays whose last axes are those of the product."""
        arrays = (v for v in variables if v not in product.inputs and v.type.shape[-axes:] == shape[-axes:])
        return sum(v.type.dtype.itemsize for v in arrays)

    rank = len(shape)
    return EpilogueBytes(size(equation.inputs, 1), size(equation.inputs, rank), size(equation.outputs, rank))


def epilogue(equation: Equation, name: str = "Epilogue", returned: Variable | None = None) -> Epilogue:
    """The epilogue of a product or convolution; see `epilogue_of`."""
    return epilogue_of(flat(body_of(equation)), name, returned)


def epilogue_of(
    body: Program, name: str = "Epilogue", returned: Variable | None = None, addends: Sequence[Variable] = ()
) -> Epilogue:
    """The epilogue of a product or convolution, the first equation. Without other equations it only stores the result.

    The epilogue of a convolution sees its images (N, C, H, W) as N matrices of C rows. An epilogue that ends with max
    pooling is called for the elements of a window, and `index` is the index of the window's maximum.

    Args:
        returned: the output that write() returns.
        addends: values of which the kernel computes sums over rows.
    """
    product, *others = body.equations
    (c,) = product.outputs
    pool = others.pop() if others and others[-1].has(Trait.MAX_POOL) else None
    results = pool.inputs if pool else body.outputs
    inputs = tuple(v for v in arguments_of(others) if v is not c)
    program = Program((*inputs, c), {}, tuple(others), (*results, *addends))
    fields = [f"{pointer(v, const=True)}x{i};" for i, v in enumerate(inputs)]
    fields += [f"{pointer(v)}y{i};" for i, v in enumerate(body.outputs)]
    prefetches = [f"prefetch_l2(x{i} + index, count);" for i, v in enumerate(inputs) if v.type.shape == c.type.shape]
    sizes = (v.type.dtype.itemsize for v in (*inputs, *body.outputs) if v.type.shape == c.type.shape or pool)
    largest = max(sizes, default=c.type.dtype.itemsize)
    aux, reads, values = _read_and_compute(program, c, not product.has(Trait.MATMUL), len(addends))
    if pool is None:
        stores = [f"if (inside) store(y{i}, index, r{i});" for i in range(len(results))]
    else:
        found = dict(zip(pool.outputs, ("largest.value", "largest.at"), strict=True))
        stores = [*MAXIMUM, *(f"if (inside) y{i}[index] = {found[v]};" for i, v in enumerate(body.outputs))]
    writes = [*values, *stores]
    writes += [f"return r{body.outputs.index(returned)};"] if returned is not None else []
    result = "void" if returned is None else "Vector<T, WIDE>"
    given, passed = "const T (&value)[WIDE], bool inside = true", "value"
    if addends:
        given = "int column, const T (&value)[WIDE], T (&addends)[SUMS][WIDE], bool inside = true"
        passed = "column, value, addends"
    text = [
        *(['#include "pool/window_max.cuh"'] if pool else []),
        f"struct {name} {{",
        f"    static constexpr int WIDEST = {16 // largest}, SUMS = {len(addends)};",
        *indented(fields),
        "    template <int WIDE> struct Aux {",
        *indented(indented(aux)),
        "    };",
        "    template <int WIDE> __device__ __forceinline__ Aux<WIDE> load_aux(",
        "        int64_t item, int row, int column, int64_t index) const {",
        "        (void)item, (void)row, (void)column, (void)index;",
        *indented(indented(reads)),
        "    }",
        "    __device__ __forceinline__ void prefetch(int64_t index, int count) const {",
        "        (void)index, (void)count;",
        *indented(indented(prefetches)),
        "    }",
        f"    template <int WIDE> __device__ __forceinline__ {result} write(",
        f"        const Aux<WIDE> &aux, int64_t index, {given}) const {{",
        *indented(indented(writes)),
        "    }",
        "    template <int WIDE> __device__ __forceinline__ void operator()(",
        "        int64_t item, int row, int column, int64_t index, const T (&value)[WIDE]) const {",
        *(["        T addends[SUMS][WIDE];"] if addends else []),
        f"        write(load_aux<WIDE>(item, row, column, index), index, {passed});",
        "    }",
        "};",
    ]
    return Epilogue("\n".join(text), inputs, body.outputs)


def _read_and_compute(
    program: Program, c: Variable, images: bool, addends: int
) -> tuple[list[str], list[str], list[str]]:
    """For the epilogue's inputs: struct members, statements that load them, and statements that compute the outputs
    ``r0.lane[k]``, ``r1.lane[k]``, ...

    Args:
        addends: how many of the last outputs are ``addends[0][k]``, ``addends[1][k]``, ... An epilogue with addends
            loads what all rows share just before its use: few elements, which are in L1.
    """
    aux, reads, late = [], ["Aux<WIDE> aux;"], []
    values = {c: "value[k]"}
    batch = c.type.shape[: 1 if images else -2]
    for i, v in enumerate(program.inputs):
        if v is c:
            continue
        shape = c.type.shape
        indices = ("item", len(batch)), ("(int64_t)row", 1), ("column", len(shape) - len(batch) - 1)
        found = access(v.type.shape, shape, *indices)
        place = "index" if v.type.shape == shape else found.place
        wide = "WIDE" if found.step else 1
        if addends and place in ("column", "0"):
            line, values[v] = read(v, f"b{i}", f"x{i}", place, wide)
            late.append(line)
            continue
        aux.append(f"{held(v, wide)} b{i};")
        text = loaded(v, f"x{i}", place, wide)
        reads.append(f"aux.b{i} = {text.replace('load<', 'load_once<', 1) if addends and place == 'index' else text};")
        values[v] = f"aux.{lane(f'b{i}', wide)}"
    writes = vector_results(program, values, "WIDE", addends=addends)
    return aux, [*reads, "return aux;"], [*late, *writes]
