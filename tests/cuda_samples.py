"""Programs whose candidates include every CUDA file and kernel function, and their sources for a target. No GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from program_samples import OPTIMIZERS, arguments, for_gpu, training_program, two_updates, update_arguments
from test_cpu_programs import values_and_gradients

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda import TARGETS as BY_ARCHITECTURE
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.forms.column_sum import COLUMN_SUM
from adtrain.backends.cuda.forms.grouped_products import GROUPED_PRODUCTS
from adtrain.backends.cuda.forms.one_block import ONE_BLOCK
from adtrain.backends.cuda.forms.reduction import REDUCTION
from adtrain.backends.cuda.forms.row_chain import ROW_CHAIN
from adtrain.backends.cuda.forms.row_fused import LONG_ROWS, ROW_FUSED
from adtrain.backends.cuda.forms.row_products import ROW_PRODUCTS
from adtrain.backends.cuda.forms.tiled_product import BACK_TO_BACK, TILED_PRODUCT, weight_tiles_p
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Candidate, Lowering
from adtrain.cases import CASES, Case
from adtrain.core.array import Value
from adtrain.core.kernel import Target
from adtrain.core.program import HORIZONTAL, Equation, Program, single_equations
from adtrain.core.staging import stage
from adtrain.passes.fusion import is_loops

TARGETS = tuple(BY_ARCHITECTURE.values())

DTYPES = ("float32", "float64")

Content: TypeAlias = "tuple[str, ...]"


class Sample(NamedTuple):
    """What `contents` tells of a source, and whether it belongs to a candidate that runs where nothing is measured."""

    contents: frozenset[Content]
    first: bool


class Shaped(Value):
    """An argument of which a Program needs the type only."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, *shape: int, dtype: str = "float32") -> None:
        self.shape, self.dtype, self.device = shape, np.dtype(dtype), "cpu"


class Large(NamedTuple):
    """A function of larger arguments than those of the case table; see `cases.Case`."""

    f: Callable[..., Any]
    inputs: Sequence[Value]
    order: int = 1


def precise(f: Callable[..., Any], precision: str) -> Callable[..., Any]:
    return ops.matmul_precision(precision)(f)


def convolution(x: Value, w: Value) -> Value:
    return ops.conv2d(x, w, padding=1)


def depthwise_between_convolutions(x: Value, w: Value, v: Value) -> Value:
    """The wide part of an inverted residual block."""
    return ops.conv2d(ops.conv2d(x, w), v, padding=1, groups=v.shape[0])


def pooled_convolution(x: Value, w: Value, b: Value) -> Value:
    return ops.max_pool2d(ops.relu(ops.conv2d(x, w, b)), 2)


def max_pool_gradient(x: Value) -> Any:
    return ad.grad(lambda x: ops.sum(ops.square(ops.max_pool2d(x, 2))))(x)


def weight_gradients(x: Value, y: Value, z: Value) -> Any:
    return ops.matmul(x, y, transpose_a=True), ops.matmul(x, z, transpose_a=True)


def updated_weights(x: Value, y: Value, z: Value, v: Value, w: Value) -> Any:
    return v - 0.1 * ops.matmul(x, y, transpose_a=True), w - 0.1 * ops.matmul(x, z, transpose_a=True)


def feed_forward(x: Value, w: Value, b: Value, v: Value, c: Value) -> Value:
    """The two linear layers of a transformer's block, with the residual sum. The weights are (out, in)."""
    hidden = ops.gelu(ops.matmul(x, w, transpose_b=True) + b)
    return x + (ops.matmul(hidden, v, transpose_b=True) + c)


def projection(x: Value, w: Value, b: Value) -> Value:
    return ops.relu(ops.matmul(x, w, transpose_b=True) + b)


def wide_and_narrow_products(x: Value, w: Value, v: Value) -> tuple[Value, Value]:
    """In bfloat16 both read the same copy of x."""
    return ops.matmul(x, w), ops.matmul(x, v)


def attention_between_products(x: Value, w: Value, v: Value) -> Value:
    """In bfloat16 all of its arrays are stored as such."""
    y = ops.self_attention(ops.reshape(ops.matmul(x, w), (2, -1, w.shape[1])), w.shape[1] // 192)
    return ops.matmul(ops.reshape(y, (-1, v.shape[0])), v)


def scores_of_classes(x: Value, w: Value) -> tuple[Value, Value]:
    """The same for the scores of many classes."""
    scores = ops.matmul(x, w)
    return ops.log_softmax(scores), ops.argmax(scores, 1)


def pools_between_convolutions(x: Value, w: Value, mean: Value, variance: Value) -> Value:
    """The same for batch norm and pooling."""
    y, _, _ = ops.batch_norm(convolution(x, w), mean, variance, training=True)
    return ops.avg_pool2d(ops.relu(ops.max_pool2d(y, 3, 1, 1)), 2)


def network_gradients(x: Value, y: Value, v: Value, w: Value, out: Value) -> Any:
    """The loss of a multilayer perceptron and the gradients of its weights."""

    def loss(v: Any, w: Any, out: Any) -> Any:
        return ops.mean(ops.square(ops.tanh(ops.tanh(x @ v) @ w) @ out - y))

    return ad.value_and_grad(loss, (0, 1, 2))(v, w, out)


def mixture_gradients(x: Value, means: Value, scales: Value) -> Any:
    """Quotients by shared divisors, and sums over the rows of x."""

    def likelihood(means: Any, scales: Any) -> Any:
        z = (x[:, None] - means) / (1.0 + ops.square(scales))
        return ops.mean(ops.logsumexp(-ops.sum(ops.square(z), 2), 1))

    return ad.grad(likelihood, (0, 1))(means, scales)


PRECISIONS = ("full", "tf32", "bfloat16")

MEDIUM: Mapping[str, Large] = {
    **{
        f"matmul {m} {n} {k}, {p}": Large(precise(ops.matmul, p), [Shaped(m, k), Shaped(k, n)])
        for m, n, k in [(128, 128, 256), (512, 520, 1024), (1024, 1024, 10)]
        for p in PRECISIONS
    },
    **{
        f"conv2d with pooling {x} {filters}, {p}": Large(
            precise(pooled_convolution, p), [Shaped(*x), Shaped(filters, x[1], 3, 3), Shaped(filters)]
        )
        for x, filters in [((64, 16, 7, 7), 32), ((16, 256, 8, 8), 128), ((8, 256, 16, 16), 32)]
        for p in PRECISIONS
    },
    **{
        f"conv2d, {p}": Large(precise(convolution, p), [Shaped(4, 32, 28, 28), Shaped(32, 32, 3, 3)])
        for p in PRECISIONS
    },
    **{
        f"attention, {p}": Large(precise(ops.attention, p), [Shaped(8, 512, 64)] * 3)
        for p in ("full", "tf32", "bfloat16")
    },
    "attention between products": Large(
        precise(attention_between_products, "bfloat16"), [Shaped(768, 512), Shaped(512, 1536), Shaped(512, 1024)]
    ),
    "wide and narrow products": Large(
        precise(wide_and_narrow_products, "bfloat16"), [Shaped(2048, 512), Shaped(512, 512), Shaped(512, 8)]
    ),
    "scores of classes": Large(precise(scores_of_classes, "bfloat16"), [Shaped(768, 512), Shaped(512, 2048)], 0),
    "pools between convolutions": Large(
        precise(pools_between_convolutions, "bfloat16"),
        [Shaped(32, 64, 28, 28), Shaped(64, 64, 3, 3), Shaped(64), Shaped(64)],
    ),
    "conv2d of few channels": Large(precise(convolution, "bfloat16"), [Shaped(32, 8, 56, 56), Shaped(64, 8, 3, 3)]),
    "updated weights": Large(
        precise(updated_weights, "bfloat16"),
        [Shaped(2048, 384), Shaped(2048, 384), Shaped(2048, 456), Shaped(384, 384), Shaped(384, 456)],
        0,
    ),
    "depthwise conv2d, bfloat16": Large(
        precise(depthwise_between_convolutions, "bfloat16"),
        [Shaped(32, 64, 28, 28), Shaped(256, 64, 1, 1), Shaped(256, 1, 3, 3)],
    ),
    "short attention, bfloat16": Large(precise(ops.attention, "bfloat16"), [Shaped(8, 256, 64)] * 3),
    "self_attention of short sequences": Large(lambda x: ops.self_attention(x, 2), [Shaped(8, 16, 96)]),
    "transpose": Large(ops.transpose, [Shaped(40, 70)]),
    "cumsum of rows": Large(lambda x: ops.cumsum(x, 1), [Shaped(4, 64)]),
    "cumsum of long rows": Large(lambda x: ops.cumsum(x, 1), [Shaped(4, 16384)]),
    "cumsum of columns": Large(lambda x: ops.cumsum(x, 0), [Shaped(256, 4)]),
    "argsort of long rows": Large(ops.argsort, [Shaped(3, 5000)], 0),
    "take of many rows": Large(lambda x, y: ops.take(x, ops.argsort(y)), [Shaped(2000, 8), Shaped(2000)]),
    "hash_grid of many points": Large(
        lambda x, table: ops.hash_grid(x, table, (4, 9), 128), [Shaped(1 << 14, 2), Shaped(125, 2)]
    ),
    "log_softmax of short rows": Large(ops.log_softmax, [Shaped(1024, 7)]),
    "softmax of columns": Large(lambda x: ops.softmax(x, 0), [Shaped(1024, 7)]),
    "sum of everything": Large(ops.sum, [Shaped(256, 64)]),
    "sum of columns": Large(lambda x: ops.sum(x, 0), [Shaped(1024, 4)]),
    "sum of short rows": Large(lambda x: ops.sum(x, 1), [Shaped(1024, 7)]),
    "gradient of max_pool2d": Large(max_pool_gradient, [Shaped(2, 2, 8, 8)]),
    "lstm of clusters": Large(
        lambda *xs: ops.lstm(*xs)[0], [Shaped(9, 3, 4), Shaped(4 * 130, 4), Shaped(4 * 130, 130)]
    ),
    "gru over the grid": Large(
        lambda *xs: ops.gru(*xs)[0], [Shaped(9, 3, 4), Shaped(3 * 128, 4), Shaped(3 * 128, 128)]
    ),
    "lstm over the grid": Large(
        lambda *xs: ops.lstm(*xs)[0], [Shaped(5, 2, 4), Shaped(4 * 384, 4), Shaped(4 * 384, 384)]
    ),
    "embedding": Large(ops.embedding, [Shaped(512, dtype="int64"), Shaped(4, 4)]),
    "take along columns": Large(lambda x, i: ops.take(x, i, 1), [Shaped(140, 64), Shaped(512, dtype="int64")]),
    "self-attention of short sequences": Large(lambda x: ops.self_attention(x, 2), [Shaped(16, 8, 96)]),
    "loss over many classes": Large(ops.cross_entropy, [Shaped(256, 8000), Shaped(256, dtype="int64")]),
    "layer norm of long rows": Large(
        lambda x, w, b: ops.layer_norm(x, 1500, w, b), [Shaped(200, 1500), Shaped(1500), Shaped(1500)]
    ),
    "gradients of a network": Large(
        network_gradients, [Shaped(60_000, 6), Shaped(60_000, 5), Shaped(6, 24), Shaped(24, 40), Shaped(40, 5)], 0
    ),
    "matmul of many small matrices": Large(ops.matmul, [Shaped(4096, 4, 4), Shaped(4096, 4, 3)]),
}
"""Arguments just large enough for the kernels that an H200 chooses for none of the case table."""

LARGE: Mapping[str, Large] = {
    **{
        f"matmul {m} {n} {k}, {p}": Large(precise(ops.matmul, p), [Shaped(m, k), Shaped(k, n)])
        for m, n, k in [(2048, 2048, 2048), (1024, 10, 4096), (128, 512, 784), (1000, 1001, 999)]
        for p in PRECISIONS
    },
    **{
        f"conv2d {x} {w}, {p}": Large(precise(convolution, p), [Shaped(*x), Shaped(*w)])
        for x, w in [
            ((256, 32, 28, 28), (64, 32, 3, 3)),
            ((256, 128, 28, 28), (128, 128, 3, 3)),
            ((128, 256, 14, 14), (256, 256, 3, 3)),
        ]
        for p in PRECISIONS
    },
    **{
        f"conv2d with pooling {channels}, {p}": Large(
            precise(pooled_convolution, p),
            [Shaped(128, channels, 26, 26), Shaped(64, channels, 3, 3), Shaped(64)],
        )
        for channels in (1, 32)
        for p in PRECISIONS
    },
    "weight gradients": Large(weight_gradients, [Shaped(8192, 512), Shaped(8192, 384), Shaped(8192, 256)], 0),
    "feed-forward layer": Large(
        feed_forward, [Shaped(8192, 128), Shaped(512, 128), Shaped(512), Shaped(128, 512), Shaped(128)]
    ),
    "projection": Large(projection, [Shaped(8192, 320), Shaped(384, 320), Shaped(384)]),
    "transpose": Large(ops.transpose, [Shaped(1024, 3000)]),
    "transpose of images": Large(lambda x: ops.transpose(x, (0, 2, 3, 1)), [Shaped(128, 64, 28, 28)]),
    "cumsum of rows": Large(lambda x: ops.cumsum(x, 1), [Shaped(4, 1 << 20)]),
    "cumsum of columns": Large(lambda x: ops.cumsum(x, 0), [Shaped(1 << 20, 4)]),
    "cumsum of short rows": Large(lambda x: ops.cumsum(x, 1), [Shaped(512, 900)]),
    "softmax of short rows": Large(ops.softmax, [Shaped(100_000, 10)]),
    "log_softmax of long rows": Large(ops.log_softmax, [Shaped(4, 70_000)]),
    "softmax of columns": Large(lambda x: ops.softmax(x, 0), [Shaped(50_000, 64)]),
    "sum of everything": Large(ops.sum, [Shaped(1 << 24)]),
    "sum of columns": Large(lambda x: ops.sum(x, 0), [Shaped(1 << 16, 48)]),
    "sum of short rows": Large(lambda x: ops.sum(x, 1), [Shaped(100_000, 7)]),
    "batch_norm": Large(
        lambda x, m, v, w, b: ops.batch_norm(x, m, v, w, b, training=True),
        [Shaped(256, 64, 28, 28), *(Shaped(64) for _ in range(4))],
    ),
    "gradient of max_pool2d": Large(max_pool_gradient, [Shaped(64, 8, 28, 28)]),
    "gradients of a mixture": Large(mixture_gradients, [Shaped(50_000, 16), Shaped(8, 16), Shaped(8, 16)], 0),
    **{
        f"embedding of {length}": Large(ops.embedding, [Shaped(16384, dtype="int64"), Shaped(length, 96)])
        for length in (200, 40_000, 10_000_000)
    },
}


def traced(large: Large) -> Program:
    return stage(lambda *xs: tuple(values_and_gradients(large, xs)), ()).program(*large.inputs)


class Sampled(NamedTuple):
    """A Program as traced, and arguments for it."""

    program: Program
    arguments: Callable[[], Sequence[np.ndarray]]


@cache
def programs(large: bool = True) -> Mapping[str, Sampled]:
    """The cases with gradients, MEDIUM, training steps, and LARGE where asked for."""
    found = {f"medium: {name}": traced(each) for name, each in MEDIUM.items()}
    if large:
        found |= {f"large: {name}": traced(each) for name, each in LARGE.items()}
    for dtype in DTYPES:
        for length in (512, 64):
            found[f"two updates: {length}, {dtype}"] = stage(two_updates, ()).program(*update_arguments(length, dtype))
        for optimizer in OPTIMIZERS:
            found[f"training: {optimizer}, {dtype}"] = training_program(optimizer, dtype)
    sampled = {name: Sampled(program, partial(arguments, program)) for name, program in found.items()}
    for dtype in DTYPES:
        for case in CASES:
            staged = stage(lambda *xs, case=case: tuple(values_and_gradients(case, xs)), ())
            given = partial(sample, case, dtype)
            sampled[f"case: {case.op}, {case.name}, {dtype}"] = Sampled(staged.program(*given()), given)
    return sampled


def sample(case: Case, dtype: str) -> list[np.ndarray]:
    return [x.numpy() for x in case.sample(dtype)]


GENERATED = (
    *(ONE_BLOCK, ROW_CHAIN, ROW_FUSED, LONG_ROWS, ROW_PRODUCTS, COLUMN_SUM, REDUCTION, GROUPED_PRODUCTS, HORIZONTAL),
    *(BACK_TO_BACK, TILED_PRODUCT, weight_tiles_p),
)
"""The fused primitives whose kernels are generated, without a choice."""


def all_candidates(lowering: Lowering, equation: Equation) -> Iterator[tuple[Candidate | None, Sequence[LaunchPlan]]]:
    """Every candidate for an equation, the one to prefer first, and its launches; None stands for a generated kernel.

    Launches without work are left out, and so are library calls.
    """
    generated = is_loops(equation) or not {equation.form, equation.primitive}.isdisjoint(GENERATED)
    for kernel in [None] if generated else lowering.candidates(equation):
        launches = lowering.launches(equation, kernel)
        yield kernel, [x for x in launches if isinstance(x, LaunchPlan) and not x.size.empty]


@cache
def sources(target: Target) -> Mapping[Source, Sample]:
    """The sources of every candidate for every equation of the programs."""
    lowering = Lowering(target)
    found: dict[Source, Sample] = {}
    for program, _ in programs().values():
        for equation in dict.fromkeys((*program.equations, *for_gpu(program, target).equations)):
            for i, (_, launches) in enumerate(all_candidates(lowering, equation)):
                for launch in launches:
                    held, first = found.get(launch.source, Sample(frozenset(), False))
                    found[launch.source] = Sample(held.union(contents(equation, launch)), first or i == 0)
    return found


def contents(equation: Equation, launch: LaunchPlan) -> Iterator[Content]:
    """The launch's kernel function with its element types, and what is generated for it, with the output's type.

    The text of an elementwise operation is the same in kernels of all forms.
    """
    source = launch.source
    generated, own, _ = source.text.partition("#line")
    dtype = equation.outputs[0].type.dtype.name
    if own:
        types = [line for line in generated.splitlines() if line.startswith(("#define T ", "#define U "))]
        yield source.name, launch.name, *types
    if not own or "EPILOGUE" in generated or "COMPUTED_ARGUMENT" in generated:
        for each in single_equations(equation):
            form = equation.name if each.primitive.expression is None else "elementwise"
            yield form, each.primitive.name, dtype


def representative(target: Target) -> list[Source]:
    """Few sources that have every kernel function of a file, and every generated operation in every form and type."""
    held = {
        source: {content[:2] if content[0] == source.name else content for content in sample.contents}
        for source, sample in sources(target).items()
    }
    missing, chosen = set().union(*held.values()), []
    while missing:
        chosen.append(max(held, key=lambda source: len(held[source] & missing)))
        missing -= held[chosen[-1]]
    return chosen
