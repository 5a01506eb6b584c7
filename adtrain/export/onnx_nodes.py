"""The equations of an evaluation as nodes of an ONNX graph: for each primitive or form by an entry of `NODES`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from adtrain import nn
from adtrain.core.errors import AdtrainError
from adtrain.core.program import Equation, Variable
from adtrain.export.evaluation import Evaluation
from adtrain.ops.attention import EXCLUDED

ONNX_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float64": 11, "uint32": 12}
"""The numbers of element types in onnx.TensorProto.DataType."""

ONNX_GATES = {"rnn_tanh": (0,), "rnn_relu": (0,), "lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}
"""The positions of ONNX's gates in PyTorch's order."""

Lengths = tuple[int, ...]
"""The lengths of a value's axes; -k is k times the number of images."""

Translation = Callable[["Nodes", Equation], str | Sequence[str]]
"""(nodes, equation) to the names of its outputs."""


class Node(NamedTuple):
    """An operation. Its first output has the node's name."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass
class Graph:
    """An ONNX graph under construction.

    Attributes:
        nodes: by name, in execution order.
        arrays: constant arrays by name. Those that nodes use are written to the file.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, name: str, op: str, *inputs: str, others: Sequence[str] = (), **attributes: Any) -> str:
        """Add a node and return its name: `name`, or `name_1`, ... if it is taken. Its output has the same name.

        `others` are the ends of the names of more outputs; "" leaves one out.
        """
        unique = self._unique(name)
        outputs = (unique, *(f"{unique}/{end}" if end else "" for end in others))
        self.nodes[unique] = Node(op, inputs, outputs, attributes)
        return unique

    def constant(self, name: str, value: ArrayLike) -> str:
        """Add a constant array and return its name: `name`, or `name_1`, ... if it is taken.

        An equal array of that name is used again.
        """
        array = np.asarray(value)
        same = self.arrays.get(name)
        if same is None or same.dtype != array.dtype or not np.array_equal(same, array):
            name = self._unique(name)
            self.arrays[name] = array
        return name

    def _unique(self, name: str) -> str:
        unique, number = name, 1
        while unique in self.nodes or unique in self.arrays:
            unique, number = f"{name}_{number}", number + 1
        return unique

    def used(self, results: Iterable[str]) -> set[str]:
        """The names that the results depend on."""
        needed = set(results)
        for node in reversed(self.nodes.values()):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.inputs)
        return needed


@dataclass
class Nodes:
    """Adds the nodes of one evaluation to a graph.

    Attributes:
        names: the names of values in the graph.
        thin: for a broadcast, the name and the lengths of its argument. Operations that broadcast read that.
        place: what the names of nodes and constants begin with: the layer's name.
    """

    graph: Graph
    evaluation: Evaluation
    lengths: Mapping[Variable, Lengths]
    images: str
    names: dict[Variable, str] = field(default_factory=dict)
    thin: dict[Variable, tuple[str, Lengths]] = field(default_factory=dict)
    place: str = ""

    def write(self) -> list[str]:
        """Add all nodes; the names of the Program's outputs."""
        program, weights = self.evaluation.program, self.evaluation.weights
        self.names[self.evaluation.images] = self.images
        for e in program.equations:
            self.place = nn.layer_of(e.scope)[0]
            if e.name not in NODES:
                raise self.refused(e)
            found = NODES[e.name](self, e)
            self.names |= zip(e.outputs, (found,) if isinstance(found, str) else found, strict=False)
        for v in weights:
            if v in self.names:
                self.graph.arrays[weights[v]] = self.evaluation.arrays[v]
        return [self.name(v) for v in program.outputs]

    def refused(self, e: Equation, reason: str = "") -> AdtrainError:
        return self.evaluation.refused(e, f"ONNX export has no {e.name}{reason}")

    def name(self, v: Variable) -> str:
        """The name of a value with all its elements."""
        if v in self.thin:
            self.names[v] = self.op("Expand", self.thin[v][0], self.shape(self.lengths[v]))
            del self.thin[v]
        elif v not in self.names:
            weights = self.evaluation.weights
            self.names[v] = weights.get(v) or self.constant("constant", self.evaluation.arrays[v])
        return self.names[v]

    def thin_name(self, v: Variable) -> tuple[str, Lengths]:
        """The name and the lengths of a value whose axes of length 1, and missing ones, are to be repeated."""
        return self.thin[v] if v in self.thin else (self.name(v), self.lengths[v])

    def op(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        return self.graph.add(f"{self.place}/{op}", op, *inputs, **attributes)

    def cast(self, x: str, dtype: np.dtype[Any]) -> str:
        return self.op("Cast", x, to=ONNX_TYPES[dtype.name])

    def constant(self, name: str, value: ArrayLike) -> str:
        """Add a constant array, Python's floats as float32, and return its name."""
        array = np.asarray(value)
        if not isinstance(value, (np.ndarray, np.generic)):
            array = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
        return self.graph.constant(f"{self.place}/{name}", array)

    def number(self, like: Variable, value: float) -> str:
        """A number of the type of `like`."""
        return self.constant("number", np.asarray(value, like.type.dtype))

    def shape(self, lengths: Lengths) -> str:
        """The name of the shape with these lengths."""
        if all(n >= 0 for n in lengths):
            return self.constant("shape", list(lengths))
        count = self.op("Slice", self.op("Shape", self.images), *(self.constant(x, [int(x)]) for x in ("0", "1")))
        parts = [
            self.op("Mul", count, self.constant("factor", [-n])) if n < 0 else self.constant("length", [n])
            for n in lengths
        ]
        return self.op("Concat", *parts, axis=0)

    def reshape(self, name: str, x: str, given: Lengths, wanted: Lengths) -> str:
        """Give `x` of the lengths `given` other ones, which become the constant `name`."""
        if sum(n < 0 for n in wanted) > 1:
            return self.op("Reshape", x, self.shape(wanted))
        kept = [0 if n < 0 and given[i : i + 1] == (n,) else max(n, -1) for i, n in enumerate(wanted)]
        return self.op("Reshape", x, self.constant(name, kept))


def values(nodes: Nodes, e: Equation) -> list[str]:
    """The names of the arguments of an equation."""
    return list(map(nodes.name, e.inputs))


def elements(nodes: Nodes, e: Equation) -> list[str]:
    """The names of the arguments of an elementwise equation; ONNX broadcasts as NumPy does."""
    found = [nodes.thin_name(v) for v in e.inputs]
    rank = len(nodes.lengths[e.outputs[0]])
    filled = [(1,) * (rank - len(lengths)) + lengths for _, lengths in found]
    joined = tuple(next((n for n in axis if n != 1), 1) for axis in zip(*filled, strict=True))
    if joined != nodes.lengths[e.outputs[0]]:
        return values(nodes, e)
    return [name for name, _ in found]


def node(op: str, arguments: Callable[[Nodes, Equation], list[str]] = values, **attributes: str | int) -> Translation:
    """One operation. `attributes` has the numbers of ONNX's attributes, or the names of parameters of the primitive."""

    def write(nodes: Nodes, e: Equation) -> str:
        given = {name: e.params[x] if isinstance(x, str) else x for name, x in attributes.items()}
        return nodes.op(op, *arguments(nodes, e), **given)

    return write


each = partial(node, arguments=elements)
"""One operation on each element; see `node`."""


class _Formula(NamedTuple):
    """Adds operations by their names: `o.Add(x, 1)`. A number becomes a constant of the type of `like`."""

    nodes: Nodes
    like: Variable

    def __getattr__(self, op: str) -> Callable[..., str]:
        def add(*given: str | float) -> str:
            names = [x if isinstance(x, str) else self.nodes.number(self.like, x) for x in given]
            return self.nodes.op(op, *names)

        return add


def composed(build: Callable[..., str]) -> Translation:
    """Several operations on each element: `build(o, *names)`, where `o` is a _Formula."""
    return lambda nodes, e: build(_Formula(nodes, e.inputs[0]), *elements(nodes, e))


def cast(nodes: Nodes, e: Equation) -> str:
    return nodes.cast(nodes.name(e.inputs[0]), e.outputs[0].type.dtype)


def integers(nodes: Nodes, v: Variable) -> str:
    """Indices as one of the types that ONNX's gathers take."""
    name = nodes.name(v)
    return name if v.type.dtype.name in ("int32", "int64") else nodes.cast(name, np.dtype(np.int64))


def broadcast(nodes: Nodes, e: Equation) -> Sequence[str]:
    nodes.thin[e.outputs[0]] = nodes.thin_name(e.inputs[0])
    return ()


def full(nodes: Nodes, e: Equation) -> Sequence[str]:
    nodes.thin[e.outputs[0]] = (nodes.number(e.outputs[0], e.params["value"]), ())
    return ()


def clip(nodes: Nodes, e: Equation) -> str:
    limits = ["" if x is None else nodes.number(e.inputs[0], x) for x in (e.params["min"], e.params["max"])]
    return nodes.op("Clip", nodes.name(e.inputs[0]), *limits)


def power(nodes: Nodes, e: Equation) -> str:
    return nodes.op("Pow", nodes.name(e.inputs[0]), nodes.number(e.inputs[0], e.params["exponent"]))


def logical(op: str) -> Translation:
    def write(nodes: Nodes, e: Equation) -> str:
        if e.inputs[0].type.dtype != np.bool_:
            raise nodes.refused(e, " of integers")
        return nodes.op(op, *elements(nodes, e))

    return write


def gelu(o: _Formula, x: str) -> str:
    """x (1 + erf(x / √2)) / 2."""
    erf = o.Erf(o.Mul(x, sqrt(0.5)))
    return o.Mul(o.Mul(x, 0.5), o.Add(erf, 1))


def floor_divide(o: _Formula, a: str, b: str) -> str:
    return o.Floor(o.Div(a, b)) if o.like.type.dtype.kind == "f" else o.Div(o.Sub(a, o.Mod(a, b)), b)


def remainder(o: _Formula, a: str, b: str) -> str:
    return o.Sub(a, o.Mul(floor_divide(o, a, b), b)) if o.like.type.dtype.kind == "f" else o.Mod(a, b)


def reshape(nodes: Nodes, e: Equation) -> str:
    (x,), (y,) = e.inputs, e.outputs
    return nodes.reshape("shape", nodes.name(x), nodes.lengths[x], nodes.lengths[y])


def flip(nodes: Nodes, e: Equation) -> str:
    axes = e.params["axes"]
    return _slice(nodes, e, axes, [(-1, -(2**62), -1)] * len(axes))


def slice_(nodes: Nodes, e: Equation) -> str:
    (x,), shape = e.inputs, e.inputs[0].type.shape
    bounds = list(zip(*(e.params[name] for name in ("starts", "stops", "steps")), strict=True))
    axes = [i for i, given in enumerate(bounds) if given != (0, shape[i], 1)]
    if any(nodes.lengths[x][i] < 0 for i in axes):
        raise nodes.refused(e, " of the axis of images")
    return _slice(nodes, e, axes, [bounds[i] for i in axes])


def _slice(nodes: Nodes, e: Equation, axes: Sequence[int], bounds: Sequence[tuple[int, int, int]]) -> str:
    """The elements of some axes between bounds: first, end, step."""
    starts, ends, steps = zip(*bounds, strict=True) if bounds else ((), (), ())
    given = {"from": starts, "to": ends, "axes": axes, "steps": steps}
    return nodes.op("Slice", nodes.name(e.inputs[0]), *(nodes.constant(k, list(x)) for k, x in given.items()))


def pad(nodes: Nodes, e: Equation) -> str:
    if any(e.params["gaps"]):
        raise nodes.refused(e, " between elements")
    widths = nodes.constant("widths", [*e.params["low"], *e.params["high"]])
    return nodes.op("Pad", nodes.name(e.inputs[0]), widths, nodes.number(e.inputs[0], e.params["value"]))


def total(nodes: Nodes, e: Equation) -> str:
    """A sum, in the type of the result."""
    (x,), (y,) = e.inputs, e.outputs
    name = nodes.name(x)
    if x.type.dtype != y.type.dtype:
        name = nodes.cast(name, y.type.dtype)
    return nodes.op("ReduceSum", name, nodes.constant("axes", list(e.params["axes"])), keepdims=0)


def mean(nodes: Nodes, e: Equation) -> str:
    (x, _), (y,) = e.inputs, e.outputs
    axes, keeps = list(e.kernel_params["axes"]), len(y.type.shape) == len(x.type.shape)
    if axes == [2, 3] and keeps and len(x.type.shape) == 4:
        return nodes.op("GlobalAveragePool", nodes.name(x))
    return nodes.op("ReduceMean", nodes.name(x), axes=axes, keepdims=int(keeps))


def argsort(nodes: Nodes, e: Equation) -> str:
    count = nodes.constant("count", [e.params["count"]])
    largest = int(e.params["descending"])
    name = nodes.op("TopK", nodes.name(e.inputs[0]), count, others=["order"], largest=largest, axis=-1)
    return nodes.cast(f"{name}/order", e.outputs[0].type.dtype)


def cumsum(nodes: Nodes, e: Equation) -> str:
    axis = nodes.constant("axis", e.params["axis"])
    return nodes.op("CumSum", nodes.name(e.inputs[0]), axis, reverse=int(e.params["reverse"]))


def gathered(nodes: Nodes, e: Equation) -> list[str]:
    """The arguments of a gather."""
    x, indices = e.inputs
    return [nodes.name(x), integers(nodes, indices)]


def embedding(nodes: Nodes, e: Equation) -> str:
    numbers, weight = e.inputs
    return nodes.op("Gather", nodes.name(weight), nodes.cast(nodes.name(numbers), np.dtype(np.int64)), axis=0)


def one_hot(nodes: Nodes, e: Equation) -> str:
    last = nodes.op("Unsqueeze", integers(nodes, e.inputs[0]), nodes.constant("last", [-1]))
    dtype = e.inputs[0].type.dtype if e.inputs[0].type.dtype == np.int32 else np.int64
    equal = nodes.op("Equal", last, nodes.constant("classes", np.arange(e.params["num_classes"], dtype=dtype)))
    return nodes.cast(equal, e.outputs[0].type.dtype)


def linear(nodes: Nodes, e: Equation) -> str:
    x, weight, *bias = e.inputs
    transposed = e.kernel_params["transpose_b"]
    if len(x.type.shape) == 2:
        return nodes.op("Gemm", *values(nodes, e), transB=int(transposed))
    factor = nodes.op("Transpose", nodes.name(weight), perm=[1, 0]) if transposed else nodes.name(weight)
    product = nodes.op("MatMul", nodes.name(x), factor)
    return nodes.op("Add", product, nodes.name(bias[0])) if bias else product


def matmul(nodes: Nodes, e: Equation) -> str:
    factors = []
    for v, name in zip(e.inputs, "ab", strict=True):
        rank = len(v.type.shape)
        last = [*range(rank - 2), rank - 1, rank - 2]
        transposed = e.params.get(f"transpose_{name}")
        factors.append(nodes.op("Transpose", nodes.name(v), perm=last) if transposed else nodes.name(v))
    return nodes.op("MatMul", *factors)


def conv2d(nodes: Nodes, e: Equation) -> str:
    low, high = (e.kernel_params.get(name, (0, 0, 0, 0))[2:] for name in ("low", "high"))
    padding = e.kernel_params["window"].padding
    pads = [p + extra for side in (low, high) for p, extra in zip(padding, side, strict=True)]
    return _convolution("Conv", nodes, e, pads=pads)


def conv_transpose2d(nodes: Nodes, e: Equation) -> str:
    window, (x, weight, *_), (y,) = e.kernel_params["window"], e.inputs, e.outputs
    extra = []
    for i in (0, 1):
        span = window.dilation[i] * (weight.type.shape[i + 2] - 1) + 1
        whole = (x.type.shape[i + 2] - 1) * window.stride[i] - 2 * window.padding[i] + span
        extra.append(y.type.shape[i + 2] - whole)
    return _convolution("ConvTranspose", nodes, e, pads=window.padding * 2, output_padding=extra)


def _convolution(op: str, nodes: Nodes, e: Equation, **more: Any) -> str:
    window, weight = e.kernel_params["window"], e.inputs[1]
    sizes = {"kernel_shape": weight.type.shape[2:], "strides": window.stride, "dilations": window.dilation}
    return nodes.op(op, *map(nodes.name, e.inputs), **sizes, group=window.groups, **more)


def max_pool2d(nodes: Nodes, e: Equation) -> str:
    if not e.form:
        raise nodes.refused(e, " with positions")
    return nodes.op("MaxPool", nodes.name(e.inputs[0]), **_windows(e))


def avg_pool2d(nodes: Nodes, e: Equation) -> str:
    return nodes.op("AveragePool", nodes.name(e.inputs[0]), **_windows(e), count_include_pad=1)


def _windows(e: Equation) -> dict[str, Any]:
    windows = e.kernel_params["windows"]
    return {"kernel_shape": windows.kernel, "strides": windows.stride, "pads": windows.padding * 2}


def adaptive_avg_pool2d(nodes: Nodes, e: Equation) -> str:
    x, rows, columns = e.inputs
    means = nodes.op("MatMul", nodes.name(rows), nodes.name(x))
    return nodes.op("MatMul", means, nodes.constant("columns", nodes.evaluation.known[columns].T))


def batch_norm(nodes: Nodes, e: Equation) -> str:
    x, mean, variance, eps, *affine = e.inputs
    factors = list(map(nodes.name, affine)) or _ones_and_zeros(nodes, mean.type.shape)
    names = nodes.name(x), *factors, nodes.name(mean), nodes.name(variance)
    return nodes.op("BatchNormalization", *names, epsilon=float(nodes.evaluation.known[eps]))


def layer_norm(nodes: Nodes, e: Equation) -> str:
    """Layer normalisation. Without factors, on (N, groups, n) as of a group norm, it is InstanceNormalization."""
    (x, *affine), axes, eps = e.inputs, e.kernel_params["axes"], e.kernel_params["eps"]
    if not affine and len(x.type.shape) == 3 and axes == (2,):
        ones_and_zeros = _ones_and_zeros(nodes, x.type.shape[1:2])
        return nodes.op("InstanceNormalization", nodes.name(x), *ones_and_zeros, epsilon=eps)
    factors = list(map(nodes.name, affine)) or _ones_and_zeros(nodes, x.type.shape[-len(axes) :])
    return nodes.op("LayerNormalization", nodes.name(x), *factors, axis=-len(axes), epsilon=eps)


def _ones_and_zeros(nodes: Nodes, shape: Sequence[int]) -> list[str]:
    """A weight and a bias that change nothing, because ONNX requires both."""
    return [nodes.constant("ones", np.ones(shape, np.float32)), nodes.constant("zeros", np.zeros(shape, np.float32))]


def self_attention(nodes: Nodes, e: Equation) -> Sequence[str]:
    x, heads = e.inputs[0], e.params["heads"]
    *leading, tokens, width = nodes.lengths[x]
    given = (*leading, tokens, width)
    by_head = nodes.reshape("heads", nodes.name(x), given, (*leading, tokens, 3, heads, width // 3 // heads))
    rank = len(leading)
    perm = [rank + 1, *range(rank), rank + 2, rank, rank + 3]
    parts = nodes.op("Transpose", by_head, perm=perm)
    q, k, v = (nodes.op("Gather", parts, nodes.constant(name, i), axis=0) for i, name in enumerate("qkv"))
    y = _attend(nodes, e, q, k, v, rank + 3, tokens)
    joined = nodes.op("Transpose", y, perm=[*range(rank), rank + 1, rank, rank + 2])
    split = (*leading, tokens, heads, width // 3 // heads)
    return [nodes.reshape("joined", joined, split, nodes.lengths[e.outputs[0]])]


def attention(nodes: Nodes, e: Equation) -> Sequence[str]:
    q, k, v = (nodes.name(v) for v in e.inputs[:3])
    return [_attend(nodes, e, q, k, v, len(e.inputs[0].type.shape), e.inputs[0].type.shape[-2])]


def _attend(nodes: Nodes, e: Equation, q: str, k: str, v: str, rank: int, tokens: int) -> str:
    """softmax(q kᵀ scale) v. A causal query excludes later keys."""
    if not nodes.evaluation.is_plain_attention(e):
        raise nodes.refused(e, " with a mask, documents or dropout")
    q = nodes.op("Mul", q, nodes.constant("scale", float(e.params["scale"])))
    scores = nodes.op("MatMul", q, nodes.op("Transpose", k, perm=[*range(rank - 2), rank - 1, rank - 2]))
    if e.params["causal"]:
        later = np.triu(np.full((tokens, tokens), EXCLUDED, np.float32), 1)
        scores = nodes.op("Add", scores, nodes.constant("causal", later))
    return nodes.op("MatMul", nodes.op("Softmax", scores, axis=-1), v)


def recurrent(nodes: Nodes, e: Equation) -> Sequence[str]:
    """ONNX's sequences are (length, batch, features), its results (length, directions, batch, hidden)."""
    x, *weights = e.inputs
    inner = e.params["body"].equations[-1]
    cell, hidden = inner.name, e.inputs[2].type.shape[1]
    if not nodes.evaluation.known.keys() >= set(weights):
        raise nodes.refused(e, " with weights that depend on the images")
    arrays = [gates_in_onnx_order(nodes.evaluation.known[v], cell) for v in weights]
    first = arrays[2] if cell != "gru" else arrays[3]
    second = np.zeros_like(first) if cell != "gru" else arrays[2]
    given = {"weight_ih": arrays[0], "weight_hh": arrays[1], "bias": np.concatenate([first, second])}
    options: dict[str, Any] = {"hidden_size": hidden}
    if inner.params["reverse"]:
        options["direction"] = "reverse"
    if cell == "gru":
        options["linear_before_reset"] = 1
    op, _, activation = cell.partition("_")
    if activation:
        options["activations"] = [activation.capitalize()]
    steps_first = nodes.op("Transpose", nodes.name(x), perm=[1, 0, 2])
    states = ["h", "c"] if cell == "lstm" else ["h"]
    constants = [nodes.constant(key, array[None]) for key, array in given.items()]
    name = nodes.op(op.upper(), steps_first, *constants, others=states, **options)
    axis = nodes.constant("direction", [1]), nodes.constant("direction", [0])
    steps = nodes.op("Transpose", nodes.op("Squeeze", name, axis[0]), perm=[1, 0, 2])
    found = [steps, *(nodes.op("Squeeze", f"{name}/{state}", axis[1]) for state in states)]
    return [found[inner.outputs.index(v)] for v in e.outputs]


def gates_in_onnx_order(x: np.ndarray, cell: str) -> np.ndarray:
    """A weight or bias of a recurrent layer with its gates in ONNX's order, in float32."""
    order = ONNX_GATES[cell]
    parts = np.split(x.astype(np.float32), len(order))
    return np.concatenate([parts[i] for i in order])


SAME = (
    "add sub mul div neg exp log sqrt reciprocal abs sign sin cos tanh erf floor ceil round equal less where relu "
    "sigmoid softplus"
)
"""The elementwise primitives that ONNX has by the same name, with a capital."""

NODES: dict[str, Translation] = {
    "astype": cast,
    "stop_gradient": values,
    "reshape": reshape,
    "broadcast_to": broadcast,
    "full": full,
    "transpose": node("Transpose", perm="axes"),
    "flip": flip,
    "slice": slice_,
    "pad": pad,
    "concatenate": node("Concat", axis="axis"),
    "take": node("Gather", gathered, axis="axis"),
    "take_along_axis": node("GatherElements", gathered, axis="axis"),
    "one_hot": one_hot,
    "sum": total,
    "max": node("ReduceMax", axes="axes", keepdims=0),
    "min": node("ReduceMin", axes="axes", keepdims=0),
    "logsumexp": node("ReduceLogSumExp", axes="axes", keepdims=0),
    "argmax": node("ArgMax", axis="axis", keepdims=0),
    "argsort": argsort,
    "cumsum": cumsum,
    "softmax": node("Softmax", axis="axis"),
    "log_softmax": node("LogSoftmax", axis="axis"),
    "matmul": matmul,
    "matmul_integers": matmul,
    "avg_pool2d": avg_pool2d,
    "attention": attention,
    "self_attention": self_attention,
    # Forms.
    "linear": linear,
    "conv2d": conv2d,
    "conv2d_input_grad": conv_transpose2d,
    "batch_norm": batch_norm,
    "max_pool2d": max_pool2d,
    "layer_norm": layer_norm,
    "mean": mean,
    "adaptive_avg_pool2d": adaptive_avg_pool2d,
    "embedding": embedding,
    **dict.fromkeys(("rnn_tanh_layer", "rnn_relu_layer", "lstm_layer", "gru_layer"), recurrent),
    # Of each element.
    **{name: each(name.capitalize()) for name in SAME.split()},
    "less_equal": each("LessOrEqual"),
    "not_equal": composed(lambda o, a, b: o.Not(o.Equal(a, b))),
    "log1p": composed(lambda o, x: o.Log(o.Add(x, 1))),
    "expm1": composed(lambda o, x: o.Sub(o.Exp(x), 1)),
    "rsqrt": composed(lambda o, x: o.Reciprocal(o.Sqrt(x))),
    "square": composed(lambda o, x: o.Mul(x, x)),
    "hypot": composed(lambda o, a, b: o.Sqrt(o.Add(o.Mul(a, a), o.Mul(b, b)))),
    "floor_divide": composed(floor_divide),
    "remainder": composed(remainder),
    "power": each("Pow"),
    "power_scalar": power,
    "integer_power": each("Pow"),
    "integer_power_scalar": power,
    "isnan": each("IsNaN"),
    "isinf": each("IsInf"),
    "isfinite": composed(lambda o, x: o.Not(o.Or(o.IsNaN(x), o.IsInf(x)))),
    "bitwise_and": logical("And"),
    "bitwise_or": logical("Or"),
    "bitwise_xor": logical("Xor"),
    "maximum": each("Max"),
    "minimum": each("Min"),
    "clip": clip,
    "leaky_relu": each("LeakyRelu", alpha="negative_slope"),
    "elu": each("Elu", alpha="alpha"),
    "silu": composed(lambda o, x: o.Mul(x, o.Sigmoid(x))),
    "gelu": composed(gelu),
}
"""The translation of each primitive and form."""
