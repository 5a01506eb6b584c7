"""Reductions: a sum, maximum or minimum over any axes with the elementwise equations that compute its argument.

Examples: the mean of the squares of a large array, and a gradient by a factor that was broadcast. The kernels of
`reduce/reduce.cu` compute an element of the argument where they would load it, so that it is never stored.

The pass `split_reductions` makes two of a reduction over rows and other axes: one along the rows, and one of its
results. Example: images are scaled by channel. The loss is a sum over all their elements, and the gradient of a scale
is the sum over a channel. The first sum is split. Then one `row_fused` kernel computes both sums along rows of H x W
elements, and reads the images once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import OPTIONS, Kernel, indented
from adtrain.backends.cuda.codegen.register_rows import ROW, Rows
from adtrain.backends.cuda.compiler import Source, of_kernel
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.column_sum import sums_columns
from adtrain.backends.cuda.forms.one_block import is_small
from adtrain.backends.cuda.forms.row_fused import row_items, rows_in_registers
from adtrain.backends.cuda.forms.thread_items import items_of_threads
from adtrain.backends.cuda.launch_plan import launch_source, with_definitions
from adtrain.codegen.elementwise import access, pointer, read, vector_results
from adtrain.core.axes import row_axes
from adtrain.core.kernel import CudaLaunch, Target
from adtrain.core.primitive import Trait
from adtrain.core.program import LOOPS, Equation, Program, Variable, arguments_of, body_of, fuse, renamed
from adtrain.core.staging import Pass, Results, keeps
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.reduce import ARGMAX, COMBINE, MAX, MIN, SUM, VECTOR
from adtrain.lowering.cuda.reduce import reduction as candidates
from adtrain.passes.fusion import Fusion, by_element, reads_by_element
from adtrain.passes.groups import MAX_EQUATIONS, Groups
from adtrain.passes.simplify import needed_for, remove_dead_code

REDUCTION = "reduction"
"""A sum, maximum or minimum over any axes of what elementwise equations compute. What they compute is never stored."""
OPERATIONS = {"sum": SUM, "max": MAX, "min": MIN, "argmax": ARGMAX}


@keeps(Results.EXACT)
def compute_arguments(program: Program) -> Program:
    """Give a reduction a copy of the equations that compute its argument, if fewer bytes are read and written then.

    Sums over the rows of a matrix get one too, for `column_sum`.
    """
    return _Arguments(program).program()


class ReductionFusion(Fusion):
    """A sum, maximum or minimum over any axes, and the loops that compute its argument.

    Reductions of small items are left to `thread_items`, of narrow rows to `row_fused`, and small ones to `one_block`.
    """

    form = REDUCTION
    limit = MAX_EQUATIONS

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return not target.by_member  # the kernels of files compute one member

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        source, e = groups.equations[producer], groups.equations[reader]
        if not any(map(_is_large, groups.group_of(reader))) or any(map(_is_large, groups.group_of(producer))):
            return False
        # All loops have the shape of the argument: a reshape stands between the last ones and the reduction.
        by_one = by_element(e) and not source.has(Trait.RESHAPE) and reads_by_element(e, value)
        return (by_one or e.has(Trait.RESHAPE) or _is_large(e)) and self._is_own(groups, source)

    def _is_own(self, groups: Groups, source: Equation) -> bool:
        """Whether loops, or a reshape of their result, compute a value for one equation."""
        if len(source.outputs) > 1 or self.readers[source.outputs[0]] > 1 or not source.inputs:
            return False
        if source.has(Trait.RESHAPE):
            (x,) = source.inputs
            return x in groups.producer and self._is_own(groups, groups.equations[groups.producer[x]])
        return by_element(source) and not self.arguments.joins_product(source)

    @cached_property
    def arguments(self) -> _Arguments:
        return _Arguments(self.program)


def _is_large(e: Equation) -> bool:
    """Whether it is a reduction that `reduces` accepts, and `column_sum` does not compute."""
    return reduces(e) and not sums_columns(e)


def reduces(e: Equation) -> bool:
    """Whether it is a reduction that `one_block`, `row_fused` and `thread_items` do not compute."""
    known = e.primitive.name in OPERATIONS and all(v.size for v in (*e.inputs, *e.outputs))
    return known and not is_small(e) and row_items(e) is None and items_of_threads(e) is None


class _Arguments:
    """The arguments of the large reductions of a Program, and the elementwise equations that compute them."""

    def __init__(self, program: Program) -> None:
        self.before = program
        self.position = {v: i for i, e in enumerate(program.equations) for v in e.outputs}
        self.loops = {i: _members(e) for i, e in enumerate(program.equations) if by_element(e)}

    def program(self) -> Program:
        """The Program with copies of equations for the reductions of what they compute, where these save bytes."""
        program, copies = self.before, dict[Equation, Equation]()
        for x in dict.fromkeys(e.inputs[0] for e in program.equations if reduces(e)):
            part = self._part(x)
            reductions = [e for e in program.readers[x] if reduces(e)]
            if part is not None and arguments_of(part) and self._saves(x, part, reductions):
                copies |= {e: _copied(part, x) for e in reductions}
        if not copies:
            return program
        equations: list[Equation] = []
        for e in program.equations:
            own = copies.get(e)
            equations += [e] if own is None else [own, renamed(e, {e.inputs[0]: own.outputs[0]})]
        return remove_dead_code(_without_unread_results(replace(program, equations=tuple(equations))))

    def joins_product(self, e: Equation) -> bool:
        """Whether it can become the epilogue of a product, or compute with rows that its kernel reads by index."""
        return any(map(self._is_of_product, e.inputs))

    def _is_of_product(self, v: Variable) -> bool:
        """Whether a value is a product, or gathered rows, for one reader."""
        if v not in self.position or len(self.before.readers[v]) > 1 or v in self.before.outputs:
            return False
        source = self.before.equations[self.position[v]]
        traits = (Trait.MATMUL, Trait.CONVOLUTION, Trait.GATHER)
        return any(x.has(trait) for x in body_of(source).equations for trait in traits)

    def _saves(self, x: Variable, part: Sequence[Equation], reductions: Sequence[Equation]) -> bool:
        """Whether fewer bytes are read and written if each of the reductions computes `x` itself."""
        source = self.before.equations[self.position[x]]
        stored = x in self.before.outputs or len(self.before.readers[x]) > len(reductions)
        spared = x.nbytes * (len(reductions) + (not stored))
        if not stored and len(source.outputs) == 1:
            if len(reductions) == 1 and set(part) == set(self._cone(x) or ()):
                return False  # it is the only reader, and joins without a copy
            spared += sum(v.nbytes for v in arguments_of(part) if v in source.inputs)
        elif not stored and self.joins_product(source):
            others = needed_for([v for v in source.outputs if v is not x], self.loops[self.position[x]])
            spared += sum(v.nbytes for v in arguments_of(part) if v in source.inputs and v not in arguments_of(others))
        return len(reductions) * self._read(part) < spared

    def _part(self, x: Variable) -> list[Equation] | None:
        """The equations that compute `x` from values in memory, such that they read the fewest bytes."""
        part = self._cone(x)
        while part is not None:
            for v in sorted(arguments_of(part), key=lambda v: -v.nbytes):
                cone = self._cone(v) if v.type.shape == x.type.shape else None
                if cone is not None:
                    more = sorted({*part, *cone}, key=self.order.__getitem__)
                    if len(more) <= MAX_EQUATIONS and self._read(more) < self._read(part):
                        part = more
                        break
            else:
                return part
        return None

    @cached_property
    def order(self) -> dict[Equation, tuple[int, int]]:
        return {e: (i, k) for i, members in self.loops.items() for k, e in enumerate(members)}

    def _cone(self, x: Variable) -> list[Equation] | None:
        """The equations on which `x` depends in the loops that compute it; None if no loops compute it."""
        i = self.position.get(x)
        if i is None or i not in self.loops:
            return None
        if not self.joins_product(self.before.equations[i]):
            return needed_for([x], self.loops[i])
        return self._after_product(x, self.before.equations[i], self.loops[i])

    def _after_product(self, x: Variable, epilogue: Equation, members: Sequence[Equation]) -> list[Equation] | None:
        """The equations that compute `x` from other results of a product's epilogue, which are stored; None if it also
        needs the product."""
        kept = {v for v in epilogue.outputs if v is not x and self._is_stored(v)}
        part = needed_for([x], [e for e in members if kept.isdisjoint(e.outputs)])
        return part if part and not any(map(self._is_of_product, arguments_of(part))) else None

    def _is_stored(self, v: Variable) -> bool:
        """Whether other equations than reductions read a value."""
        return v in self.before.outputs or any(not reduces(e) for e in self.before.readers.get(v, ()))

    def _read(self, part: Sequence[Equation]) -> int:
        """The bytes that a kernel reads for equations. Those of `_in_rows` count twice: they must be stored for it."""
        return sum(v.nbytes * (2 if self._in_rows(v) else 1) for v in arguments_of(part))

    def _in_rows(self, v: Variable) -> bool:
        """Whether a value need not be stored, because equations that work row by row compute and read it."""
        if v not in self.position or v in self.before.outputs:
            return False
        of_rows = (self.before.equations[self.position[v]], *self.before.readers[v])
        return all(row_items(e) is not None for e in of_rows)


def _members(e: Equation) -> Sequence[Equation]:
    """The elementwise equations of loops, with the variables of the Program."""
    body = body_of(e)
    names = dict(zip(body.inputs, e.inputs, strict=False)) | dict(zip(body.outputs, e.outputs, strict=True))
    changed = {v: new for v, new in names.items() if v is not new} if e.form else {}
    return [renamed(x, changed) for x in body.equations] if changed else body.equations


def _as_loops(equations: Sequence[Equation], results: Collection[Variable]) -> Equation:
    return fuse(LOOPS, equations, results) if len(equations) > 1 else equations[0]


def _copied(part: Sequence[Equation], x: Variable) -> Equation:
    """Loops that compute a copy of `x`."""
    names = {v: v.like() for e in part for v in e.outputs}
    return _as_loops([renamed(e, names) for e in part], [names[x]])


def _without_unread_results(program: Program) -> Program:
    """The Program without the results of loops that nothing reads.

    Other loops may be the only reader of what is left of such loops. Then both become one.
    """
    read, equations, cut = set(program.outputs), list[Equation](), set[Equation]()
    for e in reversed(program.equations):
        results = [v for v in e.outputs if v in read]
        if results and len(results) < len(e.outputs) and e.form == LOOPS:
            e = _as_loops(needed_for(results, _members(e)), results)
            cut.add(e)
        if results:
            read.update(e.inputs)
            equations.append(e)
    return _joined(replace(program, equations=tuple(reversed(equations))), cut)


def _joined(program: Program, cut: Collection[Equation]) -> Program:
    """The Program in which each of the loops in `cut` joins the loops that alone read its only result."""
    held: dict[Variable, Equation] = {}
    equations: list[Equation] = []
    for e in program.equations:
        joins = e in cut
        for v in e.inputs:
            if v in held:
                e, joins = _as_loops([*_members(held[v]), *_members(e)], e.outputs), True
        (v, *others), (reader, *more) = e.outputs, program.readers.get(e.outputs[0], (e,))
        alone = joins and not others and not more and v not in program.outputs
        if alone and by_element(reader) and reads_by_element(reader, v) and _fit(e, reader):
            held[v] = e
        else:
            equations.append(e)
    return replace(program, equations=tuple(equations))


def _fit(*loops: Equation) -> bool:
    return sum(len(_members(e)) for e in loops) <= MAX_EQUATIONS


def reduction_kernels(equation: Equation, target: Target) -> list[Kernel]:
    """The launches of a `reduction` equation: those of the reduction of an array, with the argument computed."""
    body = flat(body_of(equation))
    total = body.equations[-1]
    (x,), (y,) = total.inputs, total.outputs
    axes = total.params["axes"] if "axes" in total.params else (total.params["axis"],)
    chosen, *_ = candidates(target, OPERATIONS[total.name], x.type, axes, y.type.dtype)
    text = "\n".join(["#define COMPUTED_ARGUMENT", *_elements(body)])

    def source(launch: CudaLaunch) -> Source:
        found = launch_source(launch)
        return of_kernel(found if launch.name == COMBINE else with_definitions(found, text, OPTIONS), launch.name)

    return [
        Kernel(
            source(launch),
            launch.name,
            (*(body.inputs[:1] if launch.name == COMBINE else body.inputs), y),
            launch.blocks if isinstance(launch.blocks, int) else 0,
            launch.threads or 0,
            launch.shared,
            chosen.scratch or 0,
            checked=False,
            numbers=[int(n) for n in launch.numbers],
            elements=launch.elements or 0,
        )
        for launch in chosen.launches
    ]


def _elements(body: Program) -> list[str]:
    """The struct `Elements` of `reduce/accumulators.cuh`: pointers to the inputs, and the argument's elements."""
    *before, total = body.equations
    (x,) = total.inputs
    x = body.before_reshapes(x)
    program = Program(body.inputs, {}, tuple(e for e in before if not e.has(Trait.RESHAPE)), (x,))
    shape, widest = x.type.shape, VECTOR // x.type.dtype.itemsize
    loads, values = [], {}
    for n, v in enumerate(body.inputs):
        found = access(v.type.shape, shape, ("i", len(shape)))
        whole = v.size == prod(shape)
        if whole or found.run % widest == 0 or found.place == "0":
            line, values[v] = read(v, f"v{n}", f"x{n}", found.place, "N" if found.step and found.place != "0" else 1)
            loads.append(line)
        else:  # neighbours may lie in different rows of the input
            values[v] = f"x{n}[{access(v.type.shape, shape, ('(i + k)', len(shape))).place}]"
    kind = "uint32_t" if prod(shape) < 2**31 else "int64_t"
    return [
        "struct Elements {",
        *(f"    {pointer(v, const=True)}x{n};" for n, v in enumerate(body.inputs)),
        "    template <int N> __device__ __forceinline__ auto vector(int64_t first) const {",
        f"        const {kind} i = first;",
        *indented(indented([*loads, *vector_results(program, values, "N")])),
        "        return r0;",
        "    }",
        "};",
    ]


define(Form(REDUCTION, reduction_kernels, converts=True))


@keeps(Results.ROUNDING)
def split_reductions(program: Program, fuse: Pass, launch_bytes: int) -> Program:
    """Split a reduction over rows and other axes, if other equations read its rows too and so fewer bytes are moved.

    A float32 sum stays as accurate: a thread adds up to 32 elements of a row in order, the threads of the row add their
    sums in pairs, and the sums of all rows are added as in any sum.

    Args:
        fuse: the fusion pass. What its results read and write is compared.
        launch_bytes: the bytes that memory moves in the time of a launch.
    """

    def cost(program: Program) -> int:
        return sum(e.cost.bytes + launch_bytes for e in fuse(program).equations if not e.primitive.view)

    before: int | None = None
    for e, rows in _candidates(program, launch_bytes):
        split = _split(program, e, rows)
        before, after = cost(program) if before is None else before, cost(split)
        if after < before:
            program, before = split, after
    return program


def _candidates(program: Program, launch_bytes: int) -> Iterator[tuple[Equation, Rows]]:
    """Reductions that may be split, each with its rows.

    Other equations must read or compute more bytes of these rows than memory moves in the time of a launch.
    """
    held = rows_in_registers(program)
    producer = program.producer
    for e in program.equations:
        if e.primitive.name not in OPERATIONS or e in held:
            continue
        (x,) = e.inputs
        source = producer.get(x, e)
        reader = source if by_element(source) and len(program.readers[x]) == 1 else e
        for rows in dict.fromkeys(held.values()):
            arguments = (v for v in dict.fromkeys(reader.inputs) if rows.held_for(v, reader) == ROW)
            users = {v: (*program.readers[v], producer.get(v, e)) for v in arguments}
            shared = [v for v, by in users.items() if any(o not in (e, reader) and held.get(o) == rows for o in by)]
            if sum(v.nbytes for v in shared) > launch_bytes and _reduces_rows_and_others(e, rows):
                yield e, rows
                break


def _reduces_rows_and_others(e: Equation, rows: Rows) -> bool:
    """Whether an equation reduces whole rows, and other axes too."""
    shape, axes = e.inputs[0].type.shape, e.params["axes"]
    if rows.held(shape) != ROW:
        return False
    along = range(row_axes(shape, rows.count) or 0, len(shape))
    return len(axes) > len(along) and set(along) <= set(axes)


def _split(program: Program, e: Equation, rows: Rows) -> Program:
    """The Program in which a reduction is split."""
    (x,), (y,), axes = e.inputs, e.outputs, e.params["axes"]
    first = row_axes(x.type.shape, rows.count) or 0
    of_rows = x.like(ArrayType(x.type.shape[:first], y.type.dtype))
    by_row = replace(e, params={**e.params, "axes": tuple(a for a in axes if a >= first)}, outputs=(of_rows,))
    rest = replace(e, params={**e.params, "axes": tuple(a for a in axes if a < first)}, inputs=(of_rows,))
    equations = (new for old in program.equations for new in ((by_row, rest) if old is e else (old,)))
    return replace(program, equations=tuple(equations))
