"""Which of PyTorch's OpInfo entries are compared with which operation of adtrain, and which samples may be refused.

A call takes the arguments of a sample, with PyTorch's names and order, as arrays of adtrain. A sample with an argument
that the call does not take is refused. `Call.refused` lists the allowed causes. A refusal for another cause is a
failure, and so are a cause for which no sample is refused and an entry whose samples are all refused.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import adtrain as ad
from adtrain import ops


class NotTaken(Exception):
    """A sample has an option that the operation does not have."""


@dataclass(frozen=True)
class Call:
    """An operation of adtrain that takes the arguments of an OpInfo entry.

    Attributes:
        f: takes the arguments of a sample.
        refused: the allowed causes of refusals: texts, one of which is in the message of every refusal.
        needs: the public operation that f uses, if adtrain may not have it.
        gradient: whether the gradient is compared. It is not if the libraries define a subgradient differently.
        reference_gradient: whether the gradient is compared on reference samples too. These have poles, kinks and large
            numbers, at which the libraries may differ.
        integers: whether values are also compared for integers and bool.
        other_type: whether the dtype of the result may differ from PyTorch's.
    """

    f: Callable[..., Any]
    refused: tuple[str, ...] = ()
    needs: str = ""
    gradient: bool = True
    reference_gradient: bool = True
    integers: bool = True
    other_type: bool = False


CALLS: dict[str, Call] = {}
MISSING: dict[str, list[str]] = {}
"""From an operation that adtrain does not have to the OpInfo entries that would check it."""


def call(names: str, f: Callable[..., Any] | None, *refused: str, needs: str = "", **options: bool) -> None:
    """Compare `f` with the OpInfo entries of these names, or list them as missing if `ops` has no operation `needs`."""
    for name in names.split():
        if needs and not hasattr(ops, needs):
            MISSING.setdefault(needs, []).append(name)
        else:
            assert f is not None
            CALLS[name] = Call(f, refused, needs, **options)


def same(names: str, *refused: str, **options: Any) -> None:
    """Compare operations with OpInfo entries of the same name; `atan2=arctan2` gives both."""
    for name in names.split():
        entry, _, operation = name.partition("=")
        operation = operation or entry.rpartition(".")[2]
        call(entry, getattr(ops, operation, None), *refused, needs=operation, **options)


def given(operation: str, *args: Any, **options: Any) -> Any:
    """The operation of that name with the options that are not None. Raises NotTaken for one that it does not have."""
    f = getattr(ops, operation)
    options = {name: value for name, value in options.items() if value is not None}
    for name in options:
        if name not in inspect.signature(f).parameters:
            raise NotTaken(name)
    return f(*args, **options)


INTEGERS = "expected float32 or float64"
"""Functions of real numbers refuse integers and bool, where PyTorch converts them."""
BOOL = "found bool, expected numbers"
NO_OPTION = "option not taken"
EMPTY = "has no elements"
OTHER_TYPE = "elements of type"
"""An argument is complex, float16 or bfloat16."""
OUT_OF_BOUNDS = "out of bounds for uint8"
NOT_OF_TYPE = "for elements of type"
"""A number out of range for an integer type; PyTorch keeps its low bits."""

# Elementwise, one argument.
same("exp log log1p expm1 sqrt rsqrt reciprocal sin cos tanh sigmoid erf nn.functional.relu", INTEGERS)
same("nn.functional.gelu nn.functional.silu")
same("abs neg")
same("square", BOOL)
call("sign sgn", lambda x: ops.where(ops.equal(x, x), ops.sign(x), 0), BOOL)  # of NaN: 0 in PyTorch, NaN in NumPy
call("nn.functional.softplus", lambda x, beta=1.0, threshold=20.0: ops.where(
    ops.greater(x * beta, threshold), x, ops.softplus(x * beta) / beta))  # fmt: skip
call("nn.functional.logsigmoid", lambda x: -ops.softplus(-x))
call("nn.functional.leaky_relu", lambda x, negative_slope=0.01: ops.leaky_relu(x, negative_slope))
call("nn.functional.elu", lambda x, alpha=1.0, scale=1.0: ops.elu(x, alpha) * scale)
call("nn.functional.tanhshrink", lambda x: x - ops.tanh(x), INTEGERS)
call("nn.functional.mish", lambda x: x * ops.tanh(ops.softplus(x)), reference_gradient=False)
call("nn.functional.softsign", lambda x: x / (1.0 + ops.abs(x)))
same("floor ceil trunc round isnan isfinite isinf exp2 log2 log10 tan asin=arcsin acos=arccos atan=arctan sinh cosh")
same("logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor")


# Elementwise, several arguments.
def clamped(x: Any, low: Any, high: Any) -> Any:
    """OpInfo's bounds are arrays, for which adtrain has maximum and minimum instead of clip."""
    x = x if low is None else ops.maximum(x, low)
    return x if high is None else ops.minimum(x, high)


call("add", lambda x, y, *, alpha=1: ops.add(x, y if alpha == 1 else ops.mul(y, alpha)), OUT_OF_BOUNDS)
call("sub", lambda x, y, *, alpha=1: ops.sub(x, y if alpha == 1 else ops.mul(y, alpha)), OUT_OF_BOUNDS)
call("rsub", lambda x, y, *, alpha=1: ops.sub(y, x if alpha == 1 else ops.mul(x, alpha)), OUT_OF_BOUNDS)
call("mul __rmul__", ops.mul)
call("__radd__", lambda x, y: y + x)
call("__rsub__", lambda x, y: y - x)
call("__rdiv__", lambda x, y: y / x)
call("__rpow__", lambda x, y: ops.power(y, x), reference_gradient=False)
call("__rmatmul__", lambda x, y: y @ x)
call("div.no_rounding_mode", lambda x, y, *, rounding_mode=None: ops.div(x, y))
call("true_divide", ops.div)
call("pow", ops.power, reference_gradient=False)
call("float_power", ops.power, integers=False, reference_gradient=False)
call("maximum max.binary", ops.maximum)
call("minimum min.binary", ops.minimum)
call("eq", ops.equal)
call("ne", ops.not_equal)
call("lt", ops.less)
call("le", ops.less_equal)
call("gt", ops.greater)
call("ge", ops.greater_equal)
call("where", lambda a, condition, b: ops.where(condition, a, b), OTHER_TYPE)
call("clamp", lambda x, low=None, high=None: clamped(x, low, high), reference_gradient=False)
call("clamp_min", lambda x, low: clamped(x, low, None), reference_gradient=False)
call("clamp_max", lambda x, high: clamped(x, None, high), reference_gradient=False)
call("nn.functional.relu6", lambda x: ops.clip(x, 0, 6), reference_gradient=False)
call("nn.functional.hardtanh", lambda x, min_val=-1.0, max_val=1.0: ops.clip(x, min_val, max_val), integers=False,
     gradient=False)  # fmt: skip
call("lerp", lambda a, b, weight: a + weight * (b - a))
call("addcmul", lambda x, a, b, *, value=1: x + a * b * value, OTHER_TYPE)
call("addcdiv", lambda x, a, b, *, value=1: x + a / b * value, OTHER_TYPE)
same("atan2=arctan2 hypot logaddexp copysign fmod floor_divide")
call("remainder", ops.remainder, reference_gradient=False)  # PyTorch has no gradient for a number modulo an array
call("__rmod__", lambda x, y: y % x, reference_gradient=False)
call("div.floor_rounding", lambda x, y, *, rounding_mode: given("floor_divide", x, y), needs="floor_divide")
call("div.trunc_rounding", lambda x, y, *, rounding_mode: given("trunc", x / y), needs="trunc",
     integers=False)  # fmt: skip


# Reductions.
def reduction(operation: str) -> Callable[..., Any]:
    return lambda x, dim=None, keepdim=False: getattr(ops, operation)(x, all_if_empty(dim), keepdim)


def all_if_empty(dim: Any) -> Any:
    """PyTorch reduces over all axes for an empty tuple, NumPy and adtrain over none."""
    return None if isinstance(dim, (tuple, list)) and not dim else dim


def var(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> Any:
    return ops.var(x, all_if_empty(dim), keepdim, int(unbiased) if correction is None else correction)


def std(x: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> Any:
    return ops.std(x, all_if_empty(dim), keepdim, int(unbiased) if correction is None else correction)


def as_uint8(x: Any, out: Any) -> Any:
    """`out`, but of uint8 if x is, as PyTorch's any and all are."""
    return out.astype(np.uint8) if x.dtype == np.uint8 else out


OF_0D = "is out of range for an array of 0 dimensions"
for _entry, _operation in {
    "sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "argmax": "argmax", "argmin": "argmin",
}.items():  # fmt: skip
    call(_entry, reduction(_operation))
call("all", lambda *args, **dims: as_uint8(args[0], reduction("all")(*args, **dims)))
call("any", lambda *args, **dims: as_uint8(args[0], reduction("any")(*args, **dims)))
call("prod", reduction("prod"), NO_OPTION)
call("max.reduction_no_dim", ops.max)
call("min.reduction_no_dim", ops.min)
call("logsumexp", reduction("logsumexp"), INTEGERS, EMPTY)
call("var", var, "expected over")
call("var.unbiased", lambda x, unbiased: var(x, unbiased=unbiased), "expected over")
call("std", std, "expected over")
call("std.unbiased", lambda x, unbiased: std(x, unbiased=unbiased), "expected over")
call("cumsum", lambda x, dim: ops.cumsum(x, dim), NO_OPTION)


def sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    return ops.sort(x, dim, descending), ops.argsort(x, dim, descending)


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return ops.topk(x, k, dim, largest)


# Without stable=True PyTorch's order of equal elements is undefined. test_ops_sort.py compares integers with it.
call("sort", sort, OF_0D, integers=False)
call("argsort", lambda x, dim=-1, descending=False, stable=False: ops.argsort(x, dim, descending), OF_0D,
     integers=False)  # fmt: skip
call("topk", topk, OF_0D, integers=False)

# Softmax.
call("softmax", lambda x, dim: ops.softmax(x, dim), EMPTY)
call("log_softmax", lambda x, dim: ops.log_softmax(x, dim), EMPTY)
call("softmax.with_dtype", lambda x, dim, dtype: ops.softmax(ops.astype(x, dtype), dim), EMPTY)
call("log_softmax.with_dtype", lambda x, dim, dtype: ops.log_softmax(ops.astype(x, dtype), dim), EMPTY)
call("nn.functional.softmin", lambda x, dim: ops.softmax(-x, dim), EMPTY)


# Shapes.
def lengths(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Lengths that are given as one sequence or one by one."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape


def flattened(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = x.shape or (1,)
    start, end = start_dim % len(shape), end_dim % len(shape) + 1
    return ops.reshape(x, (*shape[:start], math.prod(shape[start:end]), *shape[end:]))


def swapped(x: Any, a: int, b: int) -> Any:
    axes = list(range(x.ndim))
    if axes:
        axes[a], axes[b] = axes[b], axes[a]
    return ops.transpose(x, axes)


def expand(x: Any, *shape: Any) -> Any:
    wanted = lengths(shape)
    old = (1,) * (len(wanted) - x.ndim) + x.shape
    return ops.broadcast_to(x, [m if n == -1 else n for n, m in zip(wanted, old, strict=True)])


def parts(x: Any, size: int | Sequence[int], dim: int = 0) -> list[Any]:
    """PyTorch's argument is the length of each part, or a sequence of them; the last one may be shorter."""
    cuts = range(size, x.shape[dim], size) if isinstance(size, int) else np.cumsum(size)[:-1].tolist()
    return ops.split(x, cuts, dim)


def sections(x: Any, count: Any, dim: int = 0) -> list[Any]:
    """PyTorch's first parts are longer by 1 if the length is not a multiple of the number of parts."""
    if not isinstance(count, int):
        return ops.split(x, count.numpy() if isinstance(count, ad.Array) and count.ndim else count, dim)
    length, more = divmod(x.shape[dim], count)
    return parts(x, [length + (i < more) for i in range(count)], dim)


def padded(x: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    """PyTorch lists the widths of the last axis first."""
    widths = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    return ops.pad(x, [(0, 0)] * (x.ndim - len(widths)) + widths, 0 if value is None else value)


def along(x: Any, dim: int, index: Any) -> Any:
    return x[(slice(None),) * (dim % x.ndim) + (index,)]


def masked(x: Any, mask: Any) -> Any:
    shape = np.broadcast_shapes(x.shape, mask.shape)
    return ops.broadcast_to(x, shape)[ops.broadcast_to(mask, shape)]


call("reshape view", lambda x, *shape: ops.reshape(x, lengths(shape)))
call("reshape_as view_as", lambda x, other: ops.reshape(x, other.shape))
call("ravel", lambda x: ops.reshape(x, -1))
call("flatten", flattened)
call("transpose transpose_copy", swapped)
call("permute permute_copy", lambda x, *axes: ops.transpose(x, lengths(axes)))
call("t", lambda x: ops.transpose(x))
call("mT", lambda x: swapped(x, -1, -2))
call("T", lambda x: ops.transpose(x))
call("squeeze.multiple", lambda x, dim: ops.squeeze(x, tuple(i for i in dim if x.ndim and x.shape[i] == 1)))
call("squeeze squeeze_copy", lambda x, dim=None: x if dim is not None and x.ndim and x.shape[dim] != 1
     else ops.squeeze(x, dim))  # fmt: skip
call("unsqueeze unsqueeze_copy", lambda x, dim: ops.expand_dims(x, dim))
call("expand expand_copy", expand)
call("expand_as", lambda x, other: ops.broadcast_to(x, other.shape))
call("broadcast_to", lambda x, shape: ops.broadcast_to(x, shape))
call("sum_to_size", lambda x, *shape: ops.sum_to(x, lengths(shape)), other_type=True)
call("cat", lambda xs, dim=0: ops.concatenate(xs, dim), "differ in their number of axes", OTHER_TYPE)
call("stack", lambda xs, dim=0: ops.stack(xs, dim))
call("flip", lambda x, dims: ops.flip(x, dims))
call("flipud", lambda x: ops.flip(x, 0))
call("fliplr", lambda x: ops.flip(x, 1))
call("split split.list_args split_with_sizes split_with_sizes_copy unsafe_split", parts)
call("chunk unsafe_chunk", lambda x, chunks, dim=0: parts(x, max(1, -(-x.shape[dim] // chunks)), dim))
call("tensor_split", sections)
call("hsplit", lambda x, count: sections(x, count, min(x.ndim - 1, 1)))
call("vsplit", lambda x, count: sections(x, count, 0))
call("dsplit", lambda x, count: sections(x, count, 2))
call("tile", lambda x, *dims: ops.tile(x, lengths(dims)))
call("repeat", lambda x, *sizes: ops.tile(x, lengths(sizes)))
call("repeat_interleave", lambda x, repeats, dim=None, **_: ops.repeat(x, repeats, dim))
call(
    "roll",
    lambda x, shifts, dims=(): ops.roll(x, single(shifts) if dims == () else shifts, None if dims == () else dims),
)
call("diag", lambda x, diagonal=0: ops.diag(x, diagonal))
call("diagflat", lambda x, offset=0: ops.diag(ops.reshape(x, -1), offset))
call("diagonal diagonal_copy", lambda x, offset=0, dim1=0, dim2=1: ops.diagonal(x, offset, dim1, dim2))
call("linalg.diagonal", lambda x, *, offset=0, dim1=-2, dim2=-1: ops.diagonal(x, offset, dim1, dim2))
call("tril", lambda x, diagonal=0: ops.tril(x, diagonal))
call("triu", lambda x, diagonal=0: ops.triu(x, diagonal))
same("trace")
call("select", lambda x, dim, index: along(x, dim, index))
call("narrow", lambda x, dim, start, length: along(x, dim, slice(int(start) % (x.shape[dim] or 1),
                                                               int(start) % (x.shape[dim] or 1) + length)))  # fmt: skip
call("unbind", lambda x, dim=0: tuple(along(x, dim, i) for i in range(x.shape[dim])))
call("nn.functional.pad.constant", padded, NOT_OF_TYPE)
call("constant_pad_nd", lambda x, pad, value=0: padded(x, pad, value=value))
call("full_like", lambda x, value, *, dtype=None, **_: ops.full(x.shape, value, dtype or x.dtype), NOT_OF_TYPE)
call("ones_like", lambda x, *, dtype=None, **_: ops.ones(x.shape, dtype or x.dtype))
call("zeros_like", lambda x, *, dtype=None, **_: ops.zeros(x.shape, dtype or x.dtype))

# Indices.
call("__getitem__", lambda x, index: x[index])
call("masked_select", masked, "found a boolean mask of shape ()")
call("gather", lambda x, dim, index, **_: ops.take_along_axis(x, index, dim), "do not fit", OF_0D)
call("take_along_dim", ops.take_along_axis, "do not fit", NO_OPTION)
call("index_select", lambda x, dim, index: ops.take(x, index, dim), OF_0D)
call("take", lambda x, index: ops.take(ops.reshape(x, -1), index))
call("nn.functional.embedding", lambda weight, indices: ops.embedding(indices, weight), NO_OPTION)
call("nn.functional.one_hot", lambda x, num_classes: ops.one_hot(x, num_classes, np.int64), "one_hot")


# Products.
def weighted(x: Any, beta: float, product: Any, alpha: float) -> Any:
    """beta x + alpha product, of x's type. As in BLAS, beta = 0 leaves out x, even if it is NaN."""
    beta, alpha = (x.dtype.type(number).item() for number in (beta, alpha))
    return (ops.zeros_like(x) if beta == 0 else x * beta) + product * alpha


call("matmul mm bmm mv dot vdot", ops.matmul)
call("outer", lambda a, b: ops.reshape(a, (-1, 1)) * b)
call("inner", lambda a, b: a * b if 0 in (a.ndim, b.ndim) else ops.matmul(a, ops.transpose(b)))
call("nn.functional.linear", lambda x, w, b=None: ops.matmul(x, ops.transpose(w)) + (0 if b is None else b))
call(
    "addmm addmv baddbmm addmm.decomposed",
    lambda x, a, b, *, beta=1, alpha=1: weighted(x, beta, a @ b, alpha),
)
call("addbmm", lambda x, a, b, *, beta=1, alpha=1: weighted(x, beta, ops.sum(a @ b, 0).astype(x.dtype), alpha))
call("addr", lambda x, a, b, *, beta=1, alpha=1: weighted(x, beta, ops.reshape(a, (-1, 1)) * b, alpha))
call("einsum", lambda operands, equation: ops.einsum(equation, *operands), "has no '...'", other_type=True)
call("linalg.multi_dot", lambda xs: functools.reduce(ops.matmul, xs))


def vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """PyTorch's norm of vectors over several axes is that of the elements of these axes."""
    x = x if dtype is None else ops.astype(x, dtype)
    axes = (
        list(range(x.ndim)) if dim is None else [i % max(x.ndim, 1) for i in ([dim] if isinstance(dim, int) else dim)]
    )
    axes = [i for i in axes if x.ndim]
    rest = [i for i in range(x.ndim) if i not in axes]
    rows = ops.reshape(
        ops.transpose(x, (*rest, *axes)), (*(x.shape[i] for i in rest), math.prod(x.shape[i] for i in axes))
    )
    out = ops.norm(rows, ord, -1)
    return ops.reshape(out, [1 if i in axes else n for i, n in enumerate(x.shape)]) if keepdim else out


def matrix_norm(x: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *, dtype: Any = None) -> Any:
    return ops.norm(x if dtype is None else ops.astype(x, dtype), ord, dim, keepdim)


def linalg_norm(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    dim = single(dim) if dim is not None else None
    return ops.norm(x if dtype is None else ops.astype(x, dtype), ord, dim, keepdim)


SINGULAR = "needs singular values"
call("linalg.vector_norm", vector_norm)
call("linalg.matrix_norm", matrix_norm, SINGULAR)
# Not linalg.norm.subgradients_at_zero: PyTorch's second derivatives at 0 are NaN, those of adtrain 0.
call("linalg.norm", linalg_norm, SINGULAR, EMPTY)
call("nn.functional.normalize", lambda x, p=2.0, dim=1, eps=1e-12: x / ops.maximum(vector_norm(x, p, dim, True), eps))
call("tensordot", lambda a, b, dims=2: ops.tensordot(a, b, dims), "tensordot: lengths")
call("kron", ops.kron)
call("cross linalg.cross", lambda a, b, *, dim=-1: ops.cross(a, b, dim))


# Convolution and pooling.
def single(value: Any) -> Any:
    """PyTorch takes a sequence of one number as the number for all axes, and an empty one as the default."""
    return (value[0] if value else None) if isinstance(value, (tuple, list)) and len(value) < 2 else value


def pooling(operation: str) -> Callable[..., Any]:
    def pool(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, *more: Any, **options: Any) -> Any:
        return getattr(ops, operation)(x, single(kernel_size), single(stride), single(padding), *more, **options)

    return pool


for _n, _image in (("1d", "(N, C, L)"), ("2d", "(N, C, H, W)"), ("3d", "(N, C, D, H, W)")):
    _axes = f"expected {_image.count(',') + 1} axes"
    same(f"nn.functional.conv{_n}", _axes, INTEGERS)
    same(f"nn.functional.conv_transpose{_n}", _axes, INTEGERS)
    call(f"nn.functional.max_pool{_n}", pooling(f"max_pool{_n}"), f"expected {_image}")
    call(f"nn.functional.avg_pool{_n}", pooling(f"avg_pool{_n}"), INTEGERS)
    same(f"nn.functional.adaptive_avg_pool{_n}", "or 2 of them", f"expected {_image}")


# Normalisation.
def batch_norm(x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False,
               momentum: float = 0.1, eps: float = 1e-5) -> Any:  # fmt: skip
    return ops.batch_norm(x, mean, var, weight, bias, training=training, momentum=momentum, eps=eps)[0]


def layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return ops.layer_norm(x, shape, weight, bias, eps)


def group_norm(x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return ops.group_norm(x, num_groups, weight, bias, eps)


call(
    "nn.functional.batch_norm",
    batch_norm,
    "expected arrays of shape (C,)",
    "expected (N, C, ...)",
)
call("nn.functional.layer_norm", layer_norm)
call("nn.functional.group_norm", group_norm)

# Losses.
same("nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss nn.functional.l1_loss")
same("nn.functional.huber_loss")
call("nn.functional.binary_cross_entropy_with_logits", ops.binary_cross_entropy_with_logits)


def smooth_l1(x: Any, y: Any, *, beta: float = 1.0, reduction: Any = "mean") -> Any:
    return ops.huber_loss(x, y, beta, reduction=reduction) / beta


call("nn.functional.smooth_l1_loss", smooth_l1, "expected a number in")
