"""One-block fusion: small equations that depend on one another run in one thread block, without launches in between.

Examples: the sum of the loss, the count of correct answers, schedules, the optimizer's scalars, the gradients of small
biases and their updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from adtrain.core.fused import ONE_BLOCK
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import MAX_EQUATIONS, Groups

BY_INDEX = frozenset(("take", "take_along_axis", "scatter_along_axis", "one_hot"))
FORMS = BY_INDEX | {"sum", "max", "min", "softmax", "log_softmax", "argmax", "concatenate", "transpose", "slice"}
"""The primitives that the generator of one-block kernels has code for, besides elementwise ones and reshapes."""

MAX_STEPS = 8 << 10
"""Maximum steps of a small equation: elements that are visited one after another. On an H200 a launch costs about 2 us,
as much as 8 elements for each of 1024 threads if the threads wait for every element."""
LOADS_IN_FLIGHT, VECTOR = 4, 4
"""Elements of a sum that a thread loads at once: of one sum, or of neighbouring sums."""


class OneBlockFusion(Fusion):
    """Each connected group of small equations between the same large ones.

    A small equation that reads the reshape of a small one's result computes the reshape itself.
    """

    form = ONE_BLOCK
    limit = MAX_EQUATIONS

    def copied(self, producer: Equation, reader: Equation) -> bool:
        return is_small(reader) and self._is_between(producer, reader)

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        same_depth = self.depths[producer] == self.depths[reader]
        return same_depth and all(self._is_member(groups.equations[i]) for i in (producer, reader))

    def _is_member(self, e: Equation) -> bool:
        return is_small(e) or any(is_small(reader) and self._is_between(e, reader) for reader in self._readers(e))

    def _is_between(self, view: Equation, reader: Equation) -> bool:
        """Whether an equation is a reshape of a small equation's result, at the depth of a reader."""
        source = self.producer.get(view.inputs[0]) if view.has(Trait.RESHAPE) else None
        return source is not None and is_small(source) and self.depth_of[source] == self.depth_of[reader]

    def _readers(self, e: Equation) -> Sequence[Equation]:
        return self.program.readers.get(e.outputs[0], ())

    @cached_property
    def depths(self) -> Sequence[int]:
        return depths(self.program)

    @cached_property
    def depth_of(self) -> Mapping[Equation, int]:
        return dict(zip(self.program.equations, self.depths, strict=True))

    @cached_property
    def producer(self) -> Mapping[Variable, Equation]:
        return {v: e for e in self.program.equations for v in e.outputs}


def is_small(equation: Equation) -> bool:
    """Whether one thread block computes it in less time than a launch takes."""
    e = equation
    if not by_element(e) and e.primitive.name not in FORMS:
        return False
    if not all(v.size for v in (*e.inputs, *e.outputs)):
        return False
    return _steps(e) <= MAX_STEPS


def _steps(equation: Equation) -> int:
    """The number of elements that are visited one after another."""
    e = equation
    size, shape = e.inputs[0].size if e.inputs else 0, e.inputs[0].type.shape if e.inputs else ()
    if e.has(Trait.REDUCTION):
        last = max((i for i, n in enumerate(shape) if n > 1), default=0)
        return size // LOADS_IN_FLIGHT // (1 if last in e.params["axes"] else VECTOR)
    if e.primitive.name == "argmax":
        return size
    if e.primitive.name == "scatter_along_axis":
        return e.outputs[0].size * shape[e.params["axis"]]
    return e.outputs[0].size


def depths(program: Program) -> list[int]:
    """For each equation the minimum number of launches before it. Small and `one_block` equations do not count."""
    after: dict[Variable, int] = {}
    found = []
    for e in program.equations:
        found.append(max((after.get(v, 0) for v in e.inputs), default=0))
        launch = not (is_small(e) or e.has(Trait.RESHAPE) or e.form == ONE_BLOCK)
        after |= dict.fromkeys(e.outputs, found[-1] + launch)
    return found
