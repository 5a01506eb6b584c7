"""Gram norms: sums of products of Gram matrices of few rows, without the matrices, as in ghost norms.

The squared norm of the gradient of an example by a linear layer's weights is sum(AAᵀ * BBᵀ), and that by its bias
sum(AAᵀ); see `adtrain.curvature.passes`. A thread block computes them for one example. All layers share a launch. The
Gram matrices are symmetric, so half of their elements suffice. Of many rows, kernels of matrix products are faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import gcd

from adtrain.backends.cuda.codegen.part import Kernel, Part, kernel
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.horizontal import MAX_POINTERS
from adtrain.codegen.elementwise import c_type
from adtrain.core.kernel import WARP, Target
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, body_of
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import Groups

GRAM_NORMS = "gram_norms"
"""Sums of Gram matrices, or of products of two. A thread block of a GPU computes some of one example."""

MAX_ROWS = 32
"""Maximum rows of an example."""
MAX_THREADS = 256
"""Maximum threads of a block."""
TILE = 4
"""Rows of a tile of pairs, as in `gram_norms.cuh`."""
VECTOR = 16
"""Bytes of the widest load."""


class GramNormsFusion(Fusion):
    """Gram matrices that are only summed, or multiplied in pairs and then summed, with these products and sums."""

    form = GRAM_NORMS

    @cached_property
    def suited(self) -> frozenset[Equation]:
        """The equations of such groups."""
        readers, producer = self.program.readers, self.program.producer
        found = {e for e in self.program.equations if _is_gram(e) or _is_product(e) or _is_sum(e)}

        def stays(e: Equation) -> bool:
            if not _is_gram(e) and not all(producer.get(v) in found for v in e.inputs):
                return False
            if _is_product(e) and not all(_is_gram(producer[v]) for v in e.inputs):
                return False
            inside = self.outputs.isdisjoint(e.outputs) and found.issuperset(readers.get(e.outputs[0], ()))
            return inside or _is_sum(e)

        while len(kept := {e for e in found if stays(e)}) < len(found):
            found = kept
        return frozenset(found)

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        return self.suited.issuperset((groups.equations[producer], groups.equations[reader]))

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        """The groups in order, divided into launches by the pointers that a kernel may have."""
        launch: list[int] = []
        pointers: set[Variable] = set()
        for first, members in groups.members.items():
            if groups.equations[first] not in self.suited:
                continue
            own = {v for i in members for v in _pointers(groups.equations[i])}
            if len(pointers | own) > MAX_POINTERS:
                yield launch
                launch, pointers = [], set()
            launch.append(first)
            pointers |= own
        yield launch


def _pointers(e: Equation) -> Sequence[Variable]:
    """What a kernel reads or writes of an equation's arguments and results."""
    return e.inputs[:1] if _is_gram(e) else e.outputs if _is_sum(e) else ()


def _is_gram(e: Equation) -> bool:
    """Whether it computes the Gram matrix of few rows for each example: (N, T, n) to (N, T, T)."""
    if not e.has(Trait.MATMUL) or e.inputs[0] is not e.inputs[1] or len(e.inputs[0].type.shape) != 3:
        return False
    x, full = e.inputs[0].type, e.params["precision"] == FULL
    by_rows = e.params["transpose_b"] and not e.params["transpose_a"]
    return bool(full and by_rows and 1 < x.shape[1] <= MAX_ROWS and x.dtype.name == "float32" and e.inputs[0].size)


def _is_product(e: Equation) -> bool:
    return e.primitive.name == "mul" and len(e.outputs[0].type.shape) == 3


def _is_sum(e: Equation) -> bool:
    return e.primitive.name == "sum" and e.params["axes"] == (1, 2) and len(e.inputs[0].type.shape) == 3


def _parts(body: Program) -> Iterator[Part]:
    """A part for each group of sums that need the same Gram matrices."""
    factors = {e.outputs[0]: e.inputs if _is_product(e) else e.outputs for e in body.equations if not _is_sum(e)}
    array = {e.outputs[0]: e.inputs[0] for e in body.equations if _is_gram(e)}
    groups: list[tuple[set[Variable], list[Equation]]] = []
    for e in filter(_is_sum, body.equations):
        needed, sums = set(factors[e.inputs[0]]), [e]
        for group in [group for group in groups if not needed.isdisjoint(group[0])]:
            groups.remove(group)
            needed, sums = needed | group[0], [*group[1], *sums]
        groups.append((needed, sums))
    for needed, sums in groups:
        grams = [v for v in array if v in needed]
        yield _part([array[v] for v in grams], [[grams.index(v) for v in factors[e.inputs[0]]] for e in sums], sums)


def _part(arrays: Sequence[Variable], terms: Sequence[Sequence[int]], sums: Sequence[Equation]) -> Part:
    """The part of some sums: `terms` has for each the Gram matrices, one or two, whose elements it multiplies."""
    count, rows, _ = arrays[0].type.shape
    t, first = c_type(arrays[0].type.dtype), f"(int64_t)block * {rows}"
    lines = [f"gram::sum_over_pairs<{t}, {rows}, THREADS, {len(sums)}>("]
    lines.append(f"    [&](const gram::Pair<{t}, {rows}> &pair, {t} (&terms)[{len(sums)}]) {{")
    for i, x in enumerate(arrays):
        wide = gcd(VECTOR // x.type.dtype.itemsize, x.type.shape[2])
        lines.append(f"    const {t} g{i} = pair.product<{wide}>(x{i} + {first} * n{i}, n{i});")
    for i, factors in enumerate(terms):
        lines.append(f"    terms[{i}] = {' * '.join(f'g{k}' for k in factors)};")
    lines.append(f"}}, [&](const {t} (&sums)[{len(sums)}]) {{")
    lines += [f"    y{i}[block] = sums[{i}];" for i in range(len(sums))]
    lines.append("});")
    outputs = [e.outputs[0] for e in sums]
    lengths = [x.type.shape[2] for x in arrays]
    return Part(lines, arrays, outputs, ("reduce/gram_norms.cuh",), blocks=count, lengths=lengths)


def _threads(rows: int) -> int:
    """Threads of a block: one for each element of the tiles, rounded up to warps, at most MAX_THREADS."""
    across = -(-rows // TILE)
    return min(MAX_THREADS, -(-across * (across + 1) // 2 * TILE * TILE // WARP) * WARP)


def _kernels(equation: Equation, target: Target) -> list[Kernel]:
    parts = list(_parts(body_of(equation)))
    threads = max(_threads(x.type.shape[1]) for part in parts for x in part.inputs)
    return [kernel(GRAM_NORMS, parts, threads)]


define(Form(GRAM_NORMS, _kernels))
