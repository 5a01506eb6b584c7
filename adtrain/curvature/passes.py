"""Passes for the gradients of single examples.

`factor_norms` computes norms and sums of the gradients from their factors, so that no gradient of an example is
computed. The gradient of a linear layer's weights for one example is a product AᵀB: A (T, out) has the cotangents of
the example's T rows, and B (T, in) the rows. Its squared norm is the sum of the elements of AAᵀ times those of BBᵀ, the
Gram matrices of the rows: the ghost norm (X. Li et al.: "Large language models can be strong differentially private
learners", 2022). The sum of the gradients over the examples is one product of all rows. The gradient of the bias is
the sum of the rows of A, and its squared norm the sum of the elements of AAᵀ.

The gradient of an embedding is such a product, in which B has the one-hot vectors of the tokens. An element of BBᵀ is 1
where two tokens are equal. In the gradient of a convolution B has the patches of an image. An element of BBᵀ is the
sum, over the places of a kernel, of elements of the Gram matrix of the image's pixels.

`drop_unit_axes` computes examples of `vmap` without the axis of their one item, so that other passes find the equations
of a batch. A loss of one example is that of a batch of one. Under `vmap` its values have the shape (N, 1, ...), and
those of convolutions (N, ...), with reshapes between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from typing import Any, Protocol

from adtrain.core.precision import FULL
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.types import ArrayType, Shape
from adtrain.passes.fusion import elementwise, sum_of_squares
from adtrain.passes.simplify import remove_dead_code, reshape_equation, simplify_reshapes


@keeps(Results.ROUNDING)
def factor_norms(program: Program) -> Program:
    """``program`` with the squared norms and the sums of batched products by their factors, where nothing else reads
    the products, and Gram matrices are smaller than they are."""
    new: dict[Equation, list[Equation]] = {}
    products: set[tuple[Variable, Shape]] = set()

    def rewrite(e: Equation, factors: _Factors | None) -> None:
        if factors is None or not factors.saves:
            return
        readers = _readers(program, e.outputs[0])
        computed = {reader: factors.total if is_total else factors.norms for reader, is_total in readers}
        if not computed or None in computed.values():
            return
        new.update({x: _Builder(e).ending(x.outputs[0], compute) for x, compute in computed.items() if compute})
        if isinstance(factors, _Product) and factors.precision == FULL:
            products.add((program.before_reshapes(factors.a), factors.a.type.shape))

    for e in program.equations:
        rewrite(e, _factors(e, program.producer))
    for e in program.equations:
        rewrite(e, _bias_factors(program, e, products))
    equations = [x for e in program.equations for x in new.get(e, [e])]
    return remove_dead_code(replace(program, equations=tuple(equations)))


@dataclass
class _Builder:
    """Makes equations with the scope and phase of `root`. They gather in `equations`."""

    root: Equation
    equations: list[Equation] = field(default_factory=list)

    def __call__(self, name: str, *inputs: Variable, **params: Any) -> Variable:
        primitive = PRIMITIVES[name]
        (type_,) = primitive.output_types([v.type for v in inputs], params)
        out = inputs[0].like(type_)
        self.equations.append(replace(self.root, primitive=primitive, inputs=inputs, params=params, outputs=(out,)))
        return out

    def ending(self, out: Variable, compute: Callable[[_Builder], Variable]) -> list[Equation]:
        """The equations that `compute` makes, with `out` as their result."""
        compute(self)
        self.equations[-1] = replace(self.equations[-1], outputs=(out,))
        return self.equations

    def reshape(self, x: Variable, *shape: int) -> Variable:
        return self("reshape", x, shape=shape)

    def grams(self, rows: Variable, precision: str, columns: bool = False) -> Variable:
        """The products of all pairs of rows: (N, T, n) to (N, T, T); or of all pairs of columns."""
        return self("matmul", rows, rows, transpose_a=columns, transpose_b=not columns, precision=precision)

    def norms(self, a: Variable, b: Variable) -> Variable:
        """The squared norms from both Gram matrices. Rounding errors can make a sum negative."""
        return self("relu", self("sum", self("mul", a, b), axes=(1, 2)))

    def squares(self, x: Variable) -> Variable:
        """The sums of the squares along all axes but the first."""
        return self("sum", self("mul", x, x), axes=tuple(range(1, len(x.type.shape))))


class _Factors(Protocol):
    """The factors of gradients of examples.

    Attributes:
        saves: whether two Gram matrices have fewer elements than a gradient (Z. Bu et al.: "Scalable and efficient
            training of large convolutional neural networks with differential privacy", 2022).
        total: computes the sum of the gradients; None if the factors are of no use for it.
    """

    @property
    def saves(self) -> bool: ...
    @property
    def total(self) -> Callable[[_Builder], Variable] | None: ...
    def norms(self, new: _Builder) -> Variable: ...


@dataclass(frozen=True)
class _Product:
    """The gradients AᵀB of a matrix, from A (N, T, m) and B (N, T, n)."""

    a: Variable
    b: Variable
    precision: str

    @property
    def saves(self) -> bool:
        (_, t, m), (_, _, n) = self.a.type.shape, self.b.type.shape
        return 2 * t**2 < m * n

    def norms(self, new: _Builder) -> Variable:
        if self.a.type.shape[1] == 1:
            return new("mul", new.squares(self.a), new.squares(self.b))
        return new.norms(new.grams(self.a, self.precision), new.grams(self.b, self.precision))

    def total(self, new: _Builder) -> Variable:
        a, b = (new.reshape(v, math.prod(v.type.shape[:2]), v.type.shape[2]) for v in (self.a, self.b))
        return new("matmul", a, b, transpose_a=True, transpose_b=False, precision=self.precision)


@dataclass(frozen=True)
class _Sum:
    """The gradients (N, m) of a bias, the sums of the rows of A (N, ..., m)."""

    a: Variable
    saves = True

    def norms(self, new: _Builder) -> Variable:
        count, *rest, m = self.a.type.shape
        grams = new.grams(new.reshape(self.a, count, math.prod(rest), m), FULL)
        return new("relu", new("sum", grams, axes=(1, 2)))  # rounding errors can make a sum negative

    def total(self, new: _Builder) -> Variable:
        return new("sum", self.a, axes=tuple(range(len(self.a.type.shape) - 1)))


@dataclass(frozen=True)
class _Rows:
    """The gradients (N, V, n) of a table: the cotangents (N, ..., n) added at indices (N, ...).

    Only indices of one example are compared, so they may be those of a table of all examples.
    """

    cotangents: Variable
    indices: Variable
    entries: int
    total = None

    @property
    def saves(self) -> bool:
        tokens = math.prod(self.indices.type.shape[1:])
        return 2 * tokens**2 < self.entries * self.cotangents.type.shape[-1]

    def norms(self, new: _Builder) -> Variable:
        count, *rest = self.indices.type.shape
        tokens, n = math.prod(rest), self.cotangents.type.shape[-1]
        sides = [new.reshape(self.indices, *shape) for shape in ((count, tokens, 1), (count, 1, tokens))]
        equal = new("equal", *(new("broadcast_to", v, shape=(count, tokens, tokens)) for v in sides))
        grams = new.grams(new.reshape(self.cotangents, count, tokens, n), FULL)
        return new.norms(grams, new("astype", equal, dtype=grams.type.dtype))


@dataclass(frozen=True)
class _Patches:
    """The gradients (N, O, C, KH, KW) of a kernel, from images (N, C, H, W) and cotangents (N, O, OH, OW)."""

    images: Variable
    cotangents: Variable
    window: Any
    size: tuple[int, int]
    precision: str
    total = None

    @property
    def saves(self) -> bool:
        (_, c, *image), (_, o, *out) = self.images.type.shape, self.cotangents.type.shape
        elements = max(math.prod(n + 2 * p for n, p in zip(image, self.window.padding, strict=True)), math.prod(out))
        return self.window.groups == 1 and 2 * elements**2 < o * c * math.prod(self.size)

    def norms(self, new: _Builder) -> Variable:
        (count, c, *image), (_, o, *out) = self.images.type.shape, self.cotangents.type.shape
        (sy, sx), (py, px), (dy, dx) = self.window.stride, self.window.padding, self.window.dilation
        area, positions, low = math.prod(image), math.prod(out), (0, py, px, py, px)
        pixels = new.grams(new.reshape(self.images, count, c, area), self.precision, columns=True)
        padded = new.reshape(pixels, count, *image, *image)
        if py or px:
            padded = new("pad", padded, low=low, high=low, gaps=(0,) * 5, value=0.0)
        at_places = []
        for i, j in product(*map(range, self.size)):
            starts = (0, i * dy, j * dx, i * dy, j * dx)
            steps = (1, sy, sx, sy, sx)
            counts = (count, *out, *out)
            stops = tuple(a + (n - 1) * s + 1 for a, n, s in zip(starts, counts, steps, strict=True))
            at_places.append(new("slice", padded, starts=starts, stops=stops, steps=steps))
        patches = reduce(lambda x, y: new("add", x, y), at_places)
        cotangents = new.grams(new.reshape(self.cotangents, count, o, positions), self.precision, columns=True)
        return new.norms(cotangents, new.reshape(patches, count, positions, positions))


def _factors(e: Equation, producer: Mapping[Variable, Equation]) -> _Factors | None:
    """The factors of the gradients that an equation computes."""
    shape = e.outputs[0].type.shape
    if e.primitive.name == "matmul" and len(shape) == 3 and e.params["transpose_a"] and not e.params["transpose_b"]:
        a, b = e.inputs
        return _Product(a, b, e.params["precision"])
    if e.primitive.name == "conv2d_weight_grad_by_image":
        images, cotangents = e.inputs
        return _Patches(images, cotangents, **e.params)
    added = producer.get(e.inputs[0]) if e.has(Trait.RESHAPE) else None
    if added is None or added.primitive.name != "scatter_add" or added.params["axis"] or len(shape) != 3:
        return None
    ct, indices = added.inputs
    of_examples = indices.type.shape[:1] == shape[:1] and added.params["length"] == shape[0] * shape[1]
    return _Rows(ct, indices, shape[1]) if of_examples and ct.type.shape[-1:] == shape[2:] else None


def _bias_factors(program: Program, e: Equation, products: Collection[tuple[Variable, Shape]]) -> _Sum | None:
    """The factors of the gradients of a bias, if norms by `products` need the Gram matrices of the same cotangents."""
    if e.primitive.name != "sum" or e.params["axes"] != tuple(range(1, len(e.inputs[0].type.shape) - 1)):
        return None
    (x,) = e.inputs
    count, *rest, m = x.type.shape
    rows = count, math.prod(rest), m
    return _Sum(x) if rows[1] > 1 and (program.before_reshapes(x), rows) in products else None


def _readers(program: Program, gradients: Variable) -> Sequence[tuple[Equation, bool]]:
    """The equations that sum gradients over the examples, with True, and those that sum the squares of an example, with
    False; none if the gradients have other readers, too."""
    found = []
    for e in program.readers.get(gradients, ()):
        is_total = e.primitive.name == "sum" and e.params["axes"] == (0,)
        reader = e if is_total else sum_of_squares(program, e)
        if reader is None or gradients in program.outputs:
            return []
        found.append((reader, is_total))
    return found


@keeps(Results.ROUNDING)
def drop_unit_axes(program: Program) -> Program:
    """``program`` with elementwise equations and reductions on (N, ...) in place of (N, 1, ...), and one broadcast in
    place of a broadcast of a broadcast: to the item, then to the examples."""
    repeated = {e.outputs[0]: e.inputs for e in program.equations if e.has(Trait.BROADCAST) and e.inputs}
    merged = [
        replace(e, inputs=repeated.get(e.inputs[0], e.inputs)) if e.has(Trait.BROADCAST) and e.inputs else e
        for e in program.equations
    ]
    equations = [x for e in merged for x in _without_axis(e)]
    return remove_dead_code(simplify_reshapes(replace(program, equations=tuple(equations))))


def _without_axis(e: Equation) -> list[Equation]:
    """`e` between reshapes, if it is an equation on (N, 1, ...)."""
    if e.has(Trait.REDUCTION) and "axes" in e.params:
        (x,), axes = e.inputs, e.params["axes"]
        if not _has_axis(x.type.shape):
            return [e]
        if axes == (1,):
            return [reshape_equation(e, x, e.outputs[0])]
        others = tuple(a - (a > 1) for a in axes if a != 1)
        return _around(e, (_dropped(x),), {**e.params, "axes": others})
    if not _has_axis(e.outputs[0].type.shape):
        return [e]
    if e.has(Trait.BROADCAST) and e.inputs:
        (x,), shape = e.inputs, e.outputs[0].type.shape
        axis = 1 - len(shape) + len(x.type.shape)
        return _around(e, (_dropped(x, axis) if axis >= 0 else x,), {**e.params, "shape": _shape(shape)})
    if elementwise(e):
        return _around(e, tuple(_dropped(v) if v.type.shape else v for v in e.inputs), e.params)
    return [e]


def _has_axis(shape: Shape) -> bool:
    return len(shape) > 1 and shape[1] == 1


def _shape(shape: Shape, axis: int = 1) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _dropped(v: Variable, axis: int = 1) -> Variable:
    return v.like(ArrayType(_shape(v.type.shape, axis), v.type.dtype))


def _around(e: Equation, inputs: tuple[Variable, ...], params: Mapping[str, Any]) -> list[Equation]:
    """`e` with other inputs and parameters, and reshapes before and after it."""
    types = e.primitive.output_types([v.type for v in inputs], params)
    outputs = tuple(v.like(t) for v, t in zip(e.outputs, types, strict=True))
    before = [reshape_equation(e, v, new) for v, new in zip(e.inputs, inputs, strict=True) if new is not v]
    after = [reshape_equation(e, new, v) for v, new in zip(e.outputs, outputs, strict=True)]
    return [*before, replace(e, inputs=inputs, params=params, outputs=outputs), *after]
