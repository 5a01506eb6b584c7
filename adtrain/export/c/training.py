"""One training step as C: the Program of `adtrain train`'s step, each equation as plain loops.

The step is the one that the CPU backend compiles, traced for a batch that the caller gives, so its gradient and its
update are those of `adtrain train`. Elementwise equations are fused into loops; products, convolutions and pooling are
functions of `kernels/export/layers_training.c`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adtrain import nn
from adtrain.codegen.expressions import c_type, literal
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import stage
from adtrain.export.c.text import statement
from adtrain.export.c.training_equations import WRITERS, Statement
from adtrain.passes import SIMPLIFY, fuse_loops, readers_first
from adtrain.passes.arena import Arena
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.places import nbytes
from adtrain.passes.plan_memory import plan_memory
from adtrain.training import Experiment
from adtrain.training.step import TrainState


class TrainingStep(NamedTuple):
    """The text of a training step.

    Attributes:
        arrays: definitions of the memory, of constants and of the optimizer's state.
        functions: loops that the step calls, and the step itself.
        library: the functions of `kernels/export/` that these call.
        batch: images of a step.
        label: the C type of labels, and labels of an image.
        memory: bytes of values, without weights and the optimizer's state.
        state: bytes of the optimizer's state.
    """

    arrays: list[str]
    functions: list[str]
    library: list[str]
    batch: int
    label: tuple[str, int]
    memory: int
    state: int


def training_step(experiment: Experiment, name: str, image_type: str) -> TrainingStep:
    """The step of an experiment, as the function `name`_train.

    Raises AdtrainError for a run in another precision than float32, for augmentations, and for a layer whose gradient
    has no C, which it names.
    """
    if experiment.config.training.precision != "float32":
        precision = experiment.config.training.precision
        raise AdtrainError(f"--training writes steps in float32, the run's precision is {precision}")
    if experiment.augmentations:
        raise AdtrainError("--training has no augmentations, and the run's config has: train without `augment`")
    if image_type == "double":
        reason = "the run's data have numbers far from 0, whose differences float32 loses"
        raise AdtrainError(f"--training takes numbers in float32, and {reason}: subtract their mean from the data")
    program, inputs = _traced(experiment)
    if refused := [(nn.layer_of(e.scope), e) for e in program.equations if not _supported(e)]:
        (layer, kind), equation = next((each for each in refused if each[0][1]), refused[0])
        place = f"layer {layer}: {kind}" if kind else layer
        raise AdtrainError(f"{place} has no training step in C ({equation.name}); leave out --training")
    return _Writer(experiment, program, inputs, name, image_type).step()


def _traced(experiment: Experiment) -> tuple[Program, list[str]]:
    """The Program, which gives the new state and the loss, and the C names of its inputs."""
    batch = experiment.full_batch
    indices = array(np.arange(batch))

    def step(state: TrainState, images: Value, labels: Value) -> tuple[TrainState, Value]:
        new, metrics = experiment.eager_step(state, experiment.seed("cpu"), images, labels, indices)
        return new, metrics.loss

    state = experiment.random_initial_state("cpu")
    examples = experiment.train
    images, labels = (array(np.zeros((batch, *x.shape[1:]), x.dtype)) for x in (examples.images, examples.labels))
    staged = stage(step, (*SIMPLIFY, fuse_loops, readers_first), donate=(0,))
    names = [f"layer_{path}" for part in (state.params, state.statistics) for path in tree.paths(part)]
    names += [f"optimizer_{path}" for path in tree.paths(state.optimizer)]
    names = [re.sub(r"\W", "_", each) for each in names]
    return staged.program(state, images, labels), [*names, "images", "labels"]


def _supported(equation: Equation) -> bool:
    return equation.has(Trait.RESHAPE) or by_element(equation) or equation.name in WRITERS


class _Writer:
    def __init__(self, experiment: Experiment, program: Program, inputs: list[str], name: str, image_type: str) -> None:
        self.experiment, self.program, self.name, self.image_type = experiment, program, name, image_type
        self.input_names = dict(zip(program.inputs, inputs, strict=True))
        self.names: dict[Variable, str] = dict(self.input_names)
        self.arrays: list[str] = []
        self.loops: dict[str, str] = {}  # name by text
        self.library: dict[str, None] = {}
        self.copies: list[tuple[Variable, Variable]] = []

    def step(self) -> TrainingStep:
        for i, (v, x) in enumerate(self.program.constants.items()):
            self.names[v] = f"constant_{i}"
            numbers = ", ".join(_literal(number) for number in x.numpy().reshape(-1))
            self.arrays.append(f"static const {c_type(v.type.dtype)} constant_{i}[{v.size}] = {{{numbers}}};")
        memory = self._place()
        state = 0
        for v, given in self.input_names.items():
            if given.startswith("optimizer_"):
                self.arrays.append(f"static {c_type(v.type.dtype)} {given}[{v.size}];")
                state += nbytes(v)
        body = [line for equation in self.program.equations for line in self._lines(equation)]
        labels = self.program.inputs[-1]
        batch = self.experiment.full_batch
        label = c_type(labels.type.dtype), labels.size // batch
        texts = [f"static void {name}{text}" for text, name in self.loops.items()]
        function = "\n".join(
            [
                f"void {self.name}_train(const {self.image_type} *images, const {label[0]} *labels, float *loss) {{",
                *map(statement, body),
                *(f"    memcpy({self.names[a]}, {self.names[b]}, {nbytes(b)});" for a, b in self.copies),
                f"    if (loss) *loss = *({self.names[self.program.outputs[-1]]});",
                "}",
            ]
        )
        return TrainingStep(self.arrays, [*texts, function], list(self.library), batch, label, memory, state)

    def _place(self) -> int:
        """Give each value a name: an input that it overwrites, or elements of an array of its type.

        Returns the bytes of these arrays.
        """
        program, in_place = self.program, plan_memory(self.program).in_place
        root: dict[Variable, Variable] = {v: v for v in self.names}
        for e in program.equations:
            for v in e.outputs:
                root[v] = root[e.inputs[0]] if e.has(Trait.RESHAPE) else in_place.get(v, v)
        last_use = {v: i for i, e in enumerate(program.equations) for v in e.inputs}
        last_use |= dict.fromkeys(program.outputs, len(program.equations))
        ends: dict[Variable, int] = {}
        for v, r in root.items():
            ends[r] = max(ends.get(r, -1), last_use.get(v, -1))
        arenas: dict[np.dtype, Arena] = {}
        numbered: list[Variable] = []
        for i, e in enumerate(program.equations):
            for v in e.outputs:
                if root[v] is v:
                    arenas.setdefault(v.type.dtype, Arena()).add(len(numbered), nbytes(v), i, max(ends.get(v, i), i))
                    numbered.append(v)
        total = 0
        for dtype, arena in arenas.items():
            offsets = arena.offsets()
            size = arena.size(offsets)
            total += size
            array_name = f"train_{dtype.name}"
            self.arrays.append(f"static {c_type(dtype)} {array_name}[{size // dtype.itemsize}];")
            for request in arena.requests:
                assert isinstance(request.key, int)
                self.names[numbered[request.key]] = f"{array_name} + {offsets[request.key] // dtype.itemsize}"
        for v, r in root.items():
            self.names[v] = self.names[r]
        state = [v for v in program.inputs if v in program.donated]
        for v, out in zip(state, program.outputs, strict=False):
            if root[out] is not v:
                self.copies.append((v, out))
        return total

    def _lines(self, equation: Equation) -> list[str]:
        if equation.has(Trait.RESHAPE):
            return []
        write: Callable[[Equation], list[Statement]] = WRITERS.get(equation.name, WRITERS["loops"])
        operation = "elementwise" if by_element(equation) else equation.name
        lines = [f"/* {equation.scope or 'step'}, {equation.phase}: {operation} */"]
        for call in write(equation):
            function = call.function
            if call.text is not None:
                function = self.loops.setdefault(call.text, f"{function}_{len(self.loops)}")
            self.library |= dict.fromkeys(call.calls if call.text is not None else (function,))
            arguments = [self.names[x] if isinstance(x, Variable) else str(x) for x in call.arguments]
            lines.append(f"{function}({', '.join(arguments)});")
        return lines


def _literal(number: np.generic) -> str:
    return literal(number.item()) if number.dtype != np.float32 or not np.isfinite(number) else f"{number!s}f"
