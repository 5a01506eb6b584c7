"""The second launch of a row chain: the totals of the sums of all blocks, and the equations that follow them."""

from __future__ import annotations

from adtrain.backends.cuda.codegen.part import Part, indented, part_names
from adtrain.backends.cuda.codegen.row_chain_layout import Layout
from adtrain.backends.cuda.codegen.row_chain_plan import Following
from adtrain.codegen.elementwise import access, c_type, statements
from adtrain.core.program import Program, Variable

TOTAL_COLUMNS, TOTAL_THREADS = 32, 256
"""Elements that a block of the second launch adds, and its threads."""


def totals_part(layout: Layout, body: Program, scratch: int) -> Part:
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
        at, each = layout.offsets[total], total.size * layout.copies(total) // size  # terms in the sums of a block
        term = f"partial[(int64_t)(b / {each}) * {layout.partial} + {at} + b % {each} * {size} + column]"
        lines += [
            f"double total{i} = 0;",
            f"if (column < {size})",
            "    #pragma unroll 8",
            f"    for (int b = part; b < {layout.blocks * each}; b += {parts}) total{i} += {term};",
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
