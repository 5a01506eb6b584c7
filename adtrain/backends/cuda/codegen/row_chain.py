"""The kernels of a chain of rows: the steps of a tile of rows, and the totals of its sums.

A thread block takes tiles of rows through the steps of the plan (`row_chain_plan.py`). Warps divide a step into tiles
of 16 rows and some columns. A thread computes products and elementwise equations for its elements, in registers. Each
block writes its sums over rows to scratch memory, which stays in the L2 cache. A second launch adds the sums of all
blocks in order, and computes the equations that follow the sums.

If the texts of neighbouring steps differ only in places of shared memory, one loop computes these steps. Equal layers
have such steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, groupby

from adtrain.backends.cuda.codegen.part import Kernel, Part, indented, kernel, part_names
from adtrain.backends.cuda.codegen.row_chain_layout import STRIP, TERMS, Layout, layout_of
from adtrain.backends.cuda.codegen.row_chain_plan import (
    BEFORE,
    MAX_INLINE,
    Following,
    RowSum,
    padded,
    pitch,
    plan_chain,
    weight_pitch,
    width,
)
from adtrain.codegen.elementwise import access, c_type, element, literal, statements
from adtrain.core.kernel import WARP, Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, body_of

TOTAL_COLUMNS, TOTAL_THREADS = 32, 256
"""Elements that a block of the second launch adds, and its threads."""


def row_chain_kernels(equation: Equation, count: int, target: Target) -> list[Kernel]:
    """The launches of a chain of rows."""
    body = body_of(equation)
    plan = plan_chain(body, count)
    assert plan is not None
    layout = layout_of(plan, target)
    assert layout is not None
    part = _Writer(layout, body).part()
    kernels = [kernel("row_chain", [part], layout.threads, resident=layout.resident)]
    if plan.sums:
        kernels.append(kernel("row_chain_totals", [_totals_part(layout, body, part.scratch)], TOTAL_THREADS))
    return kernels


def _at(place: int) -> str:
    """The mark of a place in shared memory in the text of a step. `_in_loops` replaces it."""
    return f"@{place}@"


MARK = re.compile("@([0-9]+)@")
"""The text of `_at`."""


def _in_loops(steps: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """The tables and the statements of all steps, with a barrier before each.

    Steps in a row with the same text are a loop. Places that differ are in a table of the loop.
    """
    tables, lines = list[str](), list[str]()
    texts = ["\n".join(step) for step in steps]
    for text, found in groupby(texts, key=lambda text: MARK.sub("@", text)):
        places = [[int(x) for x in MARK.findall(each)] for each in found]
        differ = [k for k, each in enumerate(zip(*places, strict=True)) if len(set(each)) > 1]
        name = f"places{len(tables)}"
        names = iter([f"{name}[step][{differ.index(k)}]" if k in differ else str(n) for k, n in enumerate(places[0])])
        own = ["__syncthreads();", *re.sub("@", lambda _: next(names), text).split("\n")]  # noqa: B023
        if len(places) > 1:
            rows = ", ".join("{" + ", ".join(str(each[k]) for k in differ) + "}" for each in places)
            tables.append(f"__constant__ int {name}[{len(places)}][{len(differ)}] = {{{rows}}};")
            own = ["#pragma unroll 1", f"for (int step = 0; step < {len(places)}; step++) {{", *indented(own), "}"]
        lines += own
    return "\n".join(tables), lines


def _selected(places: Sequence[str]) -> str:
    """The pointer to the place in shared memory of a copy of a sum."""
    *others, last = places
    return "values + (" + "".join(f"copy == {i} ? {place} : " for i, place in enumerate(others)) + last + ")"


class _Writer:
    """Writes the part of the chain.

    Attributes:
        own: the body of the chain's equation. The body of the plan has other equations for the same values.
        names: the pointers to arguments and results.
        scalars: the names of the registers with arguments of one element.
    """

    def __init__(self, layout: Layout, body: Program) -> None:
        self.layout, self.plan, self.own = layout, layout.plan, body
        self.names = part_names(body.inputs, body.outputs)
        self.scalars = {v: f"k{self.names[v]}" for v in body.inputs if v in layout.plan.scalars}

    def part(self) -> Part:
        plan, layout, n = self.plan, self.layout, self.plan.count
        steps = []
        for step in range(plan.steps + 1):
            sums, block = self._sums(step), self._step(step) if step < plan.steps else []
            steps.append([*sums, *(["__syncthreads();"] if sums and block else []), *block])
        tables, lines = _in_loops([x for x in steps if x])
        lines = [
            f"constexpr int ROWS = {layout.rows};",
            "float *const shared = (float *)shared_bytes;",
            f"float *const values = shared + {layout.shared.floats};",
            "const int t = threadIdx.x, warp = t / WARP, g = t % WARP / 4, c = t % 4;",
            *self._shared_arguments(),
            *self._scratch(),
            f"for (int64_t first = (int64_t)block * ROWS; first < {n}; first += {layout.blocks} * ROWS) {{",
            f"    const int left = (int)min((int64_t)ROWS, {n} - first);",
            "    const bool begin = first == (int64_t)block * ROWS; (void)begin;",
            "    __syncthreads();",
            *indented(self._arguments()),
            *indented(lines),
            "}",
        ]
        scratch = 4 * (layout.partial + layout.kept) * layout.blocks
        headers = ("common/common.cuh", f"gemm/row_chain{'_terms' if layout.way is TERMS else ''}.cuh")
        outputs = tuple(v for v, x in self.names.items() if x.startswith("y"))
        return Part(lines, self.own.inputs, outputs, headers, tables, layout.blocks, 4 * layout.floats, scratch)

    def _shared_arguments(self) -> list[str]:
        """Statements that load the arguments which all rows share: numbers to registers, others to shared memory."""
        lines = [f"const {c_type(v.type.dtype)} {text} = *{self.names[v]};" for v, text in self.scalars.items()]
        for v, at in self.layout.shared.weights.items():
            rows, columns = v.type.shape
            kind = f"rows::load_weight<{rows}, {columns}, {weight_pitch(columns)}>"
            lines.append(f"{kind}(shared + {at}, {self.names[v]});")
        for v, at in self.layout.shared.split_weights.items():
            rows, columns = v.type.shape
            lines.append(f"row_terms::load_weight<{rows}, {columns}>(shared + {at}, {self.names[v]});")
        for v, at in self.layout.shared.vectors.items():
            lines.append(f"for (int i = t; i < {v.size}; i += THREADS) shared[{at} + i] = {self.names[v]}[i];")
        return lines

    def _arguments(self) -> list[str]:
        """Statements that copy the rows of arguments to shared memory."""
        lines = []
        for v, (place, *_) in self.plan.places.items():
            if place.begin < 0:
                kind = f"ROWS, {width(v)}"
                floats = f"rows::load_rows<{kind}, {pitch(width(v))}>"
                load = f"row_terms::load_rows<{kind}>" if self.layout.in_terms(v) else floats
                lines.append(f"{load}(values + {place.at}, {self.names[v]} + first * {width(v)}, left);")
        return lines

    def _scratch(self) -> list[str]:
        """Pointers to the sums of the block, and to its kept values."""
        layout, lines = self.layout, list[str]()
        if layout.partial:
            lines.append(f"float *const sums = (float *)own + (int64_t)block * {layout.partial};")
        if layout.kept:
            first = f"(int64_t){layout.blocks} * {layout.partial} + (int64_t)block * {layout.kept}"
            lines.append(f"float *const kept = (float *)own + {first} + t % WARP * 4;")
        return lines

    def _sums(self, step: int) -> list[str]:
        """Statements that add to the sums the addends that a step has computed."""
        lines, thread = list[str](), 0
        for total in self.plan.sums:
            addends = [
                (self.place(x, step - BEFORE), y and self.place(y, step - BEFORE))
                for at, x, y in total.addends
                if at == step
            ]
            if not addends:
                continue
            to = f"sums + {_at(self.layout.offsets[total])}"
            begin = "begin" if step == min(at for at, _, _ in total.addends) else "false"
            if self.layout.by_ones(total):
                lines += self._products(total, to, [("0", x) for x, _ in addends], begin)
            elif total.of_columns:  # sums of columns have the last warps, which have less other work
                n = total.size
                columns = [f"rows::column_sum<ROWS, {pitch(n)}>(values + {x} + column)" for x, _ in addends]
                known = f"({begin} ? 0 : *({to} + column))"
                column = f"(THREADS - 1 - t + {-thread % self.layout.threads}) % THREADS"
                lines += [
                    f"if (const int column = {column}; column < {n})",
                    f"    *({to} + column) = {' + '.join([known, *columns])};",
                ]
                thread += WARP * -(-n // WARP)
            else:
                lines += self._products(total, to, [(x, str(y)) for x, y in addends], begin)
        return [*self._clear(step), *lines] if lines else []

    def _clear(self, step: int) -> list[str]:
        """Statements that clear the rows after the last one in the values whose sums are added in a step."""
        addends = [own for total in self.plan.sums for at, *own in total.addends if at == step]
        lines = []
        for v in dict.fromkeys(v for own in addends for v in own if v is not None):
            kind = f"row_terms::clear_rows<ROWS, {padded(width(v))}>"
            if not self.layout.in_terms(v):
                kind = f"rows::clear_rows<ROWS, {pitch(width(v))}>"
            lines.append(f"{kind}(values + {self.place(v, step - BEFORE)}, left);")
        return ["if (left < ROWS) {", *indented([*lines, "__syncthreads();"]), "}"]

    def _products(self, total: RowSum, to: str, pairs: Sequence[tuple[str, str]], begin: str) -> list[str]:
        """Statements that add products of values in shared memory to a sum."""
        strips, tiles, groups = self.layout.divided(total)
        (m, n), items, copies = total.shape, strips * groups, self.layout.copies(total)
        count = len(pairs) // copies
        x, y = ([_selected([pair[i] for pair in pairs[k::count]]) for k in range(count)] for i in (0, 1))
        kind = f"rows::add_products<{count}, ROWS, {pitch(m)}, {pitch(n)}, {tiles}, {m}, {n}>"
        if self.layout.way is TERMS:
            ones = str(total.of_columns).lower()
            kind = f"row_terms::add_products<{count}, ROWS, {tiles}, {m}, {n}, {ones}>"
        return [
            f"for (int item = warp; item < {copies * items}; item += {self.layout.warps}) {{",
            f"    const int copy = item / {items}, row = item % {items} / {groups} * {STRIP};",
            f"    const int column = item % {groups} * {8 * tiles};",
            f"    const float *const x[{count}] = {{{', '.join(x)}}}, *const y[{count}] = {{{', '.join(y)}}};",
            f"    {kind}({to} + copy * {m * n}, x, y, row, column, {begin});",
            "}",
        ]

    def place(self, v: Variable, step: float) -> str:
        """Where a value is in shared memory when a step begins."""
        found = self.plan.place(v, step)
        assert found is not None
        return _at(found.at)

    def _step(self, step: int) -> list[str]:
        """Statements that compute the targets of a step."""
        lines: list[str] = []
        targets = self.plan.targets[step]
        of_products = (e.outputs[0] for e in self.plan.products.get(step, ()))
        for columns in dict.fromkeys(map(width, (*of_products, *targets))):
            of_block = [v for v in targets if width(v) == columns]
            lines += _Block(self, step, columns).lines(of_block)
        return lines

    def result(self, v: Variable) -> str | None:
        """The pointer to a value that is a result of the chain."""
        return next(
            (self.names[y] for x, y in zip(self.plan.body.outputs, self.own.outputs, strict=True) if x is v), None
        )


class _Block:
    """The code of the elements of one shape in a step: products, and the elementwise equations that read them.

    Attributes:
        own: the C text of the column of the thread's element.
        code: the statements that compute elements.
        known: the C text of each element that is computed, by its value and column.
        products: the products by each weight, transposed or not.
        earlier: the places of the kept values that it reads.
    """

    def __init__(self, writer: _Writer, step: int, columns: int) -> None:
        self.writer, self.plan, self.step, self.columns = writer, writer.plan, step, columns
        self.own = "in" if columns > 1 else "0"
        self.code: list[str] = []
        self.known: dict[tuple[Variable, str], str] = {}
        self.products: dict[tuple[Variable, bool], list[Equation]] = {}
        self.earlier: dict[Variable, str] = {}

    def lines(self, targets: Sequence[Variable]) -> list[str]:
        """Statements that compute and store the targets."""
        writer, n = self.writer, self.columns
        strips = writer.layout.rows // STRIP
        tiles, groups = writer.layout.division(n)
        stores, held, factors = list[str](), list[str](), list[str]()
        for v in targets:
            value = self.at(v, self.own)
            for place in self.plan.places.get(v, ()):
                if place.begin == self.step:
                    inside = value if n % 8 == 0 else f"column < {n} ? {value} : 0"
                    if writer.layout.in_terms(v):
                        kind = f"row_terms::store<ROWS, {padded(n)}>(values + {_at(place.at)}"
                        stores.append(f"factor{len(factors)}[k] = {inside};")
                        factors.append(f"{kind}, row, first_column, factor{len(factors)}[0], factor{len(factors)}[1]);")
                        continue
                    test = "" if n > MAX_INLINE else f"if (column < {n}) "
                    stores.append(f"{test}values[{_at(place.at)} + row * {pitch(n)} + column] = {inside};")
            if v in self.plan.kept and self.plan.level[v] == self.step:
                stores.append(f"later{len(held)}.lane[2 + k] = {value};")
                held.append(f"store(kept + {_at(self.plan.kept[v].at)}, place, later{len(held)});")
            pointer = writer.result(v)
            if pointer is not None and self.plan.level[v] == self.step:
                test = "row < left" if n % 8 == 0 else f"row < left && column < {n}"
                stores.append(f"if ({test}) {pointer}[(first + row) * {n} + column] = {value};")
        elements = [
            "const int column = first_column + k;",
            f"const int in = {'column' if n % 8 == 0 else f'min(column, {n - 1})'}; (void)in;",
            *self.code,
            *stores,
        ]
        from_j = f"(item * {tiles} + j) * {4 * WARP}"
        loads = [
            f"for (int j = 0; j < {tiles}; j++) earlier{i}[j] = load<float, 4>(kept + {place} + {from_j});"
            for i, place in enumerate(self.earlier.values())
        ]
        of_item = [
            f"const int strip = item / {groups} * {STRIP}, tile = item % {groups} * {8 * tiles};",
            *(f"Vector<float, 4> earlier{i}[{tiles}];" for i in range(len(self.earlier))),
            *loads,
            *self._multiply(tiles),
            "#pragma unroll",
            f"for (int j = 0; j < {tiles}; j++) {{",
            "    const int first_column = tile + 8 * j + 2 * c;",
            *(f"    Vector<float, 4> later{i};" for i in range(len(held))),
            "    #pragma unroll 1",
            "    for (int half = 0; half < 2; half++) {",
            "        const int row = strip + g + half * 8;",
            *(f"        float factor{i}[2];" for i in range(len(factors))),
            *(f"        rows::advance(later{i}.lane);" for i in range(len(held))),
            "        #pragma unroll",
            "        for (int k = 0; k < 2; k++) {",
            *(f"            {line}" for line in elements),
            "        }",
            *(f"        {line}" for line in factors),
            *(f"        for (auto &x : {self._name(*of)}) rows::advance(x[j]);" for of in self.products),
            *(f"        rows::advance(earlier{i}[j].lane);" for i in range(len(self.earlier))),
            "    }",
            *([f"    const int place = {from_j};"] if held else []),
            *(f"    {line}" for line in held),
            "}",
        ]
        head = f"for (int item = warp; item < {strips * groups}; item += {writer.layout.warps}) {{"
        return [head, *indented(of_item), "}"]

    def _multiply(self, tiles: int) -> list[str]:
        """Statements that compute the products. Those by one weight share its fragments."""
        lines = []
        for (weight, transposed), equations in self.products.items():
            name, count, k = self._name(weight, transposed), len(equations), width(equations[0].inputs[0])
            places = [self.writer.place(e.inputs[0], self.step) for e in equations]
            n, flag = weight.type.shape[1], str(transposed).lower()
            if self.writer.layout.way is TERMS:
                factors, at = [f"values + {at}" for at in places], _at(self.writer.layout.shared.split_weights[weight])
                whole = padded(weight.type.shape[0] if transposed else n)
                kind = f"row_terms::multiply<{count}, ROWS, {padded(k)}, {whole}, {flag}, {tiles}>"
                arguments = f"{name}, factors, strip, shared + {at}, tile"
            else:
                factors = [f"values + {at} + strip * {pitch(k)}" for at in places]
                at = _at(self.writer.layout.shared.weights[weight])
                kind = f"rows::multiply<{count}, {padded(k)}, {pitch(k)}, {weight_pitch(n)}, {flag}, {tiles}>"
                arguments = f"{name}, factors, shared + {at}, tile"
            lines += [
                f"float {name}[{count}][{tiles}][4];",
                "{",
                f"    const float *const factors[{count}] = {{{', '.join(factors)}}};",
                f"    {kind}({arguments});",
                "}",
            ]
        return lines

    def _product(self, e: Equation) -> str:
        """The text of the element of a product."""
        weight, transposed = e.inputs[1], bool(e.params["transpose_b"])
        own = self.products.setdefault((weight, transposed), [])
        own.append(e)
        return f"{self._name(weight, transposed)}[{len(own) - 1}][j][k]"

    def _name(self, weight: Variable, transposed: bool) -> str:
        """The name of the products by a weight."""
        return f"products{list(self.products).index((weight, transposed))}"

    def at(self, v: Variable, column: str) -> str:
        """The C text of the element of a value in a column. The statements that compute it are written first."""
        if v not in self.plan.level:
            return self._shared(v, column)
        column = "0" if width(v) == 1 else column
        key = v, column
        if key not in self.known:
            self.known[key] = self._computed(v, column)
        return self.known[key]

    def _shared(self, v: Variable, column: str) -> str:
        """The element of an argument that all rows share."""
        if v in self.writer.scalars:
            return self.writer.scalars[v]
        if v in self.writer.layout.shared.vectors:
            return f"shared[{_at(self.writer.layout.shared.vectors[v])} + {column}]"
        return f"{self.writer.names[v]}[{column}]"

    def _computed(self, v: Variable, column: str) -> str:
        plan = self.plan
        place = plan.place(v, self.step)
        if place is not None and self.writer.layout.in_terms(v):
            kind = f"row_terms::element<ROWS, {padded(width(v))}>"
            return self._named(v, f"{kind}(values + {_at(place.at)}, row, {column})")
        if place is not None:
            return self._named(v, f"values[{_at(place.at)} + row * {pitch(width(v))} + {column}]")
        if v in plan.kept and plan.level[v] < self.step and width(v) == self.columns and column == self.own:
            number = list(self.earlier).index(v) if v in self.earlier else len(self.earlier)
            self.earlier[v] = _at(plan.kept[v].at)
            return self._named(v, f"earlier{number}[j].lane[k]")
        if plan.level[v] < 0:
            return self._named(v, f"{self.writer.names[v]}[(first + min(row, left - 1)) * {width(v)} + {column}]")
        e = plan.producer[v]
        if plan.is_product(e):
            return self._product(e)
        if e.has(Trait.MATMUL):
            return self._named(v, self._inline_product(e, column))
        if e.has(Trait.RESHAPE):
            return self.at(e.inputs[0], column)
        if e.name in _MOVED:
            return self._named(v, _MOVED[e.name](self, e, column))
        if e.name == "full":
            return self._named(v, literal(e.params["value"]))
        own = [self.at(x, column) for x in e.inputs]
        return own[0] if e.name == "broadcast_to" else self._named(v, element(e, own))

    def _named(self, v: Variable, text: str) -> str:
        name = f"t{len(self.known)}"
        self.code.append(f"const {c_type(v.type.dtype)} {name} = {text};")
        return name

    def _inline_product(self, e: Equation, column: str) -> str:
        a, b = e.inputs
        at, length = _at(self.writer.layout.shared.weights[b]), weight_pitch(b.type.shape[1])
        text = ""
        for k in range(width(a)):
            place = f"{column} * {length} + {k}" if e.params["transpose_b"] else f"{k * length} + {column}"
            x, w = self.at(a, str(k)), f"shared[{at} + {place}]"
            text = f"fma({x}, {w}, {text})" if text else f"{x} * {w}"
        return text


def _concatenated(block: _Block, e: Equation, column: str) -> str:
    ends = [*accumulate(map(width, e.inputs))]
    if column.isdigit():
        piece = next(i for i, end in enumerate(ends) if int(column) < end)
        return block.at(e.inputs[piece], str(int(column) - ends[piece] + width(e.inputs[piece])))
    own = [f"min(max({column} - {end - width(v)}, 0), {width(v) - 1})" for v, end in zip(e.inputs, ends, strict=True)]
    *first, last = (block.at(v, at) for v, at in zip(e.inputs, own, strict=True))
    return "".join(f"{column} < {end} ? {value} : " for value, end in zip(first, ends, strict=False)) + last


def _axis(v: Variable) -> int:
    """The axis of the columns."""
    return next((i for i, n in enumerate(v.type.shape) if i and n != 1), len(v.type.shape) - 1)


def _sliced(block: _Block, e: Equation, column: str) -> str:
    axis = _axis(e.inputs[0])
    start, step = e.params["starts"][axis], e.params["steps"][axis]
    place = str(start + int(column) * step) if column.isdigit() else f"({start} + {column} * {step})"
    return block.at(e.inputs[0], place)


def _padded(block: _Block, e: Equation, column: str) -> str:
    (v,), axis = e.inputs, _axis(e.outputs[0])
    low, gap = e.params["low"][axis], e.params["gaps"][axis] + 1
    n, value = width(v), literal(e.params["value"])
    if column.isdigit():
        at, rest = divmod(int(column) - low, gap)
        return block.at(v, str(at)) if rest == 0 and 0 <= at < n else value
    inside = block.at(v, f"min(max(({column} - {low}) / {gap}, 0), {n - 1})")
    test = f"{column} >= {low} && {column} <= {low + (n - 1) * gap} && ({column} - {low}) % {gap} == 0"
    return f"({test} ? {inside} : {value})"


_MOVED = {"concatenate": _concatenated, "slice": _sliced, "pad": _padded}
"""By primitive name: the text of an element of the result."""


def _totals_part(layout: Layout, body: Program, scratch: int) -> Part:
    """The second launch: the totals over all blocks, and the equations after them."""
    plan = layout.plan
    names = part_names(body.inputs, body.outputs)
    first, lines = 0, list[str]()
    for i, group in enumerate(plan.groups):
        size = group.sums[0].result.size
        blocks = -(-size // TOTAL_COLUMNS)
        lines.append(f"{'else ' if i else ''}if (block < {first + blocks}) {{")
        lines += indented(_group_lines(layout, body, names, group, first))
        lines.append("}")
        first += blocks
    needed = {v for group in plan.groups for e in group.after for v in e.inputs}
    inputs = tuple(v for v in body.inputs if v in needed)
    outputs = tuple(y for x, y in zip(plan.body.outputs, body.outputs, strict=True) if x not in plan.level)
    renames = part_names(inputs, outputs)
    lines = [
        f"__shared__ double parts[{TOTAL_THREADS // TOTAL_COLUMNS}][{TOTAL_COLUMNS}];",
        f"const int t = threadIdx.x, lane = t % {TOTAL_COLUMNS}, part = t / {TOTAL_COLUMNS};",
        "const float *const partial = (const float *)own;",
        *(f"const {c_type(v.type.dtype)} *const a{names[v]} = {renames[v]};" for v in inputs),
        *(f"{c_type(v.type.dtype)} *const a{names[v]} = {renames[v]};" for v in outputs),
        *lines,
    ]
    return Part(lines, inputs, outputs, blocks=first, scratch=scratch)


def _group_lines(layout: Layout, body: Program, names: dict[Variable, str], group: Following, first: int) -> list[str]:
    """Statements of the blocks that add some sums of one shape, and compute what follows."""
    sums, after = group.sums, group.after
    shape, size = sums[0].result.type.shape, sums[0].result.size
    parts = TOTAL_THREADS // TOTAL_COLUMNS
    lines = [f"const int column = (block - {first}) * {TOTAL_COLUMNS} + lane;"]
    values: dict[Variable, str] = {}
    for i, total in enumerate(sums):
        at, each = layout.offsets[total], total.size * layout.copies(total) // size  # addends in the sums of a block
        addend = f"partial[(int64_t)(b / {each}) * {layout.partial} + {at} + b % {each} * {size} + column]"
        lines += [
            f"double total{i} = 0;",
            f"if (column < {size})",
            "    #pragma unroll 8",
            f"    for (int b = part; b < {layout.blocks * each}; b += {parts}) total{i} += {addend};",
            *(["__syncthreads();"] if i else []),
            f"parts[part][lane] = total{i};",
            "__syncthreads();",
            f"total{i} = 0;",
            f"for (int i = 0; i < {parts}; i++) total{i} += parts[i][lane];",
        ]
        values[total.result] = f"(float)total{i}"
    outputs = [(x, y) for x, y in zip(layout.plan.body.outputs, body.outputs, strict=True)]
    made = {v for e in after for v in e.outputs} | {total.result for total in sums}
    own = [(x, y) for x, y in outputs if x in made]
    arguments = [v for v in dict.fromkeys(v for e in after for v in e.inputs) if v not in made]
    inputs = (*(total.result for total in sums), *arguments)
    program = Program(inputs, {}, tuple(after), tuple(x for x, _ in own))
    for v in arguments:
        place = access(v.type.shape, shape, ("column", len(shape))).place if shape else "0"
        values[v] = f"a{names[v]}[{place}]"
    store = statements(program, values, [f"a{names[y]}[column]" for _, y in own])
    return [*lines, f"if (part == 0 && column < {size}) {{", *indented(store), "}"]
