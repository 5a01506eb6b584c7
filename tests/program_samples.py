"""Programs for the tests of passes and of compiled code: training steps of a small network, and pairs of updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

import adtrain as ad
import adtrain.lowering.cuda  # the passes for a GPU ask for the kernels that it registers
from adtrain import nn, ops, optim, passes
from adtrain.backends.cpu.fusions import cpu_fusions
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.core.kernel import Target
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Program, Variable, fuse
from adtrain.core.staging import Pass, stage
from adtrain.core.types import ArrayType

ALL: tuple[Pass, ...] = (*passes.SIMPLIFY, *cpu_fusions())
ON_GPU: tuple[Pass, ...] = (*passes.SIMPLIFY, *gpu_fusions(H200))
"""All passes for a GPU, an H200."""
OPTIMIZERS: dict[str, optim.Optimizer] = {"sgd": optim.SGD(lr=0.1, momentum=0.9), "adam": optim.Adam(lr=0.001)}
BATCH = 9


def training(optimizer: str, dtype: str = "float32", dropout: float = 0.0) -> tuple[Callable[..., Any], Any]:
    """A training step (state, x, labels, rng) -> (state, loss) of a convolutional network, and its first state.

    After conv2d + bias, relu, max_pool2d come linear layers, dropout, cross-entropy and a cosine schedule.
    """
    body = (
        nn.Conv2d(4, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, kernel_size=3),
        nn.ReLU(),
        nn.Flatten(),
    )
    head = (nn.Linear(17), nn.ReLU(), *((nn.Dropout(dropout),) if dropout else ()), nn.Linear(3))
    model = nn.Sequential(*body, *head)
    params, statistics = model.init((1, 12, 12), np.random.default_rng(0), np.dtype(dtype))
    chosen, schedule = OPTIMIZERS[optimizer], optim.schedules.Cosine(total_steps=20)

    def step(state: Any, x: Any, labels: Any, rng: Any) -> Any:
        params, averages = state

        def loss(params: Any) -> Any:
            out, _ = model.forward(params, statistics, x, nn.Mode(training=True, rng=rng))
            with ad.core.trace.scope("loss"):
                return ops.cross_entropy(out, labels)

        value, grads = ad.value_and_grad(loss)(params)
        with ad.core.trace.phase("update"), ad.core.trace.scope("optimizer"):
            lr = schedule(averages["step"]) * chosen.lr
            return chosen.update(params, grads, averages, lr), value

    return step, (params, chosen.init(params))


def batch(dtype: str = "float32", seed: int = 0) -> tuple[Any, ...]:
    """Images, labels and the random state for one step of `training`."""
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(BATCH, 1, 12, 12)).astype(dtype)
    return ad.array(images), ad.array(rng.integers(0, 3, BATCH)), ops.rng_state(seed)


def training_program(optimizer: str = "adam", dtype: str = "float64", improve: Sequence[Any] = ()) -> Program:
    step, state = training(optimizer, dtype)
    return stage(step, improve, donate=(0,)).program(state, *batch(dtype))


def arguments(program: Program, seed: int = 0) -> list[np.ndarray]:
    """Buffers for a Program's inputs: normal numbers, and integers below 3."""
    rng = np.random.default_rng(seed)
    drawn = []
    for v in program.inputs:
        shape, dtype = v.stored
        drawn.append(np.asarray(rng.normal(size=shape) if dtype.kind == "f" else rng.integers(0, 3, shape), dtype))
    return drawn


def names(program: Program) -> list[str]:
    return [equation.name for equation in program.equations]


def bodies(program: Program, name: str) -> list[list[str]]:
    """The names of the equations inside each equation of this name."""
    return [names(e.params["body"]) for e in program.equations if e.name == name]


def everywhere(program: Program) -> list[Equation]:
    """The equations of a Program and of all bodies in it."""
    inside = [p for e in program.equations for p in e.params.values() if isinstance(p, Program)]
    return [*program.equations, *(e for body in inside for e in everywhere(body))]


Step: TypeAlias = "tuple[Primitive, Sequence[int], dict[str, Any]]"
"""An equation in a body: its primitive, its arguments, its parameters. An argument is the number of a value: the inputs
come first, then the results of the steps."""


def fused_of(form: str, inputs: Sequence[ArrayType], steps: Sequence[Step], needed: Sequence[int]) -> Equation:
    """An equation of a form on a GPU with such a body; ``needed`` are the numbers of its outputs."""
    values = [Variable(t, "gpu") for t in inputs]
    equations = []
    for primitive, numbers, params in steps:
        arguments = tuple(values[i] for i in numbers)
        types = primitive.output_types([v.type for v in arguments], params)
        equations.append(Equation(primitive, arguments, params, tuple(Variable(t, "gpu") for t in types)))
        values += equations[-1].outputs
    return fuse(form, equations, [values[i] for i in needed], tuple(values[: len(inputs)]))


def in_all_forms(program: Program) -> list[Program]:
    """As traced, simplified, and with all passes."""
    forms = [program]
    for improve in ALL:
        forms.append(improve(forms[-1]))
    return [forms[0], forms[len(passes.SIMPLIFY)], forms[-1]]


def two_updates(x: Any, y: Any, v: Any, w: Any) -> Any:
    """Two weights minus their gradients, two independent products."""
    return v - 0.1 * ops.matmul(x, y, transpose_a=True), w - 0.1 * ops.matmul(x, x, transpose_a=True)


def update_arguments(length: int, dtype: str) -> list[np.ndarray]:
    """Arguments of `two_updates`; `length` is K of the products."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=s).astype(dtype) for s in ((length, 96), (length, 200), (96, 200), (96, 96))]


def for_gpu(program: Program, target: Target = H200) -> Program:
    """``program`` after all passes for a GPU."""
    for improve in (*passes.SIMPLIFY, *gpu_fusions(target)):
        program = improve(program)
    return program


def all_layers(program: Program, layers: Sequence[set[Equation]], target: Target) -> set[Equation]:
    """In place of `channels_last._fastest`: all convolutions become channels last."""
    return set().union(*layers)


def bfloat16_gradients(x: Any, w: Any, v: Any, bias: Any) -> Any:
    """The gradients by w, v and bias of a loss of two linear layers, in bfloat16."""

    def loss(w: Any, v: Any, bias: Any) -> Any:
        with ops.matmul_precision("bfloat16"):
            return ops.mean(ops.square(ops.matmul(ops.relu(ops.matmul(x, w) + bias), v)))

    return ad.grad(loss, (0, 1, 2))(w, v, bias)
