"""Grouped products of bfloat16: several weight gradients with their updates in one launch.

The gradient of one weight has few tiles, which leave multiprocessors without work in the last wave. The tiles of
several gradients fill more waves. The last wave is split along K, or filled better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from adtrain.backends.cuda.codegen.product import (
    GROUPED_BFLOAT16,
    Epilogue,
    epilogue,
    epilogue_bytes,
    matmul_of,
)
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.core.fused import PRODUCT, body_of
from adtrain.core.kernel import CudaKernel
from adtrain.core.program import Equation
from adtrain.core.registry import cuda_kernels
from adtrain.core.target import HOPPER, Target
from adtrain.lowering.cuda.gemm.bfloat16 import (
    MATRIX_TILES,
    TILES,
    Bfloat16Product,
    bfloat16_products,
    fastest_splits,
)
from adtrain.lowering.shapes import product_lengths
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import Groups

MAX_PRODUCTS = 8
"""Maximum products of a launch. Their operands stay in memory until the last one is ready."""
MAX_WAVES, TILE = 4, 128
"""Maximum waves of tiles of a product; rows and columns of these tiles. A larger product loses little in its last wave,
and its operands would stay in memory for the others."""
MAX_POINTERS = 256
"""Maximum arrays of a launch. Its arguments have 4 KiB, of which tensor maps take half."""


class Kind(NamedTuple):
    """What products of a launch have in common.

    Attributes:
        k: their K.
        transposed: whether A and B are.
        update: the text of their epilogue.
        converted: whether other equations convert an argument of the epilogue to bfloat16: a weight, whose copy the
            epilogue may write in repeated steps (`prefetch_batch`).
    """

    k: int
    transposed: tuple[bool, bool]
    update: str
    converted: bool


class GroupedBfloat16Fusion(Fusion):
    """Consecutive products of bfloat16 of one kind whose results no other equation reads."""

    form = GROUPED_BFLOAT16

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return target.capability == HOPPER and not target.by_member

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        run: list[int] = []
        for i in self._products:
            if run and self._products[i] != self._products[run[0]]:
                yield from self._divided(run)
                run = []
            run.append(i)
        yield from self._divided(run)

    @cached_property
    def _products(self) -> dict[int, Kind]:
        """The positions and kinds of the products that can be in a group."""
        equations = self.program.equations
        read = {v for e in equations for v in e.inputs}
        converted = {e.inputs[0] for e in equations if e.primitive.name == "to_bfloat16"}
        found = {}
        for i, e in enumerate(equations):
            if e.form != PRODUCT or not read.isdisjoint(e.outputs):
                continue
            product = matmul_of(e)
            if product.name != "matmul_bfloat16" or len(product.outputs[0].type.shape) != 2:
                continue
            a, b = product.inputs
            transposed = bool(product.params["transpose_a"]), bool(product.params["transpose_b"])
            m, n = product.outputs[0].type.shape
            few = -(-m // TILE) * -(-n // TILE) <= MAX_WAVES * self.target.multiprocessors
            if few and a is not b and cuda_kernels(product.name, self.target, a.type, b.type, **product.kernel_params):
                k = product_lengths(a.type, b.type, *transposed)[-1]
                found[i] = Kind(k, transposed, epilogue(e).text, not converted.isdisjoint(e.inputs))
        return found

    def _divided(self, run: Sequence[int]) -> list[Sequence[int]]:
        """Consecutive groups of a run of products that take the fewest cycles by estimate."""
        best: list[tuple[float, list[Sequence[int]]]] = [(0.0, [])]
        known: dict[Sequence[tuple[int, ...]], float] = {}
        for end in range(1, len(run) + 1):
            found = []
            for first in range(max(0, end - MAX_PRODUCTS), end):
                members = [self.program.equations[i] for i in run[first:end]]
                pointers = {v for e in members for v in (*e.inputs, *e.outputs)}
                if len(pointers) > MAX_POINTERS and len(members) > 1:
                    continue
                key = tuple(matmul_of(e).outputs[0].type.shape for e in members)
                if key not in known:
                    known[key] = fastest_splits(_product(members, self.target), MATRIX_TILES)[0].cycles
                before, groups = best[first]
                found.append((before + known[key], [*groups, run[first:end]]))
            best.append(min(found, key=lambda x: x[0]))
        return best[-1][1]


def _product(equations: Sequence[Equation], target: Target) -> Bfloat16Product:
    """The work of several products."""
    first = matmul_of(equations[0])
    a, b = first.inputs
    transposed = bool(first.params["transpose_a"]), bool(first.params["transpose_b"])
    _, m, n, k = product_lengths(a.type, b.type, *transposed)
    shapes = (matmul_of(e).outputs[0].type.shape for e in equations[1:])
    others = tuple((rows, columns) for rows, columns in shapes)
    own = epilogue_bytes(equations[0])
    mn_major = transposed[0], not transposed[1]
    return Bfloat16Product(target, (1, m, n, k), TILES[0], mn_major, others=others, epilogue=own)


def _candidates(equation: Equation, target: Target) -> Sequence[CudaKernel]:
    products = _product(body_of(equation).equations, target)
    return [bfloat16_products(x) for x in fastest_splits(products, MATRIX_TILES)]


def _epilogues(equation: Equation) -> Epilogue:
    """The epilogues of all products, an array of structs: the pointers of the first one, then of the next one."""
    members = body_of(equation).equations
    own = [epilogue(e) for e in members]
    assert len({x.text for x in own}) == 1, "products of a kind"
    text = f"{own[0].text}\nstruct Epilogues {{\n    Epilogue of[{len(own)}];\n}};"
    return Epilogue(text, [v for x in own for v in (*x.inputs, *x.outputs)], ())


define(Form(GROUPED_BFLOAT16, candidates=_candidates, epilogue=_epilogues))
