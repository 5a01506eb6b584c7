"""Compare adtrain with PyTorch on the samples of PyTorch's OpInfo: values, gradients, and gradients of gradients."""

from __future__ import annotations

import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from compiled_parity import Function
from opinfo_table import CALLS, NO_OPTION, Call, NotTaken

import adtrain as ad
from adtrain import ops

SMALL = 300
"""Gradients of gradients are compared for samples of at most this many elements."""
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
"""Types whose values are compared, without gradients, for entries that take them."""


class Refused(Exception):
    """A sample that adtrain does not take; the text is the cause."""


class NoSample(Exception):
    """PyTorch does not take the sample either."""


class Wrong(AssertionError):
    """A result that differs from PyTorch's."""


@dataclass
class Count:
    """The outcome of the samples of one entry: how many were equal, what was compared, the others."""

    equal: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def by_cause(self, causes: Sequence[str]) -> Counter[str]:
        """The refused samples by the first cause in their message, or by the message if it has none of the causes."""
        found: Counter[str] = Counter()
        for message, number in self.refused.items():
            found[next((cause for cause in causes if cause in message), message)] += number
        return found


def entries() -> dict[str, Any]:
    """The OpInfo entries of the installed PyTorch, by name, with the variant after a dot."""
    # The import would forbid setting flags such as torch.backends.cudnn.benchmark, which other tests do.
    with mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


def count(name: str, entry: Any, limit: int | None = None, reference: bool = False) -> Count:
    """Compare up to `limit` samples of each type, chosen at random.

    Args:
        reference: take OpInfo's reference samples, which also have large, infinite and NaN elements and more shapes.
            Gradients are compared where all elements are finite.
    """
    found = Count()
    call = CALLS[name]
    if reference and not call.reference_gradient:
        call = replace(call, gradient=False)
    for dtype in (torch.float64, *(INTEGERS if call.integers else ())):
        if not entry.supports_dtype(dtype, "cpu"):
            continue
        for sample in samples(entry, dtype, limit, reference):
            try:
                found.compared.update(compare(call, entry, sample))
                found.equal += 1
            except Refused as refusal:
                found.refused[str(refusal)] += 1
            except NoSample:
                pass
            except Wrong as difference:
                found.wrong.append(f"{name} {dtype}: {described(sample)}: {difference}")
    return found


def samples(entry: Any, dtype: Any, limit: int | None = None, reference: bool = False) -> list[Any]:
    differentiable = dtype == torch.float64 and entry.supports_autograd
    # PyTorch looks at the stack for each sample: in `manual_seed`, and to find the test that it is for.
    seed = mock.patch.object(torch, "manual_seed", torch.default_generator.manual_seed)
    with seed, mock.patch.object(inspect, "stack", list):
        torch.manual_seed(0)
        if reference:  # for some entries these cannot be drawn with requires_grad
            drawn = list(entry.reference_inputs("cpu", dtype, requires_grad=False))
        else:
            drawn = list(entry.sample_inputs("cpu", dtype, requires_grad=differentiable))
    if limit is not None and len(drawn) > limit:
        drawn = [drawn[i] for i in sorted(random.Random(0).sample(range(len(drawn)), limit))]
    drawn = [sample.transform(contiguous) for sample in drawn]
    if reference and differentiable:
        for sample in drawn:
            require_gradients(entry, sample)
    return drawn


def require_gradients(entry: Any, sample: Any) -> None:
    """Mark the input of a reference sample, and the second one of a binary operation, as differentiated."""
    chosen = [sample.input, *(sample.args[:1] if type(entry).__name__ == "BinaryUfuncInfo" else ())]
    tensors = [x for x in chosen if isinstance(x, torch.Tensor) and x.dtype == torch.float64]
    if all(torch.isfinite(x).all() for x in tensors):
        for x in tensors:
            x.requires_grad_()


def described(sample: Any) -> str:
    def short(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if isinstance(x, (tuple, list)):
            return [short(item) for item in x]
        return x

    named = [f"{name}={short(value)}" for name, value in sample.kwargs.items()]
    return ", ".join(map(str, [short(sample.input), *map(short, sample.args), *named]))


def compare(call: Call, entry: Any, sample: Any) -> list[str]:
    """What was compared: "value", "gradient", "order 2". Raises Refused, Wrong or NoSample."""
    f, leaves = ours(call, sample)
    inputs = [leaf.detach().numpy() for leaf in leaves]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, about its own speed and future
        expected = outputs_of(entry.op(sample.input, *sample.args, **sample.kwargs))
    if expected == [NotImplemented]:
        raise NoSample
    try:
        equal("value", outputs_of(f(*map(ad.array, inputs))), expected, call.other_type)
        smooth = [i for i, x in enumerate(expected) if x.requires_grad]
        if not (leaves and smooth and call.gradient):
            return ["value"]
        chosen = lambda *xs: tuple(outputs_of(f(*xs))[i] for i in smooth)  # noqa: E731
        wanted = [expected[i] for i in smooth]
        cts = [torch.randn_like(x) for x in wanted]
        order2 = sum(x.numel() for x in [*leaves, *cts]) <= SMALL and entry.supports_gradgrad
        grads = torch.autograd.grad(wanted, leaves, cts, create_graph=order2, materialize_grads=True)

        def gradients(*xs: Any) -> Any:
            return ad.vjp(chosen, *xs)[1](tuple(ct.numpy() for ct in cts))

        equal("gradient", gradients(*inputs), grads)
        if not order2:
            return ["value", "gradient"]
        weights = [torch.randn_like(grad) for grad in grads]
        total = sum((grad * weight).sum() for grad, weight in zip(grads, weights, strict=True))
        second = [torch.zeros_like(leaf) for leaf in leaves]
        if total.requires_grad:
            second = torch.autograd.grad(total, leaves, materialize_grads=True, allow_unused=True)
        found = ad.vjp(gradients, *inputs)[1](tuple(weight.numpy() for weight in weights))
        equal("order 2", found, second)
        return ["value", "gradient", "order 2"]
    except NotTaken as option:
        raise Refused(f"{NO_OPTION}: {option}") from None
    except ad.AdtrainError as error:
        raise Refused(f"{type(error).__name__}: {error}") from None


def contiguous(x: Any) -> Any:
    """A contiguous copy of a tensor: PyTorch has no gradient for a leaf whose elements share memory."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_(x.requires_grad)


def compilable(call: Call, entry: Any) -> Function | None:
    """The first sample that adtrain takes, as a function of its differentiable tensors to values and gradients."""
    if not (entry.supports_dtype(torch.float64, "cpu") and entry.supports_autograd and call.gradient):
        return None
    for sample in samples(entry, torch.float64):
        try:
            if "gradient" not in compare(call, entry, sample):
                continue
        except Refused:
            continue
        f, leaves = ours(call, sample)

        def values_and_gradients(*xs: Any, f: Callable[..., Any] = f) -> Any:
            out, pullback = ad.vjp(lambda *xs: tuple(x for x in outputs_of(f(*xs)) if x.dtype.kind == "f"), *xs)
            return out, pullback(tuple(map(ops.ones_like, out)))

        return values_and_gradients, [leaf.detach().numpy() for leaf in leaves]
    return None


def ours(call: Call, sample: Any) -> tuple[Callable[..., Any], list[Any]]:
    """The call as a function of the sample's differentiable tensors, and those tensors."""
    leaves: list[Any] = []

    def converted(x: Any) -> Any:
        """An array or a Python value; a tensor that is differentiated becomes a `Place`."""
        if isinstance(x, torch.Tensor):
            if x.requires_grad:
                leaves.append(x)
                return Place(len(leaves) - 1)
            if x.dtype == torch.bfloat16:
                raise Refused("elements of type bfloat16")
            return ad.array(x.numpy())
        if isinstance(x, torch.dtype):
            return str(x).removeprefix("torch.")
        if isinstance(x, (tuple, list)):
            return list(map(converted, x)) if isinstance(x, list) else tuple(map(converted, x))
        return x

    def filled(x: Any, xs: Any) -> Any:
        if isinstance(x, Place):
            return xs[x.position]
        return type(x)(filled(item, xs) for item in x) if isinstance(x, (tuple, list)) else x

    try:
        args = [converted(x) for x in (sample.input, *sample.args)]
        kwargs = {name: converted(x) for name, x in sample.kwargs.items()}
        inspect.signature(call.f).bind(*args, **kwargs)
    except ad.AdtrainError as error:
        raise Refused(f"{type(error).__name__}: {error}") from None
    except TypeError as error:
        raise Refused(f"{NO_OPTION}: {error}") from None
    return lambda *xs: call.f(*filled(args, xs), **{name: filled(x, xs) for name, x in kwargs.items()}), leaves


@dataclass(frozen=True)
class Place:
    """Stands for a differentiable tensor among the arguments."""

    position: int


def outputs_of(result: Any) -> list[Any]:
    return [*result] if isinstance(result, (tuple, list)) else [result]


def equal(what: str, found: Any, expected: Any, other_type: bool = False) -> None:
    """Raises Wrong unless both lists have the same length, shapes and dtypes, and elements are equal up to rounding."""
    if len(found) != len(expected):
        raise Wrong(f"{what}: found {len(found)} arrays, expected {len(expected)}")
    for a, b in zip(found, expected, strict=True):
        x, y = a.numpy(), b.numpy(force=True)
        if x.shape != y.shape:
            raise Wrong(f"{what}: found shape {x.shape}, expected {y.shape}")
        if x.dtype != y.dtype and not other_type:
            raise Wrong(f"{what}: found type {x.dtype}, expected {y.dtype}")
        rounding = {"rtol": 1e-9, "atol": 1e-11} if x.dtype == np.float64 else {"rtol": 1e-5, "atol": 1e-6}
        differ = ~np.isclose(x, y, **rounding, equal_nan=True)
        if differ.any():
            raise Wrong(f"{what}: found {x[differ][0]}, expected {y[differ][0]}; {differ.sum()} elements differ")
