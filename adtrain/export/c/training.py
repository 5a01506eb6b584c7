"""One training step as C: the Program of `adtrain train`'s step, with the statements of an evaluation.

The step is the one that the CPU backend compiles, traced for a batch that the caller gives, so its gradient and its
update are those of `adtrain train`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adtrain import nn
from adtrain.codegen.expressions import c_type
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program
from adtrain.core.staging import stage
from adtrain.export.c.code import Code, c_identifier
from adtrain.export.c.statements import WRITERS
from adtrain.export.c.text import statement
from adtrain.passes import SIMPLIFY, fuse_loops, plan_memory, readers_first
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.places import nbytes
from adtrain.training import Experiment
from adtrain.training.step import TrainState


class TrainingStep(NamedTuple):
    """A training step.

    Attributes:
        code: its statements.
        function: its text.
        batch: images of a step.
        label: the C type of labels, and labels of an image.
        state: the arrays of the optimizer: C declarations, and their bytes.
    """

    code: Code
    function: str
    batch: int
    label: tuple[str, int]
    state: dict[str, int]


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
    return _written(experiment, program, inputs, f"void {name}_train(const {image_type} *images")


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
    return staged.program(state, images, labels), [*map(c_identifier, names), "images", "labels"]


def _supported(e: Equation) -> bool:
    return e.has(Trait.RESHAPE) or by_element(e) or e.name in WRITERS


def _written(experiment: Experiment, program: Program, inputs: list[str], head: str) -> TrainingStep:
    names = dict(zip(program.inputs, inputs, strict=True))
    code = Code(names, {v: x.numpy() for v, x in program.constants.items()}, {}, training=True)
    overwritten = plan_memory(program).in_place
    for e in program.equations:
        for v in e.outputs:
            if v in overwritten:
                code.same(v, overwritten[v])
        if e.has(Trait.RESHAPE):
            code.same(e.outputs[0], e.inputs[0])
            continue
        operation = "elementwise" if by_element(e) else e.name
        code.comment(f"{e.scope or 'step'}, {e.phase}: {operation}")
        for each in (WRITERS["loops"] if by_element(e) else WRITERS[e.name])(code, e):
            code.add(each)
    code.place(program.outputs)
    state = [v for v in program.inputs if v in program.donated]
    copies = [(v, out) for v, out in zip(state, program.outputs, strict=False) if code.root(out) is not v]
    labels, batch = program.inputs[-1], experiment.full_batch
    label = c_type(labels.type.dtype), labels.size // batch
    lines = [
        f"{head}, const {label[0]} *labels, float *loss) {{",
        *(f"    /* {x} */" if isinstance(x, str) else statement(code.call(x)) for x in code.steps),
        *(f"    memcpy({code.text(v)}, {code.text(out)}, {nbytes(v)});" for v, out in copies),
        f"    if (loss) *loss = *({code.text(program.outputs[-1])});",
        "}",
    ]
    arrays = {
        f"static {c_type(v.type.dtype)} {given}[{v.size}];": nbytes(v)
        for v, given in names.items()
        if given.startswith("optimizer_")
    }
    return TrainingStep(code, "\n".join(lines), batch, label, arrays)
