"""The places of a program's values in one array."""

from __future__ import annotations

from adtrain.core.program import Variable
from adtrain.export.c.writer import Buffer, Call, Program
from adtrain.passes.arena import Arena


class Memory:
    """Where each buffer is in an array of `size` bytes: `start` is its first byte, a multiple of 4.

    Values that are not alive at the same time share bytes. A result that may overwrite an argument does so if the
    argument is not read again.
    """

    def __init__(self, program: Program, last: Buffer, kept: Buffer | None = None) -> None:
        """`last` is read after the last call, and so is `kept`."""
        calls = program.calls
        owner = _owners(calls, {last, kept})
        born: dict[Buffer, int] = {}
        ends: dict[Buffer, int] = {}
        for i, call in enumerate(calls):
            for buffer in (*call.reads, *call.writes):
                born.setdefault(owner.get(buffer, buffer), i)
                ends[owner.get(buffer, buffer)] = i
        for result in (last, kept):
            if result is not None:
                ends[owner.get(result, result)] = len(calls)
        arena, roots = Arena(), list(born)
        for number, buffer in enumerate(roots):
            arena.add(number, buffer.nbytes, born[buffer], ends[buffer])
        offsets: dict[Variable | int, int] = arena.offsets()
        at = {buffer: offsets[number] for number, buffer in enumerate(roots)}
        self.start = {**at, **{buffer: at[root] for buffer, root in owner.items()}}
        self.size = arena.size(offsets)


def _owners(calls: list[Call], read_after: set[Buffer | None]) -> dict[Buffer, Buffer]:
    """The results that overwrite an argument; each with the buffer whose memory it uses."""
    owner: dict[Buffer, Buffer] = {}
    last_use = {buffer: i for i, call in enumerate(calls) for buffer in (*call.reads, *call.writes)}
    protected = {x for x in read_after if x is not None}
    for i, call in enumerate(calls):
        if not call.in_place or not call.writes:
            continue
        source, target = call.reads[0], call.writes[0]
        if (
            last_use[source] == i
            and source not in protected
            and source.nbytes == target.nbytes
            and source is not target
        ):
            owner[target] = owner.get(source, source)
    return owner
