"""C for sums over items. Threads sum parts of the items; then they add the sums of the parts, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adtrain.backends.cpu.codegen.slices import Slices
from adtrain.backends.cpu.codegen.text import Writer
from adtrain.backends.cpu.forms.batchwise import sums_items
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.program import LOOPS, Equation, Program, Variable
from adtrain.passes.arena import aligned_to_cache_line
from adtrain.passes.places import nbytes

PARTS, PARTS_OF_LARGE = 16, 8
"""Parts of a sum over items, in general and of LARGE_SUM bytes or more."""
BLOCK_ADDITIONS = 64
"""Additions to a part in the type of the sum: one for each step, the items or the slice that are computed at once."""
LARGE_SUM = 1 << 20
TOTAL_BYTES = 8
"""Bytes of an element of a part's total: double or int64_t."""


def _sums(body: Program) -> list[Equation]:
    return [e for e in body.equations if e.form != LOOPS and sums_items(e)]


def _most_parts(equation: Equation) -> int:
    return PARTS if sum(map(nbytes, equation.outputs)) < LARGE_SUM else PARTS_OF_LARGE


class SumsOverItems:
    """Sums in parts: the memory of a part, and the loops that compute and add the parts.

    A part of many steps is divided into blocks. Its memory holds the totals, in double, then the sums of one block.
    A part of few steps is one block, and its totals are the sums of the block.

    Attributes:
        blocks: whether parts are divided into blocks.
        block_at: byte of a part at which the sums of a block begin; these have `size` bytes.
        sum_at: byte of each sum among the sums of a block.
        total_at: byte of each total in a part.
        stride: bytes of a part.
    """

    def __init__(self, writer: Writer, body: Program, steps: int, workspace: str, slices: Slices) -> None:
        self.writer, self.steps, self.workspace = writer, steps, workspace
        self.slices = slices
        self.block_steps = max(1, BLOCK_ADDITIONS // slices.count) if slices.adds else BLOCK_ADDITIONS
        self.parts = min((min(_most_parts(e), max(steps, 1)) for e in _sums(body)), default=0)
        self.blocks = steps > self.parts * self.block_steps
        self.sum_at: dict[Variable, int] = {}
        self.total_at: dict[Variable, int] = {}
        self.size = totals = 0
        for e in _sums(body):
            for v in e.outputs:
                self.sum_at[v], self.total_at[v] = self.size, totals if self.blocks else self.size
                self.size += aligned_to_cache_line(nbytes(v))
                totals += aligned_to_cache_line(TOTAL_BYTES * v.size)
        self.block_at = totals if self.blocks else 0
        self.stride = self.block_at + self.size

    @property
    def nbytes(self) -> int:
        return self.parts * self.stride

    def addresses(self) -> dict[Variable, str]:
        """The address of each sum in a block. Of a value of a slice, the address of the slice's elements."""
        found = {v: f"({pointer(v)})(part + {self.block_at + at})" for v, at in self.sum_at.items()}
        return {
            v: f"({found[whole]} + slice * {self.slices.steps[v]})" if v in self.slices.steps else found[whole]
            for v, whole in self.slices.whole.items()
            if whole in found
        }

    def _total(self, v: Variable) -> str:
        """The C type of the totals of a sum."""
        return "double" if self.blocks and v.type.dtype.kind == "f" else c_type(v.type.dtype)

    def _summed_steps(self, starts: Sequence[str], inside: Sequence[str], ends: Sequence[str]) -> list[str]:
        """C that sums the steps `first` to `last` - 1 of a part."""
        add = [*starts, "for (int64_t n = first; n < last; n++) {", *(f"    {line}" for line in inside), "}", *ends]
        if not self.blocks:
            return [f"memset(part, 0, {self.size});", *add]
        lines = [f"memset(part, 0, {self.block_at});", "const int64_t part_end = last;"]
        lines += [f"for (; first < part_end; first += {self.block_steps}) {{"]
        lines += [f"    memset(part + {self.block_at}, 0, {self.size});"]
        lines += [f"    last = first + {self.block_steps} < part_end ? first + {self.block_steps} : part_end;"]
        lines += [f"    {line}" for line in add]
        for v, at in self.sum_at.items():
            block = f"({pointer(v)})(part + {self.block_at + at})"
            total = f"({self._total(v)} *)(part + {self.total_at[v]})"
            lines.append(f"    {self._add_block(v)}({block}, {total}, {v.size});")
        return [*lines, "}"]

    def _add_block(self, v: Variable) -> str:
        """A function that adds the sums of a block to the totals."""
        parameters = f"{pointer(v, const=True)}x, {self._total(v)} *total, int64_t size"
        return self.writer.function("add_block", parameters, ["for (int64_t i = 0; i < size; i++) total[i] += x[i];"])

    def _add_parts(self, v: Variable) -> str:
        """A function of the team that adds the totals of the parts, which begin at x."""
        total = self._total(v)
        lines = [
            "int64_t begin, end;",
            "my_cache_lines(team, size, &begin, &end);",
            "for (int64_t i = begin; i < end; i++) {",
            f"    {total} sum = ((const {total} *)x)[i];",
            f"    for (int64_t p = 1; p < {self.parts}; p++) sum += ((const {total} *)(x + p * stride))[i];",
            "    y[i] = sum;",
            "}",
        ]
        parameters = f"const Team *team, const char *x, int64_t stride, {pointer(v)}y, int64_t size"
        return self.writer.function("add_parts", parameters, lines)

    def lines(
        self, starts: Sequence[str], inside: Sequence[str], ends: Sequence[str], place: Callable[[Variable], str]
    ) -> list[str]:
        """C for the parts, to which `inside` adds one step, and for the sums of the parts.

        Args:
            starts: C before the first step of a part or block.
            ends: C after the last one.
        """
        lines = [
            "#pragma omp for schedule(dynamic, 1) nowait",
            f"for (int64_t p = 0; p < {self.parts}; p++) {{",
            f"    char *part = {self.workspace} + p * {self.stride};",
            f"    int64_t first = {self.steps} * p / {self.parts}, last = {self.steps} * (p + 1) / {self.parts};",
            *(f"    {line}" for line in self._summed_steps(starts, inside, ends)),
            "}",
            "#pragma omp barrier",
        ]
        for v, at in self.total_at.items():
            arguments = f"team, {self.workspace} + {at}, {self.stride}, {place(v)}, {v.size}"
            lines.append(f"{self._add_parts(v)}({arguments});")
        return lines
