"""A trained network, from an image before normalisation to its predictions, and a training step, as C statements.

The step is the Program that the CPU backend compiles, traced for a batch that the caller gives, so its gradient and its
update are those of `adtrain train`. Both have the statements of `statements`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from adtrain import nn
from adtrain.codegen.elementwise import c_type
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable, renamed
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.export.c.code import Code, Statement, c_identifier
from adtrain.export.c.statements import FORM_WRITERS, write
from adtrain.export.evaluation import EXAMPLES, Evaluation, describe, evaluation, image_dtype
from adtrain.nn.module import size_text
from adtrain.passes import (
    SIMPLIFY,
    fuse_loops,
    merge_common_subexpressions,
    plan_memory,
    readers_first,
    remove_dead_code,
    simplify_reshapes,
)
from adtrain.passes.fusion import by_element
from adtrain.training import Experiment, TrainedModel
from adtrain.training.evaluation import class_names
from adtrain.training.step import TrainState
from adtrain.training.tasks import NextClass


class Interface(NamedTuple):
    """What a program takes and gives.

    Attributes:
        example: the name of an example, "image", "row", "text", "point" or "example": the first parameter.
        c_type: of an element of an image: uint8_t or float, or double where float would lose differences.
        image, outputs: shapes of an image and of its outputs.
        labels: the names of the numbers along the last axis of the outputs.
        chooses: whether the function returns a class.
        output_type: of an output: float, or double as for `c_type`; in int8 uint16_t, in units of 1 / 65536.
        is_text: whether an image is a text, given by the classes of its characters.
    """

    example: str
    c_type: str
    image: tuple[int, ...]
    outputs: tuple[int, ...]
    labels: tuple[str, ...]
    chooses: bool
    output_type: str = "float"
    is_text: bool = False

    @property
    def results(self) -> str:
        """The name of the outputs."""
        return "probabilities" if self.chooses else "values"


def interface(trained: TrainedModel, int8: bool = False) -> Interface:
    network = trained.network
    outputs = network.model.output_shape(network.input_shape)
    names = trained.targets or class_names(trained.classes, np.zeros((1, outputs[-1])))
    labels = tuple(names[i] if i < len(names) else str(i) for i in range(outputs[-1]))
    c_type = {"uint8": "uint8_t", "float32": "float", "float64": "double"}[image_dtype(trained).name]
    output_type = "uint16_t" if int8 else "double" if network.task.needs_float64 else "float"
    is_text = isinstance(network.task, NextClass)
    example = EXAMPLES[trained.config.data.examples]
    return Interface(example, c_type, trained.image_shape, outputs, labels, not trained.targets, output_type, is_text)


class Translated(NamedTuple):
    """The statements of a network, the value of its outputs, and that of its first layer."""

    code: Code
    outputs: Variable
    first: Variable


def translated(trained: TrainedModel, simd: bool = False, training: bool = False) -> Translated:
    """The statements of a network, in float32; with `training` for weights that a training step changes.

    Raises AdtrainError for an operation that has no C, with its layer, and for weights with NaN.
    """
    found = evaluation(trained)
    if not training:
        found = found.with_known_weights()
    program, factors = _lowered(found, training)
    outputs, predictions = program.outputs
    about = interface(trained)
    names = {found.images: about.example}
    if training:
        names |= {v: c_identifier(f"layer_{name}") for v, name in found.weights.items()}
    known = {v: x.numpy() for v, x in program.constants.items()}
    code = Code(names, known, {**found.weights, **factors}, simd=simd)
    notes = Notes(found)
    for e in program.equations:
        code.steps += notes.before(e)
        if "dropout" in e.params and not found.is_plain_attention(e):
            raise found.refused(e, f"{e.name} with a mask, documents or dropout has no C")
        if what := write(code, e):
            raise found.refused(e, f"{what} has no C")
    if code.root(predictions) in (code.root(outputs), found.images) or predictions in known:
        code.add(Statement("copy", [predictions, predictions.size, about.results]))
    else:
        code.names[code.root(predictions)] = about.results
    if training:
        code.arrays |= {names[v]: found.arrays[v] for v in found.weights}
    return Translated(code, outputs, _first_layer(code, outputs))


class Notes:
    """Comments that name the layers of equations: each layer once, those without equations before the next one."""

    def __init__(self, found: Evaluation) -> None:
        self.found, self.layers = found, list(found.layers)
        self.written, self.last = 0, ""

    def before(self, e: Equation) -> Iterator[str]:
        for scope in e.scope.split("+"):
            name, kind = nn.layer_of(scope)
            if name in self.found.layers:
                end = self.layers.index(name) + 1
                for each in self.layers[self.written : end]:
                    layer, shape = self.found.layers[each]
                    yield describe(layer, each, shape)
                self.written = max(self.written, end)
            elif scope != self.last:
                image = size_text(self.found.images.type.shape[1:])
                named = {"input": f"input: {image}, normalised", "values": "values in original units"}
                yield named.get(name, f"{name} {kind}".strip())
            self.last = scope


def _lowered(found: Evaluation, training: bool) -> tuple[Program, dict[Variable, str]]:
    """The evaluation with the forms that have a function for their sizes; the equations of others are loops.

    Also the names of the factors of batch normalisations.
    """
    constants = dict(found.program.constants)
    factors: dict[Variable, str] = {}
    equations: list[Equation] = []
    for e in found.program.equations:
        if e.form == "batch_norm" and constants.keys() >= set(e.inputs[1:]):
            new, arrays = _affine(e, found)
            equations += new
            constants |= {v: array(x) for v, x in arrays.items()}
            factors |= {v: f"{found.layer_of(e)}.{name}" for v, name in zip(arrays, ("factor", "summand"), strict=True)}
        elif not e.form or _has_function(e, constants.keys(), found.weights.keys() if training else ()):
            equations.append(e)
        else:
            body: Program = e.params["body"]
            pairs = [*zip(body.inputs, e.inputs, strict=True), *zip(body.outputs, e.outputs, strict=True)]
            equations += [renamed(inner, dict(pairs)) for inner in body.equations]
    program = replace(found.program, equations=tuple(equations), constants=constants)
    for apply in (simplify_reshapes, merge_common_subexpressions, remove_dead_code, fuse_loops):
        program = apply(program)
    return program, factors


def _has_function(e: Equation, known: Container[Variable], changing: Container[Variable]) -> bool:
    """Whether C has a function for a form with these arguments: for one image, with weights that are arrays."""
    if e.form == "linear":
        return e.inputs[1] in known or (e.inputs[1] in changing and e.kernel_params["transpose_b"])
    if e.form in ("conv2d", "conv2d_input_grad", "max_pool2d"):
        return e.inputs[0].type.shape[0] == 1
    if e.form.endswith("_layer"):
        return all(v in known for v in e.inputs[1:3])
    return e.form in FORM_WRITERS


def _affine(e: Equation, found: Evaluation) -> tuple[list[Equation], dict[Variable, np.ndarray]]:
    """A batch normalisation with known statistics as a product and a sum, and the factors of its channels."""
    x, (y,), arrays = e.inputs[0], e.outputs, dict[Variable, np.ndarray]()
    equations = []
    for name, numbers in zip(("mul", "add"), factor_and_summand(e, found), strict=True):
        shape = (numbers.size, *[1] * (len(x.type.shape) - 2))
        vector, spread, out = (Variable(ArrayType(s, y.type.dtype), y.device) for s in (shape, *[y.type.shape] * 2))
        out = y if name == "add" else out
        arrays[vector] = numbers.astype(y.type.dtype).reshape(shape)
        equations += [
            Equation(PRIMITIVES["broadcast_to"], (vector,), {"shape": y.type.shape}, (spread,), e.scope),
            Equation(PRIMITIVES[name], (x, spread), {}, (out,), e.scope),
        ]
        x = out
    return equations, arrays


def factor_and_summand(e: Equation, found: Evaluation) -> tuple[np.ndarray, np.ndarray]:
    """What a `batch_norm` multiplies each channel by and adds to it, in float64."""
    mean, variance, eps, *affine = (found.known[v].astype(np.float64) for v in e.inputs[1:])
    factor = 1 / np.sqrt(variance + eps)
    if not affine:
        return factor, -mean * factor
    factor = factor * affine[0]
    return factor, affine[1] - mean * factor


def _first_layer(code: Code, outputs: Variable) -> Variable:
    """The result of the first layer with weights and of the activation after it."""
    named = {f"layer_{c_identifier(name)}" for name in code.weights.values()}
    first: Variable | None = None
    for statement in code.statements:
        values = list(statement.values)
        if first is None:
            if any(x in named or x in code.weights for x in statement.arguments if isinstance(x, (str, Variable))):
                first = values[-1]
        elif statement.function != "elementwise" or values[:-1] != [first]:
            break
        else:
            first = values[-1]
    return first or outputs


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


def training_step(experiment: Experiment, name: str, about: Interface) -> TrainingStep:
    """The step of an experiment, as the function `name`_train.

    Raises AdtrainError for a run in another precision than float32, for augmentations, and for a layer whose gradient
    has no C, which it names.
    """
    if (precision := experiment.config.training.precision) != "float32":
        raise AdtrainError(f"--training writes steps in float32, the run's precision is {precision}")
    if experiment.average is not None:
        raise AdtrainError(
            "--training has no average of the weights, and the run's config has: train without `average`"
        )
    if experiment.plateau is not None:
        raise AdtrainError("--training has no schedule plateau, which the run's config has: train with another one")
    if experiment.augmentations:
        raise AdtrainError("--training has no augmentations, and the run's config has: train without `augment`")
    if about.c_type == "double":
        reason = "the run's data have numbers far from 0, whose differences float32 loses"
        raise AdtrainError(f"--training takes numbers in float32, and {reason}: subtract their mean from the data")
    program, inputs = _traced(experiment)
    examples = f"{about.example}s"
    head = f"void {name}_train(const {about.c_type} *{examples}"
    return _written(experiment, program, [*inputs, examples, "labels"], head)


def _traced(experiment: Experiment) -> tuple[Program, list[str]]:
    """The Program, which gives the new state and the loss, and the C names of its first inputs, arrays of the state."""
    batch = experiment.full_batch
    indices = array(np.arange(batch))

    def step(state: TrainState, images: Value, labels: Value) -> tuple[TrainState, Value]:
        new, metrics = experiment.eager_step(state, experiment.seed("cpu"), images, labels, indices)
        return new, metrics.loss

    state = experiment.initial_state("cpu", random=True)
    examples = experiment.train
    images, labels = (array(np.zeros((batch, *x.shape[1:]), x.dtype)) for x in (examples.images, examples.labels))
    staged = stage(step, (*SIMPLIFY, fuse_loops, readers_first), donate=(0,))
    names = [f"layer_{path}" for part in (state.params, state.statistics) for path in tree.paths(part)]
    names += [f"optimizer_{path}" for path in tree.paths(state.optimizer)]
    return staged.program(state, images, labels), list(map(c_identifier, names))


def _written(experiment: Experiment, program: Program, inputs: list[str], head: str) -> TrainingStep:
    names = dict(zip(program.inputs, inputs, strict=True))
    code = Code(names, {v: x.numpy() for v, x in program.constants.items()}, {}, training=True)
    overwritten = plan_memory(program).in_place
    for e in program.equations:
        for v in e.outputs:
            if v in overwritten:
                code.same(v, overwritten[v])
        if not e.has(Trait.RESHAPE):
            code.steps.append(f"{e.scope or 'step'}, {e.phase}: {'elementwise' if by_element(e) else e.name}")
        if what := write(code, e):
            layer, kind = nn.layer_of(e.scope)
            place = f"layer {layer}: {kind}" if kind else layer
            raise AdtrainError(f"{place} has no training step in C ({what}); leave out --training")
    code.place(program.outputs)
    state = [v for v in program.inputs if v in program.donated]
    copies = [(v, out) for v, out in zip(state, program.outputs, strict=False) if code.root(out) is not v]
    labels, batch = program.inputs[-1], experiment.full_batch
    label = c_type(labels.type.dtype), labels.size // batch
    lines = [
        f"{head}, const {label[0]} *labels, float *loss) {{",
        *code.body(),
        *(f"    memcpy({code.text(v)}, {code.text(out)}, {v.nbytes});" for v, out in copies),
        f"    if (loss) *loss = *({code.text(program.outputs[-1])});",
        "}",
    ]
    arrays = {
        f"static {c_type(v.type.dtype)} {given}[{v.size}];": v.nbytes
        for v, given in names.items()
        if given.startswith("optimizer_")
    }
    return TrainingStep(code, "\n".join(lines), batch, label, arrays)
