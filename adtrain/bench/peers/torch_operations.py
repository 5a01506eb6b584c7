"""Single operations in PyTorch, called eagerly or recorded in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from adtrain.bench.peers.layers import unsupported
from adtrain.bench.peers.op_cases import REPEATS, OpCase, OpRunner
from adtrain.bench.peers.torch_steps import configure


def operation(case: OpCase, phase: str, device: str, form: str) -> OpRunner:
    """The operation; phase "backward" is the gradient alone, whose residuals are computed beforehand.

    For bfloat16 the inputs are converted beforehand.

    Args:
        form: "eager" or "graph".
    """
    import torch

    where = configure("tf32" if case.precision == "tf32" else "float32", device)
    kind = torch.bfloat16 if case.precision == "bfloat16" else torch.float32

    def tensor(x: np.ndarray) -> Any:
        return torch.tensor(x, device=where, dtype=kind if x.dtype.kind == "f" else None)

    args = [tensor(x).requires_grad_(x.dtype.kind == "f" and phase == "backward") for x in case.arrays()]
    functions = _functions()
    if case.op not in functions:
        unsupported("PyTorch", case.op)
    f = case.of(functions)
    stream = torch.cuda.Stream() if form == "graph" else None

    with torch.cuda.stream(stream):  # PyTorch runs a gradient on the stream of its forward operation
        if phase == "forward":
            once: Callable[..., Any] = lambda: (f(*args),)  # noqa: E731
        else:
            output, cotangent = f(*args), tensor(case.cotangent())
            floats = case.floats(args)

            def once(ct: Any = cotangent) -> Any:
                return torch.autograd.grad(output, floats, ct, retain_graph=True)

        once()
    call = _recorded(once, stream) if form == "graph" else lambda: [once() for _ in range(REPEATS)][-1]

    def run(calls: int) -> float:
        for _ in range(calls):
            found = call()
        return float(found[0].flatten()[0])  # waits for the device

    def results(*ct: np.ndarray) -> list[np.ndarray]:
        found = once(*map(tensor, ct))
        return [x.detach().float().cpu().numpy() for x in found]

    return OpRunner(run, results)


def _recorded(once: Callable[[], Any], stream: Any) -> Callable[[], Any]:
    """REPEATS runs as one CUDA graph."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(REPEATS):
            found = once()

    def call() -> Any:
        graph.replay()
        return found

    return call


def _functions() -> dict[str, Callable[..., Any]]:
    import torch

    F = torch.nn.functional
    return {
        "matmul": lambda a, b, transpose_b=False: a @ (b.T if transpose_b else b),
        "conv2d": F.conv2d,
        "conv_transpose2d": F.conv_transpose2d,
        "take": lambda x, indices, axis: torch.index_select(x, axis, indices),
        "attention": F.scaled_dot_product_attention,
        "exp": torch.exp,
        "relu": torch.relu,
        "gelu": F.gelu,
        "tanh": torch.tanh,
        "add": torch.add,
        "mul": torch.mul,
        "sum": lambda x, axis: torch.sum(x, dim=axis),
        "max": lambda x, axis: torch.amax(x, dim=() if axis is None else axis),
        "cumsum": lambda x, axis: torch.cumsum(x, axis),
        "transpose": lambda x: x.T.contiguous(),
        "softmax": lambda x: torch.softmax(x, -1),
        "log_softmax": lambda x: torch.log_softmax(x, -1),
        "cross_entropy": F.cross_entropy,
        "layer_norm": lambda x, normalized_shape: F.layer_norm(x, (normalized_shape,)),
        "max_pool2d": F.max_pool2d,
        "avg_pool2d": F.avg_pool2d,
        "embedding": F.embedding,
    }
