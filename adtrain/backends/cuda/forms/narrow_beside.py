"""A product of bfloat16 and a narrow one of the same left factor, by one kernel that reads the factor once.

Examples: the products with a weight and with a small matrix of its low-rank adaptation, and those in the backward pass.
A narrow product alone takes as long as the reads of its left factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adtrain.backends.cuda.codegen.loops import NARROW_BESIDE, Epilogue, epilogue, epilogue_bytes, matmul_of
from adtrain.backends.cuda.forms import Form, define
from adtrain.core.kernel import HOPPER, CudaKernel, Target
from adtrain.core.program import PRODUCT, Equation, Program, Variable, body_of, fuse
from adtrain.lowering.cuda.gemm.bfloat16 import BESIDE_COLUMNS, TILES, Bfloat16Product, kernels_beside
from adtrain.lowering.shapes import product_lengths
from adtrain.passes.fusion import Fusion, with_shared_views
from adtrain.passes.groups import Groups


class NarrowBesideFusion(Fusion):
    """Pairs of a wide and a narrow product of the same left factor."""

    form = NARROW_BESIDE
    early = True

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return target.capability == HOPPER and not target.by_member

    def prepared(self) -> Program:
        if not any(_is_product(e) and _is_narrow(e) for e in self.program.equations):
            return self.program
        return with_shared_views(self.program, _is_product)

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        wide: dict[Variable, list[int]] = {}
        narrow: list[int] = []
        for i, e in enumerate(self.program.equations):
            if not _is_product(e):
                continue
            if _is_narrow(e):
                narrow.append(i)
            elif _wide_kernels(e, self.target, True):
                wide.setdefault(matmul_of(e).inputs[0], []).append(i)
        for i in narrow:
            if beside := wide.get(matmul_of(self.program.equations[i]).inputs[0]):
                yield beside.pop(), i

    def fused(self, equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
        return fuse(self.form, sorted(equations, key=_is_narrow), needed)


def _is_product(e: Equation) -> bool:
    """Whether it is a product of two matrices of bfloat16, perhaps with an epilogue, whose left factor is K-major."""
    product = matmul_of(e)
    if product.name != "matmul_bfloat16" or (e is not product and e.form != PRODUCT):
        return False
    return not product.params["transpose_a"] and len(product.outputs[0].type.shape) == 2


def _is_narrow(e: Equation) -> bool:
    return matmul_of(e).outputs[0].type.shape[1] == BESIDE_COLUMNS


def _wide_kernels(wide: Equation, target: Target, k_major: bool) -> Sequence[CudaKernel]:
    """The kernels of a wide product with a narrow one whose right factor is K-major or not."""
    product = matmul_of(wide)
    (a, b), transposed = product.inputs, bool(product.params["transpose_b"])
    lengths = product_lengths(a.type, b.type, transpose_b=transposed)
    work = Bfloat16Product(target, lengths, TILES[0], (False, not transposed), epilogue=epilogue_bytes(wide))
    return kernels_beside(work, k_major)


def _candidates(equation: Equation, target: Target) -> Sequence[CudaKernel]:
    wide, narrow = body_of(equation).equations
    return _wide_kernels(wide, target, bool(matmul_of(narrow).params["transpose_b"]))


def _epilogues(equation: Equation) -> Epilogue:
    """A struct of both epilogues, with the right factor of the narrow product between them."""
    wide, narrow = body_of(equation).equations
    first, second = epilogue(wide), epilogue(narrow, "EpilogueBeside")
    members = "Epilogue own;", "const uint16_t *y;", "EpilogueBeside beside;"
    text = [first.text, second.text, "struct Epilogues {", *(f"    {x}" for x in members), "};"]
    y = matmul_of(narrow).inputs[1]
    return Epilogue("\n".join(text), [*first.inputs, *first.outputs, y, *second.inputs, *second.outputs], ())


define(Form(NARROW_BESIDE, candidates=_candidates, epilogue=_epilogues))
