"""The cases that `gpu_bandwidth.py` measures, each in adtrain and in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F

from adtrain import ops
from adtrain.backends.cuda.backend import CudaBackend
from adtrain.backends.cuda.runtime.device import Buffer
from adtrain.backends.cuda.runtime.launch import Runnable
from adtrain.core.array import Array, Value
from adtrain.core.backend import backend
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.index import scatter_add_p, scatter_along_axis_p, take_p
from adtrain.ops.normalisation import standardize_p
from adtrain.ops.pool import Windows, avg_pool2d_put_p, max_pool2d_p, max_pool2d_pick_p, max_pool2d_put_p
from adtrain.passes.fusion import fuse_loops

N = 2**28
"""Approximate number of elements of the arguments."""


@dataclass
class Case:
    """A function of tensors. `in_adtrain` takes them as arrays; `in_torch` as they are, or in float64 for the
    reference."""

    name: str
    tensors: list[torch.Tensor]
    in_adtrain: Callable[..., Any]
    in_torch: Callable[..., torch.Tensor]


def array_of(tensor: torch.Tensor) -> Array:
    """An array over the tensor's memory, valid as long as the tensor."""
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    return Array(Buffer(tensor.data_ptr(), tuple(tensor.shape), dtype), tuple(tensor.shape), dtype, "gpu")


class _Exported:
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": buffer.shape,
            "typestr": buffer.dtype.str,
            "data": (buffer.address, False),
            "version": 3,
        }


def tensor_of(value: Value) -> torch.Tensor:
    assert isinstance(value, Array)
    backend("gpu").synchronize()
    found: torch.Tensor = torch.as_tensor(_Exported(value.buffer), device="cuda")
    return found


class Fused:
    """A function of elementwise operations as one kernel, launched without the overhead of a staged function."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.staged = stage(f, [fuse_loops])
        self.known: dict[Any, tuple[Runnable, list[int], ArrayType]] = {}

    def __call__(self, *arrays: Array) -> Array:
        key, gpu = tuple(x.shape for x in arrays), cast(CudaBackend, backend("gpu"))
        if key not in self.known:
            program = self.staged.program(*arrays)
            (equation,) = program.equations
            order = [program.inputs.index(v) for v in equation.inputs]
            self.known[key] = Runnable(gpu.device, gpu.lowering, equation), order, equation.outputs[0].type
        work, order, type_ = self.known[key]
        found = gpu.empty(type_)
        work.enqueue([*(arrays[i].buffer.address for i in order), found.address], 0, 0)
        return Array(found, type_.shape, type_.dtype, "gpu")


def cases() -> Iterator[Case]:
    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    def case(name: str, in_adtrain: Callable[..., Any], in_torch: Callable[..., Any], *tensors: torch.Tensor) -> Case:
        return Case(name, list(tensors), in_adtrain, in_torch)

    def same(name: str, f: Callable[..., Any], *tensors: torch.Tensor) -> Case:
        return case(name, lambda *xs: f(ops, *xs), lambda *xs: f(torch, *xs), *tensors)

    square = normal(2**14, 2**14)
    flat = square.view(-1)
    double = normal(2**13, 2**14, dtype=torch.float64)
    byte = torch.randint(0, 255, (2**14, 2**14), device="cuda", dtype=torch.uint8)

    yield same("exp", lambda m, x: m.exp(x), square)
    yield case("relu", ops.relu, torch.relu, square)
    yield same("add", lambda m, x, y: x + y, square[: 2**13], square[2**13 :])
    yield same("exp float64", lambda m, x: m.exp(x), double)
    yield same("compare to bool", lambda m, x, y: x < y, square[: 2**13], square[2**13 :])
    yield case("uint8 to float32", lambda x: x.astype("float32"), lambda x: x.to(torch.float32), byte)
    fused = Fused(lambda x, y: x + y)
    for name, shape in (("row", (2**14,)), ("column", (2**14, 1))):
        yield case(f"add a {name}", fused, torch.add, square, normal(*shape))
    yield case("add to channels", fused, torch.add, flat.view(256, 64, 128, 128), normal(64, 1, 1))

    yield case("sum of all", ops.sum, torch.sum, flat)
    yield case("sum of all float64", ops.sum, torch.sum, double.view(-1))
    yield case("sum of all uint8", ops.sum, torch.sum, byte.view(-1))
    yield case("max of all", ops.max, torch.amax, flat)
    for length in (7, 8, 10, 64, 100, 1024, 1025, 2**14):
        rows = flat[: N // length * length].view(-1, length)
        yield same("sum of rows", lambda m, x: m.sum(x, 1), rows)
    yield same("sum of rows uint8", lambda m, x: m.sum(x, 1), byte.view(-1, 64))
    yield case("max of rows", lambda x: ops.max(x, 1), lambda x: torch.amax(x, 1), flat.view(-1, 64))
    for shape in ((8, 2**25), (2**14, 2**14), (2**22, 64), (N // 10, 10), (2**25, 8)):
        yield same("sum of columns", lambda m, x: m.sum(x, 0), flat[: shape[0] * shape[1]].view(shape))
    yield same("sum of columns float64", lambda m, x: m.sum(x, 0), double.view(-1, 64))
    yield same("sum of columns uint8", lambda m, x: m.sum(x, 0), byte.view(-1, 64))
    for shape4 in ((256, 64, 128, 128), (1024, 128, 45, 45), (4096, 1337, 7, 7)):
        images = flat[: int(np.prod(shape4))].view(shape4)
        yield same("sum over N, H, W", lambda m, x: m.sum(x, (0, 2, 3)), images)
    yield same("sum of the middle", lambda m, x: m.sum(x, 1), flat.view(64, 1024, 4096))

    for length in (10, 1024):
        rows = flat[: N // length * length].view(-1, length)
        yield case("argmax of rows", lambda x: ops.argmax(x, 1), lambda x: torch.argmax(x, 1), rows)
    yield case("argmax of columns", lambda x: ops.argmax(x, 0), lambda x: torch.argmax(x, 0), square)
    yield case("argmax of all", ops.argmax, torch.argmax, flat)
    for length in (10, 1000):
        rows = flat[: N // length * length].view(-1, length)
        yield case("logsumexp of rows", lambda x: ops.logsumexp(x, 1), lambda x: torch.logsumexp(x, 1), rows)

    for length in (8, 10, 100, 1000, 1001, 1024, 2048, 4096, 10_000, 2**14, 2**15, 50_257, 2**17, 2**20):
        rows = flat[: N // length * length].view(-1, length)
        yield same("softmax of rows", lambda m, x: m.softmax(x, 1), rows)
    yield same("log_softmax of rows", lambda m, x: m.log_softmax(x, 1), flat[: N // 10 * 10].view(-1, 10))
    yield same("log_softmax of rows", lambda m, x: m.log_softmax(x, 1), flat.view(-1, 4096))
    yield same("softmax of rows float64", lambda m, x: m.softmax(x, 1), double.view(-1, 4096))
    yield same("softmax of columns", lambda m, x: m.softmax(x, 1), flat.view(1024, 16, 2**14))
    yield same("softmax of columns", lambda m, x: m.softmax(x, 0), square)

    for length in (64, 768, 1024, 4096, 2**14):
        rows = flat[: N // length * length].view(-1, length)
        yield case(
            "layer norm", lambda x, n=length: ops.layer_norm(x, n), lambda x, n=length: F.layer_norm(x, (n,)), rows
        )
    for shape4 in ((256, 64, 128, 128), (1024, 256, 28, 28), (2048, 512, 16, 16)):
        images = flat[: int(np.prod(shape4))].view(shape4)
        yield case(
            "batch norm",
            lambda x: bind(standardize_p, x, axes=(0, 2, 3), eps=1e-5)[0],
            lambda x: F.batch_norm(x, None, None, training=True),
            images,
        )
    yield case(
        "batch norm",
        lambda x: bind(standardize_p, x, axes=(0,), eps=1e-5)[0],
        lambda x: F.batch_norm(x, None, None, training=True),
        flat.view(-1, 256),
    )

    def permuted(axes: tuple[int, ...], x: torch.Tensor) -> Case:
        return case(
            f"transpose {axes}",
            lambda x, axes=axes: ops.transpose(x, axes),
            lambda x, axes=axes: x.permute(axes).contiguous(),
            x,
        )

    yield permuted((1, 0), square)
    yield permuted((1, 0), double)
    yield permuted((1, 0), byte)
    yield permuted((0, 2, 3, 1), flat.view(256, 64, 128, 128))
    yield permuted((0, 3, 1, 2), flat.view(256, 128, 128, 64))
    yield permuted((0, 2, 3, 1), flat[: 5000 * 3 * 128 * 128].view(5000, 3, 128, 128))
    yield permuted((0, 2, 1, 3), flat.view(256, 128, 128, 64))
    yield permuted((2, 1, 0), flat.view(512, 1024, 512))
    yield case("flip all", ops.flip, lambda x: x.flip(0, 1), square)
    yield case("flip rows", lambda x: ops.flip(x, 0), lambda x: x.flip(0), square)
    halves = [square[: 2**13], square[2**13 :]]
    yield case("concatenate", lambda *xs: ops.concatenate(xs, 0), lambda *xs: torch.cat(xs, 0), *halves)
    yield case("concatenate", lambda *xs: ops.concatenate(xs, 1), lambda *xs: torch.cat(xs, 1), *halves)
    for cut in (slice(4, -4), slice(3, -1), slice(None, None, 2)):
        yield case(
            f"slice {cut.start}:{cut.stop}:{cut.step}",
            lambda x, cut=cut: x[:, cut],
            lambda x, cut=cut: x[:, cut].contiguous(),
            square,
        )
    for width in (4, 3):
        yield case(
            f"pad by {width}",
            lambda x, w=width: ops.pad(x, ((0, 0), (0, 0), (w, w), (w, w))),
            lambda x, w=width: F.pad(x, (w, w, w, w)),
            flat.view(256, 64, 128, 128),
        )
    yield same("cumsum of rows", lambda m, x: m.cumsum(x, 1), square)
    yield same("cumsum of columns", lambda m, x: m.cumsum(x, 0), square)

    images = flat.view(256, 64, 128, 128)
    for windows in (Windows((2, 2), (2, 2), (0, 0)), Windows((3, 3), (2, 2), (1, 1)), Windows((3, 3), (1, 1), (1, 1))):
        (k, _), (s, _), (p, _) = windows
        label = f"{k}x{k}/{s}"
        where = [tensor_of(x) for x in bind(max_pool2d_p, array_of(images), windows=windows)][1]
        pooled = normal(*where.shape)
        yield case(
            f"max pool {label}",
            lambda x, w=windows: bind(max_pool2d_p, x, windows=w),
            lambda x, a=(k, s, p): F.max_pool2d(x, *a, return_indices=True),
            images,
        )
        yield case(
            f"max pool {label} pick",
            lambda x, at, w=windows: bind(max_pool2d_pick_p, x, at, windows=w),
            lambda x, at, a=(k, s, p): F.max_pool2d(x, *a),
            images,
            where,
        )
        image_where = F.max_pool2d(images, k, s, p, return_indices=True)[1]
        yield case(
            f"max pool {label} put",
            lambda ct, at, w=windows: bind(max_pool2d_put_p, ct, at, windows=w, shape=(256, 64, 128, 128)),
            lambda ct, at, a=(k, s, p), where=image_where: torch.ops.aten.max_pool2d_with_indices_backward(
                ct, images.to(ct.dtype), [a[0]] * 2, [a[1]] * 2, [a[2]] * 2, [1, 1], False, where
            ),
            pooled,
            where,
        )
        yield case(
            f"average pool {label}",
            lambda x, a=(k, s, p): ops.avg_pool2d(x, *a),
            lambda x, a=(k, s, p): F.avg_pool2d(x, *a),
            images,
        )
        yield case(
            f"average pool {label} put",
            lambda ct, w=windows: bind(avg_pool2d_put_p, ct, windows=w, shape=(256, 64, 128, 128)),
            lambda ct, a=(k, s, p): torch.ops.aten.avg_pool2d_backward(
                ct, images.to(ct.dtype), [a[0]] * 2, [a[1]] * 2, [a[2]] * 2, False, True, None
            ),
            pooled,
        )
        del where, pooled, image_where

    table = normal(50_000, 256)
    places = torch.randint(0, 50_000, (2**20,), device="cuda", dtype=torch.int32)
    skewed = (50_000 * torch.rand(2**20, device="cuda") ** 8).to(torch.int32)
    yield case("take rows", lambda x, at: bind(take_p, x, at, axis=0), lambda x, at: x[at], table, places)
    for name, at in (("uniform", places), ("skewed", skewed)):
        yield case(
            f"scatter_add rows, {name}",
            lambda ct, at: bind(scatter_add_p, ct, at, axis=0, length=50_000),
            lambda ct, at: torch.zeros(50_000, 256, device="cuda", dtype=ct.dtype).index_add_(0, at, ct),
            normal(2**20, 256),
            at,
        )
    for shape2, count in (((2**18, 1000), 1), ((2**22, 64), 4)):
        along = torch.randint(0, shape2[1], (shape2[0], count), device="cuda", dtype=torch.int32)
        yield case(
            f"scatter {count} along rows of {shape2[1]}",
            lambda ct, at, n=shape2[1]: bind(scatter_along_axis_p, ct, at, axis=1, length=n),
            lambda ct, at, s=shape2: torch.zeros(s, device="cuda", dtype=ct.dtype).scatter_add_(1, at.long(), ct),
            normal(shape2[0], count),
            along,
        )
    rng = ops.rng_state(1).to("gpu")
    yield case(
        "random numbers",
        lambda x: ops.random_uniform(rng, (2**14, 2**14)),
        lambda x: torch.rand(2**14, 2**14, device="cuda"),
        normal(1),
    )
