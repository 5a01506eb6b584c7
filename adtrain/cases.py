"""The case table: test inputs for every operation.

Gradcheck, the comparison of backends, and the tests of shapes, transposes and staging use it. The inputs keep a
distance from kinks (relu at 0, ties of max), so tolerances need no allowance for them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import grad
from adtrain.core.custom import custom_vjp
from adtrain.core.precision import FULL, matmul_precision
from adtrain.core.vmap import vmap
from adtrain.ops.create import full
from adtrain.samplers import Sampler, apart, between, distinct, integers, normal, rng_state, short


@dataclass(frozen=True)
class Case:
    """One operation on one kind of input.

    Attributes:
        op: the name of the public function.
        name: the variant; ``op`` and ``name`` together are unique.
        f: the operation as a function of the inputs; returns a value or a tuple of values.
        inputs: samplers of the inputs. Floating-point inputs (float64) are differentiated, integers are not.
        linear: positions of the inputs in which ``f`` is linear while the others are fixed.
        order: the highest order of derivative that is checked; 0 for none.
        precision: the `ops.matmul_precision` of ``f``.
    """

    op: str
    name: str
    f: Callable[..., Any]
    inputs: tuple[Sampler, ...]
    linear: tuple[int, ...] = ()
    order: int = 3
    precision: str = FULL

    def sample(self, dtype: str = "float64", number: int = 0) -> list[Array]:
        """The inputs, the same in every call; another ``number`` gives others."""
        rng = np.random.default_rng(zlib.crc32(f"{self.op}/{self.name}".encode()) + number)
        drawn = [make(rng) for make in self.inputs]
        return [array(x.astype(dtype) if x.dtype.kind == "f" else x) for x in drawn]


CASES: list[Case] = []


def case(
    op: str,
    name: str,
    f: Callable[..., Any],
    *inputs: Sampler,
    linear: tuple[int, ...] = (),
    order: int = 3,
    precision: str = FULL,
) -> None:
    """Add a row to the table."""
    CASES.append(Case(op, name, matmul_precision(precision)(f), inputs, linear, order, precision))


# Elementwise, one argument.
for _op, _domain in {
    "neg": normal(3, 5), "exp": normal(3, 5), "log": between(0.3, 3, 3, 5), "log1p": between(-0.5, 3, 3, 5),
    "expm1": normal(3, 5), "sqrt": between(0.3, 3, 3, 5), "rsqrt": between(0.3, 3, 3, 5), "square": normal(3, 5),
    "reciprocal": apart(3, 5, kinks=(0.0, 0.1, -0.1)), "abs": apart(3, 5), "sin": normal(3, 5), "cos": normal(3, 5),
    "tanh": normal(3, 5), "sigmoid": normal(3, 5), "softplus": normal(3, 5), "erf": normal(3, 5), "relu": apart(3, 5),
    "silu": normal(3, 5), "gelu": normal(3, 5), "squared_relu": apart(3, 5),
}.items():  # fmt: skip
    case(_op, "odd", getattr(ops, _op), _domain, order=4, linear=(0,) if _op == "neg" else ())
case("leaky_relu", "slope", lambda x: ops.leaky_relu(x, 0.2), apart(3, 5), order=4)
case("soft_cap", "cap", lambda x: ops.soft_cap(x, 1.5), normal(3, 5), order=4)
case("elu", "alpha", lambda x: ops.elu(x, 0.7), apart(3, 5), order=4)
case("gelu", "tanh", lambda x: ops.gelu(x, "tanh"), normal(3, 5), order=4)
case("clip", "both", lambda x: ops.clip(x, -0.5, 1.0), apart(3, 7, kinks=(-0.5, 1.0)), order=4)
case("clip", "min", lambda x: ops.clip(x, min=0.25), apart(9, kinks=(0.25,)), order=4)
case("all_gather", "one rank", ops.all_gather, normal(3, 4), linear=(0,))
case("gather_shards", "one shard", lambda x: ops.gather_shards(x, 1), normal(3, 4), linear=(0,))
case("all_to_all", "one rank", ops.all_to_all, normal(1, 4), linear=(0,))
case("all_reduce", "of squares", lambda x: ops.all_reduce(ops.square(x)), normal(3, 4))
case("astype", "to integers", lambda x: ops.astype(x, "int64"), normal(4), order=0)
case("sign", "odd", ops.sign, normal(3, 5), order=0)
case("stop_gradient", "beside", lambda x: ops.stop_gradient(ops.square(ops.stop_gradient(x))), normal(3), order=0)
for _op in ("floor", "ceil", "trunc"):
    case(_op, "fractions", getattr(ops, _op), apart(3, 5, kinks=(-2.0, -1.0, 0.0, 1.0, 2.0)))
    case(_op, "integers", getattr(ops, _op), integers(9, 5), order=0)
case("round", "fractions", ops.round, apart(3, 5, kinks=(-1.5, -0.5, 0.5, 1.5)))
for _op in ("isnan", "isfinite", "isinf"):  # of -infinity, NaN and 1
    case(_op, "mixed", lambda x, op=_op: getattr(ops, op)((x - 1) / ops.maximum(x - 1, 0)), integers(3, 9), order=0)
case("power", "cube", lambda x: ops.power(x, 3), normal(3, 5), order=4)
case("power", "zero", lambda x: ops.power(x, 0), normal(5), order=4)
case("power", "fraction", lambda x: ops.power(x, -1.5), between(0.3, 3, 5), order=4)
case("power", "array", ops.power, between(0.3, 3, 3, 5), normal(3, 5), order=4)
case("power", "broadcast", ops.power, between(0.3, 3, 3, 1), normal(5), order=4)
case("power", "integers", ops.power, integers(9, 3, 5), integers(9, 5), order=0)
case("power", "integers, number", lambda x: ops.power(x - 4, 5), integers(9, 3, 5), order=0)

# Elementwise, several arguments.
for _op, _linear in {"add": (), "sub": (), "mul": (0, 1), "div": (0,)}.items():
    _second = between(0.3, 3, 4, 3) if _op == "div" else normal(4, 3)
    case(_op, "same", getattr(ops, _op), normal(4, 3), _second, linear=_linear, order=4)
case("add", "broadcast", ops.add, normal(2, 1, 3), normal(4, 1), order=4)
case("mul", "broadcast", ops.mul, normal(2, 1, 3), normal(4, 1), linear=(0, 1), order=4)
case("mul", "twice the same", lambda x: ops.mul(x, x), normal(4), order=4)
case("div", "by a broadcast", ops.div, normal(2, 3), between(0.3, 3, 1, 3), linear=(0,), order=4)
case("add", "empty", ops.add, normal(0, 3), normal(3), order=4)
case("maximum", "apart", lambda x, y: ops.maximum(x, y + 3.0 * ops.sign(y)), between(-1, 1, 3, 5), apart(3, 5), order=4)
case("minimum", "apart", lambda x, y: ops.minimum(x, y + 3.0 * ops.sign(y)), between(-1, 1, 3, 5), apart(3, 5), order=4)
for _op in ("add", "mul", "maximum", "minimum"):
    case(_op, "bool", lambda x, y, op=_op: getattr(ops, op)(x < y, x == y), integers(3, 4, 5), integers(3, 5), order=0)
for _op in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    case(_op, "bool", lambda x, y, op=_op: getattr(ops, op)(x < y, x == y), integers(3, 4, 5), integers(3, 5), order=0)
    case(_op, "integers", lambda x, y, op=_op: getattr(ops, op)(x - 9, y - 4), integers(19, 4, 5), integers(9, 5),
         order=0)  # fmt: skip
case("bitwise_not", "bool", lambda x: ops.bitwise_not(ops.equal(x, 1)), integers(3, 4, 5), order=0)
case("bitwise_not", "integers", lambda x: ops.bitwise_not(x - 4), integers(9, 5), order=0)
for _op in ("floor_divide", "remainder"):
    case(_op, "apart", getattr(ops, _op), between(4.6, 5.9, 4, 3), between(2.0, 2.2, 3), order=4)
    case(_op, "signs", lambda x, op=_op: getattr(ops, op)(x, -1.3), apart(4, 3, kinks=(-1.3, 0.0, 1.3)))
    case(_op, "integers", lambda x, y, op=_op: getattr(ops, op)(x - 9, y - 4), integers(19, 4, 5), integers(9, 5),
         order=0)  # fmt: skip
for _op in ("arctan2", "hypot"):
    case(_op, "right", getattr(ops, _op), normal(3, 5), between(0.3, 3, 5), order=4)
    case(_op, "above", getattr(ops, _op), between(0.3, 3, 3, 5), normal(5), order=4)
case("where", "mask", lambda c, a, b: ops.where(ops.equal(c, 1), a, b), integers(2, 3, 5), normal(3, 5), normal(5),
     order=4)  # fmt: skip
case("where", "else zero", lambda c, a: ops.where(ops.equal(c, 1), a, 0.0), integers(2, 3, 5), normal(5), linear=(1,))
for _op in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
    case(_op, "integers", getattr(ops, _op), integers(3, 4, 5), integers(3, 5), order=0)

# Reductions.
case("sum", "all", ops.sum, normal(3, 4, 5), linear=(0,))
case("sum", "axes kept", lambda x: ops.sum(x, (0, -1), keepdims=True), normal(3, 4, 5), linear=(0,))
case("sum", "empty axis", lambda x: ops.sum(x, 0), normal(0, 3), linear=(0,))
case("mean", "axis", lambda x: ops.mean(x, 1), normal(3, 4, 5), linear=(0,))
case("var", "corrected", lambda x: ops.var(x, (0, 2), correction=1), normal(3, 4, 5))
case("std", "corrected", lambda x: ops.std(x, (0, 2), correction=1), normal(3, 4, 5))
case("std", "all, kept", lambda x: ops.std(x, keepdims=True), normal(3, 4))
case("prod", "all", ops.prod, between(0.5, 2, 3, 2))
case("prod", "axes kept", lambda x: ops.prod(x, (0, 2), keepdims=True), normal(3, 2, 4))
case("prod", "zeros", lambda x, m: ops.prod(x * m, 1), normal(3, 5), integers(2, 3, 5))
case("max", "all", ops.max, distinct(3, 5))
case("max", "axes kept", lambda x: ops.max(x, (0, 2), keepdims=True), distinct(3, 4, 5))
case("min", "axis", lambda x: ops.min(x, 1), distinct(3, 5))
case("logsumexp", "axis", lambda x: ops.logsumexp(x, 1), normal(3, 5))
case("logsumexp", "all", ops.logsumexp, normal(3, 5))
case("argmax", "axis", lambda x: ops.argmax(x, 1), distinct(3, 5), order=0)
case("argmin", "axis", lambda x: ops.argmin(x, 1), distinct(3, 5), order=0)
case("argsort", "axis", lambda x: ops.argsort(x, 0), distinct(5, 3), order=0)
case("argsort", "descending", lambda x: ops.argsort(x, descending=True), distinct(3, 5), order=0)
case("sort", "rows", ops.sort, distinct(3, 5))
case("sort", "descending", lambda x: ops.sort(x, 1, descending=True), distinct(2, 5, 3))
case("topk", "largest", lambda x: ops.topk(x, 3)[0], distinct(3, 5))
case("topk", "smallest", lambda x: ops.topk(x, 2, 0, largest=False)[0], distinct(5, 3))
for _op in ("any", "all"):
    case(_op, "axis", lambda x, op=_op: getattr(ops, op)(x, 1), integers(3, 9, 2), order=0)
    case(_op, "bool", lambda x, op=_op: getattr(ops, op)(x > 0, (0, 2), keepdims=True), normal(2, 9, 2), order=0)
for _op in ("sum", "mean", "var", "max", "min", "logsumexp"):
    case(_op, "no axes", lambda x, op=_op: getattr(ops, op)(x, ()), normal(3, 5))
for _op in ("sum", "mean", "var", "max", "min", "logsumexp", "cumsum", "softmax", "log_softmax"):
    case(_op, "number", lambda x, op=_op: getattr(ops, op)(x, -1), normal())
case("argmax", "number", lambda x: ops.argmax(x, 0), normal(), order=0)
case("cumsum", "axis", lambda x: ops.cumsum(x, 1), normal(3, 5), linear=(0,))
for _name, _ord in {"2": None, "1": 1, "3": 3, "infinity": np.inf, "-infinity": -np.inf}.items():
    case("norm", f"of vectors, {_name}", lambda x, p=_ord: ops.norm(x, p, 1, keepdims=True), distinct(3, 4, 2))
case("norm", "count", lambda x: ops.norm(x, 0, 0), apart(3, 4), order=0)
case("norm", "all", ops.norm, normal(3, 4, 2))
case("norm", "Frobenius", lambda x: ops.norm(x, "fro", (2, 0)), normal(3, 4, 2))
case("norm", "of columns", lambda x: ops.norm(x, 1), apart(3, 4))
case("norm", "of rows", lambda x: ops.norm(x, -np.inf, (2, 0)), apart(3, 2, 4))
case("norm", "of zeros", lambda x: ops.norm(x * 0.0, axis=1), normal(3, 4))
case("cumsum", "reverse", lambda x: ops.cumsum(x, 0, reverse=True), normal(3, 5), linear=(0,))

# Shapes.
case("reshape", "inferred", lambda x: ops.reshape(x, (5, -1)), normal(3, 5), linear=(0,))
case("transpose", "reversed", ops.transpose, normal(2, 3, 4), linear=(0,))
case("transpose", "cyclic", lambda x: ops.transpose(x, (2, 0, 1)), normal(2, 3, 4), linear=(0,))
case("broadcast_to", "new and stretched", lambda x: ops.broadcast_to(x, (2, 3, 4)), normal(3, 1), linear=(0,))
case("sum_to", "new and stretched", lambda x: ops.sum_to(x, (3, 1)), normal(2, 3, 4), linear=(0,))
case("concatenate", "three", lambda *xs: ops.concatenate(xs, 1), normal(2, 1), normal(2, 3), normal(2, 0))
case("concatenate", "rows", lambda *xs: ops.concatenate(xs), normal(2, 3), normal(1, 3), normal(5, 3))
case("stack", "middle", lambda *xs: ops.stack(xs, 1), normal(2, 3), normal(2, 3))
case("slice", "steps", lambda x: ops.slice(x, (1, 0), (6, 5), (2, 3)), normal(7, 5), linear=(0,))
case("pad", "value", lambda x: ops.pad(x, ((1, 2), (0, 3)), 0.5), normal(2, 3))
case("pad", "zero", lambda x: ops.pad(x, 1), normal(2, 3), linear=(0,))
case("pad", "negative", lambda x: ops.pad(x, ((-1, 2), (1, -2)), 0.5), normal(3, 4))
case("pad", "cropped", lambda x: ops.pad(x, ((-1, 0), (0, -2))), normal(3, 4), linear=(0,))
case("flip", "axis", lambda x: ops.flip(x, 1), normal(3, 4), linear=(0,))
case("squeeze", "all", ops.squeeze, normal(1, 3, 1), linear=(0,))
case("expand_dims", "two", lambda x: ops.expand_dims(x, (0, 2)), normal(3, 4), linear=(0,))
case("getitem", "mixed", lambda x: x[1, ::-2, None, ..., 1:], normal(2, 5, 3, 4), linear=(0,))
case("getitem", "array", lambda x, i: x[:, i], normal(3, 4), integers(4, 2, 3), linear=(0,))
case("getitem", "two arrays", lambda x, i, j: x[i, :, j - 4], normal(3, 2, 4), integers(3, 2, 1), integers(4, 5),
     linear=(0,))  # fmt: skip
case("getitem", "three neighbours", lambda x, i, j: x[:, i, 1, j], normal(2, 3, 2, 4), integers(3, 5), integers(4, 5),
     linear=(0,))  # fmt: skip
case("split", "sections", lambda x: tuple(ops.split(x, 3, 1)), normal(2, 6))
case("split", "positions", lambda x: ops.split(x, (2, 3))[2], normal(5, 2), linear=(0,))
case("tile", "new axis", lambda x: ops.tile(x, (2, 1, 3)), normal(2, 3), linear=(0,))
case("repeat", "axis", lambda x: ops.repeat(x, 3, 1), normal(2, 3, 2), linear=(0,))
case("repeat", "each by itself", lambda x: ops.repeat(x, (2, 0, 1), 0), normal(3, 2), linear=(0,))
case("roll", "all", lambda x: ops.roll(x, 4), normal(2, 3), linear=(0,))
case("roll", "axes", lambda x: ops.roll(x, (1, -2), (0, 2)), normal(2, 3, 5), linear=(0,))
case("diag", "of a matrix", lambda x: ops.diag(x, 1), normal(3, 4), linear=(0,))
case("diag", "of a vector", lambda x: ops.diag(x, -2), normal(3), linear=(0,))
case("diagonal", "axes", lambda x: ops.diagonal(x, -1, 2, 0), normal(3, 2, 4), linear=(0,))
case("trace", "matrix", ops.trace, normal(4, 3), linear=(0,))
case("trace", "axes", lambda x: ops.trace(x, 1, -1, 0), normal(3, 2, 4), linear=(0,))
for _op in ("tril", "triu"):
    case(_op, "matrix", getattr(ops, _op), normal(3, 4), linear=(0,))
    case(_op, "matrices", lambda x, op=_op: getattr(ops, op)(x, -1), normal(2, 4, 3), linear=(0,))
case("take", "axis", lambda x, i: ops.take(x, i, 1), normal(3, 4, 2), integers(4, 5), linear=(0,))
case("take", "repeated", lambda x: ops.take(x, np.array([2, -1, 2])), normal(3, 2), linear=(0,))
case("take_along_axis", "rows", lambda x, i: ops.take_along_axis(x, i, 1), normal(3, 4), integers(4, 3, 2), linear=(0,))
case("put_rows", "middle", lambda x, rows, i: ops.put_rows(x, rows, i, 2), normal(3, 2, 5, 4), normal(3, 2, 4),
     integers(5, 3))  # fmt: skip
case("put_rows", "last", lambda x, rows, i: ops.put_rows(x, rows, i, 1), normal(3, 5), normal(3),
     integers(5, 3))  # fmt: skip
case("one_hot", "matrix", lambda i: ops.one_hot(i, 4, "float64"), integers(4, 3, 2), order=0)
case("embedding", "matrix", ops.embedding, integers(5, 3, 2), normal(5, 4), linear=(1,))
for _d, _rows in {1: 9, 2: 25, 3: 32, 4: 32}.items():  # not at the faces of cells, where slopes jump
    case("hash_grid", f"{_d}-D", lambda x, c, w: ops.hash_grid((x + c) / 10.0, w, (2, 5), 16),
         between(0.1, 0.9, 4, _d), integers(10, 4, _d), normal(_rows, 2), linear=(2,))  # fmt: skip
case("hash_grid", "points outside", lambda x, w: ops.hash_grid(x, w, (1, 2), 8), apart(3, 2, kinks=(0.0, 0.5, 1.0)),
     normal(12, 3), linear=(1,))  # fmt: skip

# Matrix products.
for _a, _b in ((False, False), (True, False), (False, True), (True, True)):
    case("matmul", f"transposed {_a:d}{_b:d}", lambda a, b, ta=_a, tb=_b: ops.matmul(a, b, ta, tb),
         normal(*((5, 3) if _a else (3, 5))), normal(*((4, 5) if _b else (5, 4))), linear=(0, 1))  # fmt: skip
    case("matmul", f"batch, transposed {_a:d}{_b:d}", lambda a, b, ta=_a, tb=_b: ops.matmul(a, b, ta, tb),
         normal(2, *((5, 3) if _a else (3, 5))), normal(2, *((4, 5) if _b else (5, 4))), linear=(0, 1))  # fmt: skip
case("matmul", "broadcast", ops.matmul, normal(2, 1, 3, 4), normal(3, 4, 2), linear=(0, 1))
case("matmul", "batch by matrix", ops.matmul, normal(2, 3, 4), normal(4, 5), linear=(0, 1))
case("matmul", "vectors", ops.matmul, normal(5), normal(5), linear=(0, 1))
case("tensordot", "two axes", ops.tensordot, normal(2, 3, 4), normal(3, 4, 5), linear=(0, 1))
case("tensordot", "pairs", lambda a, b: ops.tensordot(a, b, ((-1, 0), (1, 2))), normal(2, 3, 4), normal(5, 4, 2),
     linear=(0, 1))  # fmt: skip
for _subscripts, _shapes in {
    "ij,jk->ik": ((3, 4), (4, 2)), "bij,bkj->bik": ((2, 3, 4), (2, 5, 4)), "ij,ik->jk": ((3, 4), (3, 2)),
    "i,j->ji": ((3,), (4,)), "...ij,...j->...i": ((2, 1, 3, 4), (5, 4)), "ii->i": ((4, 4),), "iij->j": ((3, 3, 2),),
    "ijk->ki": ((2, 3, 4),), "bi,bj,ijk->bk": ((2, 3), (2, 4), (3, 4, 2)), "ij,ij->": ((3, 4), (3, 1)),
}.items():  # fmt: skip
    case("einsum", _subscripts, lambda *xs, s=_subscripts: ops.einsum(s, *xs), *(normal(*shape) for shape in _shapes),
         linear=tuple(range(len(_shapes))))  # fmt: skip
case("einsum", "integers", lambda a, b: ops.einsum("ij,jk", a, b), integers(9, 3, 4), integers(9, 4, 2), order=0)
case("kron", "matrix and block", ops.kron, normal(2, 3), normal(2, 1, 2), linear=(0, 1))
case("cross", "broadcast", ops.cross, normal(2, 1, 3), normal(4, 3), linear=(0, 1))
case("cross", "axis", lambda a, b: ops.cross(a, b, 0), normal(3, 2), normal(3, 2), linear=(0, 1))
case("matmul", "empty batch", ops.matmul, normal(0, 4), normal(4, 5), linear=(0, 1))
case("matmul", "integers", ops.matmul, integers(9, 2, 1, 3, 4), integers(9, 3, 4, 2), order=0)
case("matmul", "integers, transposed", lambda a, b: ops.matmul(a, b, True, True), integers(9, 4, 3), integers(9, 2, 4),
     order=0)  # fmt: skip
for _precision in ("tf32", "bfloat16"):
    case("matmul", _precision, ops.matmul, short(9, 5), short(5, 8), linear=(0, 1), precision=_precision)
    case("matmul", f"{_precision}, batch", ops.matmul, short(2, 3, 4), short(2, 4, 5), linear=(0, 1),
         precision=_precision)  # fmt: skip


# Convolution and pooling.
_CONVOLUTIONS: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    ("conv2d", "plain"): ((2, 3, 6, 5), (4, 3, 3, 2), {}),
    ("conv2d", "stride and padding"): ((2, 2, 7, 6), (3, 2, 3, 3), {"stride": (2, 3), "padding": (1, 2)}),
    ("conv2d", "dilation"): ((1, 2, 8, 7), (3, 2, 3, 2), {"dilation": (2, 3), "padding": 1}),
    ("conv2d", "groups"): ((2, 4, 5, 5), (6, 2, 2, 2), {"groups": 2, "stride": 2}),
    ("conv2d", "depthwise"): ((2, 3, 5, 5), (3, 1, 3, 3), {"groups": 3, "padding": 1}),
    ("conv2d", "one pixel"): ((2, 3, 1, 1), (4, 3, 1, 1), {}),
    ("conv2d", "rows left over"): ((1, 1, 6, 8), (2, 1, 3, 3), {"stride": 4}),
    ("conv2d", "empty batch"): ((0, 3, 5, 5), (4, 3, 3, 3), {}),
    ("conv2d", "same"): ((2, 2, 4, 3), (3, 2, 2, 3), {"padding": "same"}),
    ("conv2d", "unequal padding"): ((2, 2, 4, 3), (3, 2, 2, 3), {"padding": ((0, 1), (2, 1))}),
    ("conv3d", "groups"): ((1, 4, 4, 5, 4), (2, 2, 2, 2, 3),
                           {"stride": (2, 1, 2), "padding": (1, 0, 1), "dilation": (1, 2, 1), "groups": 2}),
    ("conv_transpose1d", "stride"): ((2, 3, 4), (3, 2, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    ("conv_transpose2d", "groups"): ((1, 4, 3, 3), (4, 2, 2, 3), {"stride": (1, 2), "groups": 2, "dilation": 2}),
    ("conv_transpose3d", "groups"): ((1, 4, 2, 3, 2), (4, 1, 3, 2, 3),
                                     {"stride": 2, "padding": (1, 0, 1), "output_padding": (1, 0, 0), "groups": 2}),
}  # fmt: skip
for (_op, _name), (_x, _w, _options) in _CONVOLUTIONS.items():
    _conv = partial(getattr(ops, _op), **_options)
    case(_op, _name, _conv, normal(*_x), normal(*_w), linear=(0, 1))
    if (_op, _name) in (("conv2d", "stride and padding"), ("conv2d", "groups")):
        for _p in ("tf32", "bfloat16"):
            case(_op, f"{_name}, {_p}", _conv, short(*_x), short(*_w), linear=(0, 1), precision=_p)
case("conv2d", "bias", lambda x, w, b: ops.conv2d(x, w, b), normal(2, 3, 4, 4), normal(5, 3, 3, 3), normal(5))


def _weight_gradients(x: Value, g: Value, groups: int) -> Value:
    """The gradient by the weights of a convolution of each image, for the cotangents g."""
    weights = full((g.shape[1], x.shape[1] // groups, 3, 2), 0.0, g.dtype, g.device)

    def of_image(x: Value, g: Value) -> Value:
        return grad(lambda w: ops.sum(ops.conv2d(x[None], w, stride=(2, 1), padding=1, groups=groups)[0] * g))(weights)

    return vmap(of_image)(x, g)


for _groups in (1, 2):
    case("conv2d", f"weight gradients of images, {_groups} groups", lambda x, g, n=_groups: _weight_gradients(x, g, n),
         normal(3, 2, 5, 4), normal(3, 4, 3, 5), linear=(0, 1))  # fmt: skip
case("conv_transpose2d", "stride", lambda x, w, b: ops.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1),
     normal(2, 3, 3, 4), normal(3, 2, 3, 3), normal(2))  # fmt: skip
case("conv1d", "stride", lambda x, w, b: ops.conv1d(x, w, b, 2, 1, 2), normal(2, 3, 7), normal(4, 3, 2), normal(4))
case("max_pool2d", "disjoint", lambda x: ops.max_pool2d(x, 2), distinct(2, 3, 5, 4))
case("max_pool2d", "overlapping, padded", lambda x: ops.max_pool2d(x, 3, stride=2, padding=1), distinct(2, 2, 6, 5))
case("avg_pool2d", "disjoint", lambda x: ops.avg_pool2d(x, 2), normal(2, 3, 5, 4), linear=(0,))
case("avg_pool2d", "overlapping, padded", lambda x: ops.avg_pool2d(x, (3, 2), 2, 1), normal(2, 2, 6, 5), linear=(0,))
case("max_pool1d", "padded", lambda x: ops.max_pool1d(x, 3, 2, 1), distinct(2, 3, 7))
case("max_pool2d", "dilated", lambda x: ops.max_pool2d(x, 2, 1, dilation=(2, 1)), distinct(2, 2, 5, 4))
case("max_pool2d", "partial windows", lambda x: ops.max_pool2d(x, 2, ceil_mode=True), distinct(2, 2, 5, 3))
case("max_pool2d", "same", lambda x: ops.max_pool2d(x, 2, 1, "same"), distinct(2, 2, 3, 4))
case("max_pool2d", "positions", lambda x: ops.max_pool2d(x, 2, return_indices=True)[0], distinct(2, 2, 4, 4))
case("max_pool3d", "padded", lambda x: ops.max_pool3d(x, (2, 3, 2), 2, (1, 1, 0)), distinct(1, 2, 4, 5, 4))
case("avg_pool1d", "padded", lambda x: ops.avg_pool1d(x, 3, 2, 1), normal(2, 3, 7), linear=(0,))
case(
    "avg_pool2d",
    "partial windows",
    lambda x: ops.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    normal(2, 2, 6, 5),
    linear=(0,),
)
case("avg_pool2d", "divisor", lambda x: ops.avg_pool2d(x, 2, divisor_override=3), normal(2, 2, 4, 4), linear=(0,))
case(
    "avg_pool2d",
    "unequal padding",
    lambda x: ops.avg_pool2d(x, 2, 1, ((1, 0), (0, 1))),
    normal(2, 2, 4, 3),
    linear=(0,),
)
case("avg_pool3d", "padded", lambda x: ops.avg_pool3d(x, (2, 3, 2), 2, (1, 1, 0)), normal(1, 2, 4, 5, 4), linear=(0,))
case("adaptive_avg_pool2d", "uneven", lambda x: ops.adaptive_avg_pool2d(x, (3, 2)), normal(2, 2, 7, 5), linear=(0,))
case("adaptive_avg_pool2d", "global", lambda x: ops.adaptive_avg_pool2d(x, 1), normal(2, 2, 7, 5), linear=(0,))


# Normalisation and softmax.
def _batch_norm(training: bool) -> Callable[..., Any]:
    return lambda x, w, b, m, v: ops.batch_norm(x, m, v, w, b, training=training)


_STATISTICS = (normal(3), normal(3), normal(3), between(0.5, 2, 3))
case("batch_norm", "training", _batch_norm(True), normal(4, 3, 2, 2), *_STATISTICS)
case("batch_norm", "training, matrix", _batch_norm(True), normal(5, 3), *_STATISTICS)
case("batch_norm", "inference", _batch_norm(False), normal(4, 3, 2, 2), *_STATISTICS)
case("layer_norm", "two axes", lambda x, w, b: ops.layer_norm(x, (3, 4), w, b), normal(2, 3, 4), normal(3, 4),
     normal(3, 4))  # fmt: skip
case("group_norm", "groups", lambda x, w, b: ops.group_norm(x, 2, w, b), normal(2, 4, 3, 3), normal(4), normal(4))
case("softmax", "rows", ops.softmax, normal(3, 5))
case("softmax", "axis", lambda x: ops.softmax(x, 1), normal(2, 4, 3))
case("log_softmax", "rows", ops.log_softmax, normal(3, 5))

# Recurrent: batch, length, features and hidden units; with and without biases and initial states.
_GATES_AND_STATES = {"rnn": (1, 1), "lstm": (4, 2), "gru": (3, 1)}
_SEQUENCES: dict[str, tuple[int, int, int, int]] = {
    "odd": (3, 4, 2, 3), "reverse": (2, 3, 3, 2), "one step": (2, 1, 2, 2), "batch of one": (1, 3, 1, 1),
    "empty batch": (0, 2, 2, 3),
}  # fmt: skip
for _op, (_gates, _states) in _GATES_AND_STATES.items():
    for _name, (_batch, _steps, _features, _hidden) in _SEQUENCES.items():
        _rows = _gates * _hidden
        case(_op, _name, lambda *xs, op=_op, r=_name == "reverse": getattr(ops, op)(*xs, reverse=r),
             normal(_batch, _steps, _features), normal(_rows, _features), normal(_rows, _hidden), normal(_rows),
             normal(_rows), *[normal(_batch, _hidden)] * _states)  # fmt: skip
    case(_op, "no biases", lambda *xs, op=_op: getattr(ops, op)(*xs)[0], normal(2, 3, 2), normal(_gates * 3, 2),
         normal(_gates * 3, 3))  # fmt: skip
case("rnn", "relu", lambda x, w, u: ops.rnn(x, w, u, nonlinearity="relu"), between(0.2, 1, 2, 3, 2),
     between(0.2, 1, 3, 2), between(-0.1, 0.1, 3, 3))  # fmt: skip


# Attention.
STARTS = np.array([0, 0, 2, 2, 2], np.int32)
"""Two documents in a sequence of five."""


def _attention(queries: tuple[int, ...], keys: tuple[int, ...]) -> tuple[Sampler, ...]:
    return normal(*queries), normal(*keys), normal(*keys)


case("attention", "odd lengths", ops.attention, *_attention((2, 3, 5, 3), (2, 3, 7, 3)), linear=(2,))
case("attention", "causal, scale", lambda q, k, v: ops.attention(q, k, v, causal=True, scale=0.7),
     *_attention((1, 7, 4), (1, 7, 4)), linear=(2,))  # fmt: skip
case("attention", "one query", ops.attention, *_attention((1, 1, 5), (1, 9, 5)), linear=(2,))
case("attention", "one key, width 1", ops.attention, *_attention((3, 1), (1, 1)), linear=(2,))
case("attention", "broadcast", ops.attention, *_attention((2, 1, 3, 2), (3, 4, 2)), linear=(2,))
case("attention", "mask, a query without a key",
     lambda q, k, v, m: ops.attention(q, k, v, causal=True, mask=(m > 0) & (np.arange(5) > 0)),
     *_attention((2, 5, 3), (2, 5, 3)), integers(3, 2, 5), linear=(2,))  # fmt: skip
case("attention", "dropout", lambda q, k, v, s: ops.attention(q, k, v, dropout=0.4, rng=s, stream=3),
     *_attention((2, 3, 4), (2, 5, 4)), rng_state, linear=(2,))  # fmt: skip
case("attention", "dropout, mask", lambda q, k, v, m, s: ops.attention(q, k, v, mask=m > 0, dropout=0.4, rng=s),
     *_attention((2, 3, 4), (2, 5, 4)), integers(3, 2, 5), rng_state, linear=(2,))  # fmt: skip
case("attention", "documents, dropout",
     lambda q, k, v, s: ops.attention(q, k, v, causal=True, starts=STARTS, dropout=0.4, rng=s),
     *_attention((2, 5, 3), (2, 5, 3)), rng_state, linear=(2,))  # fmt: skip
case("attention", "documents, window, mask",
     lambda q, k, v, m: ops.attention(q, k, v, causal=True, starts=STARTS, window=2, mask=m > 0),
     *_attention((2, 5, 3), (2, 5, 3)), integers(3, 2, 5), linear=(2,))  # fmt: skip
case("attention", "empty batch", ops.attention, *_attention((0, 3, 2), (0, 4, 2)), linear=(2,))
case("attention", "no queries", ops.attention, *_attention((2, 0, 2), (2, 4, 2)), linear=(2,))
case("self_attention", "two heads", lambda x: ops.self_attention(x, 2), normal(2, 5, 18))
case("self_attention", "causal, dropout", lambda x, s: ops.self_attention(x, 1, True, 0.7, 0.4, s, 3), normal(1, 4, 6),
     rng_state)  # fmt: skip
case("self_attention", "documents", lambda x: ops.self_attention(x, 2, True, starts=STARTS), normal(2, 5, 12))
case("self_attention", "one row", lambda x: ops.self_attention(x, 3), normal(1, 9))
case("self_attention", "empty batch", lambda x: ops.self_attention(x, 2), normal(0, 3, 6))

# Empty batches.
for _name, _f, _input in (
    ("relu", ops.relu, normal(0, 3)),
    ("transpose", ops.transpose, normal(0, 3)),
    ("softmax", ops.softmax, normal(0, 3)),
    ("log_softmax", ops.log_softmax, normal(0, 3)),
    ("logsumexp", lambda x: ops.logsumexp(x, 1), normal(0, 3)),
    ("max", lambda x: ops.max(x, 1), normal(0, 3)),
    ("cumsum", lambda x: ops.cumsum(x, 1), normal(0, 3)),
    ("layer_norm", lambda x: ops.layer_norm(x, 3), normal(0, 3)),
    ("group_norm", lambda x: ops.group_norm(x, 2), normal(0, 4, 2)),
    ("max_pool2d", lambda x: ops.max_pool2d(x, 2), normal(0, 2, 4, 4)),
    ("avg_pool2d", lambda x: ops.avg_pool2d(x, 2), normal(0, 2, 4, 4)),
    ("take", lambda x: ops.take(x, np.zeros(0, np.int64)), normal(4, 3)),
):
    case(_name, "empty batch", _f, _input)

# Random numbers.
case("random_uniform", "odd", lambda s: ops.random_uniform(s, (3, 5), stream=2, dtype="float64"), rng_state, order=0)
case("random_uniform", "states of members",
     lambda s: tuple(vmap(lambda s, n=n: ops.random_uniform(s, n, dtype="float64"))(ops.stack([s, s + 1, s + 2]))
                     for n in ((), (8,), (5, 15))), rng_state, order=0)  # fmt: skip
case("random_normal", "odd", lambda s: ops.random_normal(s, (3, 5), stream=2, dtype="float64"), rng_state, order=0)
case("dropout", "half", lambda x, s: ops.dropout(x, 0.5, s, stream=1), normal(5, 7), rng_state, linear=(0,))
case("dropout", "empty batch", lambda x, s: ops.dropout(x, 0.5, s), normal(0, 3), rng_state)

# Losses.
case("cross_entropy", "plain", ops.cross_entropy, normal(4, 5), integers(5, 4))
case("cross_entropy", "smoothed", lambda x, t: ops.cross_entropy(x, t, 0.1), normal(4, 5), integers(5, 4))
case("cross_entropy", "class weights", lambda x, t, w: ops.cross_entropy(x, t, weight=w), normal(4, 5), integers(5, 4),
     between(0.5, 2, 5))  # fmt: skip
case("cross_entropy", "smoothed, weights, ignored, pixels",
     lambda x, t, w: ops.cross_entropy(x, t, 0.1, weight=w, ignore_index=1), normal(3, 4, 2, 3), integers(4, 3, 2, 3),
     between(0.5, 2, 4))  # fmt: skip
case("cross_entropy", "one row, not reduced", lambda x, t: ops.cross_entropy(x, t, reduction="none"), normal(5),
     integers(5))  # fmt: skip
case("cross_entropy", "probabilities, weights", lambda x, p, w: ops.cross_entropy(x, p, 0.1, weight=w),
     normal(3, 4, 2), between(0, 1, 3, 4, 2), between(0.5, 2, 4))  # fmt: skip
case("nll_loss", "plain", ops.nll_loss, normal(4, 5), integers(5, 4), linear=(0,))
case("nll_loss", "ignored, not reduced", lambda x, t: ops.nll_loss(x, t, ignore_index=2, reduction="none"),
     normal(4, 5, 2), integers(5, 4, 2), linear=(0,))  # fmt: skip
case("nll_loss", "weights, sum", lambda x, t, w: ops.nll_loss(x, t, weight=w, reduction="sum"), normal(4, 5),
     integers(5, 4), between(0.5, 2, 5), linear=(0, 2))  # fmt: skip
case("mse_loss", "plain", ops.mse_loss, normal(4, 5), normal(4, 5))
case("mse_loss", "sum", lambda x, y: ops.mse_loss(x, y, reduction="sum"), normal(4, 5), normal(4, 5))
case("l1_loss", "apart", lambda x: ops.l1_loss(x, ops.zeros_like(x)), apart(4, 5))
case("huber_loss", "both sides", lambda x: ops.huber_loss(x, ops.zeros_like(x), 0.8), apart(4, 5, kinks=(-0.8, 0, 0.8)))
case(
    "binary_cross_entropy_with_logits", "plain", ops.binary_cross_entropy_with_logits, normal(4, 5), between(0, 1, 4, 5)
)
case("binary_cross_entropy_with_logits", "weights",
     lambda x, t, w, p: ops.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=p), normal(4, 5),
     between(0, 1, 4, 5), between(0.5, 2, 4, 1), between(0.5, 2, 5), linear=(2,))  # fmt: skip


def _sin_times_y_forward(x: Value, y: Value) -> tuple[Value, Any]:
    cos = ops.cos(x)
    return ops.sin(x) * y, (cos, y, ops.sin(x))


def _sin_times_y_backward(residuals: Any, ct: Value) -> tuple[Value, Value]:
    cos, y, sin = residuals
    return ct * cos * y, ct * sin


case("custom_vjp", "two arguments", custom_vjp(_sin_times_y_forward, _sin_times_y_backward), normal(3, 4), normal(3, 4),
     order=4)  # fmt: skip
case("create", "full", lambda: ops.full((2, 3), 1.5, "float64"), order=0)
