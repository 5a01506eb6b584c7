"""Statements of one thread block, and how its threads divide work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from adtrain.backends.cuda.codegen.part import indented
from adtrain.core.program import Equation, Variable

WARP = 32


@dataclass(frozen=True)
class Step:
    """Statements between two barriers; they may use `t`, the thread's number.

    Attributes:
        threads: how many threads have work.
        partial: bytes, at `partial`, that this step writes for the next one.
        waits: False for asynchronous copies, which are complete after the next barrier.
        declared: declarations before all statements.
        early: statements that may run between the barriers before these, by the same threads: loads of arguments.
        loads: loads between the same barriers. They come before `lines` of all equations, which hide their latency.
    """

    lines: Sequence[str]
    threads: int
    partial: int = 0
    waits: bool = True
    declared: Sequence[str] = ()
    early: Sequence[str] = ()
    loads: Sequence[str] = ()


Names = Mapping[Variable, str]
StepRule = Callable[[Equation, Names, int], Sequence[Step]]
"""``form(equation, pointers of its variables, threads of the block)`` returns its steps."""


def loop(count: int, lines: Sequence[str], threads: int, unrolled: int = 4) -> Step:
    """`lines` for i = 0 ... count - 1, divided among the threads of the block.

    The compiler does not know how many i a thread has. If all threads have the same number, the text has it as a
    constant, so that the compiler unrolls the loop without a remainder. unrolled: the most i in a row.
    """
    if count <= threads:
        head = [f"if (const int i = t; i < {count}) {{"]
    elif count % threads == 0:
        rounds = f"for (int round = 0; round < {count // threads}; round++) {{"
        head = [f"#pragma unroll {unrolled}", rounds, "    const int i = t + round * THREADS;"]
    else:
        head = [f"#pragma unroll {unrolled}", f"for (int i = t; i < {count}; i += THREADS) {{"]
    return Step([*head, *indented(lines), "}"], count)


def lanes_for(count: int, rows: int, threads: int) -> int:
    """The lanes that share a row of `count` elements: a power of two, no more than have work."""
    most = min(1 << (count.bit_length() - 1), WARP)
    while most > 1 and rows * most > threads:
        most //= 2
    return most
