"""Narrow values: values that one kernel writes and others read are bfloat16 in memory.

The pass runs after the fusions, when it is known which values are stored. A value becomes bfloat16 where `precision`
permits it, where its kernel can write bfloat16, and where the kernels of all its readers can read it. The conversions
are equations in the bodies of the fused equations:

y = loops(x: exp(x))                        ->    y_ = loops(x: to_bfloat16(exp(x)))
z = row_fused(y: sum(y))                    ->    z = row_fused(y_: sum(from_bfloat16(y_)))

So arithmetic, sums and statistics are float32, and the NumPy reference of the Program rounds where a GPU rounds.

Which values may be rounded follows PyTorch's autocast: the results of products, convolutions and attention in bfloat16,
and what equations compute from rounded values alone, element by element or by pooling. Results of norms before scale
and shift are rounded too. Not rounded are sums and other reductions, softmax, weights, what an update reads, inputs and
outputs of the Program, and sums over layers, such as the sum along the residual connections of a transformer: with
autocast it begins with an embedding in float32, to which layers add. A sum along the residual connections of
convolutions is rounded: with autocast all of its terms are bfloat16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from adtrain.backends.cuda.forms import kernel_form
from adtrain.backends.cuda.forms.column_sum import COLUMN_SUM, sums_columns
from adtrain.backends.cuda.forms.product import CONVOLUTION
from adtrain.backends.cuda.forms.product_sums import PRODUCT_SUMS
from adtrain.backends.cuda.forms.reduction import REDUCTION, reduces
from adtrain.backends.cuda.forms.row_fused import ROW_FUSED, row_items
from adtrain.backends.cuda.write_channels_last import IMAGES, POOLS
from adtrain.core.kernel import Target, cuda_kernels
from adtrain.core.primitive import BFLOAT16, CHANNELS_LAST, PRIMITIVES, Trait
from adtrain.core.program import (
    GATHER,
    HORIZONTAL,
    LOOPS,
    PRODUCT,
    Equation,
    Program,
    Variable,
    body_of,
    fuse,
    fused_p,
    single_equations,
)
from adtrain.core.staging import Results, keeps
from adtrain.core.types import BITS, ArrayType
from adtrain.passes.fusion import by_element

TO_BITS, FROM_BITS = "to_bfloat16", "from_bfloat16"
"""The primitives that convert."""
MIN_SIZE = 1 << 16
"""Minimum elements of a value that is stored as bfloat16."""
FILTER_GRADIENT = "conv2d_weight_grad_bfloat16"
"""The primitive whose results updates read, at once or after a sum over groups."""
POOLS_LAST = tuple(name + CHANNELS_LAST for name in POOLS)
ARRAYS: Mapping[str, tuple[Sequence[int], Sequence[int]]] = {
    "standardize": ((0,), (0,)),
    "softmax": ((0,), ()),
    "log_softmax": ((0,), ()),
    **dict.fromkeys((*POOLS, *POOLS_LAST), ((0,), (0,))),
    "attention": ((0, 1, 2), (0,)),
    "attention_grad": ((0, 1, 2, 3, 5), (0, 1, 2)),
    "self_attention": ((0,), (0,)),
    "self_attention_grad": ((0, 1, 3), (0,)),
}
"""By primitive, the indices of the arguments and results that are bfloat16 in the form NAME_bfloat16. Statistics are
float32."""
COPIES = frozenset(("transpose", "flip", "slice", "concatenate", "pad"))
"""Primitives whose results are elements of their arguments, or zeros. Their kernels copy elements of any type."""


@keeps(Results.ROUNDING)
def narrow_values(program: Program, target: Target) -> Program:
    """``program`` with values between kernels in bfloat16, if it has products in bfloat16."""
    if not any(map(_is_rounded_product, _singles(program))):
        return program
    narrow = _Values(program, target).narrow()
    return _Converter(program, narrow).program() if narrow else program


def _singles(program: Program) -> Iterator[Equation]:
    return (x for e in program.equations for x in single_equations(e))


def _is_rounded_product(e: Equation) -> bool:
    return e.params.get("precision") == "bfloat16"


def _is_float(v: Variable) -> bool:
    return v.type.dtype == np.float32


class _Values:
    """Which values of a Program are stored as bfloat16.

    Attributes:
        single: the equation that computes each value, outside or inside a fused equation.
        root: for a reshape or a part of a value in memory, that value. Both are stored as bfloat16, or neither.
    """

    def __init__(self, program: Program, target: Target) -> None:
        self.program, self.target = program, target
        self.producer = {v: e for e in program.equations for v in e.outputs}
        self.single = {v: e for e in _singles(program) for v in e.outputs}
        self.root: dict[Variable, Variable] = {}
        for e in program.equations:
            if e.is_view:
                self.root |= {v: self.root.get(x, x) for x in e.inputs for v in e.outputs}

    def narrow(self) -> set[Variable]:
        """The values that are stored as bfloat16, and their reshapes."""
        sharing: dict[Variable, list[Variable]] = {}
        for v in self.program.names:
            sharing.setdefault(self.root.get(v, v), []).append(v)
        kept = {*self.program.inputs, *self.program.constants, *self.program.outputs}
        chosen = {r for r, vs in sharing.items() if kept.isdisjoint(vs) and self._may_round(r)}
        while True:  # a kernel may need several of its arrays in bfloat16, or none of them
            refused = {r for r in chosen if not self._can_store(r, sharing[r], chosen)}
            if not refused:
                return {v for r in chosen for v in sharing[r]}
            chosen -= refused

    def _may_round(self, v: Variable) -> bool:
        return _is_float(v) and v.size >= MIN_SIZE and not v.members and self._rounded.get(v) is True

    def _can_store(self, root: Variable, sharing: Sequence[Variable], chosen: Collection[Variable]) -> bool:
        """Whether the kernel that computes a value can write bfloat16, and those of its readers can read it."""
        if not self.converts(self.producer[root], root, chosen):
            return False
        readers = [(e, v) for v in sharing for e in self.program.readers.get(v, ())]
        views = all(_is_part(e) for e, _ in readers if e.is_view)
        return views and all(self.converts(e, v, chosen) for e, v in readers if not e.is_view)

    def converts(self, e: Equation, v: Variable, chosen: Collection[Variable]) -> bool:
        """Whether the kernel of an equation can read or write `v` in bfloat16."""
        updates = [x for x in single_equations(e) if x.phase == "update"]
        if updates and (e.form == GATHER or any(v in x.inputs for x in updates)):
            return False
        if by_element(e):
            return True
        if e.form:
            return self._fused_converts(e, v, chosen)
        if e.has(Trait.MATMUL) or e.has(Trait.CONVOLUTION):
            return v in e.outputs
        return _form_with_argument(e) is not None or self._has_kernels(e, v, chosen)

    def _fused_converts(self, e: Equation, v: Variable, chosen: Collection[Variable]) -> bool:
        inside = [x for x in body_of(e).equations if v in x.inputs or v in x.outputs]
        if e.form in (HORIZONTAL, PRODUCT_SUMS):
            return all(self.converts(x, v, chosen) for x in inside)
        if e.form == GATHER:
            return all(by_element(x) or (x.primitive.name == "transpose" and v in x.inputs) for x in inside)
        form = kernel_form(e)
        operand = any(v in x.inputs and not by_element(x) and (x.form or _takes_epilogue(x)) for x in inside)
        return form is not None and form.converts and not operand

    def _has_kernels(self, e: Equation, v: Variable, chosen: Collection[Variable]) -> bool:
        """Whether there are kernels for an equation of a primitive whose arrays are bfloat16."""
        inputs, outputs = (range(len(e.inputs)), (0,)) if e.name in COPIES else ARRAYS.get(e.name, ((), ()))
        arrays = [*(e.inputs[i] for i in inputs), *(e.outputs[i] for i in outputs)]
        if v not in arrays or any(self.root.get(x, x) not in chosen for x in arrays):
            return False
        if e.name in COPIES:
            return e.params.get("value", 0) == 0
        types = [narrowed(x.type) if i in inputs else x.type for i, x in enumerate(e.inputs)]
        return bool(cuda_kernels(e.name + BFLOAT16, self.target, *types, **e.params))

    @cached_property
    def _rounded(self) -> Mapping[Variable, bool | None]:
        """Whether each value may be rounded; None for numbers, broadcasts, and what is computed from these alone."""
        found: dict[Variable, bool | None] = dict.fromkeys((*self.program.inputs, *self.program.constants), False)
        for e in _singles(self.program):
            found |= {v: self._is_rounded(e, i, found) for i, v in enumerate(e.outputs)}
        return found

    def _is_rounded(self, e: Equation, output: int, known: Mapping[Variable, bool | None]) -> bool | None:
        v, name = e.outputs[output], e.primitive.name
        if not _is_float(v) or e in self._running_sums or name == FILTER_GRADIENT:
            return False
        if _is_rounded_product(e) or name in (FROM_BITS, "standardize"):
            return output in ARRAYS.get(name, ((), (0,)))[1]
        if by_element(e) or _is_part(e) or name in (*COPIES, *POOLS, *POOLS_LAST):
            arrays = (x for x in e.inputs if _is_float(x) and (x.size == v.size or not by_element(e)))
            of = {known.get(x, False) for x in arrays}
            return False if False in of else True if True in of else None
        return False

    @cached_property
    def _running_sums(self) -> Collection[Equation]:
        """Sums over layers: two additions of arrays, of which one reads the result of the other.

        Sums of images that are channels last do not count.
        """
        images = self._images
        sums = {
            e
            for e in _singles(self.program)
            if e.primitive.name == "add" and all(map(self._is_whole, e.inputs)) and images.isdisjoint(e.outputs)
        }
        found = set[Equation]()
        for e in sums:
            before = {x for v in e.inputs if (x := self.single.get(self._viewed(v))) in sums}
            found |= {e, *before} if before else set()
        return found

    @cached_property
    def _images(self) -> set[Variable]:
        """The results of convolutions that are channels last, and what is computed from them element by element."""
        found = set[Variable]()
        for e in _singles(self.program):
            same = by_element(e) or _is_part(e) or e.name in (*COPIES, *POOLS_LAST)
            if e.name in IMAGES or (same and not found.isdisjoint(e.inputs)):
                found.update(e.outputs)
        return found

    def _is_whole(self, v: Variable) -> bool:
        """Whether a term is a large array, and no broadcast of a number or vector."""
        source = self.single.get(v)
        return v.size >= MIN_SIZE and not (source is not None and source.has(Trait.BROADCAST))

    def _viewed(self, v: Variable) -> Variable:
        while v in self.single and self.single[v].has(Trait.RESHAPE):
            (v,) = self.single[v].inputs
        return v


def _is_part(e: Equation) -> bool:
    """Whether an equation is a view of neighbouring elements of one value."""
    return e.has(Trait.RESHAPE) or e.has(Trait.SUBVIEW)


def _takes_epilogue(e: Equation) -> bool:
    return e.has(Trait.MATMUL) or e.has(Trait.CONVOLUTION)


def narrowed(type_: ArrayType) -> ArrayType:
    """The type of an array with bfloat16 elements."""
    return ArrayType(type_.shape, BITS)


def _form_with_argument(e: Equation) -> str | None:
    """The form whose kernels convert the argument of an equation when they load it; None for others."""
    if sums_columns(e):
        return COLUMN_SUM
    if reduces(e):
        return REDUCTION
    return ROW_FUSED if row_items(e) is not None and not e.has(Trait.MATMUL) else None


class _Converter:
    """Writes a Program in which some values are bfloat16 in memory.

    Attributes:
        bits: for each narrow value its array of bfloat16.
    """

    def __init__(self, program: Program, narrow: Collection[Variable]) -> None:
        self.before = program
        self.bits = {v: v.like(narrowed(v.type)) for v in narrow}
        for e in program.equations:  # the array exists if a product reads it
            for x in single_equations(e):
                if x.primitive.name == TO_BITS and x.inputs[0] in self.bits and (x is e or x.inputs[0] in e.outputs):
                    self.bits[x.inputs[0]] = x.outputs[0]

    def program(self) -> Program:
        equations = []
        for e in self.before.equations:
            read, written = _among(e.inputs, self.bits), _among(e.outputs, self.bits)
            if e.is_view and read:
                equations.append(replace(e, inputs=self._stored(e.inputs), outputs=self._stored(e.outputs)))
            elif not (read and e.primitive.name == TO_BITS and e.outputs[0] is self.bits[e.inputs[0]]):
                equations.append(self._equation(e, read, written) if read or written else e)
        return replace(self.before, equations=tuple(equations))

    def _stored(self, variables: Iterable[Variable]) -> tuple[Variable, ...]:
        """The variables, with the arrays of bfloat16 in place of narrow values."""
        return tuple(dict.fromkeys(self.bits.get(v, v) for v in variables))

    def _equation(self, e: Equation, read: Sequence[Variable], written: Sequence[Variable]) -> Equation:
        """An equation that reads and writes some values as bfloat16."""
        if by_element(e):
            return self._loops(e, read, written, self._stored(e.outputs))
        if e.form:
            return self._fused(e, read, written)
        if _takes_epilogue(e):
            form = PRODUCT if e.has(Trait.MATMUL) else CONVOLUTION
            return fuse(form, [e, *self._to_bits(e, written)], self._stored(e.outputs))
        if of_argument := _form_with_argument(e):
            own = {v: v.like() for v in read}
            equations = [*self._from_bits(e, own), e.renamed_inputs(own), *self._to_bits(e, written)]
            return fuse(of_argument, equations, self._stored(e.outputs))
        return _copy(e, self.bits) if e.name in COPIES else in_bfloat16(e, self.bits)

    def _loops(
        self, e: Equation, read: Sequence[Variable], written: Sequence[Variable], needed: Collection[Variable]
    ) -> Equation:
        """Loops that convert what they read and write."""
        own = {v: v.like() for v in read}
        members = (x.renamed_inputs(own) for x in (body_of(e).equations if e.form else [e]))
        return fuse(LOOPS, [*self._from_bits(e, own), *members, *self._to_bits(e, written)], needed)

    def _fused(self, e: Equation, read: Sequence[Variable], written: Sequence[Variable]) -> Equation:
        """A fused equation whose body converts what it reads and writes."""
        body = body_of(e).equations
        inside: list[Equation] = []
        own: dict[Variable, Variable] = {}
        of_product: list[Variable] = []  # results of a product that its epilogue converts
        for x in body:
            reads, writes = _among(x.inputs, read), [*of_product, *_among(x.outputs, written)]
            if e.form in (PRODUCT, CONVOLUTION, PRODUCT_SUMS) and x is body[0]:
                of_product = writes
                inside.append(x)
            elif e.form == PRODUCT_SUMS and x.form == COLUMN_SUM:  # of results of the product, as they are stored
                inside += self._to_bits(e, of_product)
                inside.append(self._equation(x, _among(x.inputs, [*read, *written]), writes))
            elif not reads and not writes:
                inside.append(x)
            elif by_element(x):
                others = {v for other in body if other is not x for v in other.inputs}
                needed = {*self._stored(x.outputs), *self._stored(writes), *_among(writes, others)}
                inside.append(self._loops(x, reads, writes, needed))
                of_product = []
            elif e.form == HORIZONTAL:
                inside.append(self._equation(x, reads, writes))
            elif e.form == GATHER:
                inside += self._transpose(x)
            else:
                new = {v: v.like() for v in reads if v not in own}
                own |= new
                inside += [*self._from_bits(e, new), x.renamed_inputs(own), *self._to_bits(e, writes)]
        return fuse(e.form, inside, self._stored(e.outputs), self._stored(e.inputs))

    def _transpose(self, e: Equation) -> Sequence[Equation]:
        """A transpose of an array of bfloat16, and the conversion of its result."""
        (x,), (y,) = e.inputs, e.outputs
        bits = y.like(narrowed(y.type))
        return [replace(e, inputs=(self.bits[x],), outputs=(bits,)), _conversion(FROM_BITS, bits, y, e)]

    def _from_bits(self, e: Equation, own: Mapping[Variable, Variable]) -> list[Equation]:
        """The conversions of narrow values to `own`, the float32 variables that an equation reads."""
        return [_conversion(FROM_BITS, self.bits[v], x, e) for v, x in own.items()]

    def _to_bits(self, e: Equation, values: Iterable[Variable]) -> list[Equation]:
        """The conversions to bfloat16 of results of an equation, if it does not write their arrays already."""
        return [_conversion(TO_BITS, v, self.bits[v], e) for v in values if self.bits[v] not in e.outputs]


def in_bfloat16(e: Equation, bits: Mapping[Variable, Variable]) -> Equation:
    """An equation of a primitive of ARRAYS with the arrays of bfloat16 in ``bits`` in place of its variables."""
    inputs, outputs = ([bits.get(v, v) for v in variables] for variables in (e.inputs, e.outputs))
    own = {v: v.like() for v in dict.fromkeys(e.inputs) if v in bits}
    before = [_conversion(FROM_BITS, bits[v], x, e) for v, x in own.items()]
    after = [_conversion(TO_BITS, v, bits[v], e) for v in e.outputs if v in bits]
    body = Program(tuple(inputs), {}, (*before, e.renamed_inputs(own), *after), tuple(outputs))
    params = {"form": e.name + BFLOAT16, "body": body}
    return Equation(fused_p, body.inputs, params, body.outputs, e.scope, e.phase)


def _copy(e: Equation, bits: Mapping[Variable, Variable]) -> Equation:
    """An equation of COPIES that reads and writes arrays of bfloat16."""
    params = {**e.params, "value": 0} if "value" in e.params else e.params
    inputs, outputs = (tuple(bits[v] for v in variables) for variables in (e.inputs, e.outputs))
    return replace(e, inputs=inputs, outputs=outputs, params=params)


def _among(variables: Iterable[Variable], those: Collection[Variable]) -> list[Variable]:
    """Those of the variables that are among others, each once and in their order."""
    return [v for v in dict.fromkeys(variables) if v in those]


def _conversion(primitive: str, v: Variable, out: Variable, beside: Equation) -> Equation:
    return Equation(PRIMITIVES[primitive], (v,), {}, (out,), beside.scope, beside.phase)
